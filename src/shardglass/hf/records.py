"""Conversations from a JSON or JSON Lines file, and what is wrong with those that cannot be used.

Owns the checking of records; needs no tokenizer, so a file is judged before a model is loaded. Leaves
the text to ``record_file``, tokens to ``labels``, batches to ``data``.

A record is ``{"id", "conversations": [{"from", "value"}]}`` or ``{"messages": [{"role", "content"}]}``; either kind of
turn may stand under either key. ``human`` means user and ``gpt`` means assistant. Turns are kept as they come: two
turns of one role in a row are two turns. Empty contents are allowed, but one assistant turn must hold text.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardglass.errors import DataError, nearest, suggestion
from shardglass.hf.record_file import kind_of, read_records_text, split_records

logger = logging.getLogger(__name__)

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
"""Roles as files write them, and as we call them."""

MAX_LISTED = 20
"""Bad records that one message lists; the rest is a number."""

_TURNS_KEYS = ("conversations", "messages")
_RECORD_KEYS = (*_TURNS_KEYS, "id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn: ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One record: ``place`` names it in messages (its index from 0, its line in JSON Lines, its id)."""

    place: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecord:
    """A record that cannot be used, and why."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """The usable records of a file, in order.

    Attributes:
        path: The file.
        records: Those that can be used.
        skipped: Those that were left out because ``skip_bad_records`` was given.
        ignored_keys: Keys that were not read, with the number of times each was met.
    """

    path: str
    records: tuple[Conversation, ...]
    skipped: tuple[BadRecord, ...]
    ignored_keys: tuple[tuple[str, int], ...]


def load_conversations(
    path: str | os.PathLike[str], *, skip_bad_records: bool = False, is_main: bool = True
) -> Conversations:
    """Read and check a data file.

    Args:
        path: A JSON file that holds a list of records, or JSON Lines with one record a line.
        skip_bad_records: Go on without the bad records, instead of refusing the file.
        is_main: This rank tells what was skipped and ignored.

    Raises:
        DataError: The file is missing, is no JSON, holds no usable record, or (unless ``skip_bad_records``) holds bad
            records; these are all reported in one error.
    """
    name = str(path)
    raws = split_records(read_records_text(Path(path)), name)
    if not raws:
        raise DataError(f"{name}: the file holds no record; give it at least one conversation")
    records: list[Conversation] = []
    bad: list[BadRecord] = []
    ignored: Counter[str] = Counter()
    for raw in raws:
        if raw.fault is not None:
            bad.append(BadRecord(place=raw.place, reason=raw.fault))
            continue
        try:
            records.append(Conversation(place=raw.place, turns=_turns(raw.value, ignored)))
        except DataError as error:
            bad.append(BadRecord(place=raw.place, reason=str(error)))
    keys = tuple(ignored.most_common())
    refuse_or_skip(name, bad, len(raws), skip=skip_bad_records, is_main=is_main)
    if keys and is_main:
        shown = ", ".join(f"{key!r} ({num} x)" for key, num in keys[:MAX_LISTED])
        logger.warning("%s: %d keys are not read: %s", name, len(keys), shown)
    return Conversations(path=name, records=tuple(records), skipped=tuple(bad), ignored_keys=keys)


def refuse_or_skip(name: str, bad: Sequence[BadRecord], num_records: int, *, skip: bool, is_main: bool) -> None:
    """Say what is wrong with the bad records, as an error or (with ``skip``) as one warning.

    Raises:
        DataError: There are bad records and ``skip`` is False, or nothing is left without them.
    """
    if not bad:
        return
    lines = [f"  {record.place}: {record.reason}" for record in bad[:MAX_LISTED]]
    if len(bad) > MAX_LISTED:
        lines.append(f"  and {len(bad) - MAX_LISTED} more")
    listing = "\n".join(lines)
    if len(bad) == num_records:
        raise DataError(f"{name}: none of the {num_records} records can be used; correct them\n{listing}")
    if not skip:
        raise DataError(
            f"{name}: {len(bad)} of {num_records} records cannot be used; correct them, or go on without them with "
            f"--skip_bad_records\n{listing}"
        )
    if is_main:
        logger.warning("%s: going on without %d of %d records\n%s", name, len(bad), num_records, listing)


def _turns(record: object, ignored: Counter[str]) -> tuple[Turn, ...]:
    """Return the turns of a record.

    Raises:
        DataError: Says why it cannot be used, without its place.
    """
    if not isinstance(record, dict):
        raise DataError(f"is {kind_of(record)}, not an object")
    key = _turns_key(record)
    listed = record[key]
    if not isinstance(listed, list):
        raise DataError(f"{key!r} is {kind_of(listed)}, not a list of turns")
    if not listed:
        raise DataError("is empty: it has no turns")
    unread: Counter[str] = Counter(name for name in record if name not in _RECORD_KEYS)
    turns = tuple(_turn(number, entry, unread) for number, entry in enumerate(listed))
    contents = [turn.content for turn in turns if turn.role == "assistant"]
    if not contents:
        raise DataError("has no assistant turn")
    if not any(content.strip() for content in contents):
        raise DataError("has no text in any assistant turn")
    ignored.update(unread)
    return turns


def _turns_key(record: dict[str, object]) -> str:
    """Return the key that holds the turns."""
    keys = [key for key in _TURNS_KEYS if key in record]
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise DataError("has both 'conversations' and 'messages'; keep one")
    close = next((key for key in record if nearest(key, _TURNS_KEYS)), None)
    hint = f", but {close!r}{suggestion(close, _TURNS_KEYS)}" if close is not None else ""
    raise DataError(f"has no 'conversations' or 'messages'{hint}")


def _turn(number: int, entry: object, unread: Counter[str]) -> Turn:
    if not isinstance(entry, dict):
        raise DataError(f"turn {number} is {kind_of(entry)}, not an object")
    role_key, content_key = ("from", "value") if "from" in entry else ("role", "content")
    for key in (role_key, content_key):
        if key not in entry:
            raise DataError(
                f"turn {number} has no {key!r} (its keys: {', '.join(map(repr, list(entry)[:5])) or 'none'})"
            )
    role, content = entry[role_key], entry[content_key]
    if not isinstance(role, str) or role not in ROLES:
        hint = suggestion(role, ROLES) if isinstance(role, str) else ""
        raise DataError(f"turn {number} has the unknown role {str(role)[:40]!r}{hint}; known are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise DataError(f"turn {number} holds {kind_of(content)} as {content_key!r}, not a string")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        where = f"character {error.start} of {content_key!r}"
        raise DataError(f"turn {number} holds half of a surrogate pair at {where}, which is no text") from None
    unread.update(name for name in entry if name not in (role_key, content_key))
    return Turn(role=ROLES[role], content=content)
