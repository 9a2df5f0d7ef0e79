"use strict";
// The map of the model, as a reader uses it: hover, click, drag, zoom and the keyboard.
// Owns what lies at a point. Leaves where things are to `map_geometry`, and the canvas to `map_drawing`.
// A unit that is clicked at its name is shown alone.

SG.Map = class extends SG.MapDrawing {
  constructor() {
    super();
    this._listen();
  }

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
