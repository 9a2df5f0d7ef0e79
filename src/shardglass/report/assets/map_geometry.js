"use strict";
// Where the map's rows and tensors are: a row for each unit, as high as its bytes; in it its tensors, as wide as theirs.
// A unit that is shown alone has a lane of equal height for each tensor. Owns rows, zoom of each axis and what is in
// sight. Leaves the canvas to `map_drawing` and the pointer to `map`.

SG.MapGeometry = class {
  constructor() {
    this.canvas = document.getElementById("map");
    this.frame = document.getElementById("map-frame");
    this.tip = document.getElementById("tip");
    this.context = this.canvas.getContext("2d");
    this.view = { x: 0, y: 0, zoom: 1 };  // x, y: shares of the map, 0 to 1, of the left upper corner
  }

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
};
