"""``shardglass look`` and ``where`` on the files of a run: pages, JSON, the comparison with the plan, mistakes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import tiny_causal_lm, tokens
from ranks import run_ranks
from typer.testing import CliRunner

import shardglass
from shardglass import Snapshot, cli, look, shard
from shardglass.errors import UsageError
from shardglass.lens.store import Moment, write_moment
from shardglass.plan.expected import planned_snapshot
from shardglass.plan.kinds import OptimizerKind, PlannedOptions, StepShape

DOWN = "model.layers.1.mlp.down_proj.weight"


def trained(rank, world_size, folder):
    model = tiny_causal_lm(tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = shard(model, optimizer, stage=2)
    kind = OptimizerKind(name="AdamW", groups=({},))
    for step in (1, 2):
        model(input_ids=tokens(step, rank), labels=tokens(step, rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plan = planned_snapshot(
            handle.layout, PlannedOptions(stage=2), rank, optimizer=kind, step=step, shape=StepShape()
        )
        write_moment(Path(folder), step, Moment(live=look(model, optimizer), plan=plan))
    handle.close()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run_ranks(2, trained, str(folder))
    return folder


def shown(*argv, columns="150"):
    """Exit code and standard output of a command in this process."""
    done = CliRunner().invoke(cli.app, [str(word) for word in argv], env={"COLUMNS": columns})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_a_page_has_wrappers_memory_attributes_cuts_and_the_verdict_of_every_rank(run_folder):
    code, text = shown("look", run_folder)
    assert code == 0
    lines = text.splitlines()
    assert lines[0] == f"{run_folder}: step 2, shardglass, ZeRO stage 2, world size 2"
    for rank in (0, 1):
        snapshot = Snapshot.from_json((run_folder / "snapshots" / "step-000002" / f"rank-{rank}.json").read_text())
        assert repr(snapshot) in lines
        for row in snapshot.memory:
            assert f"{row.nbytes:,}" in text
    assert sum(line.startswith("Wrappers, outermost first") for line in lines) == 1
    assert sum(line.startswith("handle.buffers[0..3].whole ") for line in lines) == 2
    assert any(line.startswith("0 | 1") and line.endswith("model.embed_tokens.weight") for line in lines)
    assert (
        lines[-1] == "= ranks 0 to 1: layout, tensors and bytes as planned, and every tensor is where the layout says"
    )


def test_one_rank_one_pattern_and_an_earlier_step(run_folder):
    code, text = shown("look", run_folder, "--rank", "1", "--tensor", "*layers.1.mlp*", "--step", "1", "--diff", "2")
    assert code == 0
    assert "step 1, shardglass" in text.splitlines()[0]
    assert text.splitlines()[1] == "not shown: rank 0"
    assert [line.split()[0] for line in text.splitlines() if line.startswith("model.layers.1.mlp")] == [
        f"model.layers.1.mlp.{word}_proj.weight" for word in ("gate", "up", "down")
    ]
    assert "from step 2 to step 1" in text
    assert "  step: 2 → 1" in text
    assert "lm_head" not in text
    assert "= lm_head.weight" in shown("look", run_folder, "--tensor", "lm_head")[1]


def test_json_has_the_snapshots_and_the_verdict(run_folder):
    code, text = shown("look", run_folder, "--diff", "1", "--json")
    tree = json.loads(text)
    assert (code, tree["step"], tree["compared"], tree["agrees"]) == (0, 2, 1, True)
    for rank, row in enumerate(tree["ranks"]):
        snapshot = Snapshot.from_json(json.dumps(row["snapshot"]))
        assert (snapshot.rank, row["line"], row["planned"], row["faults"]) == (rank, repr(snapshot), True, [])
        assert {"where": "step", "left": "1", "right": "2"} in row["changes"]


def changed(run_folder, tmp_path, **changes):
    """A copy of the run whose rank 1 differs in some fields."""
    for rank in (0, 1):
        folder = run_folder / "snapshots" / "step-000002"
        live, plan = (Snapshot.from_json((folder / f"rank-{rank}{end}.json").read_text()) for end in ("", ".plan"))
        if rank == 1:
            live = replace(live, **{key: change(live) for key, change in changes.items()})
        write_moment(tmp_path, 2, Moment(live=live, plan=plan))
    return tmp_path


def test_what_is_not_as_planned_is_told_with_code_1(run_folder, tmp_path):
    def moved(live):
        rows = [row if row.name != DOWN else replace(row, data=replace(row.data, start=7)) for row in live.params]
        return tuple(rows)

    def smaller(live):
        return tuple(replace(row, nbytes=row.nbytes - 4) if row.category == "gradients" else row for row in live.memory)

    code, text = shown("look", changed(run_folder, tmp_path, params=moved, memory=smaller), columns="300")
    assert code == 1
    assert "2 differences: what runs is not what was planned" in text
    faults = text[text.index("rank 1, as planned → as it is") :].splitlines()
    assert [line.partition(":")[0] for line in faults[1:]] == ["  memory.gradients.nbytes", f"  params.{DOWN}.data"]
    code, text = shown("look", tmp_path, "--rank", "0")
    assert (code, text.splitlines()[-1].partition(":")[0]) == (0, "= rank 0")
    code, text = shown("look", tmp_path, "--json")
    assert (code, json.loads(text)["agrees"]) == (1, False)


def test_a_run_without_a_plan_is_held_against_its_layout_alone(run_folder, tmp_path):
    live = Snapshot.from_json((run_folder / "snapshots" / "step-000002" / "rank-0.json").read_text())
    write_moment(tmp_path, 5, Moment(live=live, plan=None))
    code, text = shown("look", tmp_path)
    assert code == 0
    assert (
        text.splitlines()[-1]
        == "= rank 0: every tensor is where the layout says; the run has no plan to be held against"
    )
    assert "not shown: rank 1" in text


def test_where_is_told_rank_by_rank_with_what_a_debugger_shows(run_folder):
    code, text = shown("where", run_folder, DOWN, columns="160")
    assert code == 0
    assert text.splitlines()[0] == DOWN
    assert text.splitlines()[2] == "buffer model.layers.1/float32/trainable"
    assert "32 × 56 = 1,792 elements, float32, group 0; shardglass, scheme units, step 2" in text
    tree = json.loads(shown("where", run_folder, f"module.{DOWN}", "--json")[1])
    assert (tree["name"], tree["shape"], tree["step"]) == (DOWN, [32, 56], 2)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        places = [row for row in tree["places"] if row["kind"] == kind]
        assert sum(row["stop"] - row["start"] for row in places) == 1792
        assert all(row["attribute"] and row["attribute"].split("[")[0] in text for row in places)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["look", "{run}x"], "there is no such folder (did you mean "),
        (["look", __file__], "test_look.py: this is a file; give the run's output_dir"),
        (["look", "{run}/snapshots"], "has no snapshots: train with --look STEP, or send SIGUSR1 to the run"),
        (["look", "{run}", "--step", "9"], "--step 9: no snapshot is of this step; there are those of 1, 2"),
        (["look", "{run}", "--diff", "9"], "--diff 9: no snapshot is of this step"),
        (["look", "{run}", "--rank", "2"], "--rank 2: it wrote no snapshot of step 2; there are those of ranks 0, 1"),
        (["look", "{run}", "--tensor", DOWN + "s"], f"no tensor has such a name (did you mean '{DOWN}'?)"),
        (["where", "{run}", DOWN.replace("down", "dwon")], f"(did you mean '{DOWN}'?)"),
    ],
)
def test_mistakes_name_the_nearest(run_folder, argv, message):
    with pytest.raises(UsageError) as caught:
        shown(*(word.format(run=run_folder) for word in argv))
    assert message in str(caught.value)


def test_a_damaged_file_and_another_version_are_one_line(run_folder, tmp_path):
    file = tmp_path / "snapshots" / "step-000001" / "rank-0.json"
    file.parent.mkdir(parents=True)
    for text, message in (
        ("{", f"{file} is no JSON"),
        ('{"version": 99}', f"{file} is a snapshot of version 99"),
        ("\udcff", f"{file} cannot be read"),
    ):
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(UsageError) as caught:
            shown("look", tmp_path)
        assert message in str(caught.value)


def test_an_unknown_tensor_is_one_line_with_code_2_and_no_torch_is_loaded(run_folder):
    script = (
        "import sys; from shardglass import cli\n"
        f"sys.argv = ['shardglass', 'where', {str(run_folder)!r}, 'lm_haed.weight']\n"
        "try:\n    cli.main()\nfinally:\n    print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(shardglass.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr == (
        "shardglass: no parameter is named 'lm_haed.weight' (did you mean 'lm_head.weight'?); names are those of "
        "model.named_parameters()\n"
    )
