"use strict";
// Charts of memory and of a run, drawn by plotly. Owns their form; every number is in the data.

const GIB = 2 ** 30, MIB = 2 ** 20;
const MOMENTS = { loading: "while loading", loss: "at the loss", backward: "inside backward", step: "at the step" };
const SERIES = ["#4477aa", "#66ccee", "#228833", "#bbaa22", "#ee7733", "#cc3377", "#9966cc", "#a05030"];
const COLOURS = {
  parameters: "#4477aa", weights: "#4477aa", "master weights": "#66ccee", gradients: "#228833", communication: "#9966cc",
  "optimizer exp_avg": "#ee7733", "optimizer exp_avg_sq": "#cc3377", "optimizer step": "#7a1f4a", "gathered units": "#1b4f8a",
  "activations of blocks": "#bbaa22", "activations of the head": "#e3d67c", "logits and loss": "#a05030", "recomputed block": "#8a7f1a",
  "gradients of activations": "#7fbf8f", "a tensor's gradient": "#aee0b8", "module buffers": "#777777", "step temporaries": "#c9a0dc", "model as loaded": "#8899cc",
};

SG.chart = (id, traces, title, options = {}) => {
  const colours = SG.theme();
  const axis = { gridcolor: colours.line, linecolor: colours.line, zerolinecolor: colours.line, automargin: true };
  const layout = {
    title: { text: title, font: { size: 14 }, x: 0, xref: "paper", xanchor: "left" }, font: { color: colours.text, size: 12, family: "system-ui, sans-serif" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 56, r: 16, t: 44, b: 44 }, height: options.height || 380,
    barmode: "stack", hovermode: "closest", legend: { orientation: "h", y: -0.2, yanchor: "top", traceorder: "normal", font: { size: 11 } },
    hoverlabel: { bgcolor: colours.panel, bordercolor: colours.line, font: { color: colours.text } },
    ...options.layout, xaxis: { ...axis, ...(options.x || {}) }, yaxis: { ...axis, rangemode: "tozero", ...(options.y || {}) },
  };
  Plotly.react(id, traces, layout, { displaylogo: false, responsive: true, displayModeBar: false });
};

const bar = (name, x, y, colour, more = {}) => ({
  type: "bar", name, x, y: y.map((v) => v / (more.unit || GIB)), marker: { color: colour, ...(more.marker || {}) }, customdata: y.map(SG.bytes),
  hovertemplate: `${name}<br>%{customdata}<extra>%{x}</extra>`, ...(more.trace || {}),
});

/** A category has one colour in every chart; states of rarer optimizers take those of AdamW. */
const others = new Map();
SG.seriesColour = (name) => {
  if (COLOURS[name]) return COLOURS[name];
  if (!others.has(name)) others.set(name, SERIES[(4 + others.size) % SERIES.length]);
  return others.get(name);
};

/** GiB or MiB, whichever suits the largest bar: [bytes of it, its name]. */
const unitFor = (sizes) => (Math.max(...sizes, 0) >= GIB ? [GIB, "GiB"] : [MIB, "MiB"]);

SG.drawMemory = () => {
  const memory = SG.state.data.model.memory.find((m) => m.world_size === SG.state.worldSize);
  drawStages(memory);
  drawRanks(memory.stages.find((s) => s.stage === SG.state.stage));
  drawShards();
};

