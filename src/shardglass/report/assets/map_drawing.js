"use strict";
// How the map is drawn. Area is bytes; the markers of cuts have one size whatever the zoom.
// Owns the canvas. Leaves where things are to `map_geometry`.

const DENSE = 400;  // markers of cuts above which they are drawn smaller

SG.MapDrawing = class extends SG.MapGeometry {
  draw() {
    if (!SG.state.layout) return;
    const c = this.context;
    this.colours = SG.theme();
    this.hatches = {};
    c.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    c.clearRect(0, 0, this.width, this.height);
    this.marks = new Map();  // cell of the screen → cuts in it
    this.names = [];
    let lastLine = -1, lastLabel = -100;
    for (const row of this.rows) {
      const y0 = this.yOf(row.top), y1 = this.yOf(row.top + row.height);
      if (y1 < 0 || y0 > this.height) continue;
      if (y1 - y0 < 1) {  // more units than lines: one unit for each line stands for its neighbours
        if (Math.floor(y0) === lastLine) continue;
        lastLine = Math.floor(y0);
      }
      const gap = y1 - y0 > 7 ? 1.5 : y1 - y0 > 3 ? 0.5 : 0;
      this._row(row, y0, Math.max(1, y1 - y0 - gap));
      const middle = Math.max(8, Math.min(this.height - 8, (Math.max(0, y0) + Math.min(this.height, y1)) / 2));
      if (middle - lastLabel >= 12) { this._label(row, middle); lastLabel = middle; }
    }
    // Where cuts are dense, names stand over them in a few rows alone; elsewhere no name may hide a cut.
    const isDense = this.marks.size > DENSE, rows = [...new Set(this.names.map((name) => name.y))];
    const named = isDense ? new Set(rows.filter((_, i) => i % 6 === 0)) : null;
    if (isDense) this._markers(true);
    for (const name of this.names) if (!named || named.has(name.y)) this._nameAt(name);
    if (!isDense) this._markers(false);
  }

  _label(row, y) {
    const c = this.context, { tensors } = SG.state;
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.textAlign = "right";
    c.fillStyle = row.lane && row.members[0] === SG.state.tensor ? this.colours.accent : this.colours.dim;
    let text = row.label;
    if (row.lane) text += `  ${SG.bytes(tensors.bytes(row.members[0]))}`;
    while (text.length > 4 && c.measureText(text).width > this.left - 12) text = `…${text.slice(2)}`;
    c.fillText(text, this.left - 8, y);
  }

  _row(row, y, height) {
    for (const [t, from, to] of this._inSight(row)) {
      const x0 = this.xOf(from), x1 = this.xOf(to);
      this._tensor(t, x0, x1, y, height);
      this._cutsOf(t, x0, x1, y, height);
    }
    this._padding(row, y, height);
  }

  _fill(x0, x1, y, height, style) {
    const low = Math.max(this.left, x0), high = Math.min(this.width - this.right, x1);
    if (high <= low) return;
    this.context.fillStyle = style;
    this.context.fillRect(low, y, high - low, height);
  }

  _hatch(kind) {
    const colour = this.colours.hatch;
    if (!this.hatches[kind]) {
      const pattern = SG.hatch(this.context, kind, colour, this.scale);
      pattern.setTransform(new DOMMatrix().scale(1 / this.scale));
      this.hatches[kind] = pattern;
    }
    return this.hatches[kind];
  }

  /** One tensor: its ranks' colours, then hatchings, its frame and, where there is room, its name. */
  _tensor(t, x0, x1, y, height) {
    const { tensors, words } = SG.state, low = this.left, high = this.width - this.right;
    if (x1 < low || x0 > high) return;
    if (!SG.has(t)) this._fill(x0, x1, y, height, this.colours.none);
    else if (!SG.isSharded()) this._fill(x0, x1, y, height, this.colours.whole);
    else this._pieces(t, x0, x1, y, height);
    if (x1 - x0 > 3 && height > 3) {
      if (!tensors.isTrained(t)) this._fill(x0, x1, y, height, this._hatch("frozen"));
      else if (tensors.group(t) > 0) this._fill(x0, x1, y, height, this._hatch("group"));
      if (tensors.isTied(t)) this._fill(x0, x1, y, height, this._hatch("tied"));
    }
    const found = words.length && tensors.matches(t, words);
    if (words.length && !found) {
      this.context.globalAlpha = 0.72;
      this._fill(x0, x1, y, height, this.colours.back);
      this.context.globalAlpha = 1;
    }
    if (x1 - x0 > 4 && height > 5) this._fill(x1 - 1, x1, y, height, this.colours.back);
    if (found || t === SG.state.tensor) this._frame(x0, x1, y, height, t === SG.state.tensor);
    if (height >= 13) this._name(t, x0, x1, y, height);
  }

  _frame(x0, x1, y, height, isChosen) {
    const c = this.context, low = Math.max(this.left, x0 - (isChosen ? 2 : 0)), high = Math.min(this.width - this.right, x1 + (isChosen ? 2 : 0));
    c.strokeStyle = isChosen ? this.colours.text : this.colours.accent;
    c.lineWidth = isChosen ? 2.5 : 1.5;
    c.strokeRect(low, y + 1, Math.max(3, high - low), Math.max(2, height - 2));
  }

  _name(t, x0, x1, y, height) {
    if (SG.state.unit >= 0) return;
    const c = this.context, low = Math.max(this.left, x0), high = Math.min(this.width - this.right, x1);
    const text = SG.state.tensors.shortName(t).replace(/\.weight$/, "");
    c.font = "11px system-ui, sans-serif";
    const width = c.measureText(text).width;
    if (width + 24 <= high - low) this.names.push({ text, x: low + 8, y: y + height / 2, width });
  }

  _nameAt({ text, x, y, width }) {
    const c = this.context;
    c.font = "11px system-ui, sans-serif";
    c.textAlign = "left";
    c.textBaseline = "middle";
    c.globalAlpha = 0.85;
    this._fill(x - 3, x + width + 3, y - 6.5, 13, this.colours.panel);
    c.globalAlpha = 1;
    c.fillStyle = this.colours.text;
    c.fillText(text, x, y);
  }

  /** The colours of the ranks, piece by piece; where pieces are narrower than a pixel, one for each pixel. */
  _pieces(t, x0, x1, y, height) {
    const { layout, tensors, worldSize } = SG.state, numel = tensors.numel(t);
    if (!numel) return;
    const buffer = layout.buffers[layout.bufferOf[t]], perPixel = numel / (x1 - x0);
    let element = Math.min(numel - 1, Math.max(0, Math.floor((this.left - x0) * perPixel)));
    const end = Math.min(numel, Math.ceil((this.width - this.right - x0) * perPixel));
    while (element < end) {
      const place = layout.place(t, element);
      const stop = Math.min(numel, Math.max(place.stop, element + Math.max(1, Math.floor(perPixel * 0.7))));
      const from = x0 + element / perPixel, to = x0 + stop / perPixel;
      const rank = layout.rankOf(buffer, place.shard);
      this._fill(from, Math.max(to, from + 0.5), y, height, this.colourOf(buffer, rank));
      this._rankName(buffer, rank, from, to, y, height, worldSize);
      element = stop;
    }
  }

  colourOf(buffer, rank) {
    const { worldSize, rank: chosen } = SG.state;
    if (buffer.copies === worldSize && worldSize > 1) return this.colours.whole;
    if (chosen >= 0 && chosen !== rank) return this.colours.none;
    return SG.rankColour(rank, worldSize, this.colours.dark);
  }

  _rankName(buffer, rank, from, to, y, height, worldSize) {
    const low = Math.max(this.left, from), high = Math.min(this.width - this.right, to);
    const c = this.context, isNarrow = high - low < 30;
    if (high - low < 9 || height < (isNarrow ? 22 : 11) || worldSize === 1 || buffer.copies === worldSize) return;
    if (SG.state.rank >= 0 && SG.state.rank !== rank) return;
    c.font = `${isNarrow ? 9 : 10}px system-ui, sans-serif`;
    c.textBaseline = "middle";
    const text = String(rank);
    if (c.measureText(text).width > high - low) return;
    c.fillStyle = SG.darkTextOn(rank, worldSize) ? "#111" : "#fff";
    c.textAlign = isNarrow ? "center" : "right";
    c.fillText(text, isNarrow ? (low + high) / 2 : high - 8, y + (isNarrow ? 9 : height / 2));
  }

  /** The padding of the buffers that end in a row, in a column of its own: it is too little to be drawn by area. */
  _padding(row, y, height) {
    if (!SG.isSharded() || !this._paddingOf(row).elements) return;
    const x = this.width - this.right + 4;
    this.context.fillStyle = this._hatch("padding");
    this.context.fillRect(x, y, this.right - 5, Math.max(2, height));
  }

  /** {elements, bytes, keys} of padding in the buffers whose last tensor is in a row. */
  _paddingOf(row) {
    const { layout } = SG.state, found = { elements: 0, bytes: 0, keys: [] };
    for (const buffer of this.paddedBuffers.get(row.unit) || []) {
      if (row.lane && buffer.members[buffer.members.length - 1] !== row.members[0]) continue;
      if (SG.state.kind !== "params" && !buffer.trainable) continue;
      const elements = layout.padding(buffer);
      found.elements += elements;
      found.bytes += elements * buffer.itemsize;
      if (elements) found.keys.push(buffer.key);
    }
    return found;
  }

  indexPadding() {
    this.paddedBuffers = new Map();
    for (const buffer of SG.state.layout.buffers) {
      const unit = SG.state.tensors.unit(buffer.members[buffer.members.length - 1]);
      this.paddedBuffers.set(unit, [...(this.paddedBuffers.get(unit) || []), buffer]);
    }
  }

  // ---- cuts ----

  /** Note where a tensor is cut, and where a boundary falls just before it. */
  _cutsOf(t, x0, x1, y, height) {
    const { layout, tensors } = SG.state;
    if (!SG.isSharded() || !SG.has(t) || !tensors.numel(t)) return;
    const [first, last] = layout.shardsOf(t), numel = tensors.numel(t);
    const every = Math.max(1, Math.floor((last - first) / Math.max(8, (x1 - x0) / 2)));
    for (let shard = first; shard < last; shard += every) {
      const left = layout.boundary(t, shard)[0];
      if (left > 0 && left < numel) this._mark(x0 + ((x1 - x0) * left) / numel, y, height, t, shard, Math.min(every, last - shard), false);
    }
    const buffer = layout.buffers[layout.bufferOf[t]], offset = buffer.offsets[layout.memberOf[t]];
    if (!buffer.chunks && offset > 0 && offset % buffer.shardNumel === 0) {
      this._mark(x0, y, height, t, first - 1, 1, true);
    }
  }

  _mark(x, y, height, tensor, shard, count, between) {
    if (x < this.left - 1 || x > this.width - this.right + 1) return;
    const key = `${Math.round(x / 5)}:${Math.round((y + height / 2) / 7)}`;
    const mark = this.marks.get(key);
    if (mark) { mark.count += count; return; }
    this.marks.set(key, { x, y: y + height / 2, height, tensor, shard, count, between });
  }

  /** Every cut as a marker of fixed size; those that would lie on each other are one. */
  _markers(small) {
    const c = this.context, chosen = SG.state.cut;
    for (const mark of this.marks.values()) {
      const size = small ? 2.6 : 5, isChosen = this._isChosen(mark, chosen);
      c.beginPath();
      const s = isChosen ? 7 : size;
      c.moveTo(mark.x, mark.y - s);
      c.lineTo(mark.x + s * 0.8, mark.y);
      c.lineTo(mark.x, mark.y + s);
      c.lineTo(mark.x - s * 0.8, mark.y);
      c.closePath();
      c.fillStyle = isChosen ? this.colours.accent : mark.between ? this.colours.back : this.colours.cut;
      c.fill();
      c.lineWidth = isChosen ? 2 : 1;
      c.strokeStyle = mark.between ? this.colours.cut : this.colours.back;
      c.stroke();
    }
  }

  _isChosen(mark, cut) {
    if (!cut) return false;
    const tensor = cut.tensor >= 0 ? cut.tensor : cut.after;
    return mark.tensor === tensor && cut.shard >= mark.shard && cut.shard < mark.shard + mark.count;
  }
};
