"""``shardglass debug-config``: its entries, and what becomes of a launch.json that is there."""

import json
import os
import stat

import pytest
from typer.testing import CliRunner

from shardglass import cli
from shardglass.commands.debug_config import read_command
from shardglass.errors import ConfigError
from shardglass.jsonc import parse

TORCHRUN = ["torchrun", "--nproc_per_node", "2", "examples/finetune.py", "--bf16", "True"]

FILE = """{
  // Use IntelliSense to learn about possible attributes.
  "version": "0.2.0",
  "inputs": [], /* none */
  "configurations": [
    {
      "name": "mine", // keep me
      "type": "debugpy",
    }, // and me
    // and me too
  ],
}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".vscode" / "launch.json"


def written(*flags, command=TORCHRUN):
    """What the command said."""
    done = CliRunner().invoke(cli.app, ["debug-config", *flags, "--", *command])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def message_of(*flags, command=TORCHRUN):
    with pytest.raises(ConfigError) as caught:
        written(*flags, command=command)
    return str(caught.value)


def entries(file):
    return parse(file.read_text()).value["configurations"]


def test_an_entry_starts_the_run_and_follows_into_its_processes(here, tmp_path):
    assert "shardglass: finetune.py, every rank; start it with F5" in written()
    assert entries(here) == [
        {
            "name": "shardglass: finetune.py, every rank",
            "type": "debugpy",
            "request": "launch",
            "module": "torch.distributed.run",
            "args": TORCHRUN[1:],
            "cwd": str(tmp_path),
            "env": {"SHARDGLASS_DEBUGGED": "all"},
            "console": "integratedTerminal",
            "subProcess": True,
            "justMyCode": False,
        }
    ]
    written("--ranks", "1,0")
    assert entries(here)[1]["name"] == "shardglass: finetune.py, ranks 0, 1"
    assert entries(here)[1]["env"] == {"SHARDGLASS_DEBUGGED": "0,1"}
    assert json.loads(here.read_text())["version"] == "0.2.0"


def test_an_entry_joins_one_rank_and_the_command_for_the_terminal_is_said(here):
    said = written("--rank", "1", "--port", "6000")
    assert said.endswith(f"first start in a terminal: {' '.join(TORCHRUN)} --debugpy_rank 1 --debugpy_port 6000\n")
    (entry,) = entries(here)
    assert (entry["request"], entry["connect"]) == ("attach", {"host": "127.0.0.1", "port": 6000})


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["A=b", "C=", "torchrun", "x.py"], ({"A": "b", "C": ""}, None, "torch.distributed.run", None, ("x.py",))),
        (["python", "-m", "torch.distributed.run", "x.py"], ({}, None, "torch.distributed.run", None, ("x.py",))),
        (["/opt/bin/python3", "-m", "shardglass", "train"], ({}, "/opt/bin/python3", "shardglass", None, ("train",))),
        (["shardglass", "train", "--bf16"], ({}, None, "shardglass", None, ("train", "--bf16"))),
        (["python", "x.py", "a"], ({}, None, None, "x.py", ("a",))),
    ],
)
def test_commands_are_taken_apart(command, found):
    started = read_command(command)
    assert (started.environment, started.python, started.module, started.program, started.args) == found


def test_what_is_in_the_file_stays_with_its_comments(here):
    here.parent.mkdir()
    here.write_text(FILE)
    here.chmod(0o600)
    written()
    text = here.read_text()
    head, _, tail = FILE.partition("  ],\n}\n")
    assert text.startswith(head)
    assert text.endswith(f"\n    }}\n  ],\n}}\n{tail}")
    assert text.splitlines()[len(head.splitlines())] == "    {"
    assert text.splitlines()[len(head.splitlines()) + 1].startswith('      "name": "shardglass: ')
    assert [entry["name"] for entry in entries(here)] == ["mine", "shardglass: finetune.py, every rank"]
    assert stat.S_IMODE(here.stat().st_mode) == 0o600
    assert sorted(path.name for path in here.parent.iterdir()) == ["launch.json"]


def test_the_same_entry_is_there_once_and_one_of_the_user_is_never_replaced(here):
    written()
    once = here.read_bytes()
    written()
    assert here.read_bytes() == once
    here.write_text(once.decode().replace("true", "false /* by hand */", 1))
    assert "every rank (2)" in written()
    assert "by hand" in here.read_text()
    written()
    assert [entry["name"][-10:] for entry in entries(here)] == ["every rank", "y rank (2)"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "// only this\n",
        "{}",
        "{ /* a */ }",
        '{"version": "0.2.0"}',
        '{"configurations": []}',
        '\ufeff{"a": 1,}',
    ],
)
def test_files_without_entries_get_their_first(here, text):
    here.parent.mkdir()
    here.write_text(text)
    written()
    assert [entry["type"] for entry in entries(here)] == ["debugpy"]
    assert [
        part for part in ("// only this", "/* a */", '"a": 1') if part in text and part not in here.read_text()
    ] == []


def test_line_ends_tabs_and_links_stay(here, tmp_path):
    here.parent.mkdir()
    real = tmp_path / "real.json"
    real.write_bytes(b'{\r\n\t"configurations": [\r\n\t\t{"name": "a"} // b\r\n\t]\r\n}\r\n')
    here.symlink_to(real)
    written()
    assert here.is_symlink()
    lines = real.read_bytes().split(b"\r\n")
    assert lines[2] == b'\t\t{"name": "a"}, // b'
    assert lines[3:5] == [b"\t\t{", b'\t\t\t"name": "shardglass: finetune.py, every rank",']
    assert not any(b"\n" in line for line in lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"configurations": [}', "is no JSON with comments, line 1, column 21"),
        (b"[]", "it must be an object"),
        (b'{"configurations": {}}', '"configurations" must be an array'),
        (b"\xff\xfe{}", "not UTF-8 text"),
        (b"[" * 100000, "nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_and_stays_as_it_is(here, content, message):
    here.parent.mkdir()
    here.write_bytes(content)
    assert message in message_of()
    assert "\n" not in message_of()
    assert here.read_bytes() == content


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_one_line(here):
    here.parent.mkdir(mode=0o500)
    assert "cannot be written: Permission denied" in message_of()


def test_a_place_that_cannot_be_written_is_one_line(here):
    here.parent.write_text("a file")
    assert "cannot be" in message_of()


@pytest.mark.parametrize(
    ("flags", "command", "message"),
    [
        ([], [], "the command of the run is missing, such as: shardglass debug-config -- torchrun"),
        ([], ["accelerate", "launch", "x.py"], "accelerate: the run must be started by torchrun"),
        ([], ["python", "-m", "pytest"], "pytest: this starts no ranks"),
        (["--rank", "1", "--ranks", "0"], TORCHRUN, "give one of them"),
        (["--ranks", "0,x"], TORCHRUN, "--ranks 0,x: it must be ranks with commas"),
        (["--rank", "-1"], TORCHRUN, "a rank is at least 0"),
        (["--rank", "0", "--port", "70000"], TORCHRUN, "a port at least 1"),
    ],
)
def test_mistakes_are_told_in_one_line(here, flags, command, message):
    assert message in message_of(*flags, command=command)
    assert not here.exists()
