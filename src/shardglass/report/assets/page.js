"use strict";
// The page as a whole: fills in the words, makes the switches, and draws what a change concerns.

const $ = (id) => document.getElementById(id);

/** Buttons of which one is on. */
function buttons(id, choices, key) {
  $(id).replaceChildren(...choices.map(({ value, label, title, disabled }) => {
    const button = SG.make("button", SG.state[key] === value ? "on" : "", label);
    Object.assign(button, { type: "button", title: title || "", disabled: Boolean(disabled) });
    button.dataset.value = value;
    button.setAttribute("aria-pressed", String(SG.state[key] === value));
    button.addEventListener("click", () => choose({ [key]: value }));
    return button;
  }));
}

/** Choose scheme, stage, ranks or kind; a stage that the scheme is not used for gives way to one that it is. */
async function choose(changes) {
  const { data } = SG.state, scheme = data.model.schemes.find((s) => s.name === (changes.scheme || SG.state.scheme));
  const next = { scheme: SG.state.scheme, worldSize: SG.state.worldSize, stage: SG.state.stage, kind: SG.state.kind, ...changes };
  if (!stagesOf(scheme).includes(next.stage)) next.stage = scheme.stages[scheme.stages.length - 1];
  next.layout = await SG.layoutOf(next.scheme, next.worldSize);
  const isNew = next.layout !== SG.state.layout;
  if (isNew || next.kind !== SG.state.kind || next.stage !== SG.state.stage) next.cut = null;
  if (SG.state.rank >= next.worldSize) next.rank = -1;
  SG.change(next);
}

/** The stages a scheme is used for, and the plan's own for its own scheme. */
function stagesOf(scheme) {
  const { run } = SG.state.data.model.plan;
  return run.scheme === scheme.name ? [...new Set([...scheme.stages, run.stage])].sort() : scheme.stages;
}

function drawControls() {
  const { data, scheme, layout } = SG.state, { model } = data, used = stagesOf(model.schemes.find((s) => s.name === scheme));
  $("scheme").replaceChildren(...model.schemes.map((s) => {
    const option = SG.make("option", "", `${s.name} (${s.used_by})`);
    option.value = s.name;
    option.selected = s.name === scheme;
    return option;
  }));
  buttons("stage", model.stages.map((s) => ({ value: s.number, label: String(s.number), disabled: !used.includes(s.number), title: used.includes(s.number) ? "" : `layout ${scheme} is not used at stage ${s.number}` })), "stage");
  buttons("world", model.world_sizes.map((n) => ({ value: n, label: SG.number(n) })), "worldSize");
  buttons("kind", SG.KINDS.map((k) => ({ value: k.id, label: k.label, title: k.long })), "kind");
  $("says").textContent = layout.refused ? `This layout does not take the model: ${layout.refused}` : says();
  $("map-frame").hidden = Boolean(layout.refused);
}

/** What is seen, in a sentence. */
function says() {
  const { layout, stage, worldSize } = SG.state, kind = SG.kind(), cuts = SG.cuts();
  if (!SG.isSharded()) return `Stage ${stage} keeps the ${kind.long} whole on each of ${SG.plural(worldSize, "rank")}: nothing is cut.`;
  const padding = layout.buffers.filter((b) => SG.state.kind === "params" || b.trainable).reduce((sum, b) => sum + layout.padding(b), 0);
  const between = cuts.owners.filter((owner) => !owner.many && owner.tensor < 0).length;
  return `${kind.long[0].toUpperCase()}${kind.long.slice(1)}, cut over ${SG.plural(worldSize, "rank")}: ${SG.plural(cuts.count, "cut")}${between ? `, ${SG.number(between)} of them between two tensors` : ""}; ${SG.plural(padding, "element")} of padding.`;
}

function drawLegend() {
  const { worldSize, rank, tensors, layout } = SG.state, colours = SG.theme(), box = SG.make("div", "ranks-legend");
  if (SG.isSharded() && layout.buffers.some((b) => b.copies < worldSize || worldSize === 1)) {
    const shown = Math.min(worldSize, 64);
    for (let r = 0; r < shown; r++) {
      const button = SG.make("button", r === rank ? "on" : "", worldSize <= 32 || r % 4 === 0 || r === rank ? String(r) : "");
      button.type = "button";
      button.style.background = SG.rankColour(r, worldSize, colours.dark);
      button.style.color = SG.darkTextOn(r, worldSize) ? "#111" : "#fff";
      button.title = `rank ${r}: show it alone`;
      button.addEventListener("click", () => SG.change({ rank: r === SG.state.rank ? -1 : r }));
      box.append(button);
    }
    if (shown < worldSize) box.append(SG.make("span", "dim", ` … rank ${SG.number(worldSize - 1)}`));
  } else box.append(swatch(null, "whole", "whole on every rank"));
  const columns = tensors.columns, marks = [];
  if (columns.trainable.includes(0)) marks.push(swatch("frozen", "none", "frozen"));
  if (tensors.secondNames.size) marks.push(swatch("tied", "none", "tied"));
  if (columns.groups.some((g) => g > 0)) marks.push(swatch("group", "none", "optimizer group 1 or later"));
  if (SG.isSharded()) marks.push(swatch("padding", "panel", "padding"), SG.make("span", "key", SG.make("span", "diamond", "◆"), "cut"), SG.make("span", "key", SG.make("span", "diamond", "◇"), "boundary between two tensors"));
  $("legend").replaceChildren(box, SG.make("div", "keys", ...marks));
  const back = SG.state.unit >= 0 ? `${tensors.unitNames[SG.state.unit]}: lanes of equal height, not by bytes. “whole model” leads back.` : "Rows are units, cells tensors; area is bytes. Wheel zooms, dragging moves, a click opens a tensor, a unit's name opens it in lanes.";
  $("map-help").textContent = back;
}

