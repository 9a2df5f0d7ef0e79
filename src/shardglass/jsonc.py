"""JSON with comments and trailing commas, as VS Code keeps it: reading it, and adding to it without touching the rest.

Owns the scanner and the insertion of text. Standard library only.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

_SPACE = re.compile(r"(?:[ \t\r\n\ufeff]+|//[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_PLAIN = re.compile(r"[^\s,\[\]{}:\"/]+")


class JsoncError(ValueError):
    """A text is no JSON with comments; the message has line, column and what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value and where it stands.

    Attributes:
        value: As ``json`` would have it; of an object or array its values all the way down.
        start: Index of its first character.
        end: One past its last.
        members: Of an object, key → value; the last of equal keys.
        items: Of an array.
        last_comma: One past the comma behind the last item of an object or array; None if there is none.
    """

    value: Any
    start: int
    end: int
    members: dict[str, "Node"]
    items: tuple["Node", ...]
    last_comma: int | None


def parse(text: str) -> Node | None:
    """Read a text; None if it has nothing but spaces and comments.

    Raises:
        JsoncError: It is no JSON with comments.
    """
    scanner = _Scanner(text)
    at = scanner.skip(0)
    if at == len(text):
        return None
    node = scanner.value(at)
    end = scanner.skip(node.end)
    if end < len(text):
        scanner.fail(end, "the value ended before this")
    return node


def insert_item(text: str, container: Node, item: str, *, indent: str, newline: str) -> str:
    """Put a value, or a ``"key": value`` pair, behind the last one of an array or object.

    Args:
        text: The whole text; all of it stays, comments too.
        container: Where to, from ``parse(text)``.
        item: What; its lines after the first have their final indentation already.
        indent: What the item's first line begins with.
        newline: How lines end.
    """
    close = container.end - 1
    last = max((node.end for node in (*container.items, *container.members.values())), default=None)
    head, tail = text[:close], text[close:]
    if last is not None and container.last_comma is None:
        head = f"{text[:last]},{text[last:close]}"
    body = head.rstrip(" \t\r\n")
    closing = line_indent(text, container.start)
    return f"{body}{newline}{indent}{item}{newline}{closing}{tail}"


def line_indent(text: str, at: int) -> str:
    """The spaces that the line of a place begins with."""
    begin = max(text.rfind("\n", 0, at), text.rfind("\r", 0, at)) + 1
    line = text[begin:at].lstrip("\ufeff")
    return line[: len(line) - len(line.lstrip(" \t"))]


class _Scanner:
    """Reads one text by recursion."""

    def __init__(self, text: str) -> None:
        self._text = text

    def fail(self, at: int, what: str) -> NoReturn:
        before = self._text[:at]
        line = before.count("\n") + 1
        raise JsoncError(f"line {line}, column {at - (before.rfind(chr(10)) + 1) + 1}: {what}")

    def skip(self, at: int) -> int:
        """The first place behind spaces and comments."""
        match = _SPACE.match(self._text, at)
        end = at if match is None else match.end()
        if self._text.startswith("/*", end):
            self.fail(end, "a comment that does not end")
        return end

    def value(self, at: int) -> Node:
        if at >= len(self._text):
            self.fail(at, "the text ends where a value should be")
        first = self._text[at]
        if first == "{":
            return self._object(at)
        if first == "[":
            return self._array(at)
        match = _STRING.match(self._text, at) if first == '"' else _PLAIN.match(self._text, at)
        if match is None:
            self.fail(at, "a string that does not end" if first == '"' else f"{first!r} where a value should be")
        try:
            found = json.loads(match.group())
        except ValueError:
            self.fail(at, f"{match.group()!r} is no value of JSON")
        return Node(value=found, start=at, end=match.end(), members={}, items=(), last_comma=None)

    def _array(self, start: int) -> Node:
        items: list[Node] = []
        comma: int | None = None
        at = self.skip(start + 1)
        while not self._text.startswith("]", at):
            if items and comma is None:
                self.fail(at, "a comma or ] is missing before this")
            items.append(self.value(at))
            at, comma = self._comma(items[-1].end)
        values = [item.value for item in items]
        return Node(value=values, start=start, end=at + 1, members={}, items=tuple(items), last_comma=comma)

    def _object(self, start: int) -> Node:
        members: dict[str, Node] = {}
        comma: int | None = None
        at = self.skip(start + 1)
        while not self._text.startswith("}", at):
            if members and comma is None:
                self.fail(at, "a comma or } is missing before this")
            key = self.value(at)
            if not isinstance(key.value, str):
                self.fail(at, "a key must be a string in double quotes")
            colon = self.skip(key.end)
            if not self._text.startswith(":", colon):
                self.fail(colon, "a colon is missing behind the key")
            members[key.value] = self.value(self.skip(colon + 1))
            at, comma = self._comma(members[key.value].end)
        values = {key: node.value for key, node in members.items()}
        return Node(value=values, start=start, end=at + 1, members=members, items=(), last_comma=comma)

    def _comma(self, end: int) -> tuple[int, int | None]:
        """The place behind a value and its comma, and one past the comma if there is one."""
        at = self.skip(end)
        if not self._text.startswith(",", at):
            if at >= len(self._text):
                self.fail(at, "the text ends before a bracket is closed")
            return at, None
        return self.skip(at + 1), at + 1
