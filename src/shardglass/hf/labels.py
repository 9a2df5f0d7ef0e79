"""How a conversation becomes token ids and labels.

Owns the two label policies. Leaves reading to ``records``, cutting and padding to ``data``.

``qwen`` is the rule of the Qwen fine-tuning script: ChatML with a fixed system text; counted are ``<|im_start|>``,
``<|im_end|>`` and the newline after it in every turn, and the contents of assistant turns. A first turn that is not the
user's is dropped. A system turn at the head of the record takes the place of the fixed system text.

``assistant`` renders with the tokenizer's chat template, or ChatML when it has none, and counts assistant contents and
the end-of-turn token behind them. What the template adds by itself (a default system prompt, a date) is never counted.
What the template does not take (say, two turns of one role in a row) is an error of that record.

Contents are tokenized as the tokenizer does: a control token spelled out in a content becomes that token.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from shardglass.errors import ConfigError, DataError, ModelError, suggestion
from shardglass.hf.records import Conversation, Turn

IGNORED = -100
"""Label of a token that the loss does not count; torch's cross entropy ignores it by default."""

QWEN_SYSTEM = "You are a helpful assistant."

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Used when the tokenizer has no chat template; adds no system prompt."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = dict[str, str]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Token ids and labels of one conversation, of one length, before cutting."""

    input_ids: list[int]
    labels: list[int]


class Encoder(Protocol):
    """One label policy, bound to a tokenizer."""

    def encode(self, conversation: Conversation) -> Encoded:
        """Return ids and labels.

        Raises:
            DataError: The conversation cannot be rendered; says why, without its place.
        """


class QwenEncoder:
    """Label policy ``qwen``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Look up the control tokens.

        Raises:
            ModelError: The tokenizer has no ChatML control tokens.
        """
        self._start, self._end = chatml_tokens(tokenizer, "label policy 'qwen'")
        self._tokenizer = tokenizer
        self._newline = self._ids("\n")
        self._roles = {role: self._ids(role) for role in ("system", "user", "assistant")}

    def encode(self, conversation: Conversation) -> Encoded:
        """Return ids and labels of the system turn and the turns of the record."""
        turns = self._kept(conversation.turns)
        contents: list[list[int]] = self._tokenizer(
            [turn.content for turn in turns], add_special_tokens=False, verbose=False
        )["input_ids"]
        ids: list[int] = []
        labels: list[int] = []
        for turn, content in zip(turns, contents, strict=True):
            header = self._roles[turn.role] + self._newline
            ids += [self._start, *header, *content, self._end, *self._newline]
            counted = content if turn.role == "assistant" else [IGNORED] * len(content)
            labels += [self._start, *[IGNORED] * len(header), *counted, self._end, *self._newline]
        return Encoded(input_ids=ids, labels=labels)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    @staticmethod
    def _kept(turns: tuple[Turn, ...]) -> list[Turn]:
        system = Turn(role="system", content=QWEN_SYSTEM)
        if turns[0].role == "system":
            system, *turns_left = turns
        else:
            turns_left = list(turns)
        if turns_left[0].role != "user":
            del turns_left[0]
        if not any(turn.role == "assistant" for turn in turns_left):
            raise DataError("its only assistant turn is the first turn, which label policy 'qwen' drops")
        return [system, *turns_left]


