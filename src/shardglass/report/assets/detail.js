"use strict";
// One tensor: the lines under the pointer, and the panel of the tensor or cut that was clicked, with a zoomed strip.
// Owns `SG.tipLines` and `SG.Detail`.

/** The ranks that hold a shard, in words. */
SG.ranksText = (buffer, shard) => {
  const first = SG.state.layout.rankOf(buffer, shard);
  if (buffer.copies === 1) return `rank ${SG.number(first)}`;
  if (buffer.copies * buffer.numShards === SG.state.worldSize && buffer.numShards === 1) return "every rank";
  return `ranks ${SG.number(first)}, ${SG.number(first + buffer.stride * buffer.numShards)}, … (${buffer.copies})`;
};

/** Why a tensor is not cut here, or null if it may be. */
SG.whyWhole = (t) => {
  if (!SG.has(t)) return `frozen: it has no ${SG.kind().label}`;
  if (!SG.isSharded()) return `every rank holds all of it: stage ${SG.state.stage} does not shard ${SG.kind().label}`;
  return null;
};

SG.tipLines = (hit, map) => {
  const { tensors, layout } = SG.state, lines = [];
  const line = (className, text) => lines.push(SG.make("div", className, text));
  if (hit.label || (hit.tensor < 0 && !hit.padding && !hit.mark)) {
    line("strong", hit.row.lane ? tensors.names[hit.row.members[0]] : tensors.unitNames[hit.row.unit]);
    const bytes = hit.row.members.reduce((sum, t) => sum + tensors.bytes(t), 0);
    line("", `${SG.plural(hit.row.members.length, "tensor")}, ${SG.bytes(bytes)}`);
    if (hit.label && !hit.row.lane) line("dim", "click: each tensor in a lane of its own");
    return lines;
  }
  if (hit.padding) {
    const padding = map._paddingOf(hit.row);
    line("strong", padding.elements && SG.isSharded() ? "padding" : "no padding here");
    if (padding.elements && SG.isSharded()) {
      line("", `${SG.plural(padding.elements, "element")}, ${SG.bytes(padding.bytes)}`);
      line("dim", padding.keys.length > 3 ? SG.plural(padding.keys.length, "buffer") : padding.keys.join(", "));
    }
    return lines;
  }
  const t = hit.tensor >= 0 ? hit.tensor : hit.mark.tensor;
  line("strong", tensors.names[t]);
  line("", `${SG.shapeText(t)} ${tensors.dtype(t)} · ${SG.number(tensors.numel(t))} elements · ${SG.bytes(tensors.bytes(t))}`);
  if (hit.mark) {
    const n = hit.mark.count;
    line("cut-word", n > 1 ? `◆ ${SG.number(n)} cuts here: zoom in` : hit.mark.between ? "◇ a boundary falls just before it" : "◆ cut here: click");
  }
  const whole = SG.whyWhole(t);
  if (whole) line("dim", whole);
  else if (tensors.numel(t)) {
    const buffer = layout.buffers[layout.bufferOf[t]], place = layout.place(t, hit.element || 0);
    const [first, last] = layout.shardsOf(t);
    line("", first === last ? `whole on ${SG.ranksText(buffer, first)}` : `on ${SG.plural(last - first + 1, "rank")}, ${layout.rankOf(buffer, first)} to ${layout.rankOf(buffer, last)}`);
    if (first !== last) line("dim", `here: element ${SG.number(hit.element || 0)}, ${SG.ranksText(buffer, place.shard)} at offset ${SG.number(place.offset)}`);
  }
  const words = SG.tensorWords(t);
  if (words) line("dim", words);
  return lines;
};

/** Group, frozen, tied. */
SG.tensorWords = (t) => {
  const { tensors } = SG.state, words = [];
  words.push(tensors.isTrained(t) ? `optimizer group ${tensors.group(t)}` : "frozen");
  for (const name of tensors.secondNames.get(t) || []) words.push(`tied to ${name}`);
  return words.join(" · ");
};

