"""The interactive page in headless Chromium: it opens from disk, finds, shows, switches; its arithmetic is Python's."""

import pages
import pytest

from shardglass.json_form import to_tree
from shardglass.layout import SCHEMES, boundary_cuts, locate, make_layout, rank_bytes, slices_of
from shardglass.report.html_layouts import page_layout
from shardglass.report.html_page import write_page
from shardglass.report.html_run import read_run, run_page


@pytest.fixture(scope="module")
def browser():
    path = pages.browser_path()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page that was opened from disk, and what it asked for and complained of."""

    def __init__(self, browser, file, **options):
        self.complaints, self.requests = [], []
        self.context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("body[data-ready=yes]", timeout=20_000)

    def check(self):
        assert self.complaints == []
        assert len(self.requests) == 1
        assert self.requests[0].startswith("file:")


@pytest.fixture(scope="module")
def small(browser, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "small.html"
    write_page(pages.page_of(pages.small_facts(), world_size=3, stage=2), file)
    found = Opened(browser, file, color_scheme="dark")
    yield found
    found.context.close()


@pytest.fixture
def page(small):
    """The page of a small model as it is when it was just opened; in the end nothing was asked for or complained of."""
    small.page.fill("#search", "")
    small.page.click("#tab-cuts")
    small.page.evaluate("SG.change({ tensor: -1, cut: null, unit: -1, rank: -1 })")
    small.page.evaluate("choose({ scheme: 'units', stage: 2, worldSize: 3, kind: 'state' })")
    yield small.page
    small.check()


@pytest.fixture
def opened(browser):
    """Opens other pages; in the end nothing but their files was asked for, and nothing was complained of."""
    every = []

    def open_page(file, **options):
        every.append(Opened(browser, file, **options))
        return every[-1].page

    yield open_page
    for found in every:
        found.check()
        found.context.close()


def test_search_finds_a_tensor_and_a_click_opens_its_detail(page):
    page.fill("#search", "blocks.2 down")
    page.click("#tab-tensors")
    assert page.locator("#list .item").all_inner_texts()[0].splitlines()[0] == "blocks.2.down.weight"
    assert page.locator("#list .item").count() == 1
    page.click("#list .item")
    detail = page.inner_text("#detail")
    for words in ("blocks.2.down.weight", "[7 × 13]", "bfloat16", "182 B = 182", "group 0", "rank 1"):
        assert words in detail
    page.fill("#search", "head.weight")  # the second name of a tied tensor
    assert "embed.weight" in page.inner_text("#list .item")


def test_a_click_on_the_map_opens_the_tensor_under_the_pointer(page):
    x, y = page.evaluate("() => { const row = SG.map.rows[0]; return [SG.map.xOf(0.2), SG.map.yOf(row.height / 2)]; }")
    page.locator("#map").hover(position={"x": x, "y": y})
    tip = page.inner_text("#tip")
    assert "embed.weight" in tip
    assert "[97 × 8]" in tip
    page.locator("#map").click(position={"x": x, "y": y})
    assert "tied names" in page.inner_text("#detail")


def test_every_cut_is_in_the_list_and_opens_a_strip_around_it(page):
    facts = pages.small_facts()
    layout = make_layout("units", facts.params, 3)
    cuts = [cut for cut in boundary_cuts(layout) if layout.buffers[cut.buffer].trainable]
    assert page.inner_text("#tab-cuts") == f"cuts {len(cuts)}"
    assert page.evaluate("[...SG.map.marks.values()].reduce((n, mark) => n + mark.count, 0)") == len(
        [cut for cut in cuts if cut.name is not None or _starts_at(layout, cut)]
    )
    first = next(cut for cut in cuts if cut.name is not None)
    page.fill("#search", first.name)
    page.click("#list .item")
    assert f"{first.left:,} elements left" in page.inner_text("#detail")
    pieces = page.evaluate("SG.detail.around(SG.state.cut, 4)")
    assert [piece["rank"] for piece in pieces if piece["to"] <= 0][-1] == first.left_rank
    assert next(piece for piece in pieces if piece["from"] == 0)["rank"] == first.right_rank
    assert next(piece for piece in pieces if piece["from"] == 0)["element"] == first.first_right


def _starts_at(layout, cut):
    """Whether the tensor behind a boundary begins right at it, so that the map marks it there."""
    buffer = layout.buffers[cut.buffer]
    return (cut.right_rank * buffer.shard_numel) in buffer.offsets and cut.after is not None


def test_the_switches_change_layout_stage_and_ranks(page):
    assert page.locator("#stage .on").inner_text() == "2"
    page.select_option("#scheme", "deepspeed-param")
    page.wait_for_function("SG.state.layout.scheme === 'deepspeed-param'")
    assert page.locator("#stage .on").inner_text() == "3"
    page.click("#world [data-value='64']")
    page.wait_for_function("SG.state.layout.worldSize === 64")
    layout = make_layout("deepspeed-param", pages.small_facts().params, 64)
    assert f"{sum(layout.buffers[c.buffer].trainable for c in boundary_cuts(layout)):,} cuts" in page.inner_text(
        "#says"
    )
    page.select_option("#scheme", "units")
    page.wait_for_function("SG.state.layout.scheme === 'units'")
    page.click("#stage [data-value='0']")
    page.wait_for_function("SG.state.stage === 0")
    assert "nothing is cut" in page.inner_text("#says")
    assert page.locator("#chart-stages .bars").count() > 0


def test_the_arithmetic_of_the_page_is_pythons(page):
    facts = pages.small_facts()
    for scheme in SCHEMES:
        for world_size in (1, 2, 3, 8, 64):
            layout = make_layout(scheme.name, facts.params, world_size)
            found = page.evaluate(ASKED, [scheme.name, world_size])
            assert found["bytes"] == [_bytes(layout, rank) for rank in range(world_size)]
            names = [p.name for p in facts.params]
            for t, name in enumerate(names):
                for rank in range(world_size):
                    expected = [[s.start, s.length, s.offset] for s in slices_of(layout, name, rank)]
                    assert found["runs"][t][rank] == expected, (scheme.name, world_size, name, rank)
                places = [locate(layout, name, i) for i in _some(facts.params[t].numel)]
                assert found["places"][t] == [[place.rank, place.offset] for place in places]
            expected = sorted(_cut(cut, names) for cut in boundary_cuts(layout))
            assert sorted(found["cuts"]) == expected, (scheme.name, world_size)


def test_boundaries_of_thousands_of_ranks_are_worked_out_one_by_one(page):
    params = pages.small_facts().params
    layout = make_layout("units", params, 5000)
    names = [p.name for p in params]
    columns = to_tree(page_layout(layout, {name: i for i, name in enumerate(names)}))
    found = page.evaluate(
        "(columns) => { const cuts = new SG.Layout(columns, SG.state.tensors).cuts(() => true);"
        "  const told = (c) => [c.buffer, c.leftRank, c.rightRank, c.tensor, c.left, c.right, c.firstRight, c.before, c.after];"  # noqa: E501
        "  const inTensor = cuts.filter((t) => t === 0);"
        "  return [cuts.owners.length, Array.from({ length: cuts.count }, (_, i) => told(cuts.get(i))),"
        "    Array.from({ length: inTensor.count }, (_, i) => told(inTensor.get(i)))]; }",
        columns,
    )
    cuts = [_cut(cut, names) for cut in boundary_cuts(layout)]
    assert found[0] == len(layout.buffers)
    assert found[1] == cuts
    assert found[2] == [cut for cut in cuts if cut[3] == 0]
    assert len(found[2]) > 10


def _some(numel):
    return range(0, numel, max(1, numel // 9))


def _bytes(layout, rank):
    found = rank_bytes(layout, rank)
    return [found["trainable parameters"], found["frozen parameters"], found["padding"]]


def _cut(cut, names):
    def index(name):
        return -1 if name is None else names.index(name)

    return [cut.buffer, cut.left_rank, cut.right_rank, index(cut.name), cut.left, cut.right, cut.first_right,
            index(cut.before), index(cut.after)]  # fmt: skip


ASKED = """async ([scheme, worldSize]) => {
  const layout = await SG.layoutOf(scheme, worldSize), tensors = SG.state.tensors, cuts = layout.cuts(() => true);
  const ranks = Array.from({ length: worldSize }, (_, rank) => rank), all = tensors.names.map((_, t) => t);
  const bufferOf = (t) => layout.buffers[layout.bufferOf[t]];
  return {
    bytes: ranks.map((rank) => Object.values(layout.rankBytes(rank))),
    runs: all.map((t) => ranks.map((rank) => layout.runs(t, layout.shardOf(bufferOf(t), rank)))),
    places: all.map((t) => {
      const numel = tensors.numel(t), step = Math.max(1, Math.floor(numel / 9)), found = [];
      for (let i = 0; i < numel; i += step) {
        const place = layout.place(t, i);
        found.push([layout.rankOf(bufferOf(t), place.shard), place.offset]);
      }
      return found;
    }),
    cuts: Array.from({ length: cuts.count }, (_, i) => cuts.get(i)).map((c) => [
      c.buffer, c.leftRank, c.rightRank, c.tensor, c.left, c.right, c.firstRight, c.before, c.after]),
  };
}"""


def test_the_page_follows_the_systems_colours_and_its_own_button(page):
    theme = "document.documentElement.dataset.theme"
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"{theme} === 'light'")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{theme} === 'dark'")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.click("#theme")
    assert page.evaluate(theme) == "light"


def test_40_000_tensors_are_drawn_and_a_layer_opens_in_lanes(opened, tmp_path):
    write_page(pages.many_page(), tmp_path / "many.html")
    page = opened(tmp_path / "many.html")
    assert page.evaluate("SG.state.tensors.count") == 40_001
    page.fill("#search", "layers.77.mlp.experts.391.")
    page.click("#tab-tensors")
    page.click("#list .item")
    assert "model.layers.77.mlp.experts.391.down_proj.weight" in page.inner_text("#detail")
    page.click("text=open model.layers.77")
    page.wait_for_function("SG.map.rows.length === 400")
    page.keyboard.press("Escape")
    page.wait_for_function("SG.map.rows.length === 101")
    assert page.evaluate("() => { const t = performance.now(); SG.map.draw(); return performance.now() - t; }") < 2000


def test_a_run_shows_the_remainder_curves_clip_line_and_skipped_steps(opened, tmp_path):
    pages.write_run(tmp_path)
    small = pages.page_of(pages.small_facts(), world_size=2, stage=2)
    write_page(
        type(small)(title="run", model=small.model, layouts=small.layouts, run=run_page(read_run(tmp_path)), notes=()),
        tmp_path / "run.html",
    )
    page = opened(tmp_path / "run.html")
    bars = page.evaluate(
        "document.getElementById('chart-accounts').data"
        ".map((trace) => [trace.name, trace.x, trace.y.map((v) => Math.round(v * 2 ** 20))])"
    )
    name, columns, sizes = bars[-1]
    assert name == "rest of the process (RSS)"
    assert dict(zip(columns, sizes, strict=True))["rank 0 unexplained"] == 1000
    norm = page.evaluate("document.getElementById('chart-norm').layout")
    assert [shape["y0"] for shape in norm["shapes"] if shape.get("xref") == "paper"] == [1.0]
    assert [shape["x0"] for shape in norm["shapes"] if shape.get("yref") == "paper"] == [2]
    assert page.evaluate("document.getElementById('chart-loss').data[0].y") == [3.5, 3.25, 3.0]
    assert page.evaluate("document.getElementById('chart-rate').data[0].y") == [1e-5, 1e-5, 5e-6]
    assert "1 deviation" in page.inner_text("#verdict")
    write_page(
        type(small)(title="run", model=None, layouts=(), run=run_page(read_run(tmp_path)), notes=("no map",)),
        tmp_path / "bare.html",
    )
    bare = opened(tmp_path / "bare.html")
    assert not bare.is_visible("#map-section")
    assert "no map" in bare.inner_text("#notes")
