"""The interactive page: one file that opens from disk, with everything it needs inside.

Owns the values that go in, how they are packed, and the file. Leaves what they are to ``html_layouts``, ``html_memory``
and ``html_run``, and how they are drawn to the scripts in ``assets``.
"""

import base64
import html
import json
import re
import zlib
from dataclasses import dataclass, fields
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardglass.errors import ConfigError
from shardglass.json_form import to_tree
from shardglass.layout import SCHEMES, SchemeOptions
from shardglass.options import STAGES
from shardglass.plan.model import ModelFacts
from shardglass.plan.plan import Plan
from shardglass.plan.setup import Setup
from shardglass.report.html_layouts import (
    STAGES_OF,
    PageLayout,
    TensorTable,
    page_layouts,
    tensor_table,
    world_sizes,
)
from shardglass.report.html_memory import WorldMemory, page_memory
from shardglass.report.html_run import RunPage

ASSETS = files("shardglass.report") / "assets"
SCRIPTS = (
    "layout.js",
    "state.js",
    "map_geometry.js",
    "map_drawing.js",
    "map.js",
    "detail.js",
    "lists.js",
    "charts.js",
    "page.js",
)
"""In the order they are loaded; each adds its names to one object, ``SG``."""

PLOTLY = ("package_data", "plotly.min.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeLine:
    """A scheme to choose: its name, who lays out so, and the stages it is used for."""

    name: str
    used_by: str
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLine:
    """A stage to choose, and what it shards."""

    number: int
    shards_state: bool
    shards_grads: bool
    shards_params: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPage:
    """A model and its plans.

    Attributes:
        plan: The plan, without its cut table, which the page makes itself.
        tensors: The tensors.
        schemes: Schemes to choose from.
        stages: Stages to choose from.
        world_sizes: World sizes to choose from.
        memory: The native engine's memory at each.
    """

    plan: Plan
    tensors: TensorTable
    schemes: tuple[SchemeLine, ...]
    stages: tuple[StageLine, ...]
    world_sizes: tuple[int, ...]
    memory: tuple[WorldMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything a page shows.

    Attributes:
        title: Of the page.
        model: The model; None if what is left of a run does not say.
        layouts: Its layouts.
        run: The run; None for a plan.
        notes: What a reader must know.
    """

    title: str
    model: ModelPage | None
    layouts: tuple[PageLayout, ...]
    run: RunPage | None
    notes: tuple[str, ...]


def plan_page(
    plan: Plan,
    facts: ModelFacts,
    setup: Setup,
    *,
    scheme_options: SchemeOptions | None = None,
    run: RunPage | None = None,
    notes: tuple[str, ...] = (),
) -> Page:
    """The page of a plan, with the run that was planned if there is one.

    Args:
        plan: The plan.
        facts: Its model.
        setup: Its run.
        scheme_options: What its layout scheme was told beside.
        run: What came of it.
        notes: What the caller has to say beside the plan's notes.
    """
    sizes = world_sizes(len(facts.params), setup.world_size)
    model = ModelPage(
        plan=plan,
        tensors=tensor_table(facts.params, facts.tied),
        schemes=tuple(SchemeLine(name=s.name, used_by=s.used_by, stages=STAGES_OF[s.name]) for s in SCHEMES),
        stages=tuple(
            StageLine(
                number=rules.number,
                shards_state=rules.shards_state,
                shards_grads=rules.shards_grads,
                shards_params=rules.shards_params,
            )
            for rules in STAGES.values()
        ),
        world_sizes=sizes,
        memory=page_memory(facts, setup, sizes),
    )
    layouts = page_layouts(facts.params, sizes, own=plan.run.scheme, options=scheme_options or SchemeOptions())
    what = "run" if run is not None else "plan"
    title = f"{Path(facts.name).name or facts.name}: ZeRO {what}"
    return Page(title=title, model=model, layouts=layouts, run=run, notes=(*notes, *plan.notes, *plan.assumptions))


def write_page(page: Page, path: Path) -> None:
    """Write a page as one file that needs no network.

    Raises:
        ConfigError: plotly is not installed, or the file cannot be written.
    """
    text = page_text(page)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the page cannot be written: {error.strerror}") from None


def check_page(path: Path) -> None:
    """Find out, before anything is computed for it, that a page cannot be written.

    Raises:
        ConfigError: plotly is not installed, or the path is a folder or below a file.
    """
    _plotly_path()
    if path.is_dir():
        raise ConfigError(f"{path}: the page cannot be written: this is a folder; name a file in it")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ConfigError(f"{path}: the page cannot be written: {above} is a file, not a folder")


def page_text(page: Page) -> str:
    """The page.

    Raises:
        ConfigError: plotly is not installed.
    """
    parts = {
        "title": html.escape(page.title),
        "style": _asset("page.css"),
        "plotly": _script(plotly_text()),
        "scripts": "\n".join(_script(_asset(name)) for name in SCRIPTS),
        "data": "\n".join(_data(name, value) for name, value in _values(page).items()),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


def plotly_text() -> str:
    """The plotting library's JavaScript, from its Python package; nothing of the package is run.

    Raises:
        ConfigError: plotly is not installed.
    """
    return _plotly_path().read_text(encoding="utf-8")


def _plotly_path() -> Path:
    spec = find_spec("plotly")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    path = None if folder is None else folder.joinpath(*PLOTLY)
    if path is None or not path.is_file():
        raise ConfigError("the page needs plotly, which is not installed: pip install 'shardglass[report]'")
    return path


def _values(page: Page) -> dict[str, Any]:
    """What the page reads, by the id of its element; layouts by themselves, since each is unpacked when it is shown."""
    tree = to_tree(page, without=("layouts",))
    if tree["model"] is not None:
        tree["model"]["plan"]["partition"]["cuts"] = []
    return {"page-data": tree} | {layout.name: _columns(layout) for layout in page.layouts}


def _columns(layout: PageLayout) -> dict[str, Any]:
    """A layout by its fields, with columns of one value as ``{"all": value}``."""
    tree: dict[str, Any] = {field.name: getattr(layout, field.name) for field in fields(layout)}
    for name, column in tree.items():
        if isinstance(column, tuple) and len(column) > 1 and all(item == column[0] for item in column):
            tree[name] = {"all": column[0]}
    return tree


def _data(name: str, value: Any) -> str:
    """A value as compressed JSON in an element that a browser does not run."""
    packed = zlib.compress(json.dumps(value, separators=(",", ":"), allow_nan=False).encode(), 9)
    return f'<script type="text/plain" id="{name}">{base64.b64encode(packed).decode()}</script>'


def _script(text: str) -> str:
    """JavaScript inside a page: nothing in it may look like the end of its element."""
    safe = text.replace("</script", "<\\/script")
    return f"<script>\n{safe}\n</script>"


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
