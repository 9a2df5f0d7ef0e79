"use strict";
// What the page knows and what it shows: the data, the choices, colours and the words for numbers.
// Owns `SG.load`, `SG.Tensors`, `SG.state` and `SG.theme`. Every view reads `SG.state` and listens to `SG.changed`.

/** Parsed JSON of an element that holds zlib-compressed, base64-coded text. */
SG.load = async (id) => {
  const element = document.getElementById(id);
  if (!element) return null;
  const packed = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
};

/** The tensor table; see html_layouts.TensorTable. */
SG.Tensors = class {
  constructor(columns) {
    Object.assign(this, { names: columns.names, shapes: columns.shapes, unitNames: columns.unit_names, columns });
    this.count = this.names.length;
    this.numels = this.shapes.map((shape) => shape.reduce((a, b) => a * b, 1));
    this.secondNames = new Map();
    for (const [tensor, name] of columns.tied) {
      this.secondNames.set(tensor, [...(this.secondNames.get(tensor) || []), name]);
    }
    this.byUnit = this.unitNames.map(() => []);
    columns.units.forEach((unit, tensor) => this.byUnit[unit].push(tensor));
    this.bytesOfUnit = this.byUnit.map((members) => members.reduce((sum, t) => sum + this.bytes(t), 0));
    this.totalBytes = this.bytesOfUnit.reduce((a, b) => a + b, 0);
  }

  shape(t) { return this.shapes[t]; }
  numel(t) { return this.numels[t]; }
  itemsize(t) { return this.columns.dtype_bytes[this.columns.dtypes[t]]; }
  dtype(t) { return this.columns.dtype_names[this.columns.dtypes[t]]; }
  bytes(t) { return this.numels[t] * this.itemsize(t); }
  unit(t) { return this.columns.units[t]; }
  group(t) { return this.columns.groups[t]; }
  isTrained(t) { return this.columns.trainable[t] === 1; }
  isTied(t) { return this.secondNames.has(t); }

  /** Whether a tensor has all words of a search in one of its names. */
  matches(t, words) {
    const names = [this.names[t], ...(this.secondNames.get(t) || [])];
    return names.some((name) => words.every((word) => name.toLowerCase().includes(word)));
  }

  /** A name without that of its unit. */
  shortName(t) {
    const unit = this.unitNames[this.unit(t)];
    return this.names[t].startsWith(`${unit}.`) ? this.names[t].slice(unit.length + 1) : this.names[t];
  }
};

SG.KINDS = [
  { id: "state", label: "optimizer state", long: "optimizer state and master weights", rule: "shards_state" },
  { id: "grads", label: "gradients", long: "gradients kept between micro-batches", rule: "shards_grads" },
  { id: "params", label: "parameters", long: "parameters between uses", rule: "shards_params" },
];

/** What is shown. `layout` is that of scheme and worldSize; `cut` a cut as SG.Cuts gives it. */
SG.state = {
  data: null, tensors: null, layout: null, scheme: "", stage: 0, worldSize: 1, kind: "state",
  tensor: -1, cut: null, unit: -1, rank: -1, words: [],
};

SG.listeners = [];
SG.onChange = (listener) => SG.listeners.push(listener);
/** Change what is shown; every view is told which keys. */
SG.change = (changes) => {
  Object.assign(SG.state, changes);
  const keys = new Set(Object.keys(changes));
  for (const listener of SG.listeners) listener(keys);
};

SG.rules = () => SG.state.data.model.stages.find((s) => s.number === SG.state.stage);
SG.kind = () => SG.KINDS.find((k) => k.id === SG.state.kind);

/** Whether the stage shards what is shown; otherwise every rank holds it whole. */
SG.isSharded = () => SG.rules()[SG.kind().rule];

/** Whether a tensor has what is shown: a frozen one has no gradient and no optimizer state. */
SG.has = (t) => SG.state.kind === "params" || SG.state.tensors.isTrained(t);