/** A swatch of the legend with a hatching. */
function swatch(kind, back, text) {
  const canvas = SG.make("canvas", "swatch-canvas"), scale = window.devicePixelRatio || 1, colours = SG.theme();
  canvas.width = 22 * scale;
  canvas.height = 14 * scale;
  const c = canvas.getContext("2d");
  for (const style of [colours[back], kind && SG.hatch(c, kind, colours.hatch, scale)]) if (style) { c.fillStyle = style; c.fillRect(0, 0, canvas.width, canvas.height); }
  return SG.make("span", "key", canvas, text);
}

/** Draw what a change concerns. */
function redraw(keys) {
  const has = (...names) => names.some((name) => keys.has(name));
  if (has("layout", "scheme", "stage", "worldSize", "kind", "theme")) drawControls();
  if (SG.state.layout.refused) { $("detail").hidden = true; $("list-inner").replaceChildren(); $("legend").replaceChildren(); if (has("worldSize", "stage", "theme")) SG.drawMemory(); return; }
  if (has("layout")) SG.map.indexPadding();
  if (has("layout", "scheme", "stage", "worldSize", "kind", "unit", "rank", "theme")) drawLegend();
  if (has("layout", "unit", "theme", "size")) SG.map.resize();
  if (has("layout", "stage", "kind", "words")) SG.list.fill(); else SG.list.draw();
  SG.map.draw();
  SG.detail.draw();
  if (has("layout", "worldSize", "stage", "theme")) SG.drawMemory();
}

// ---- words ----

function fillWords(data) {
  const { model, run } = data;
  if (model) {
    const { plan } = model, m = plan.model, r = plan.run;
    if (!run) { $("verdict").textContent = plan.verdict; $("verdict").classList.add(plan.verdict.startsWith("fits") ? "good" : plan.verdict.startsWith("does not") ? "bad" : "open"); }
    $("model-line").textContent = `${m.name} (${m.model_type}): ${SG.plural(m.num_tensors, "tensor")}, ${SG.number(m.numel)} elements, ${SG.plural(m.num_units, "unit")}; ${SG.bytes(m.compute_bytes)} in ${r.dtype}, stored as ${m.stored_dtype}`;
    $("run-line").textContent = `stage ${r.stage}, ${SG.plural(r.world_size, "rank")} on ${r.device}, ${r.optimizer} with ${SG.plural(r.num_groups, "group")}; micro-batch ${r.micro_batch} × ${SG.number(r.length)} tokens, accumulation ${r.accumulation}, ${r.attention} attention${r.recomputes ? ", gradient checkpointing" : ""}`;
    $("memory-help").textContent = "Stages are those of the native engine at the chosen number of ranks; each bar is the moment that needs the most. Shards are those of the chosen layout.";
  }
  if (run) fillRun(run);
  $("notes").replaceChildren(...data.notes.map((note) => SG.make("li", "", note)));
  $("notes-section").hidden = !data.notes.length;
}

function fillRun(run) {
  $("verdict").textContent = run.deviations.length ? SG.plural(run.deviations.length, "deviation") + ":" : "no deviations: everything as planned and as asked for";
  $("verdict").classList.add(run.deviations.length ? "bad" : "good");
  $("deviations").replaceChildren(...run.deviations.map((d) => SG.make("li", "", d)));
  for (const [what, value] of run.facts) $("run-facts").append(SG.make("dt", "", what), SG.make("dd", "", value));
  $("accounts-help").textContent = `Unexplained: bytes of the process (${run.process_kind}) at the end that are none of the engine's: libraries, data, what an allocator keeps. The dashed line is the highest the process ever had.`;
  $("no-curves").hidden = Boolean(run.source);
  $("no-curves").textContent = "No curves: the run left no trainer_state.json, neither in its folder nor in a checkpoint.";
}

// ---- light and dark ----

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  if (SG.state.layout) redraw(new Set(["theme"]));
  if (SG.state.data && SG.state.data.run) SG.drawRun();
}

const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

async function start() {
  setTheme(prefersDark.matches ? "dark" : "light");
  const data = await SG.load("page-data");
  SG.state.data = data;
  fillWords(data);
  $("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  prefersDark.addEventListener("change", () => setTheme(prefersDark.matches ? "dark" : "light"));
  if (data.run) { $("run-section").hidden = false; SG.drawRun(); }
  if (data.model) await startMap(data);
  document.body.dataset.ready = "yes";
}

async function startMap(data) {
  $("map-section").hidden = $("memory-section").hidden = false;
  SG.state.tensors = new SG.Tensors(data.model.tensors);
  SG.map = new SG.Map();
  SG.detail = new SG.Detail();
  SG.list = new SG.List();
  SG.onChange(redraw);
  $("scheme").addEventListener("change", () => choose({ scheme: $("scheme").value }));
  $("zoom-in").addEventListener("click", () => SG.map.zoomAt(SG.map.width / 2, SG.map.height / 2, 2));
  $("zoom-out").addEventListener("click", () => SG.map.zoomAt(SG.map.width / 2, SG.map.height / 2, 0.5));
  $("whole").addEventListener("click", () => SG.map.whole());
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") SG.map.whole(); });
  new ResizeObserver(() => { if (SG.state.layout) redraw(new Set(["size"])); }).observe($("map-frame"));
  const { run } = data.model.plan;
  const rules = data.model.stages.find((s) => s.number === run.stage);
  await choose({ scheme: run.scheme, stage: run.stage, worldSize: run.world_size, kind: rules.shards_params ? "params" : "state" });
}

start().catch((error) => {
  $("failure").hidden = false;
  $("failure").textContent = `This page could not be drawn: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
