"""JSON with comments: read as VS Code reads it, and added to without losing a character."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardglass.jsonc import JsoncError, insert_item, parse

TEXT = """\ufeff// head
{
    "a": [1, 2.5e3, -0, true, null, "x // no comment \\" /* */",], // tail
    /* between
       lines */ "b": {"c": [], "d": {},},
}
// end
"""


def test_comments_and_trailing_commas_are_no_values():
    assert parse(TEXT).value == {"a": [1, 2500.0, 0, True, None, 'x // no comment " /* */'], "b": {"c": [], "d": {}}}
    assert parse(" // nothing\n/* at all */") is None
    assert parse("") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1 "b": 2}', "line 1, column 9: a comma or } is missing before this"),
        ("[1 2]", "line 1, column 4: a comma or ] is missing before this"),
        ('{\n  "a" 1}', "line 2, column 7: a colon is missing behind the key"),
        ("{1: 2}", "line 1, column 2: a key must be a string in double quotes"),
        ("{'a': 1}", "line 1, column 2: \"'a'\" is no value of JSON"),
        ('["a\n"]', "line 1, column 2: a string that does not end"),
        ("[1, ", "line 1, column 5: the text ends where a value should be"),
        ("[1", "line 1, column 3: the text ends before a bracket is closed"),
        ("[,]", "line 1, column 2: ',' where a value should be"),
        ("{} {}", "line 1, column 4: the value ended before this"),
        ("/* x", "line 1, column 1: a comment that does not end"),
        ("[True]", "line 1, column 2: 'True' is no value of JSON"),
    ],
)
def test_a_fault_is_told_with_its_place(text, message):
    with pytest.raises(JsoncError) as caught:
        parse(text)
    assert str(caught.value) == message


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
gaps = st.sampled_from(["", " ", "\n", "\r\n", "\t", "// c ,]}\n", "/* [{, */", " // \n /* x */ "])


def written(value, draw):
    """A value as text, with comments and spaces between its tokens, and with trailing commas or not."""
    if isinstance(value, list | dict):
        opening, closing = "[]" if isinstance(value, list) else "{}"
        pairs = value.items() if isinstance(value, dict) else [(None, item) for item in value]
        parts = [
            ("" if key is None else f"{json.dumps(key)}{draw(gaps)}:{draw(gaps)}") + written(item, draw)
            for key, item in pairs
        ]
        comma = "," if parts and draw(st.booleans()) else ""
        inside = "".join(f"{draw(gaps)}{part}{draw(gaps)}{',' * (k < len(parts) - 1)}" for k, part in enumerate(parts))
        return f"{opening}{inside}{comma}{draw(gaps)}{closing}"
    return json.dumps(value)


@given(value=values, data=st.data())
def test_any_text_is_read_as_its_value(value, data):
    assert parse(f"{data.draw(gaps)}{written(value, data.draw)}{data.draw(gaps)}").value == value


@given(items=st.lists(values, max_size=3), new=values, data=st.data())
def test_an_item_is_added_and_every_other_character_stays(items, new, data):
    text = data.draw(gaps) + written(items, data.draw) + data.draw(gaps)
    after = insert_item(text, parse(text), json.dumps(new), indent="  ", newline="\n")
    assert parse(after).value == [*items, new]
    rest = iter(after)
    assert all(letter in rest for letter in text if letter not in " \t\r\n")  # in order, and nothing is missing
