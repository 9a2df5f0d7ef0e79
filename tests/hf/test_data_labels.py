"""Token ids and labels of the two policies."""

import json
from pathlib import Path

import pytest
from qwen_tokenizer import CHAT_TEMPLATE, load_qwen_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardglass.errors import ConfigError, DataError, ModelError
from shardglass.hf.data import DataOptions, build_collator, build_dataset
from shardglass.hf.labels import AssistantEncoder, QwenEncoder, encoder_for, tokens_in_spans
from shardglass.hf.records import Conversation, Turn

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "qwen_labels.json").read_text(encoding="utf-8"))
LETTERS = {"s": "system", "u": "user", "a": "assistant"}

LLAMA_STYLE = (  # a beginning token, trimmed contents, a header of special tokens right behind the end of turn
    "{{ '<s>' }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are kind.<|im_end|>\n' }}{% endif %}"
    + CHAT_TEMPLATE
)
STRICT = (  # alternation is checked, the end of a turn is a space and the end-of-sequence token
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
REASONING = (  # drops the reasoning of every turn but the last, where a content without any gets an empty one
    "{% for m in messages %}{% set c = m['content'] %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% set answer = c.split('</think>')[-1].lstrip('\n') %}"
    "{% set reason = c.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in c else '' %}"
    "{% if loop.last %}{{ '<think>\n' + reason + '\n</think>\n\n' + answer }}{% else %}{{ answer }}{% endif %}"
    "{% else %}{{ c }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)
TWICE = "{% for m in messages %}{{ m['content'] + m['content'] }}{% endfor %}"
GLOBAL = "{{ messages[-1]['content'] | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shared = tmp_path_factory.getbasetemp() / "qwen-tokenizer"
    load_qwen_tokenizer(shared)
    return shared


@pytest.fixture(scope="module")
def qwen(folder):
    return load_qwen_tokenizer(folder)


def talk(roles, *contents):
    turns = tuple(Turn(role=LETTERS[role], content=content) for role, content in zip(roles, contents, strict=True))
    return Conversation(place="record 0", turns=turns)


def counted(tokenizer, encoded):
    """The text of each run of counted tokens."""
    runs, run = [], []
    for token, label in zip([*encoded.input_ids, 0], [*encoded.labels, -100], strict=True):
        if label == -100 and run:
            runs.append(tokenizer.decode(run))
            run = []
        elif label != -100:
            assert label == token
            run.append(token)
    return runs


def assistant(qwen, template, conversation):
    tokenizer = load_qwen_tokenizer(qwen.name_or_path, chat_template=template)
    encoded = AssistantEncoder(tokenizer).encode(conversation)
    messages = [{"role": turn.role, "content": turn.content} for turn in conversation.turns]
    if template is not None:
        assert encoded.input_ids == tokenizer.apply_chat_template(messages)["input_ids"]
    return counted(tokenizer, encoded), tokenizer.decode(encoded.input_ids)


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_qwen_policy_gives_the_tokens_and_labels_of_the_original_script(qwen, tmp_path, case):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"id": "0", "conversations": case["conversations"]}]), encoding="utf-8")
    length = case["model_max_length"]
    for lazy in (False, True):
        options = DataOptions(label_policy="qwen", model_max_length=length, lazy=lazy, pad_to_multiple_of=length)
        (sample,) = build_dataset(path, qwen, options)
        batch = build_collator(qwen, options)([sample])
        for key in ("input_ids", "labels", "attention_mask"):
            assert batch[key].tolist() == [case[key]], key


def test_policy_all_counts_every_token_of_the_same_text(qwen):
    conversation = talk("uaua", "q", "r", "s", "t")
    whole, assistant_only = (encoder_for(policy, qwen).encode(conversation) for policy in ("all", "assistant"))
    assert whole.input_ids == assistant_only.input_ids == whole.labels
    assert -100 in assistant_only.labels


def test_qwen_policy_puts_a_system_turn_of_the_record_in_place_of_the_fixed_one(qwen):
    encoded = QwenEncoder(qwen).encode(talk("sua", "Be brief.", "q", "r"))
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nr<|im_end|>\n"
    )
    assert qwen.decode(encoded.input_ids) == text
    ends = "<|im_end|>\n<|im_start|>"
    assert counted(qwen, encoded) == ["<|im_start|>", ends, ends, "r<|im_end|>\n"]


def test_qwen_policy_refuses_a_record_whose_only_assistant_turn_comes_first(qwen):
    for conversation in (talk("a", "Welcome."), talk("au", "Welcome.", "thanks"), talk("sa", "s", "Welcome.")):
        with pytest.raises(DataError, match="only assistant turn is the first turn"):
            QwenEncoder(qwen).encode(conversation)


def test_assistant_policy_counts_contents_and_ends_of_turn_only(qwen):
    runs, _ = assistant(qwen, CHAT_TEMPLATE, talk("suaua", "s", "Hi", "Hello!", "2+2?", "4"))
    assert runs == ["Hello!<|im_end|>", "4<|im_end|>"]


