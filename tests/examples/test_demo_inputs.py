"""The demo's dialogues and its cache: everything but the long parts."""

import json
import re
import sys
from pathlib import Path

import pytest

from shardglass.errors import DataError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

import prepare


def questions(dialogues):
    return {" ".join(re.findall(r"\w+", dialogue[0]["value"].casefold())) for dialogue in dialogues}


def dialogue(question, reply="yes"):
    return [{"from": "user", "value": question}, {"from": "assistant", "value": reply}]


@pytest.fixture(scope="module")
def corpus():
    return prepare.read_dialogues(prepare.package_folder("chatterbot_corpus", "chatterbot-corpus"))


def test_the_corpus_gives_whole_clean_dialogues(corpus):
    assert len(corpus) > 500
    for turns in corpus:
        assert [turn["from"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        for turn in turns:
            assert turn["value"] == " ".join(turn["value"].split()) != ""
    assert len({json.dumps(turns) for turns in corpus}) == len(corpus)


def test_the_split_is_the_same_for_any_order_and_shares_no_question(corpus):
    train, held_out = prepare.split_dialogues(corpus)
    assert (train, held_out) == prepare.split_dialogues(corpus[::-1])
    assert len(train) + len(held_out) == len(corpus)
    assert 30 <= len(held_out) <= 80
    assert not questions(train) & questions(held_out)


def test_one_question_spelled_differently_falls_in_one_part():
    for number in range(50):
        spellings = [dialogue(f"Is {number} even?"), dialogue(f"is {number}  EVEN", "no")]
        assert sorted(map(len, prepare.split_dialogues(spellings))) == [0, 2]


@pytest.mark.parametrize(
    ("row", "multi_turn", "turns"),
    [
        (["hi", " hello \n you "], False, ("hi", "hello you")),
        (["hi", "hello", "hey"], False, ("hi", "hello")),
        (["hi", "hello", "how are you?", "fine"], True, ("hi", "hello", "how are you?", "fine")),
        (["hi", "hello", "bye"], True, ("hi", "hello")),
        (["hi"], True, ()),
        (["hi", "  "], False, ()),
        (["hi", 22], False, ()),
        ("hi - hello", False, ()),
    ],
)
def test_broken_rows_give_nothing_and_alternatives_are_not_turns(row, multi_turn, turns):
    assert prepare.clean_turns(row, multi_turn=multi_turn) == turns


def test_written_dialogues_are_records_the_trainer_reads(tmp_path):
    from shardglass.hf.data import load_conversations

    prepare.write_conversations(tmp_path / "new" / "train.json", [dialogue("What is “π”?", "3.14")])
    records = json.loads((tmp_path / "new" / "train.json").read_text(encoding="utf-8"))
    assert records == [{"id": "demo-0", "conversations": dialogue("What is “π”?", "3.14")}]
    assert len(load_conversations(tmp_path / "new" / "train.json").records) == 1


def test_a_missing_package_is_an_error_that_says_how_to_install_it():
    with pytest.raises(DataError, match="pip install --no-deps no-such-package"):
        prepare.package_folder("no_such_package", "no-such-package")


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDGLASS_CACHE", str(tmp_path / "own"))
    assert prepare.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("SHARDGLASS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert prepare.cache_folder() == tmp_path / "xdg" / "shardglass"


def test_a_conversion_counts_only_when_every_file_is_whole(tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"12345")
    folder = tmp_path / "plain"
    folder.mkdir()
    assert not prepare.is_converted(folder, gguf)
    (folder / "config.json").write_text("{}")
    marker = {"source": gguf.name, "source_bytes": 5, "files": {"config.json": 2}}
    (folder / prepare.MARKER).write_text(json.dumps(marker))
    assert prepare.is_converted(folder, gguf)
    (folder / "config.json").write_text("{")
    assert not prepare.is_converted(folder, gguf)
    (folder / "config.json").write_text("{}")
    gguf.write_bytes(b"123456")
    assert not prepare.is_converted(folder, gguf)


def test_the_demo_config_is_one_that_the_package_reads():
    from shardglass.config import load_config

    config = Path(prepare.__file__).with_name("ds_config.json")
    assert load_config(config).zero_optimization.stage == 2