class AssistantEncoder:
    """Label policy ``assistant``.

    A template that marks what the assistant says (``{% generation %}``) is believed. For others the span of a turn is
    found by rendering the whole conversation again with only that turn's content replaced by a mark: what is the same
    before and after is not the turn's. Prompts that the template adds are so in every rendering alike. Where the text
    before a content depends on the content (reasoning models), the span starts where the generation prompt ends.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Choose the template.

        Raises:
            ModelError: There is neither a chat template nor ChatML's control tokens, or the tokenizer gives no offsets.
        """
        if not tokenizer.is_fast:
            raise ModelError(
                f"label policy 'assistant' needs a tokenizer that gives character offsets, and "
                f"{type(tokenizer).__name__} does not; save the model with a tokenizer.json"
            )
        if tokenizer.chat_template is None:
            chatml_tokens(tokenizer, "the tokenizer has no chat template, and ChatML, which is used instead,")
        try:
            self._template: str = tokenizer.get_chat_template() if tokenizer.chat_template else CHATML
        except ValueError as error:
            raise ModelError(f"the tokenizer's chat templates cannot be used: {error}") from None
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)

    def encode(self, conversation: Conversation) -> Encoded:
        """Return the ids of the rendered conversation; labels count assistant contents and end-of-turn tokens."""
        messages: list[Message] = [{"role": turn.role, "content": turn.content} for turn in conversation.turns]
        if _GENERATION.search(self._template):
            ids, counted = self._by_generation_marks(messages)
        else:
            ids, counted = self._by_spans(messages)
        self._count_ends_of_turn(ids, counted)
        labels = [i if count else IGNORED for i, count in zip(ids, counted, strict=True)]
        return Encoded(input_ids=ids, labels=labels)

    def _by_generation_marks(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        try:
            encoded: Any = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"the chat template refuses it: {error}") from None
        return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]

    def _by_spans(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        text = self._render(messages)
        # A turn without text has no span: its end-of-turn token is not counted either.
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and message["content"]]
        spans = [self._span(text, messages, turn) for turn in turns]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoded["input_ids"]), tokens_in_spans(encoded["offset_mapping"], spans)

    def _span(self, text: str, messages: list[Message], turn: int) -> Span:
        """Return the characters of ``text`` that come from the content of one turn."""
        mark = "turnmark"
        while mark in text:
            mark += "x"
        marked = self._render([*messages[:turn], {**messages[turn], "content": mark}, *messages[turn + 1 :]])
        head, found, tail = marked.partition(mark)
        if not found or mark in tail:
            raise DataError(f"the chat template does not write the content of turn {turn} exactly once")
        if not text.startswith(head) and turn > 0:
            head = self._render(messages[:turn], add_generation_prompt=True)
        if not text.startswith(head) or not text.endswith(tail) or len(head) + len(tail) > len(text):
            raise DataError(
                f"the chat template changes other parts of the text with the content of turn {turn}, so what the "
                "assistant says cannot be found; give a template with {% generation %} marks"
            )
        return len(head), len(text) - len(tail)

    def _render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        try:
            text: Any = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"the chat template refuses it: {error}") from None
        return str(text)

    def _count_ends_of_turn(self, ids: list[int], counted: list[bool]) -> None:
        """Count the control token right behind each run of counted tokens.

        Some templates write a space before the end-of-sequence token; both are counted then.
        """
        last = len(ids) - 1
        ends = [i for i in range(last) if counted[i] and not counted[i + 1] and ids[i] not in self._special]
        for i in ends:
            if ids[i + 1] in self._special:
                counted[i + 1] = True
            elif ids[i + 2 : i + 3] == [self._tokenizer.eos_token_id] and self._is_space(ids[i + 1]):
                counted[i + 1] = counted[i + 2] = True

    def _is_space(self, token: int) -> bool:
        return not str(self._tokenizer.decode([token])).strip()


class AllEncoder(AssistantEncoder):
    """Label policy ``all``: the rendered conversation as ``assistant`` has it, and every token of it counts."""

    def encode(self, conversation: Conversation) -> Encoded:
        """Return the ids of the rendered conversation, which are the labels too."""
        ids = super().encode(conversation).input_ids
        return Encoded(input_ids=ids, labels=list(ids))


LABEL_POLICIES: dict[str, type[QwenEncoder] | type[AssistantEncoder]] = {
    "assistant": AssistantEncoder,
    "all": AllEncoder,
    "qwen": QwenEncoder,
}


def encoder_for(label_policy: str, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Return the encoder of a label policy.

    Raises:
        ConfigError: There is no such policy.
        ModelError: The tokenizer does not fit it.
    """
    check_label_policy(label_policy)
    return LABEL_POLICIES[label_policy](tokenizer)


def check_label_policy(label_policy: str) -> None:
    """Raise ConfigError if there is no such policy."""
    if label_policy not in LABEL_POLICIES:
        raise ConfigError(
            f"label_policy is {label_policy!r}{suggestion(str(label_policy), LABEL_POLICIES)}; "
            f"it must be one of {', '.join(LABEL_POLICIES)}"
        )


def chatml_tokens(tokenizer: PreTrainedTokenizerBase, who: str) -> tuple[int, int]:
    """Return the ids of ``<|im_start|>`` and ``<|im_end|>``; nothing is ever added to the vocabulary.

    Raises:
        ModelError: Some are no single token of the vocabulary.
    """
    tokens = ["<|im_start|>", "<|im_end|>"]
    ids: Any = tokenizer.convert_tokens_to_ids(tokens)
    # A token that does not exist gives None, or the id of the unknown token.
    missing = [
        token
        for token, known in zip(tokens, ids, strict=True)
        if known is None or tokenizer.convert_ids_to_tokens(known) != token
    ]
    if missing:
        raise ModelError(
            f"{who} needs the tokens {' and '.join(missing)}, which the tokenizer "
            f"{tokenizer.name_or_path or type(tokenizer).__name__!r} does not have; use a chat model's tokenizer, or "
            "set tokenizer.chat_template and label_policy 'assistant' (tokens are not added, as that changes the model)"
        )
    return ids[0], ids[1]


def tokens_in_spans(offsets: Iterable[Span], spans: Sequence[Span]) -> list[bool]:
    """Tell which tokens lie in, or reach into, a span of characters.

    Args:
        offsets: First and last + 1 character of each token, ascending. Byte-level tokenizers may trim whitespace off:
            a token of nothing but whitespace then is empty and stands at its own end.
        spans: First and last + 1 character of each span, ascending.
    """
    inside: list[bool] = []
    at = 0
    for start, end in offsets:
        while at < len(spans) and (start >= spans[at][1] if end > start else start > spans[at][1]):
            at += 1
        inside.append(at < len(spans) and end > spans[at][0])
    return inside
