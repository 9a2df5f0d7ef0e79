"""Models and pages for the tests of the interactive page: no weights, no transformers."""

import base64
import json
import re
import shutil
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from shardglass.layout import ParamSpec, SchemeOptions
from shardglass.plan.model import ModelFacts
from shardglass.plan.plan import make_plan
from shardglass.plan.setup import Setup
from shardglass.report.html_layouts import page_layouts, tensor_table, world_sizes
from shardglass.report.html_page import plan_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def small_facts():
    """15 tensors of odd sizes: two groups, a frozen block, a tied head, an empty tensor, one element."""
    rows = [("embed.weight", (97, 8), "root:0", 0)]
    for k in range(3):
        unit = f"blocks.{k}"
        group = None if k == 1 else 0
        rows += [
            (f"{unit}.up.weight", (13, 7), unit, group),
            (f"{unit}.up.bias", (13,), unit, None if k == 1 else 1),
            (f"{unit}.down.weight", (7, 13), unit, group),
            (f"{unit}.mix", (3, 5, 4), unit, group),
        ]
    rows += [("norm.weight", (1,), "root:1", 1), ("norm.empty", (0, 4), "root:1", 1)]
    return facts_of_rows(rows, tied=(("head.weight", "embed.weight"),))


def many_facts(layers=100, each=400):
    """Tens of thousands of tensors, as a mixture of experts with an expert's matrices apart."""
    rows = [("model.embed_tokens.weight", (32_000, 1024), "root:0", 0)]
    for k in range(layers):
        unit = f"model.layers.{k}"
        rows.append((f"{unit}.input_layernorm.weight", (1024,), unit, 1))
        rows += [(f"{unit}.mlp.experts.{e}.down_proj.weight", (1024, 768), unit, 0) for e in range(each - 1)]
    return facts_of_rows(rows)


def facts_of_rows(rows, tied=()):
    """(name, shape, unit, group) of each tensor; group None is frozen."""
    return ModelFacts(
        name="house/odd-model",
        model_type="odd",
        source="preset",
        params=tuple(
            ParamSpec(name=name, shape=shape, dtype="bfloat16", trainable=group is not None, group=group, unit=unit)
            for name, shape, unit, group in rows
        ),
        tied=tied,
        stored_dtype="bfloat16",
        buffer_bytes=0,
        max_length=None,
        geometry=None,
    )


def page_of(facts, **setup):
    run = Setup(**setup)
    return plan_page(make_plan(facts, run), facts, run)


@cache
def many_page():
    """A page of 40,001 tensors; its plan and memory, which take no room, are a small model's."""
    facts, small = many_facts(), page_of(small_facts(), world_size=8, stage=2)
    sizes = world_sizes(len(facts.params), 8)
    model = replace(small.model, tensors=tensor_table(facts.params), world_sizes=sizes)
    layouts = page_layouts(facts.params, sizes, own="units", options=SchemeOptions())
    return replace(small, model=model, layouts=layouts)


def data_of(text, name):
    """What a page holds in one of its elements."""
    packed = re.search(rf'<script type="text/plain" id="{re.escape(name)}">([^<]*)</script>', text)
    assert packed is not None, name
    return json.loads(zlib.decompress(base64.b64decode(packed[1])))


def browser_path():
    """A Chromium of this machine; skips with the reason if there is none, or nothing to drive it."""
    pytest.importorskip("playwright", reason="playwright is not installed, which drives the browser")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser on this machine: none of {', '.join(BROWSERS)}")
    return found


def write_run(folder: Path, *, skipped=1):
    """The files of a run of two ranks in which a step was skipped; a remainder of 1,000 bytes on rank 0."""
    rows = [
        {"category": "parameters", "planned": 600, "measured": 600},
        {"category": "gradients", "planned": 400, "measured": 404},
    ]
    account = {"rank": 0, "rows": rows, "process": 2004, "peak": 3000}
    dtypes = [
        {"kind": "parameters", "computed": "bfloat16", "reduced": None, "accumulated": None},
        {"kind": "gradients", "computed": "bfloat16", "reduced": "bfloat16", "accumulated": "float32"},
    ]
    summary = {
        "version": 1,
        "model": "/models/tiny",
        "stage": 2,
        "memory": account,
        "largest": account | {"rank": 1, "process": 2100},
        "batch": {
            "ranks": 2,
            "micro": 1,
            "accumulation": 2,
            "tokens_per_step": 183.0,
            "label_share": 0.15,
            "max_length": 64,
        },
        "progress": {"steps": 3, "skipped": skipped, "tokens_per_s": 7.5},
        "groups": [{"index": 0}, {"index": 1}],
        "dtypes": dtypes,
        "environment": {"attention": "sdpa", "backend": "gloo", "device": "cpu", "versions": [["Python", "3.11"]]},
        "all_deviations": ["1 of 3 steps were skipped: their gradient was inf or nan"] if skipped else [],
        "notes": ["a note of the run"],
        "process_kind": "RSS",
    }
    log = [
        {"step": 1, "loss": 3.5, "grad_norm": 1.5, "learning_rate": 1e-5},
        {"step": 2, "loss": 3.25, "grad_norm": float("nan"), "learning_rate": 1e-5, "steps_skipped": 1},
        {"step": 2, "eval_loss": 3.0},
        {"step": 3, "loss": 3.0, "grad_norm": 1.25, "learning_rate": 5e-6, "steps_skipped": 1},
    ]
    config = {"version": 1, "values": [{"key": "gradient_clipping", "value": 1.0}]}
    (folder / "shardglass_summary.json").write_text(json.dumps(summary))
    (folder / "shardglass_config.json").write_text(json.dumps(config))
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    return summary
