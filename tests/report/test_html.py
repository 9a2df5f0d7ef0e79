"""The interactive page as data: what is in the file, without a browser."""

import json
import re
import sys
import zipfile
from subprocess import run

import pages
import pytest

from shardglass.errors import ConfigError, UsageError
from shardglass.layout import SCHEMES, make_layout
from shardglass.plan.kinds import PlannedOptions
from shardglass.plan.memory import planned_bytes
from shardglass.plan.setup import Setup
from shardglass.report import html_page
from shardglass.report.html_layouts import page_layout, world_sizes
from shardglass.report.html_page import ASSETS, SCRIPTS, page_text, write_page
from shardglass.report.html_run import read_run, run_page

MOST_BYTES = 6_000_000


@pytest.fixture(scope="module")
def text():
    return page_text(pages.page_of(pages.small_facts(), world_size=3, stage=2))


def test_the_page_is_one_file_that_refers_to_nothing_outside(text):
    assert len(text.encode()) < MOST_BYTES
    head = text[: text.index("<script>")]
    assert not re.findall(r'(?:src|href)="(?!data:)', head)
    own = "".join((ASSETS / name).read_text(encoding="utf-8") for name in (*SCRIPTS, "page.css", "page.html"))
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", own)
    assert "{{" not in head


def test_the_page_holds_every_scheme_at_every_world_size_and_the_plans_own(text):
    assert world_sizes(15, 3) == (1, 2, 3, 4, 8, 16, 32, 64)
    for scheme in SCHEMES:
        for world_size in world_sizes(15, 3):
            data = pages.data_of(text, f"layout-{scheme.name}-{world_size}")
            assert (data["scheme"], data["world_size"], data["refused"]) == (scheme.name, world_size, None)


def test_columns_of_a_layout_are_its_buffers(text):
    facts = pages.small_facts()
    index = {p.name: i for i, p in enumerate(facts.params)}
    for scheme in SCHEMES:
        layout = make_layout(scheme.name, facts.params, 3)
        columns = page_layout(layout, index)
        assert columns.sizes == tuple(len(b.params) for b in layout.buffers)
        assert columns.shards == tuple(b.shard_numel for b in layout.buffers)
        order = [first + i for first, count in columns.order for i in range(count)]
        assert [facts.params[i].name for i in order] == list(layout.names)
        assert len(columns.gaps) == len(columns.chunks) == len(index)


def test_a_layout_that_takes_no_such_model_says_why():
    facts = pages.facts_of_rows([("scale", (), "root", 0), ("w", (3, 4), "root", 0)])
    data = pages.data_of(page_text(pages.page_of(facts, world_size=2)), "layout-dim0-2")
    assert "scale is a scalar" in data["refused"]


def test_memory_is_the_plans_at_every_world_size_stage_and_rank(text):
    facts = pages.small_facts()
    data = pages.data_of(text, "page-data")["model"]
    for world in data["memory"]:
        layout = make_layout("units", facts.params, world["world_size"])
        for stage in world["stages"]:
            setup = Setup(world_size=world["world_size"], stage=stage["stage"])
            assert len(stage["account_of"]) == world["world_size"]
            for rank in {0, world["world_size"] - 1}:
                found = {c["name"]: c["bytes"] for c in stage["accounts"][stage["account_of"][rank]]}
                options = PlannedOptions(stage=stage["stage"])
                assert found == planned_bytes(layout, options, rank, optimizer=setup.optimizer, shape=setup.shape)


def test_40_000_tensors_stay_under_6_mb():
    page = pages.many_page()
    assert len(page.model.tensors.names) == 40_001
    written = page_text(page)
    assert len(written.encode()) < MOST_BYTES
    assert {layout.world_size for layout in page.layouts} == {2, 8, 64}


def test_a_missing_plotly_is_one_error_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(html_page, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'shardglass\[report\]'"):
        write_page(pages.page_of(pages.small_facts()), tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_page_that_cannot_be_written_names_the_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/page\.html: the page cannot be written"):
        write_page(pages.page_of(pages.small_facts()), tmp_path / "file" / "page.html")


def test_names_cannot_break_out_of_the_page():
    facts = pages.facts_of_rows([("</script><b>{{style}}", (3, 4), "root", 0)])
    name = "a</title><script>alert(1)</script>{{data}}"
    written = page_text(pages.page_of(type(facts)(**{f: getattr(facts, f) for f in facts.__slots__} | {"name": name})))
    assert "<script>alert" not in written
    assert pages.data_of(written, "page-data")["model"]["tensors"]["names"] == ["</script><b>{{style}}"]


def test_the_wheel_has_the_assets(tmp_path):
    done = run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-build-isolation",
            "--no-deps",
            "--no-index",
            "-w",
            tmp_path,
            ".",
        ],
        cwd=pages.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"shardglass/report/assets/{name}" for name in (*SCRIPTS, "page.css", "page.html")} <= names


# ---- a run ----


def test_a_run_in_charts(tmp_path):
    pages.write_run(tmp_path)
    page = run_page(read_run(tmp_path))
    assert (page.loss.steps, page.loss.values) == ((1, 2, 3), (3.5, 3.25, 3.0))
    assert page.grad_norm.values == (1.5, None, 1.25)
    assert (page.eval_loss.steps, page.eval_loss.values) == ((2,), (3.0,))
    assert page.rate.values == (1e-5, 1e-5, 5e-6)
    assert (page.clip, page.skipped, page.num_skipped) == (1.0, (2,), 1)
    first, second = page.accounts
    assert (first.rank, first.planned, first.measured) == (0, (600, 400), (600, 404))
    assert first.remainder == 2004 - 1004
    assert second.remainder == 2100 - 1004
    assert page.source == "trainer_state.json"


def test_the_log_of_the_last_checkpoint_stands_in(tmp_path):
    pages.write_run(tmp_path)
    state = (tmp_path / "trainer_state.json").read_text()
    (tmp_path / "trainer_state.json").unlink()
    for number in (9, 10):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text(state)
    assert run_page(read_run(tmp_path)).source == "checkpoint-10/trainer_state.json"


def test_a_run_without_a_log_or_config_has_no_curves(tmp_path):
    pages.write_run(tmp_path)
    (tmp_path / "trainer_state.json").unlink()
    (tmp_path / "shardglass_config.json").unlink()
    page = run_page(read_run(tmp_path))
    assert (page.loss.steps, page.clip, page.source) == ((), None, None)


def test_what_is_no_run_is_one_error(tmp_path):
    with pytest.raises(UsageError, match="there is no such folder"):
        read_run(tmp_path / "none")
    with pytest.raises(UsageError, match=r"no shardglass_summary\.json in it"):
        read_run(tmp_path)
    summary = pages.write_run(tmp_path)
    file = tmp_path / "shardglass_summary.json"
    file.write_text(json.dumps(summary | {"version": 99}))
    with pytest.raises(UsageError, match="version 99, and version 1 is understood"):
        read_run(tmp_path)
    file.write_text('{"version": 1,')
    with pytest.raises(UsageError, match=r"shardglass_summary\.json:1:15: not JSON"):
        read_run(tmp_path)
    del summary["progress"]
    file.write_text(json.dumps(summary))
    with pytest.raises(UsageError, match="it is damaged: KeyError"):
        run_page(read_run(tmp_path))
