"""``shardglass report`` and ``plan --html``: a page of a folder, of a preset, and of mistakes."""

import json

import pages
import pytest
from typer.testing import CliRunner

from shardglass import cli
from shardglass.errors import ConfigError, UsageError
from shardglass.hf.run_report import setup_of_run, write_run_report
from shardglass.report import html_page
from shardglass.report.html_run import read_run

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}


def invoke(*argv):
    done = CliRunner().invoke(cli.app, argv)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


@pytest.fixture
def run_dir(tmp_path):
    pages.write_run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_the_report_of_a_run_has_its_curves_and_its_model(run_dir):
    assert invoke("report", str(run_dir)) == f"report: {run_dir / 'report.html'}\n"
    data = pages.data_of((run_dir / "report.html").read_text(encoding="utf-8"), "page-data")
    assert data["run"]["loss"]["values"] == [3.5, 3.25, 3.0]
    assert data["model"]["plan"]["run"]["world_size"] == 2
    assert len(data["model"]["tensors"]["names"]) == data["model"]["plan"]["model"]["num_tensors"] == 26
    assert [name for _, name in data["model"]["tensors"]["tied"]] == ["lm_head.weight"]
    assert "a note of the run" in data["notes"]


def test_the_setup_is_the_runs(run_dir):
    setup = setup_of_run(read_run(run_dir))
    assert (setup.world_size, setup.stage, setup.num_groups, setup.accumulation, setup.length) == (2, 2, 2, 2, 64)
    assert (setup.device, setup.dtype, setup.reduce_dtype, setup.accum_dtype) == (
        "cpu",
        "bfloat16",
        "bfloat16",
        "float32",
    )
    assert setup.optimizer.name == "AdamW"


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_run_is_planned_again_with_its_own_checkpointing_and_kernel(run_dir, recomputes):
    summary = json.loads((run_dir / "shardglass_summary.json").read_text())
    summary["environment"]["attention"] = "eager"
    (run_dir / "shardglass_summary.json").write_text(json.dumps(summary | {"recomputes": recomputes}))
    setup = setup_of_run(read_run(run_dir))
    assert (setup.recomputes, setup.attention) == (recomputes, "eager")
    page = write_run_report(run_dir).read_text(encoding="utf-8")
    note = f"and {'with' if recomputes else 'without'} gradient checkpointing"
    assert any(note in line for line in pages.data_of(page, "page-data")["notes"])


@pytest.mark.parametrize("argv", [["report", "{run}"], ["plan", "nowhere", "--html", "{run}/plan.html"]])
def test_a_missing_plotly_is_told_before_anything_is_planned(run_dir, monkeypatch, argv):
    monkeypatch.setattr(html_page, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'shardglass\[report\]'"):
        invoke(*(word.format(run=run_dir) for word in argv))


@pytest.mark.parametrize(
    ("path", "message"),
    [("", "this is a folder; name a file in it"), ("config.json/x/plan.html", r"config\.json is a file, not a folder")],
)
def test_a_page_that_cannot_be_written_is_told_before_anything_is_planned(run_dir, path, message):
    with pytest.raises(ConfigError, match=message):
        invoke("plan", "nowhere", "--html", str(run_dir / path))


def test_a_run_whose_model_is_not_there_has_a_page_without_a_map(run_dir, tmp_path):
    (run_dir / "config.json").unlink()
    path = write_run_report(run_dir, tmp_path / "elsewhere" / "page.html")
    data = pages.data_of(path.read_text(encoding="utf-8"), "page-data")
    assert data["model"] is None
    assert "no map and no plan of the model" in data["notes"][0]
    assert "config.json" in data["notes"][0]


def test_a_plan_is_written_as_a_page(tmp_path):
    file = tmp_path / "plan.html"
    invoke("plan", "qwen1.5-7b", "--world-size", "2", "--scheme", "deepspeed-flat", "--html", str(file))
    text = file.read_text(encoding="utf-8")
    assert len(text.encode()) < 6_000_000
    assert len(pages.data_of(text, "page-data")["model"]["tensors"]["names"]) == 387
    shown = pages.data_of(text, "layout-deepspeed-flat-2")
    # Two optimizer groups without an optimizer section; the order is that of the groups.
    assert [sum(count for _, count in shown["order"]), sum(shown["sizes"]), shown["world_size"]] == [387, 387, 2]


def test_mistakes_are_one_error(tmp_path):
    with pytest.raises(UsageError, match="there is no such folder"):
        invoke("report", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"plan\.html: the page cannot be written"):
        invoke("plan", "smollm2-135m", "--html", "/proc/nowhere/plan.html")
