"""The resolved config as JSON and as a table, and the page of all keys."""

import functools
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from shardglass.config import Status, known_keys, load_config
from shardglass.config.types import OPTIMIZERS, SCHEDULERS
from shardglass.errors import ConfigError
from shardglass.report import config_json, render_config
from shardglass.report.config_page import config_page
from shardglass.resolve import RunArguments, resolve

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "config.md"
SOURCE = {
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "wandb": {"enabled": False, "team": "é"},
    "amp": {"opt_level": "auto"},
}


def resolved(final=True, **flags):
    args = RunArguments(**flags, explicit=frozenset(flags))
    return resolve(load_config(SOURCE), args, world_size=2, final=final)


def test_json_holds_every_row_with_its_origin():
    run = resolved(warmup_ratio=0.1, max_steps=30, learning_rate=1e-4)
    body = json.loads(config_json(run))
    assert (body["version"], body["config"], body["world_size"]) == (1, "the DeepSpeed config", 2)
    assert [row["key"] for row in body["values"]] == [row.key for row in run.values]
    rows = {row.pop("key"): row for row in body["values"]}
    warmup_flags = "--warmup_steps, --warmup_ratio"
    assert rows["scheduler.params.warmup_num_steps"] == {
        "value": 3,
        "source": "derived",
        "flag": warmup_flags,
        "used": True,
    }
    assert rows["wandb"] == {"value": {"enabled": False, "team": "é"}, "source": "json", "flag": None, "used": False}
    assert rows["optimizer.params.lr"]["source"] == "flag"
    assert rows["amp.opt_level"]["value"] is None
    assert body["notes"] == list(run.notes)


def test_what_is_not_known_yet_is_null_and_named():
    body = json.loads(config_json(resolved(final=False, warmup_ratio=0.1)))
    assert body["pending"] == ["scheduler.params.warmup_num_steps"]
    assert next(row for row in body["values"] if row["key"] in body["pending"])["value"] is None


def test_the_table_shows_what_is_used_first_with_flag_and_origin():
    out = io.StringIO()
    render_config(resolved(warmup_ratio=0.1, max_steps=30), Console(file=out, width=120))
    head, titles, *lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert head == "Resolved config: the DeepSpeed config, 2 ranks"
    assert titles.split() == ["key", "value", "from", "used"]
    cells = {line.split()[0]: re.split(r"  +", line)[1:] for line in lines}
    assert cells["zero_optimization.stage"] == ["1", "config", "yes"]
    assert cells["scheduler.params.warmup_num_steps"] == ["3", "derived", "yes"]
    assert cells["optimizer.type"] == ['"adamw_torch_fused"', "default", "yes"]
    assert cells["wandb"] == ['{"enabled": false, "team": "é"}', "config", "no"]
    assert cells["amp.opt_level"] == ["-", "config", "no"]
    used = [line.split()[-1] for line in lines]
    assert used == sorted(used, reverse=True)


def test_a_flag_that_decided_is_named_in_the_table():
    out = io.StringIO()
    render_config(resolved(max_grad_norm=0.5, max_steps=3), Console(file=out, width=120))
    line = next(line for line in out.getvalue().splitlines() if line.startswith("gradient_clipping"))
    assert line.split() == ["gradient_clipping", "0.5", "flag", "--max_grad_norm", "yes"]


# ---- docs/config.md ----


def test_the_committed_page_is_the_one_the_schema_gives():
    assert PAGE.read_text(encoding="utf-8") == config_page(), (
        "write it anew: python -m shardglass.report.config_page > docs/config.md"
    )


def test_the_module_writes_the_page():
    done = subprocess.run(
        [sys.executable, "-m", "shardglass.report.config_page"],
        env={"PYTHONPATH": str(ROOT / "src"), "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )
    assert done.stdout == config_page()


@functools.cache
def page_rows():
    lines = [line for line in config_page().splitlines() if line.startswith("| `") and line.count("|") >= 7]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_key_stands_on_the_page_once_with_words():
    rows = page_rows()
    assert sorted(row[0].strip("`") for row in rows) == sorted(known.key for known in known_keys())
    assert [row[0] for row in rows if not row[2]] == []


@pytest.mark.parametrize("known", known_keys(), ids=lambda known: known.key)
def test_what_the_page_says_of_a_key_is_what_the_loader_does(known):
    row = next(row for row in page_rows() if row[0] == f"`{known.key}`")
    fates = {Status.HONOURED: ("honoured", "only "), Status.NO_EFFECT: ("no effect",), Status.NOT_YET: ("refused",)}
    assert row[1].startswith(fates[known.rule.status])
    for value in map(json.loads, re.findall(r"`([^`]+)`", row[1])):
        assert message_of(known, value) is None
    if known.rule.fine is not None or known.rule.status is Status.NOT_YET:
        assert "not supported yet" in (message_of(known, asking(known)) or "")


def asking(known):
    """A value that the key can have and that is not among those it may have."""
    for value in (True, False, 7, "nvme", "sum", "fp16", "Lion", "OneCycle", {"enabled": True}):
        try:
            read = known.rule.read(value)
        except ValueError:
            continue
        if known.rule.fine is None or all(
            read != fine or isinstance(read, bool) != isinstance(fine, bool) for fine in known.rule.fine
        ):
            return value
    raise AssertionError(known.key)


def message_of(known, value):
    """What loading a config with this key says; None if it loads."""
    tree = {known.path[-1]: value}
    for part in reversed(known.path[:-1]):
        tree = {part: tree}
    for section, types in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        if section in tree:
            takes = (name for name, row in types.items() if known.path[-1] in (row.params or ()))
            tree[section].setdefault("type", next(takes, next(iter(types))))
    try:
        load_config(tree)
    except ConfigError as error:
        return str(error)
    return None
