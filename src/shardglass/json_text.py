"""JSON files as people write them: reading the text, and the likely cause of a syntax fault.

Owns what a config and a data file have in common before anybody asks what their values mean.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from shardglass.errors import ShardglassError

_TRAILING = "a comma before the closing bracket (trailing comma); remove it"

_CAUSES_BY_TEXT = (
    (r",\0(?:[}\]]|$)", _TRAILING),
    (r"\0,\s*(?:[}\]]|$)", _TRAILING),
    (r"\0'", "single quotes; JSON strings and keys take double quotes"),
    (r"\0True", "True is Python; JSON writes true"),
    (r"\0False", "False is Python; JSON writes false"),
    (r"\0None", "None is Python; JSON writes null"),
    (r"^\0$", "the file is empty"),
)
"""Likely causes, by the text around the fault; \\0 stands where the parser stopped."""

Cause = tuple[str, str]
"""A pattern or the start of a message, and what to say when it fits."""


def read_text(path: Path, kind: type[ShardglassError], *, missing: str) -> str:
    """Return the text of a file.

    Args:
        path: Where it is.
        kind: Class of the error.
        missing: What the message says behind "there is no such file".

    Raises:
        ShardglassError: Of class ``kind``: there is no such file, it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise kind(f"{path}: there is no such file{missing}") from None
    except IsADirectoryError:
        raise kind(f"{path}: this is a folder; give the JSON file in it") from None
    except UnicodeDecodeError as error:
        raise kind(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise kind(f"{path}: cannot be read: {error}") from None


def is_text(value: str) -> bool:
    """Tell whether a string can be written as UTF-8; JSON can spell half of a surrogate pair, which cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def likely_cause(
    text: str, error: json.JSONDecodeError, *, by_text: Sequence[Cause], by_message: Sequence[Cause]
) -> str:
    r"""Name the likely cause of a syntax fault.

    Args:
        text: What was parsed.
        error: Where the parser stopped.
        by_text: Patterns of one kind of file, tried behind those of every JSON file; \0 stands where it stopped.
        by_message: Starts of the parser's messages, tried if no pattern fits; an unclosed string is tried first, as
            the text around its start says nothing.
    """
    around = text[max(0, error.pos - 200) : error.pos].rstrip()[-1:] + "\0" + text[error.pos : error.pos + 200].lstrip()
    patterns = () if error.msg.startswith("Unterminated") else (*_CAUSES_BY_TEXT, *by_text)
    found = (say for pattern, say in patterns if re.search(pattern, around))
    said = (say for start, say in by_message if error.msg.startswith(start))
    return next(found, None) or next(said, None) or error.msg[:1].lower() + error.msg[1:]
