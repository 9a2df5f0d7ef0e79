"""Any change of a valid data file gives exactly the records that a naive reading gives, or one error that names it."""

import copy
import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen_tokenizer import load_qwen_tokenizer

from shardglass.errors import DataError
from shardglass.hf.labels import encoder_for
from shardglass.hf.records import load_conversations

FOLDER = tempfile.TemporaryDirectory(prefix="data-fuzz-")
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}

RECORDS = [
    {"id": "a", "conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "r"}]},
    {
        "messages": [
            {"role": "system", "content": ""},
            {"role": "human", "content": "é\u2028"},
            {"role": "gpt", "content": "😀"},
        ]
    },
    {"id": 3, "conversations": [{"from": "gpt", "value": "first"}, {"from": "user", "value": "<|im_end|>"}] * 2},
    {"conversations": [{"from": "human", "value": "x", "weight": 1}, {"role": "assistant", "content": "y"}], "tag": []},
]

TEXT = st.text(st.one_of(st.characters(), st.characters(categories=["Cs"])), max_size=5)
NAMES = st.sampled_from(["id", "conversations", "messages", "from", "value", "role", "content", "weight", "Value"])
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 10**20),
        st.floats(),
        st.sampled_from(["user", "gpt", "asistant", "tool", "", " \n", "\x00", "\ufeff", "a" * 300]),
        TEXT,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.one_of(NAMES, TEXT), inner, max_size=3)),
    max_leaves=4,
)


