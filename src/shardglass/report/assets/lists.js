"use strict";
// The list beside the map: all cuts, or all tensors, narrowed by the search. Only rows in sight are made.
// Owns `SG.List`.

const ROW = 40, MOST_HEIGHT = 16_000_000;  // browsers stop at about 33 million pixels

SG.List = class {
  constructor() {
    this.element = document.getElementById("list");
    this.inner = document.getElementById("list-inner");
    this.foot = document.getElementById("list-foot");
    this.search = document.getElementById("search");
    this.tab = "cuts";
    this.items = { count: 0 };
    this.element.addEventListener("scroll", () => this.draw());
    this.search.addEventListener("input", () => SG.change({ words: this.search.value.toLowerCase().split(/\s+/).filter(Boolean) }));
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && this.tab === "tensors" && this.items.count) this._choose(0);
    });
    for (const tab of ["cuts", "tensors"]) {
      document.getElementById(`tab-${tab}`).addEventListener("click", () => { this.tab = tab; this.fill(); });
    }
  }

  /** Collect what the list holds now. */
  fill() {
    const { tensors, words } = SG.state, cuts = SG.cuts();
    const found = [];
    for (let t = 0; t < tensors.count; t++) if (!words.length || tensors.matches(t, words)) found.push(t);
    const kept = words.length ? new Set(found) : null;
    const shown = kept ? cuts.filter((t) => kept.has(t)) : cuts;
    document.getElementById("tab-cuts").textContent = `cuts ${SG.number(shown.count)}`;
    document.getElementById("tab-tensors").textContent = `tensors ${SG.number(found.length)}`;
    for (const tab of ["cuts", "tensors"]) document.getElementById(`tab-${tab}`).classList.toggle("on", tab === this.tab);
    this.items = this.tab === "cuts" ? shown : { count: found.length, get: (i) => found[i] };
    this.rows = Math.min(this.items.count, Math.floor(MOST_HEIGHT / ROW));
    this.inner.style.height = `${this.rows * ROW}px`;
    this.foot.textContent = this._foot();
    this.element.scrollTop = 0;
    this.draw();
  }

  _foot() {
    if (this.rows < this.items.count) return `the first ${SG.number(this.rows)} of ${SG.number(this.items.count)}; search to see others`;
    if (this.tab === "cuts" && !this.items.count) return SG.isSharded() ? "nothing is cut" : `nothing is cut: stage ${SG.state.stage} keeps ${SG.kind().label} whole on every rank`;
    return this.tab === "cuts" ? "left | right: elements of the tensor before and behind the boundary" : "in model order";
  }

  draw() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW) - 2);
    const last = Math.min(this.rows, first + Math.ceil(this.element.clientHeight / ROW) + 5);
    const rows = [];
    for (let i = first; i < last; i++) rows.push(this._row(i));
    this.inner.replaceChildren(...rows);
  }

  _row(i) {
    const row = this.tab === "cuts" ? this._cutRow(this.items.get(i)) : this._tensorRow(this.items.get(i));
    row.style.top = `${i * ROW}px`;
    row.addEventListener("click", () => this._choose(i));
    return row;
  }

  _choose(i) {
    const item = this.items.get(i);
    if (this.tab === "tensors") { SG.change({ tensor: item, cut: null }); SG.map.show(item); return; }
    const tensor = item.tensor >= 0 ? item.tensor : item.after >= 0 ? item.after : item.before;
    SG.change({ tensor, cut: item });
    if (tensor >= 0) SG.map.show(tensor, item.tensor >= 0 ? item.firstRight : 0);
  }

  _swatch(rank) {
    const swatch = SG.make("span", "swatch");
    swatch.style.background = SG.rankColour(rank, SG.state.worldSize, SG.theme().dark);
    return swatch;
  }

  _cutRow(cut) {
    const { tensors } = SG.state, chosen = SG.state.cut;
    const isOn = chosen && chosen.buffer === cut.buffer && chosen.shard === cut.shard && chosen.tensor === cut.tensor;
    const ranks = SG.make("span", "ranks", this._swatch(cut.leftRank), `${cut.leftRank} | ${cut.rightRank}`, this._swatch(cut.rightRank));
    const name = (t) => (t < 0 ? "padding" : tensors.names[t]);
    const what = cut.tensor < 0 ? "between two tensors" : `${SG.number(cut.left)} | ${SG.number(cut.right)}   ${SG.percent(cut.left, cut.left + cut.right)}`;
    const shown = cut.tensor < 0 ? (cut.after < 0 ? "padding" : `before ${name(cut.after)}`) : name(cut.tensor);
    const row = SG.make("div", `item${isOn ? " on" : ""}`, SG.make("div", "line", ranks, SG.make("span", "numbers", what)), SG.make("div", "name", SG.make("bdi", "", shown)));
    row.title = shown;
    return row;
  }

  _tensorRow(t) {
    const { tensors } = SG.state;
    const row = SG.make("div", `item${t === SG.state.tensor ? " on" : ""}`, SG.make("div", "name strong", SG.make("bdi", "", tensors.names[t])),
      SG.make("div", "line", SG.make("span", "", SG.shapeText(t)), SG.make("span", "numbers", SG.bytes(tensors.bytes(t)))));
    row.title = tensors.names[t];
    return row;
  }
};
