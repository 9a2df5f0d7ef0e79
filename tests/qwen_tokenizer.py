"""The Qwen tokenizer, built from the vocabulary file that the package `dashscope` carries."""

import base64
import copy
import functools
import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

NUM_RANKS = 151643
SPECIAL_TOKENS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def load_qwen_tokenizer(folder: str | Path, *, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerBase:
    """Return the tokenizer, reloaded by AutoTokenizer; it is saved in `folder` first if it is not there yet.

    The template is that of the returned object only; a folder is read once in a process.
    """
    tokenizer = copy.copy(_reloaded(Path(folder)))
    tokenizer.chat_template = chat_template
    return tokenizer


@functools.cache
def _reloaded(folder: Path) -> PreTrainedTokenizerBase:
    if not (folder / "tokenizer_config.json").exists():
        build_qwen_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@functools.cache
def build_qwen_tokenizer() -> PreTrainedTokenizerBase:
    """Build it (a few seconds); skips the test where dashscope is not installed."""
    ranks = _ranks()
    letters = _byte_letters()
    vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _parts(ranks, token, rank)
            merges.append(("".join(letters[byte] for byte in left), "".join(letters[byte] for byte in right)))
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, extra_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = CHAT_TEMPLATE
    for token, rank in SPECIAL_TOKENS.items():
        assert tokenizer.convert_tokens_to_ids(token) == rank, token
    return tokenizer


def _ranks() -> dict[bytes, int]:
    # find_spec does not run the package, whose own dependencies need not be installed.
    spec = importlib.util.find_spec("dashscope")
    if spec is None or spec.origin is None:
        pytest.fail("dashscope, which carries Qwen's vocabulary, is not installed; `make test` installs it")
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    assert len(ranks) == NUM_RANKS
    return ranks


def _parts(ranks: dict[bytes, int], token: bytes, rank: int) -> tuple[bytes, bytes]:
    """The two tokens that merge into `token`: byte pair encoding with the merges before it."""
    cuts = [i for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
    if len(cuts) == 1:  # most tokens; spares the search
        return token[: cuts[0]], token[cuts[0] :]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(plain))
    return letters