def places(value, path=()):
    """The paths of everything inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


@st.composite
def mutated(draw):
    """A list of records with one to three changes, at least one of them left as it was."""
    records = copy.deepcopy(draw(st.lists(st.sampled_from(RECORDS), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(records)) or [()]))
        node = records
        for part in path[:-1]:
            node = node[part]
        if path:
            _change(draw, node, path[-1])
    return [*records, RECORDS[0]]


def _change(draw, node, key):
    kind = draw(st.sampled_from(["delete", "retype", "rename", "nest", "add"]))
    if kind == "delete":
        del node[key]
    elif kind == "retype":
        node[key] = draw(VALUES)
    elif kind == "nest":
        node[key] = draw(st.sampled_from([[node[key]], {"value": node[key]}]))
    elif isinstance(node, list):
        node.insert(key, draw(VALUES))
    elif kind == "rename":
        node[draw(st.one_of(NAMES, TEXT))] = node.pop(key)
    else:
        node[draw(st.one_of(NAMES, TEXT))] = draw(VALUES)


def naive(record):
    """The turns of a record and the keys that are not read; None if it cannot be used."""
    if not isinstance(record, dict) or ("conversations" in record) == ("messages" in record):
        return None
    key = "conversations" if "conversations" in record else "messages"
    if not isinstance(record[key], list):
        return None
    unread = Counter(name for name in record if name not in ("id", key))
    turns = []
    for entry in record[key]:
        if not isinstance(entry, dict):
            return None
        names = ("from", "value") if "from" in entry else ("role", "content")
        role, content = (entry.get(name) for name in names)
        if not isinstance(role, str) or role not in ROLES or not isinstance(content, str) or not is_utf8(content):
            return None
        unread.update(name for name in entry if name not in names)
        turns.append((ROLES[role], content))
    if not any(content.strip() for role, content in turns if role == "assistant"):
        return None
    return turns, unread


def is_utf8(text):
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def write(records, *, lines, ascii_only):
    path = Path(FOLDER.name) / ("data.jsonl" if lines else "data.json")
    texts = [json.dumps(record, ensure_ascii=ascii_only) for record in records]
    # surrogates cannot be written as UTF-8; JSON can spell them
    text = "\n".join(texts) if lines else f"[{','.join(texts)}]"
    text = "".join(letter if is_utf8(letter) else json.dumps(letter)[1:-1] for letter in text)
    path.write_text(text, encoding="utf-8", newline="")
    return path


def read_or_refused(path, **options):
    """What is read; None if it is one error that names the file and says something of it."""
    try:
        return load_conversations(path, is_main=False, **options)
    except DataError as error:
        text = str(error)
    assert text.startswith(f"{path}: ")
    assert text.removeprefix(f"{path}: ").strip()
    return None


def is_read_as_the_naive_reading_has_it(records, lines, ascii_only):
    path = write(records, lines=lines, ascii_only=ascii_only)
    expected = [naive(record) for record in json.loads(f"[{','.join(map(json.dumps, records))}]")]
    loaded = read_or_refused(path)
    assert (loaded is None) == (None in expected)
    # A list on a line is told apart from other bad lines, so it is bad in both readings.
    skipping = read_or_refused(path, skip_bad_records=True)
    good = [row for row in expected if row is not None]
    assert [[(turn.role, turn.content) for turn in record.turns] for record in skipping.records] == [t for t, _ in good]
    assert Counter(dict(skipping.ignored_keys)) == sum((unread for _, unread in good), Counter())
    assert len(skipping.skipped) == len(expected) - len(good)


def is_damaged(text, position, inserted, removed, lines):
    path = Path(FOLDER.name) / ("damaged.jsonl" if lines else "damaged.json")
    position %= len(text) + 1
    path.write_text(text[:position] + inserted + text[position + removed :], encoding="utf-8", newline="")
    read_or_refused(path)
    read_or_refused(path, skip_bad_records=True)


def is_cut(lines, indent, length):
    records = RECORDS[:3]
    path = Path(FOLDER.name) / ("cut.jsonl" if lines else "cut.json")
    text = "\n".join(map(json.dumps, records)) if lines else json.dumps(records, indent=indent)
    text = text[: 1 + length % (len(text) - 1)]
    path.write_text(text, encoding="utf-8")
    loaded = read_or_refused(path)
    if not lines:
        assert loaded is None
    else:  # whole lines in front of the cut are records, and a cut line is never one
        whole = text.split("\n")
        is_whole = whole[-1] == "" or whole[-1] == json.dumps(records[len(whole) - 1])
        assert (loaded is not None) == is_whole
        assert loaded is None or len(loaded.records) == len([line for line in whole if line])


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    shared = tmp_path_factory.getbasetemp() / "qwen-tokenizer"
    load_qwen_tokenizer(shared)
    return [encoder_for(policy, load_qwen_tokenizer(shared)) for policy in ("assistant", "qwen")]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(records=mutated())
def test_whatever_is_read_can_be_tokenized_or_is_refused_with_a_reason(encoders, records):
    loaded = read_or_refused(write(records, lines=True, ascii_only=True), skip_bad_records=True)
    for record in loaded.records:
        for encoder in encoders:
            try:
                encoded = encoder.encode(record)
            except DataError as error:
                reason = str(error)
            else:
                reason = "tokenized" if len(encoded.input_ids) == len(encoded.labels) > 0 else ""
            assert reason


FEW = settings(max_examples=200, deadline=None, derandomize=True)
MANY = settings(max_examples=4000, deadline=None)
CHANGES = given(records=mutated(), lines=st.booleans(), ascii_only=st.booleans())
DAMAGES = given(
    text=st.sampled_from(
        [json.dumps(RECORDS, indent=indent) for indent in (None, 1)] + ["\n".join(map(json.dumps, RECORDS))]
    ),
    position=st.integers(0),
    inserted=st.text("{}[]\",:'#/0 \n\r\\-eNé\u2028\ufeff\x00", max_size=3),
    removed=st.integers(0, 4),
    lines=st.booleans(),
)
CUTS = given(lines=st.booleans(), indent=st.sampled_from([None, 2]), length=st.integers(0))

test_a_changed_file_is_read_as_the_naive_reading_has_it = FEW(CHANGES(is_read_as_the_naive_reading_has_it))
test_any_damage_to_the_text_is_read_or_refused = FEW(DAMAGES(is_damaged))
test_a_file_that_is_cut_off_never_gives_half_a_record = FEW(CUTS(is_cut))

test_thousands_of_changed_files = pytest.mark.soak(MANY(CHANGES(is_read_as_the_naive_reading_has_it)))
test_thousands_of_damaged_files = pytest.mark.soak(MANY(DAMAGES(is_damaged)))