const MOST_SLICES = 64;

SG.Detail = class {
  constructor() {
    this.element = document.getElementById("detail");
    this.reach = 8;
  }

  draw() {
    const { tensor, cut } = SG.state;
    this.element.hidden = tensor < 0 && !cut;
    if (this.element.hidden) return;
    const close = SG.make("button", "close", "×");
    close.title = "Close";
    close.addEventListener("click", () => SG.change({ tensor: -1, cut: null }));
    this.element.replaceChildren(close, ...(cut ? this._cut(cut) : []), ...(tensor >= 0 ? this._tensor(tensor) : []));
  }

  // ---- a cut ----

  _cut(cut) {
    const { layout, tensors } = SG.state, buffer = layout.buffers[cut.buffer];
    const head = SG.make("h3", "", `Boundary between rank ${SG.number(cut.leftRank)} and rank ${SG.number(cut.rightRank)}`);
    const parts = [head];
    if (cut.tensor < 0) {
      const name = (t) => (t < 0 ? "padding" : tensors.names[t]);
      parts.push(SG.make("p", "", `It falls between two tensors of ${buffer.key}: ${name(cut.before)} | ${name(cut.after)}`));
    } else {
      const shape = tensors.shape(cut.tensor);
      const where = shape.length === 2 ? `; the right side begins in row ${SG.number(Math.floor(cut.firstRight / shape[1]))}, column ${SG.number(cut.firstRight % shape[1])}` : "";
      parts.push(SG.make("p", "", `${SG.number(cut.left)} elements left (${SG.percent(cut.left, cut.left + cut.right)}), ${SG.number(cut.right)} right (${SG.percent(cut.right, cut.left + cut.right)}) of ${tensors.names[cut.tensor]}${where}`));
    }
    const strip = SG.make("canvas", "strip");
    const slider = SG.make("input", "");
    Object.assign(slider, { type: "range", min: "2", max: "30", step: "0.25", value: String(Math.log2(this.reach)) });
    slider.setAttribute("aria-label", "Elements on each side");
    const text = SG.make("span", "dim", "");
    const paint = () => {
      this.reach = Math.round(2 ** Number(slider.value));
      text.textContent = `${SG.number(this.reach)} elements on each side`;
      this._strip(strip, cut, this.reach);
    };
    slider.addEventListener("input", paint);
    parts.push(strip, SG.make("label", "reach", "zoom ", slider, text));
    requestAnimationFrame(paint);
    return parts;
  }

  /** What lies around a boundary: pieces {from, to, tensor, element, rank}, from and to relative to it. */
  around(cut, reach) {
    const { layout } = SG.state, buffer = layout.buffers[cut.buffer];
    return buffer.chunks ? this._inTensor(layout, buffer, cut, reach) : this._inRun(layout, buffer, cut, reach);
  }

  /** In a buffer that is one run: its elements in memory order, with what lies before and behind the tensor. */
  _inRun(layout, buffer, cut, reach) {
    const edge = (cut.shard + 1) * buffer.shardNumel, pieces = [];
    const low = Math.max(0, edge - reach), high = Math.min(buffer.shardNumel * buffer.numShards, edge + reach);
    const add = (from, to, tensor, element) => {
      for (let at = from; at < to;) {  // cut at the shards in sight
        const shard = Math.floor(at / buffer.shardNumel), stop = Math.min(to, (shard + 1) * buffer.shardNumel);
        pieces.push({ from: at - edge, to: stop - edge, tensor, element: element + at - from, rank: layout.rankOf(buffer, shard) });
        at = stop;
      }
    };
    let at = low;
    for (let k = Math.max(0, SG.lastBelow(buffer.offsets, low)); k < buffer.members.length && at < high; k++) {
      const start = buffer.offsets[k], stop = start + layout.numel(buffer.members[k]);
      if (start > at) { add(at, Math.min(start, high), -1, 0); at = Math.min(start, high); }
      if (stop > at && at < high) { add(at, Math.min(stop, high), buffer.members[k], at - start); at = Math.min(stop, high); }
    }
    if (at < high) add(at, high, -1, 0);
    return pieces;
  }

  /** In a tensor that is cut by itself: its elements, counted in the flattened tensor. */
  _inTensor(layout, buffer, cut, reach) {
    const numel = layout.numel(cut.tensor), edge = cut.firstRight, pieces = [];
    let element = Math.max(0, edge - reach);
    const high = Math.min(numel, edge + reach);
    while (element < high) {
      const place = layout.place(cut.tensor, element), stop = Math.min(high, place.stop);
      pieces.push({ from: element - edge, to: stop - edge, tensor: cut.tensor, element, rank: layout.rankOf(buffer, place.shard) });
      element = stop;
    }
    return pieces;
  }

  _strip(canvas, cut, reach) {
    const scale = window.devicePixelRatio || 1, width = this.element.clientWidth - 32, height = 96;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const c = canvas.getContext("2d"), colours = SG.theme(), { worldSize } = SG.state;
    c.scale(scale, scale);
    const x = (at) => width / 2 + (at * (width / 2 - 2)) / reach;
    const padding = SG.hatch(c, "padding", colours.hatch, scale);
    padding.setTransform(new DOMMatrix().scale(1 / scale));
    for (const piece of this.around(cut, reach)) {
      const [x0, x1] = [x(piece.from), x(piece.to)];
      c.fillStyle = SG.rankColour(piece.rank, worldSize, colours.dark);
      c.globalAlpha = piece.tensor < 0 ? 0.35 : 1;
      c.fillRect(x0, 30, x1 - x0, 30);
      c.globalAlpha = 1;
      if (piece.tensor < 0) { c.fillStyle = padding; c.fillRect(x0, 30, x1 - x0, 30); }
      this._pieceWords(c, piece, x0, x1, colours);
      if (reach <= 64) this._cells(c, piece, x, colours, reach);
    }
    c.fillStyle = colours.cut;
    c.fillRect(width / 2 - 1, 20, 2, 50);
    c.beginPath();
    [[0, 12], [5, 18], [0, 24], [-5, 18]].forEach(([dx, y], i) => (i ? c.lineTo(width / 2 + dx, y) : c.moveTo(width / 2 + dx, y)));
    c.fill();
    c.font = "12px system-ui, sans-serif";
    c.fillStyle = colours.text;
    c.textAlign = "right";
    c.fillText(`rank ${SG.number(cut.leftRank)}`, width / 2 - 14, 14);
    c.textAlign = "left";
    c.fillText(`rank ${SG.number(cut.rightRank)}`, width / 2 + 14, 14);
  }

  /** Which elements a piece is, below it. */
  _pieceWords(c, piece, x0, x1, colours) {
    const numel = piece.to - piece.from;
    const text = piece.tensor < 0 ? `padding, ${SG.number(numel)}`
      : `${SG.state.tensors.names[piece.tensor]} [${SG.number(piece.element)} … ${SG.number(piece.element + numel - 1)}]`;
    c.font = "11px system-ui, sans-serif";
    c.fillStyle = colours.text;
    c.textAlign = "left";
    let shown = text;
    while (shown.length > 3 && c.measureText(shown).width > x1 - x0 - 6) shown = `…${shown.slice(2)}`;
    if (shown.length > 3) c.fillText(shown, x0 + 3, 76);
    if (piece.tensor >= 0) { c.fillStyle = colours.line; c.fillRect(x0, 62, 1, 18); }
  }

  /** Single elements, with their numbers where there is room. */
  _cells(c, piece, x, colours, reach) {
    for (let at = piece.from; at < piece.to; at++) {
      c.fillStyle = colours.back;
      c.fillRect(x(at) - 0.5, 30, 1, 30);
      if (reach > 8 || piece.tensor < 0) continue;
      c.fillStyle = SG.darkTextOn(piece.rank, SG.state.worldSize) ? "#111" : "#fff";
      c.font = "10px system-ui, sans-serif";
      c.textAlign = "center";
      c.fillText(SG.number(piece.element + at - piece.from), (x(at) + x(at + 1)) / 2, 48);
    }
  }

  // ---- a tensor ----

  _tensor(t) {
    const { tensors, layout } = SG.state;
    const show = SG.make("button", "", "show on the map");
    show.addEventListener("click", () => SG.map.show(t, SG.state.cut && SG.state.cut.tensor === t ? SG.state.cut.firstRight : null));
    const unit = SG.make("button", "", `open ${tensors.unitNames[tensors.unit(t)]}`);
    unit.addEventListener("click", () => { SG.map.view = { x: 0, y: 0, zoom: 1 }; SG.change({ unit: tensors.unit(t) }); });
    const facts = [
      ["shape", SG.shapeText(t)], ["dtype", tensors.dtype(t)], ["elements", SG.number(tensors.numel(t))],
      ["bytes", `${SG.bytes(tensors.bytes(t))} = ${SG.number(tensors.bytes(t))}`],
      ["index", `${SG.number(t)} of ${SG.number(tensors.count)}, from 0`], ["unit", tensors.unitNames[tensors.unit(t)]],
      ["optimizer", tensors.isTrained(t) ? `group ${tensors.group(t)}` : "frozen: no gradient, no state"],
      ["tied names", (tensors.secondNames.get(t) || []).join(", ")],
    ].filter(([, value]) => value);
    const list = SG.make("dl", "facts");
    for (const [what, value] of facts) list.append(SG.make("dt", "", what), SG.make("dd", "", value));
    const parts = [SG.make("h3", "tensor-name", tensors.names[t]), SG.make("div", "row", show, unit), list];
    const whole = SG.whyWhole(t);
    if (whole) return [...parts, SG.make("p", "dim", whole)];
    if (layout.refused || !tensors.numel(t)) return parts;
    return [...parts, this._slices(t), ...this._moreSlices(t)];
  }

  /** A row for each run of each rank: range in the tensor, offset in its shard, bytes. */
  _slices(t) {
    const { layout, tensors, worldSize } = SG.state, buffer = layout.buffers[layout.bufferOf[t]], dark = SG.theme().dark;
    const table = SG.make("table", "slices"), [first, last] = layout.shardsOf(t);
    const head = SG.make("tr", "", ...["rank", "elements", "number", "share", "offset in the shard", "bytes"].map((w) => SG.make("th", "", w)));
    table.append(SG.make("caption", "", `buffer ${buffer.key}: ${SG.plural(buffer.numShards, "shard")} of ${SG.number(buffer.shardNumel)} elements, ${SG.number(layout.padding(buffer))} padding in all`), SG.make("thead", "", head));
    const body = SG.make("tbody", "");
    for (let shard = first; shard <= last && body.childElementCount < MOST_SLICES; shard++) {
      for (const [start, length, offset] of layout.runs(t, shard, MOST_SLICES)) {
        if (body.childElementCount >= MOST_SLICES) break;
        const swatch = SG.make("span", "swatch");
        swatch.style.background = buffer.copies === worldSize ? "var(--whole)" : SG.rankColour(layout.rankOf(buffer, shard), worldSize, dark);
        const cells = [`${SG.number(start)} … ${SG.number(start + length - 1)}`, SG.number(length), SG.percent(length, tensors.numel(t)), SG.number(offset), SG.number(length * buffer.itemsize)];
        body.append(SG.make("tr", "", SG.make("td", "", swatch, ` ${SG.ranksText(buffer, shard)}`), ...cells.map((cell) => SG.make("td", "", cell))));
      }
    }
    table.append(body);
    return SG.make("div", "scroll", table);
  }

  _moreSlices(t) {
    const [first, last] = SG.state.layout.shardsOf(t);
    return last - first + 1 > MOST_SLICES ? [SG.make("p", "dim", `and those of ${SG.plural(last - first + 1 - MOST_SLICES, "rank")} more`)] : [];
  }
};