/** Stages side by side: what is there at the moment that needs the most. */
function drawStages(memory) {
  const names = [...new Set(memory.stages.flatMap((s) => s.terms.map((t) => t.name)))], { run } = SG.state.data.model.plan;
  const x = memory.stages.map((s) => `stage ${s.stage}`), totals = memory.stages.map((s) => s.total), [unit, word] = unitFor(totals);
  const traces = names.map((name) => {
    const sizes = memory.stages.map((s) => s.terms.filter((t) => t.name === name && t.moments.includes(s.highest)).reduce((a, t) => a + t.bytes, 0));
    return bar(name, x, sizes, SG.seriesColour(name), { unit });
  }).filter((trace) => trace.y.some((v) => v > 0));
  traces.push(bar("reserve (assumed)", x, memory.stages.map((s) => s.reserve), SG.theme().whole, { unit, marker: { pattern: { shape: "/" } } }));
  const notes = memory.stages.map((s, i) => ({ x: x[i], y: s.total / unit, text: `<b>${(s.total / unit).toFixed(1)}</b><br>${MOMENTS[s.highest]}`, showarrow: false, yanchor: "bottom", font: { size: 11 } }));
  // A GPU with far more memory than is needed would press the bars flat.
  const highest = Math.max(...totals), hasLine = run.memory !== null && run.memory <= 2.5 * highest;
  const shapes = hasLine ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: run.memory / unit, y1: run.memory / unit, line: { color: SG.theme().accent, dash: "dash", width: 2 } }] : [];
  const free = run.memory === null ? "" : `; a GPU has ${SG.bytes(run.memory)}${hasLine ? " (dashed)" : ""}`;
  SG.chart("chart-stages", traces, `Stages on ${SG.plural(memory.world_size, "rank")}, ${word}${free}`,
    { height: 500, layout: { annotations: notes, shapes }, y: { range: [0, (Math.max(highest, hasLine ? run.memory : 0) / unit) * 1.25] } });
}

const rankAxis = (count) => ({ title: { text: "rank", standoff: 4 }, ...(count <= 16 ? { dtick: 1 } : {}) });

/** The engine's own bytes on each rank. */
function drawRanks(stage) {
  const names = [...new Set(stage.accounts.flatMap((a) => a.map((c) => c.name)))];
  const ranks = stage.account_of.length ? stage.account_of.map((a, rank) => [rank, a]) : [[stage.rank, 0]];
  const x = ranks.map(([rank]) => rank), [unit, word] = unitFor(stage.accounts.map((a) => a.reduce((sum, c) => sum + c.bytes, 0)));
  const sizeOf = (account, name) => stage.accounts[account].filter((c) => c.name === name).reduce((sum, c) => sum + c.bytes, 0);
  const traces = names.map((name) => bar(name, x, ranks.map(([, a]) => sizeOf(a, name)), SG.seriesColour(name), { unit }));
  const alone = stage.account_of.length ? "" : " (the heaviest stands for all)";
  SG.chart("chart-ranks", traces, `Engine by rank, stage ${stage.stage}, ${word}${alone}`, { height: 500, x: rankAxis(x.length) });
}

/** What the chosen layout puts in each rank's shards. */
function drawShards() {
  const { layout, tensors, worldSize } = SG.state, box = document.getElementById("chart-shards");
  const isTooMuch = Boolean(layout.refused) || tensors.count * worldSize > 4e6;
  box.hidden = isTooMuch;
  if (isTooMuch) return;
  const x = Array.from({ length: worldSize }, (_, rank) => rank), sums = x.map((rank) => layout.rankBytes(rank)), colours = SG.theme();
  const [unit, word] = unitFor(sums.map((s) => s.trainable + s.frozen + s.padding));
  const traces = [
    bar("trainable parameters", x, sums.map((s) => s.trainable), SG.seriesColour("parameters"), { unit }),
    bar("frozen parameters", x, sums.map((s) => s.frozen), colours.whole, { unit, marker: { pattern: { shape: "x" } } }),
    bar("padding", x, sums.map((s) => s.padding), colours.cut, { unit, marker: { pattern: { shape: "/" } } }),
  ].filter((trace) => trace.y.some((v) => v > 0));
  SG.chart("chart-shards", traces, `Shards by rank, ${layout.scheme}, ${word}`, { height: 500, layout: { showlegend: true }, x: rankAxis(worldSize) });
}

// ---- a run ----

SG.drawRun = () => {
  const { run } = SG.state.data;
  drawAccounts(run);
  const has = run.loss.steps.length + run.rate.steps.length > 0;
  document.getElementById("curves").hidden = !has;
  if (!has) return;
  drawLoss(run);
  drawNorm(run);
  line("chart-rate", [curve("learning rate", run.rate, SERIES[4])], "Learning rate");
};