def test_a_tokenizer_without_a_template_is_given_chatml_without_a_system_prompt(qwen):
    runs, text = assistant(qwen, None, talk("ua", "Hi", "Hello!"))
    assert runs == ["Hello!<|im_end|>"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"


def test_a_system_prompt_that_the_template_adds_stands_once_and_is_never_counted(qwen):
    for roles, expected in (
        ("uaua", ["b<|im_end|>", "d<|im_end|>"]),
        ("auaa", ["a<|im_end|>", "c<|im_end|>", "d<|im_end|>"]),
    ):
        runs, text = assistant(qwen, DEFAULT_SYSTEM, talk(roles, "a", "b", "c", "d"))
        assert runs == expected
        assert text.count("You are kind.") == 1


def test_trimmed_contents_and_headers_of_special_tokens_are_told_apart(qwen):
    runs, _ = assistant(qwen, LLAMA_STYLE, talk("uaua", " q ", "  one\n", "q", "\n\ntwo  "))
    assert runs == ["one<|im_end|>", "two<|im_end|>"]


def test_contents_that_merge_with_the_newline_of_the_header_are_counted_whole(qwen):
    runs, _ = assistant(qwen, CHAT_TEMPLATE, talk("ua", "q", "\n\n  code 你好😀\n"))
    (run,) = runs
    assert run.lstrip("\n") == "  code 你好😀\n<|im_end|>"


def test_an_end_of_sequence_token_behind_a_space_is_counted(qwen):
    runs, _ = assistant(qwen, STRICT, talk("uaua", "q", "r", "s", "t"))
    assert [run.strip() for run in runs] == ["r <|endoftext|>", "t <|endoftext|>"]


def test_what_a_template_refuses_is_said_with_its_own_words(qwen):
    with pytest.raises(DataError, match="the chat template refuses it: roles must alternate"):
        assistant(qwen, STRICT, talk("uua", "a", "b", "c"))


def test_a_template_that_drops_earlier_reasoning_counts_what_it_left(qwen):
    think = "<think>\nhm\n</think>\n\n"
    runs, text = assistant(qwen, REASONING, talk("uaua", "q", think + "one", "q", think + "two"))
    assert text.count("hm") == 1
    assert runs == ["one<|im_end|>", think + "two<|im_end|>"]


def test_an_empty_reasoning_that_a_template_adds_is_not_counted(qwen):
    runs, text = assistant(qwen, REASONING, talk("uaua", "q", "one", "q", "two"))
    assert "<think>\n\n</think>\n\ntwo" in text
    assert runs == ["one<|im_end|>", "two<|im_end|>"]


def test_generation_marks_of_a_template_are_used_and_the_end_of_turn_is_added(qwen):
    runs, _ = assistant(qwen, GENERATION, talk("uaa", "one", "one", "two"))
    assert runs == ["one<|im_end|>", "two<|im_end|>"]


def test_the_same_text_in_a_user_turn_is_not_mistaken_for_the_answer(qwen):
    runs, _ = assistant(qwen, CHAT_TEMPLATE, talk("ua", "same turnmark", "same turnmark"))
    assert runs == ["same turnmark<|im_end|>"]


def test_an_empty_assistant_turn_counts_nothing(qwen):
    runs, _ = assistant(qwen, CHAT_TEMPLATE, talk("uaua", "q", "", "q", "r"))
    assert runs == ["r<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [(TWICE, "does not write the content of turn 1 exactly once"), (GLOBAL, "changes other parts of the text")],
)
def test_a_template_in_which_the_answer_cannot_be_found_is_refused(qwen, template, reason):
    with pytest.raises(DataError, match=reason):
        assistant(qwen, template, talk("ua", "q", "a longer answer"))


def plain_tokenizer(**options):
    """A tokenizer of three words, without control tokens."""
    model = Tokenizer(models.WordLevel({"q": 0, "r": 1, "?": 2}, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?", **options)


def test_chatml_on_a_tokenizer_without_its_tokens_is_refused_and_adds_none():
    tokenizer = plain_tokenizer()
    for policy in ("qwen", "assistant"):
        with pytest.raises(ModelError, match=r"needs the tokens <\|im_start\|> and <\|im_end\|>.*tokens are not added"):
            encoder_for(policy, tokenizer)
    assert len(tokenizer) == 3


def test_a_template_without_control_tokens_counts_the_answer_alone():
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    encoded = encoder_for("assistant", tokenizer).encode(talk("uau", "q q", "r q", "r"))
    assert encoded.input_ids == [0, 0, 1, 0, 1]
    assert encoded.labels == [-100, -100, 1, 0, -100]


def test_named_templates_without_a_default_one_are_refused():
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = {"rag": "x", "tool": "y"}
    with pytest.raises(ModelError, match="chat templates cannot be used"):
        encoder_for("assistant", tokenizer)


def test_an_unknown_policy_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"'asistant' \(did you mean 'assistant'\?\); it must be one of"):
        encoder_for("asistant", plain_tokenizer())


def test_tokens_in_spans_counts_tokens_that_reach_in_and_whitespace_that_was_trimmed_to_nothing():
    offsets = [(0, 2), (2, 2), (2, 4), (3, 6), (6, 6), (7, 7), (6, 9), (9, 12)]
    assert tokens_in_spans(offsets, [(2, 3), (5, 6), (8, 9)]) == [False, False, True, True, True, False, True, False]
