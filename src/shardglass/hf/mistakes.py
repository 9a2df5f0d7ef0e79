"""Exceptions of other libraries that are the user's mistake, as one line.

Owns the decision and the line. While arguments, model and Trainer are made, a library that raises has been given
something it cannot use: a package that is not installed, a value that it does not know, a file it cannot read. An
exception that our own lines raise is a fault of ours and keeps its traceback, and so does everything that happens once
training has begun.
"""

import pickle
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from shardglass.errors import ConfigError, ShardglassError
from shardglass.words import ON_A_COMMAND_LINE, Words

THEIRS = (ValueError, TypeError, KeyError, RuntimeError, ImportError, OSError, SafetensorError, StrictDataclassError)
"""Kinds that are taken for an answer to what the user gave; other kinds are faults of whoever raised them."""

OF_A_FILE = (*THEIRS, pickle.UnpicklingError, EOFError, struct.error, IndexError, AttributeError, OverflowError)
"""Kinds that come of reading a file of any content; for a call that does nothing but read one."""

MOST_CHARACTERS = 400
"""Of a library's message; what follows is advice of many lines."""

_FREE_TEXT = re.compile(r"(path|dir|name|id|token|deepspeed|dtype)$")
"""Flags whose value may be any word, so that a message has it by chance."""

_SWITCH_WORDS = ("True", "False", "None")


@contextmanager
def mistakes_told(given: Mapping[str, object], what: str = "flags") -> Iterator[None]:
    """Turn an exception that a library raises inside into a ConfigError.

    Args:
        given: The flags that the user gave, with their values; the one that the message speaks of is named.
        what: What is named when no flag is.

    Raises:
        ConfigError: One line.
    """
    try:
        yield
    except THEIRS as error:
        if isinstance(error, ShardglassError) or _raised_by_us(error):
            raise
        flag = flag_meant(str(error), given)
        raise ConfigError(f"{flag or what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The message of an exception in one line; its class stands before one that says little without it."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError | TypeError | AttributeError) or len(text.split()) < 2:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


def flag_meant(message: str, given: Mapping[str, object], words: Words = ON_A_COMMAND_LINE) -> str | None:
    """The given flag that a message speaks of, as ``words`` give it; None if none or several are meant.

    A flag's name counts where it cannot be an ordinary word: with an underscore in it (``FlashAttention`` is
    ``flash_attention``), behind ``--`` or ``args.``, or between backticks. Where no name stands, a given value does.
    """
    by_name = [name for name in given if _speaks_of(name, message)]
    said = {_squashed(word) for word in re.findall(r"[\w.-]+", message)}
    by_value = [name for name, value in given.items() if _words_of(value) & said and not _FREE_TEXT.search(name)]
    for found in (by_name, by_value):
        if len(found) == 1:
            return words.given(found[0], value=given[found[0]])
        if found:
            return None
    return None


def _speaks_of(name: str, message: str) -> bool:
    if "_" in name:
        return _squashed(name) in {_squashed(word) for word in re.findall(r"\w+", message)}
    return re.search(rf"(?<!\w)(?:--|args\.|`){name}(?!\w)", message) is not None


def _squashed(word: str) -> str:
    """A name as it is compared, however it is written."""
    return word.replace("_", "").lower()


def _words_of(value: object) -> set[str]:
    """The words of a flag's value that a message may repeat."""
    values = value if isinstance(value, list) else [value]
    return {_squashed(word) for word in values if isinstance(word, str) and len(word) > 3 and word not in _SWITCH_WORDS}


def _raised_by_us(error: BaseException) -> bool:
    """Whether the innermost line of an exception's traceback is ours; one without a traceback is."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == "shardglass"