/** Planned beside measured, and what nobody planned as a bar of its own. */
function drawAccounts(run) {
  const traces = [], colours = SG.theme(), order = [];
  for (const account of run.accounts) order.push(`rank ${account.rank} planned`, `rank ${account.rank} measured`, `rank ${account.rank} unexplained`);
  const categories = [...new Set(run.accounts.flatMap((a) => a.categories))];
  for (const name of categories) {
    const sizes = run.accounts.flatMap((a) => {
      const i = a.categories.indexOf(name);
      return i < 0 ? [0, 0, 0] : [a.planned[i] || 0, a.measured[i], 0];
    });
    traces.push(bar(name, order, sizes, SG.seriesColour(name), { unit: MIB }));
  }
  const rest = run.accounts.flatMap((a) => [0, 0, a.remainder]);
  traces.push(bar(`rest of the process (${run.process_kind})`, order, rest, colours.whole, { unit: MIB, marker: { pattern: { shape: "x" } } }));
  const shapes = run.accounts.map((a, i) => ({ type: "line", x0: 3 * i - 0.45, x1: 3 * i + 2.45, y0: a.peak / MIB, y1: a.peak / MIB, line: { color: colours.accent, dash: "dash" } }));
  const notes = run.accounts.map((a, i) => ({ x: 3 * i + 2.45, y: a.peak / MIB, text: `peak ${SG.bytes(a.peak)}`, showarrow: false, yanchor: "bottom", xanchor: "right", font: { size: 11 } }));
  SG.chart("chart-accounts", traces, "Planned against measured, MiB", { height: 420, layout: { shapes, annotations: notes }, x: { type: "category", categoryorder: "array", categoryarray: order } });
}

const curve = (name, values, colour) => ({
  type: "scatter", mode: values.steps.length > 100 ? "lines" : "lines+markers", name, x: values.steps, y: values.values, line: { color: colour }, connectgaps: false,
  hovertemplate: `${name} %{y:.5g}<extra>step %{x}</extra>`,
});

/** Steps that were skipped, as lines from top to bottom. */
const skippedLines = (run) => run.skipped.map((step) => ({ type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: { color: SG.theme().cut, dash: "dot", width: 1.5 } }));

function line(id, traces, title, layout = {}) {
  SG.chart(id, traces, title, { height: 320, layout: { showlegend: traces.length > 1, legend: { orientation: "h", y: -0.3, yanchor: "top" }, ...layout }, x: { title: { text: "step", standoff: 4 } }, y: { rangemode: "normal" } });
}

function drawLoss(run) {
  const traces = [curve("training loss", run.loss, SERIES[0])];
  if (run.eval_loss.steps.length) traces.push(curve("held-out loss", run.eval_loss, SERIES[2]));
  line("chart-loss", traces, "Loss", { shapes: skippedLines(run) });
}

function drawNorm(run) {
  const skips = run.num_skipped ? `; ${SG.plural(run.num_skipped, "skipped step")}, dotted` : "; no step skipped";
  const clip = run.clip === null ? [] : [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: run.clip, y1: run.clip, line: { color: SG.theme().accent, dash: "dash", width: 1.5 } }];
  const words = run.clip === null ? [] : [{ xref: "paper", x: 1, y: run.clip, text: `clipped to ${run.clip}`, showarrow: false, yanchor: "bottom", xanchor: "right", font: { size: 11 } }];
  // A trace without colour makes the axis reach the clip line.
  const reach = run.clip === null ? [] : [{ type: "scatter", mode: "lines", x: run.grad_norm.steps, y: run.grad_norm.steps.map(() => run.clip), line: { color: "rgba(0,0,0,0)" }, hoverinfo: "skip", showlegend: false }];
  line("chart-norm", [curve("gradient norm", run.grad_norm, SERIES[5]), ...reach], `Gradient norm before clipping${skips}`, { shapes: [...clip, ...skippedLines(run)], annotations: words, showlegend: false });
}