/** The cuts of what is shown. */
SG.cuts = () => {
  const { layout, kind } = SG.state;
  if (!layout || layout.refused || !SG.isSharded()) return new SG.Cuts(layout, [], [], 0);
  return layout.cuts((buffer) => kind === "params" || buffer.trainable);
};

const layouts = new Map();
/** The layout of a scheme and world size; unpacked once. */
SG.layoutOf = async (scheme, worldSize) => {
  const id = `layout-${scheme}-${worldSize}`;
  if (!layouts.has(id)) layouts.set(id, new SG.Layout(await SG.load(id), SG.state.tensors));
  return layouts.get(id);
};

// ---- words ----

SG.number = (n) => n.toLocaleString("en-US");
SG.bytes = (n) => {
  const size = Math.abs(n);
  if (size < 1024) return `${n} B`;
  const power = Math.min(4, Math.floor(Math.log2(size) / 10));
  return `${(n / 1024 ** power).toLocaleString("en-US", { maximumFractionDigits: 2 })} ${["", "KiB", "MiB", "GiB", "TiB"][power]}`;
};
SG.percent = (part, all) => {
  const share = all ? (100 * part) / all : 0;
  return `${share.toFixed(share && (share < 1 || share > 99) ? 3 : 1)}%`;
};
SG.plural = (n, word) => `${SG.number(n)} ${word}${n === 1 ? "" : "s"}`;
SG.shapeText = (t) => `[${SG.state.tensors.shape(t).join(" × ")}]`;

/** An element with text, made without parsing any. */
SG.make = (tag, className, ...children) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

// ---- colours ----

const FEW = ["#4477aa", "#ee7733", "#228833", "#cc3377", "#66ccee", "#bbaa22", "#9966cc", "#a05030"];

/** Colours of the page as it is now, light or dark. */
SG.theme = () => {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return {
    dark: of("--mode") === "dark", text: of("--text"), dim: of("--dim"), line: of("--line"), back: of("--back"),
    panel: of("--panel"), whole: of("--whole"), none: of("--none"), accent: of("--accent"), cut: of("--cut"), hatch: of("--hatch"),
  };
};

/** The colour of a rank: eight distinct ones, or a walk through the hues in which neighbours differ in lightness. */
SG.rankColour = (rank, worldSize, dark) => {
  if (worldSize <= FEW.length) return FEW[rank];
  const hue = 265 - (300 * rank) / worldSize;
  const light = (dark ? 52 : 48) + (rank % 2 ? 14 : -6);
  return `hsl(${(hue + 360) % 360} ${rank % 2 ? 58 : 68}% ${light}%)`;
};

/** Whether text on a rank's colour is dark. */
SG.darkTextOn = (rank, worldSize) => (worldSize <= FEW.length ? [1, 4, 5].includes(rank) : rank % 2 === 1);

/** A hatching for canvases, in device pixels. */
SG.hatch = (context, kind, colour, scale) => {
  const size = Math.round(8 * scale), tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const c = tile.getContext("2d");
  c.strokeStyle = c.fillStyle = colour;
  c.lineWidth = scale * (kind === "padding" ? 2 : 1.4);
  const line = (x0, y0, x1, y1) => { c.beginPath(); c.moveTo(x0, y0); c.lineTo(x1, y1); c.stroke(); };
  const dot = (x, y) => { c.beginPath(); c.arc(x, y, 1.3 * scale, 0, 7); c.fill(); };
  const rising = () => [-size, 0, size].forEach((s) => line(s, size, s + size, 0));
  const falling = () => [-size, 0, size].forEach((s) => line(s, 0, s + size, size));
  if (kind === "padding") rising();
  if (kind === "frozen") { rising(); falling(); }
  if (kind === "tied") line(size / 2, 0, size / 2, size);
  if (kind === "group") { dot(size / 4, size / 4); dot((3 * size) / 4, (3 * size) / 4); }
  return context.createPattern(tile, "repeat");
};
