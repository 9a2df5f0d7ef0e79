"""Reading and checking data files."""

import json
import logging

import pytest

from shardglass.errors import DataError
from shardglass.hf.records import MAX_LISTED, Turn, load_conversations

GOOD = {"id": "a", "conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "r"}]}
TURNS = (Turn(role="user", content="q"), Turn(role="assistant", content="r"))


def save(folder, content, name="data.json"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def fault(path, **options):
    with pytest.raises(DataError) as caught:
        load_conversations(path, **options)
    return str(caught.value)


def turns_of(path):
    return [record.turns for record in load_conversations(path).records]


def test_conversations_and_messages_and_both_namings_of_roles_give_the_same_turns(tmp_path):
    shapes = [
        GOOD,
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]},
        {"conversations": [{"role": "user", "content": "q"}, {"from": "gpt", "value": "r"}]},
    ]
    assert turns_of(save(tmp_path, shapes)) == [TURNS] * 4


def test_turns_of_one_role_in_a_row_and_a_system_turn_are_kept(tmp_path):
    roles = ["system", "user", "user", "assistant", "assistant"]
    record = {"messages": [{"role": role, "content": str(i)} for i, role in enumerate(roles)]}
    (turns,) = turns_of(save(tmp_path, [record]))
    assert [(turn.role, turn.content) for turn in turns] == [(role, str(i)) for i, role in enumerate(roles)]


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.txt", "data.ndjson"])
def test_json_lines_are_read_under_any_name_with_blank_lines_and_line_separators_in_strings(tmp_path, name):
    other = {"messages": [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": "r"}]}
    text = json.dumps(GOOD) + "\r\n\n" + json.dumps(other, ensure_ascii=False) + "\n"
    loaded = load_conversations(save(tmp_path, text, name))
    assert [record.turns[0].content for record in loaded.records] == ["q", "a\u2028b"]
    assert [record.place for record in loaded.records] == ["record 0 (line 1, id 'a')", "record 1 (line 3)"]


def test_a_list_under_a_json_lines_name_and_one_record_alone_and_a_byte_order_mark_are_read(tmp_path):
    assert turns_of(save(tmp_path, json.dumps([GOOD, GOOD]), "data.jsonl")) == [TURNS] * 2
    assert turns_of(save(tmp_path, json.dumps([GOOD], indent=1), "pretty.jsonl")) == [TURNS]
    assert turns_of(save(tmp_path, json.dumps(GOOD, indent=1))) == [TURNS]
    assert turns_of(save(tmp_path, "\ufeff" + json.dumps([GOOD]))) == [TURNS]


BAD_RECORDS = [
    (7, "is a number, not an object"),
    (None, "is null, not an object"),
    (True, "is true or false, not an object"),
    ([], "is a list, not an object"),
    ({}, "has no 'conversations' or 'messages'"),
    ({"conversation": []}, "but 'conversation' (did you mean 'conversations'?)"),
    ({"conversations": [], "messages": []}, "has both 'conversations' and 'messages'"),
    ({"conversations": "hello"}, "'conversations' is a string, not a list of turns"),
    ({"messages": {"role": "user"}}, "'messages' is an object, not a list of turns"),
    ({"conversations": []}, "is empty: it has no turns"),
    ({"conversations": ["hi"]}, "turn 0 is a string, not an object"),
    ({"conversations": [{}]}, "turn 0 has no 'role' (its keys: none)"),
    ({"conversations": [{"from": "user"}]}, "turn 0 has no 'value' (its keys: 'from')"),
    ({"messages": [{"role": "asistant", "content": ""}]}, "'asistant' (did you mean 'assistant'?); known are system"),
    ({"messages": [{"role": 3, "content": ""}]}, "turn 0 has the unknown role '3'"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "turn 0 holds a list as 'content', not a string"),
    ({"conversations": [{"from": "user", "value": None}]}, "turn 0 holds null as 'value', not a string"),
    ({"messages": [{"role": "user", "content": "x"}]}, "has no assistant turn"),
    ({"messages": [{"role": "assistant", "content": " \n"}]}, "has no text in any assistant turn"),
    ({"messages": [{"role": "assistant", "content": "a\ud83d"}]}, "half of a surrogate pair at character 1"),
]


@pytest.mark.parametrize(("record", "reason"), BAD_RECORDS, ids=[reason for _, reason in BAD_RECORDS])
def test_a_bad_record_is_named_with_its_index_and_reason(tmp_path, record, reason):
    message = fault(save(tmp_path, [GOOD, record]))
    assert "1 of 2 records cannot be used" in message
    assert "--skip_bad_records" in message
    (line,) = message.splitlines()[1:]
    assert line.startswith("  record 1: ")
    assert reason in line


def test_all_bad_records_are_reported_at_once_and_a_long_list_ends_in_a_count(tmp_path):
    message = fault(save(tmp_path, [GOOD, *[{"id": str(i)} for i in range(MAX_LISTED + 5)]]))
    lines = message.splitlines()
    assert "25 of 26 records cannot be used" in lines[0]
    assert lines[1].startswith("  record 1 (id '0'): has no")
    assert lines[-2].startswith(f"  record {MAX_LISTED} ")
    assert lines[-1] == "  and 5 more"


def test_a_key_given_twice_in_a_record_is_a_bad_record_in_json_and_in_json_lines(tmp_path):
    turns = '[{"from": "user", "value": "q"}, {"from": "gpt", "value": "r", "value": "s"}]'
    twice = f'{{"id": "x", "conversations": {turns}}}'
    message = fault(save(tmp_path, f"[{json.dumps(GOOD)}, {twice}]"))
    assert message.splitlines()[1:] == ["  record 1 (id 'x'): holds the key 'value' twice in one object; keep one"]
    message = fault(save(tmp_path, f"{json.dumps(GOOD)}\n{twice}", "data.jsonl"))
    assert message.splitlines()[1:] == [
        "  record 1 (line 2, id 'x'): holds the key 'value' twice in one object; keep one"
    ]


def test_skip_bad_records_goes_on_without_them_and_says_how_many_on_the_main_rank(tmp_path, caplog):
    path = save(tmp_path, [3, GOOD, {"messages": []}])
    loaded = load_conversations(path, skip_bad_records=True)
    assert [record.place for record in loaded.records] == ["record 1 (id 'a')"]
    assert [bad.place for bad in loaded.skipped] == ["record 0", "record 2"]
    assert "going on without 2 of 3 records" in caplog.text
    caplog.clear()
    load_conversations(path, skip_bad_records=True, is_main=False)
    assert caplog.text == ""


def test_a_file_with_only_bad_records_is_refused_even_when_they_may_be_skipped(tmp_path):
    assert "none of the 2 records can be used" in fault(save(tmp_path, [3, {}]), skip_bad_records=True)


def test_keys_that_are_not_read_are_counted_and_said_once(tmp_path, caplog):
    turns = [{**turn, "weight": 1} for turn in GOOD["conversations"]]
    loaded = load_conversations(save(tmp_path, [{"system": "s", "conversations": turns}] * 2))
    assert dict(loaded.ignored_keys) == {"weight": 4, "system": 2}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "2 keys are not read: 'weight' (4 x), 'system' (2 x)" in caplog.text


RECORD = '{"messages": [{"role": "user", "content": "x"}]'
SYNTAX = [
    ('[\n {"id": 1,}\n]', "line 2, column 1", "trailing comma"),
    ("[\n 1,\n]", "line ", "trailing comma"),
    ("[\n // note\n 1]", "line 2, column 2", "JSON has no comments"),
    ("[{'id': 1}]", "line 1, column 3", "single quotes"),
    ('[{"id": None}]', "line 1, column 9", "None is Python"),
    (f"[{RECORD}}},\n{RECORD}", "line 2, column 48", "the file ends inside"),
    ('[{"id": "cut', "line 1, column 9", "not closed (was the file cut off?)"),
    ('[{"id": "a "quoted" word"}]', "line 1, column 13", "a comma is missing"),
    ('[{"id": "a\nb"}]', "line 1, column 11", "a line break or tab"),
    ('[{"id": "C:\\data"}]', "line 1, column 12", "a backslash"),
    ("[1]\n[2]", "line 2, column 1", "several JSON values"),
    ("hello", "line 1, column 1", "expecting value"),
]


@pytest.mark.parametrize(("text", "where", "cause"), SYNTAX, ids=[cause for *_, cause in SYNTAX])
def test_invalid_json_gets_file_line_column_and_likely_cause(tmp_path, text, where, cause):
    path = save(tmp_path, text)
    message = fault(path)
    assert message.startswith(f"{path}: not valid JSON: ")
    assert where in message
    assert cause in message


def test_a_line_of_json_lines_that_is_no_json_is_a_bad_record_with_its_line_and_column(tmp_path):
    path = save(tmp_path, json.dumps(GOOD) + '\n{"id": 1,}\n' + json.dumps([GOOD, GOOD]) + "\n", "data.jsonl")
    first, second, third = fault(path).splitlines()
    assert "2 of 3 records" in first
    assert second.startswith("  record 1 (line 2): line 2, column ")
    assert "trailing comma" in second
    assert third.startswith("  record 2 (line 3): a list of records stands on one line")
    assert len(load_conversations(path, skip_bad_records=True).records) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "the file is empty"),
        (" \n\n", "the file is empty"),
        ([], "the file holds no record"),
        ({"data": [GOOD]}, "its key 'data' holds a list"),
        ("{}", "one JSON object, not a list of records"),
        ('"text"', "the file holds a string, not a list"),
        ("12", "the file holds a number, not a list"),
        ("[" * 100_000, "nested too deeply"),
        ("[" + "9" * 5000 + "]", "digits"),
    ],
)
def test_a_file_without_a_list_of_records_is_refused_with_the_reason(tmp_path, content, reason):
    assert reason in fault(save(tmp_path, content))


def test_a_missing_file_names_the_nearest_file_in_its_folder(tmp_path):
    save(tmp_path, [GOOD], "train_data.json")
    meant = tmp_path / "train_data.json"
    assert f"there is no such file (did you mean {str(meant)!r}?)" in fault(tmp_path / "train_dta.json")
    assert f"{tmp_path} holds train_data.json" in fault(tmp_path / "zzz")
    assert f"its folder {tmp_path / 'no'} does not exist" in fault(tmp_path / "no" / "train_data.json")


def test_a_folder_other_bytes_than_text_and_an_impossible_path_are_refused(tmp_path):
    assert "this is a folder" in fault(tmp_path)
    path = tmp_path / "latin.json"
    path.write_bytes('["é"]'.encode("latin-1"))
    assert "not UTF-8 text (byte 2" in fault(path)
    assert "cannot be read" in fault("a\0b")
    assert "cannot be read: [Errno 36] File name too long" in fault("x" * 5000)
