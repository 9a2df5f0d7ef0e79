"use strict";
// The map of the model: a row for each unit, as high as its bytes; in it its tensors, as wide as theirs. Area is bytes.
// Owns the canvas, zoom, hover and the markers of cuts, which have one size whatever the zoom.
// A unit that is clicked at its name is shown alone, a lane of equal height for each tensor.

const DENSE = 400;  // markers of cuts above which they are drawn smaller

SG.Map = class {
  constructor() {
    this.canvas = document.getElementById("map");
    this.frame = document.getElementById("map-frame");
    this.tip = document.getElementById("tip");
    this.context = this.canvas.getContext("2d");
    this.view = { x: 0, y: 0, zoom: 1 };  // x, y: shares of the map, 0 to 1, of the left upper corner
    this.flash = 0;
    this._listen();
  }

  // ---- geometry ----

  resize() {
    this.scale = window.devicePixelRatio || 1;
    this.width = this.frame.clientWidth;
    const { unit, tensors } = SG.state;
    const lanes = unit >= 0 ? tensors.byUnit[unit].length : 0;
    this.height = unit >= 0 ? Math.max(120, Math.min(640, lanes * 40 + 8)) : 620;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * this.scale);
    this.canvas.height = Math.round(this.height * this.scale);
    this.left = unit >= 0 ? Math.min(300, this.width * 0.36) : Math.min(150, this.width * 0.2);
    this.right = 18;
    this.rows = unit >= 0 ? this._lanes(tensors, unit) : this._unitRows(tensors);
  }

  /** {unit or tensor, label, tensors, top, height} of every row, in shares of the map's height. */
  _unitRows(tensors) {
    let top = 0;
    const least = tensors.unitNames.length > 120 ? 0 : 4 / 620;  // a unit of a few bytes is still a line
    const shares = tensors.bytesOfUnit.map((bytes) => Math.max(least, bytes / tensors.totalBytes));
    const sum = shares.reduce((a, b) => a + b, 0);
    return tensors.unitNames.map((name, unit) => {
      const height = shares[unit] / sum;
      const row = { unit, label: this._unitLabel(name, unit), members: tensors.byUnit[unit], top, height };
      top += height;
      return row;
    });
  }

  /** The unit's name; of a root unit, what is in it. */
  _unitLabel(name, unit) {
    const members = SG.state.tensors.byUnit[unit];
    const last = (n) => n.split(".").slice(-2, -1)[0] || n;
    const text = name.startsWith("root") ? [...new Set(members.map((t) => last(SG.state.tensors.names[t])))].join(", ") : name;
    return text.replace(/^model\./, "");
  }

  _lanes(tensors, unit) {
    const members = tensors.byUnit[unit], height = 1 / members.length;
    return members.map((t, i) => ({ unit, label: tensors.shortName(t), members: [t], top: i * height, height, lane: true }));
  }

  /** Zoom of each axis: rows are not zoomed out of sight while columns still are. */
  get zoomX() { return this.view.zoom; }
  get zoomY() {
    const { unit, tensors } = SG.state;
    const lanes = unit >= 0 ? tensors.byUnit[unit].length : 0;
    if (lanes) return Math.max(1, (lanes * 26) / this.height);
    const tallest = Math.max(...this.rows.map((row) => row.height));
    return Math.max(1, Math.min(this.view.zoom, 0.7 / tallest));
  }

  get plot() { return this.width - this.left - this.right; }
  xOf(share) { return this.left + (share - this.view.x) * this.zoomX * this.plot; }
  yOf(share) { return (share - this.view.y) * this.zoomY * this.height; }
  shareX(x) { return this.view.x + (x - this.left) / (this.zoomX * this.plot); }
  shareY(y) { return this.view.y + y / (this.zoomY * this.height); }

  clamp() {
    this.view.zoom = Math.max(1, Math.min(1e7, this.view.zoom));
    this.view.x = Math.max(0, Math.min(1 - 1 / this.zoomX, this.view.x));
    this.view.y = Math.max(0, Math.min(1 - 1 / this.zoomY, this.view.y));
  }

  /** The tensors of a row that are in sight: [tensor, left, right] in shares of the row. */
  *_inSight(row) {
    const { tensors } = SG.state;
    if (row.lane) { yield [row.members[0], 0, 1]; return; }
    const all = tensors.bytesOfUnit[row.unit] || 1, low = this.view.x, high = this.view.x + 1 / this.zoomX;
    let at = 0;
    for (const t of row.members) {
      const next = at + tensors.bytes(t) / all;
      if (next >= low && at <= high) yield [t, at, next];
      at = next;
    }
  }

  // ---- drawing ----

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

  // ---- hover, click, zoom ----

  /** What lies at a point of the canvas: {row, tensor, element, mark}; null outside. */
  at(x, y) {
    if (!this.rows) return null;
    const share = this.shareY(y), row = this.rows.find((r) => share >= r.top && share < r.top + r.height);
    if (!row) return null;
    if (x < this.left) return { row, tensor: -1, label: true };
    if (x > this.width - this.right) return { row, tensor: -1, padding: true };
    let mark = null, nearest = 8;
    for (const m of this.marks.values()) {
      const distance = Math.hypot(m.x - x, m.y - y);
      if (distance < nearest) [mark, nearest] = [m, distance];
    }
    let best = null;
    for (const [t, from, to] of this._inSight(row)) {
      const x0 = this.xOf(from), x1 = this.xOf(to);
      if (x >= x0 && x < x1) {
        const element = Math.min(SG.state.tensors.numel(t) - 1, Math.floor(((x - x0) / (x1 - x0)) * SG.state.tensors.numel(t)));
        best = { row, tensor: t, element: Math.max(0, element), mark };
      }
    }
    return best || { row, tensor: -1, mark };
  }

  _listen() {
    const point = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.deltaY || (SG.state.unit >= 0 && event.shiftKey)) return;
      event.preventDefault();
      const [x, y] = point(event);
      if (SG.state.unit >= 0 && !event.ctrlKey && x < this.left) { this.view.y += event.deltaY / this.height / this.zoomY; } else {
        this.zoomAt(x, y, Math.exp(-event.deltaY / 300));
      }
      this.clamp();
      this.draw();
    }, { passive: false });
    let drag = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      drag = { from: point(event), view: { ...this.view }, moved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const [x, y] = point(event);
      if (!drag) { this._hover(x, y); return; }
      const [dx, dy] = [x - drag.from[0], y - drag.from[1]];
      if (Math.abs(dx) + Math.abs(dy) > 4) drag.moved = true;
      if (!drag.moved) return;
      this.view.x = drag.view.x - dx / (this.zoomX * this.plot);
      this.view.y = drag.view.y - dy / (this.zoomY * this.height);
      this.clamp();
      this.draw();
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const moved = drag && drag.moved;
      drag = null;
      if (!moved) this._click(...point(event));
    });
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("keydown", (event) => {
      const step = 0.15, keys = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
      if (event.key === "+" || event.key === "-") this.zoomAt(this.width / 2, this.height / 2, event.key === "+" ? 1.5 : 1 / 1.5);
      else if (keys[event.key]) { this.view.x += keys[event.key][0] / this.zoomX; this.view.y += keys[event.key][1] / this.zoomY; } else return;
      event.preventDefault();
      this.clamp();
      this.draw();
    });
  }

  zoomAt(x, y, factor) {
    const [sx, sy] = [this.shareX(x), this.shareY(y)];
    this.view.zoom = Math.max(1, Math.min(1e7, this.view.zoom * factor));
    this.view.x = sx - (x - this.left) / (this.zoomX * this.plot);
    this.view.y = sy - y / (this.zoomY * this.height);
    this.clamp();
    this.draw();
  }

  /** Bring a tensor into sight, wide enough to be seen, around an element of it. */
  show(tensor, element = null) {
    const { tensors } = SG.state, row = this.rows.find((r) => r.members.includes(tensor));
    if (!row || row.lane) return;
    const all = tensors.bytesOfUnit[row.unit];
    let at = 0;
    for (const t of row.members) { if (t === tensor) break; at += tensors.bytes(t) / all; }
    const width = tensors.bytes(tensor) / all;
    this.view.zoom = Math.max(1, Math.min(1e7, 0.25 / Math.max(width, 1e-9)));
    const centre = at + width * (element === null ? 0.5 : element / tensors.numel(tensor));
    this.view.x = centre - 0.5 / this.zoomX;
    this.view.y = row.top + row.height / 2 - 0.5 / this.zoomY;
    this.clamp();
    this.draw();
  }

  whole() {
    this.view = { x: 0, y: 0, zoom: 1 };
    if (SG.state.unit >= 0) SG.change({ unit: -1 }); else this.draw();
  }

  _click(x, y) {
    const hit = this.at(x, y);
    if (!hit) return;
    if (hit.label && SG.state.unit < 0) {
      this.view = { x: 0, y: 0, zoom: 1 };
      SG.change({ unit: hit.row.unit });
    } else if (hit.label) {
      SG.change({ tensor: hit.row.members[0], cut: null });
    } else if (hit.mark && hit.mark.count === 1) {
      const { layout } = SG.state, buffer = layout.buffers[layout.bufferOf[hit.mark.tensor]];
      const cut = hit.mark.between ? layout.rowInRun(buffer, hit.mark.shard) : layout.cutOf(hit.mark.tensor, hit.mark.shard);
      SG.change({ tensor: hit.mark.tensor, cut });
    } else if (hit.tensor >= 0) {
      SG.change({ tensor: hit.tensor, cut: null });
    }
  }

  _hover(x, y) {
    const hit = this.at(x, y);
    this.tip.hidden = !hit;
    this.canvas.style.cursor = hit && (hit.tensor >= 0 || hit.label) ? "pointer" : "default";
    if (!hit) return;
    this.tip.replaceChildren(...SG.tipLines(hit, this));
    const width = this.tip.offsetWidth, left = Math.max(4, Math.min(x + 14, this.width - width - 4));
    const below = y + 16 + this.tip.offsetHeight < this.height;
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${below ? y + 16 : Math.max(0, y - this.tip.offsetHeight - 10)}px`;
  }
};
