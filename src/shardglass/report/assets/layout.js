"use strict";
// Where an element is, and what a shard holds: the arithmetic of a cut, as shardglass/layout/buffer.py has it.
// Owns `SG.Layout`. Everything that a scheme decides (order, offsets, padding, chunks, holders) comes from Python; a
// test holds every answer given here against Python's.
var SG = window.SG || {};
window.SG = SG;

/** The value of a column at i; a column of one value is {all: value}. */
SG.at = (column, i) => (Array.isArray(column) ? column[i] : column.all);

/** The numbers of runs of [first, how many]. */
SG.unrolled = (runs) => {
  const numbers = [];
  for (const [first, count] of Array.isArray(runs) ? runs : []) for (let i = 0; i < count; i++) numbers.push(first + i);
  return numbers;
};

/** The last index whose value is not above x, in an ascending array. */
SG.lastBelow = (array, x) => {
  let low = 0, high = array.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] <= x) low = middle + 1; else high = middle;
  }
  return low - 1;
};

const MANY_SHARDS = 4096;  // shards of a buffer above which its boundaries are worked out only when they are shown

SG.Layout = class {
  /** A layout from its columns and the tensor table; see html_layouts.PageLayout and TensorTable. */
  constructor(columns, tensors) {
    this.scheme = columns.scheme;
    this.worldSize = columns.world_size;
    this.refused = columns.refused;
    this.tensors = tensors;
    this.buffers = [];
    this.bufferOf = new Int32Array(tensors.names.length).fill(-1);
    this.memberOf = new Int32Array(tensors.names.length).fill(-1);
    if (!this.refused) this._fill(columns);
  }

  _fill(columns) {
    const numBuffers = columns.sizes.all === undefined ? columns.sizes.length : this._numBuffers(columns);
    const order = SG.unrolled(columns.order);
    let position = 0;
    for (let b = 0; b < numBuffers; b++) {
      const [numShards, copies, first, stride] = SG.at(columns.holders, b);
      const size = SG.at(columns.sizes, b), dim = SG.at(columns.dims, b);
      const buffer = {
        index: b, key: SG.at(columns.keys, b), shardNumel: SG.at(columns.shards, b), numShards, copies, first, stride,
        dim, members: [], offsets: [], chunks: null,
      };
      let end = 0;
      for (let k = 0; k < size; k++, position++) {
        const tensor = order[position];
        const chunk = SG.at(columns.chunks, position);
        if (chunk >= 0) (buffer.chunks = buffer.chunks || []).push(chunk);
        const offset = end + SG.at(columns.gaps, position);
        buffer.members.push(tensor);
        buffer.offsets.push(offset);
        end = offset + (chunk >= 0 ? chunk : this.numel(tensor));
        this.bufferOf[tensor] = b;
        this.memberOf[tensor] = k;
      }
      if (!buffer.key) buffer.key = this.tensors.names[buffer.members[0]];
      buffer.trainable = this.tensors.isTrained(buffer.members[0]);
      buffer.itemsize = this.tensors.itemsize(buffer.members[0]);
      this.buffers.push(buffer);
    }
  }

  /** Buffers of one size each share out the tensors. */
  _numBuffers(columns) {
    return this.tensors.names.length / columns.sizes.all;
  }

  numel(tensor) { return this.tensors.numel(tensor); }

  /** A parameter of a buffer cut parameter by parameter: [rows, elements of a row, elements of it that a shard has]. */
  grid(buffer, k) {
    const chunk = buffer.chunks[k], tensor = buffer.members[k], shape = this.tensors.shape(tensor);
    const product = (part) => part.reduce((a, b) => a * b, 1);
    if (buffer.dim < 0) return [1, this.numel(tensor), chunk];
    if (chunk >= shape[buffer.dim]) return [1, this.numel(tensor), this.numel(tensor)];
    const inner = product(shape.slice(buffer.dim + 1));
    return [product(shape.slice(0, buffer.dim)), shape[buffer.dim] * inner, chunk * inner];
  }

  /** Where an element of a tensor is: {shard, offset, stop}; stop is the first later element elsewhere. */
  place(tensor, element) {
    const buffer = this.buffers[this.bufferOf[tensor]], k = this.memberOf[tensor], offset = buffer.offsets[k];
    if (!buffer.chunks) {
      const at = offset + element, shard = Math.floor(at / buffer.shardNumel);
      const stop = Math.min((shard + 1) * buffer.shardNumel - offset, this.numel(tensor));
      return { shard, offset: at - shard * buffer.shardNumel, stop };
    }
    const [, width, part] = this.grid(buffer, k);
    const row = Math.floor(element / width), column = element - row * width, shard = Math.floor(column / part);
    const length = Math.min(part, width - shard * part);
    return { shard, offset: offset + row * length + (column - shard * part), stop: row * width + shard * part + length };
  }

  /** What a shard has of a tensor: [first element, number, offset in the shard] of each run, at most `most` of them. */
  runs(tensor, shard, most = Infinity) {
    const buffer = this.buffers[this.bufferOf[tensor]], k = this.memberOf[tensor], offset = buffer.offsets[k];
    const found = [];
    if (!buffer.chunks) {
      const low = shard * buffer.shardNumel - offset;
      const start = Math.max(0, low), stop = Math.min(this.numel(tensor), low + buffer.shardNumel);
      if (start < stop) found.push([start, stop - start, start - low]);
      return found;
    }
    const [rows, width, part] = this.grid(buffer, k);
    const length = Math.min(part, width - shard * part);
    for (let row = 0; length > 0 && row < rows && row < most; row++) {
      found.push([row * width + shard * part, length, offset + row * length]);
    }
    return found;
  }

  /** Where the end of a shard is in a tensor: [elements up to there, first element behind]. */
  boundary(tensor, shard) {
    const buffer = this.buffers[this.bufferOf[tensor]], k = this.memberOf[tensor];
    if (!buffer.chunks) {
      const left = Math.min(Math.max(0, (shard + 1) * buffer.shardNumel - buffer.offsets[k]), this.numel(tensor));
      return [left, left];
    }
    const [rows, width, part] = this.grid(buffer, k);
    const edge = Math.min((shard + 1) * part, width);
    return [rows * edge, edge];
  }

  /** The first and the last shard that have elements of a tensor; [0, -1] for a tensor without elements. */
  shardsOf(tensor) {
    if (!this.numel(tensor)) return [0, -1];
    return [this.place(tensor, 0).shard, this.place(tensor, this.numel(tensor) - 1).shard];
  }

  /** The first rank that holds a shard; every `copies`-th share of ranks holds it too. */
  rankOf(buffer, shard) { return buffer.first + buffer.stride * shard; }

  shardOf(buffer, rank) {
    const steps = (rank - buffer.first) / buffer.stride;
    if (!Number.isInteger(steps) || steps < 0 || steps >= buffer.numShards * buffer.copies) return -1;
    return steps % buffer.numShards;
  }

  /** The number of elements that a shard has of a tensor. */
  heldOf(tensor, shard) {
    const buffer = this.buffers[this.bufferOf[tensor]], k = this.memberOf[tensor];
    if (!buffer.chunks) return this.runs(tensor, shard).reduce((sum, run) => sum + run[1], 0);
    const [rows, width, part] = this.grid(buffer, k);
    return rows * Math.max(0, Math.min(part, width - shard * part));
  }

  /** Elements on a rank: {trainable, frozen, padding} in bytes of each buffer's dtype. */
  rankBytes(rank) {
    const sums = { trainable: 0, frozen: 0, padding: 0 };
    for (const buffer of this.buffers) {
      const shard = this.shardOf(buffer, rank);
      if (shard < 0) continue;
      let held = 0;
      for (const tensor of this._members(buffer, shard)) held += this.heldOf(tensor, shard);
      sums[buffer.trainable ? "trainable" : "frozen"] += held * buffer.itemsize;
      sums.padding += (buffer.shardNumel - held) * buffer.itemsize;
    }
    return sums;
  }

  /** The tensors that may have elements in a shard. */
  _members(buffer, shard) {
    if (buffer.chunks) return buffer.members;
    const first = Math.max(0, SG.lastBelow(buffer.offsets, shard * buffer.shardNumel));
    const last = SG.lastBelow(buffer.offsets, (shard + 1) * buffer.shardNumel - 1);
    return buffer.members.slice(first, last + 1);
  }

  /** Padding elements of a buffer, over all shards. */
  padding(buffer) {
    return buffer.shardNumel * buffer.numShards - buffer.members.reduce((sum, t) => sum + this.numel(t), 0);
  }

  /** What the boundary behind a shard cuts in a buffer that is one run; see cuts.py. */
  rowInRun(buffer, shard) {
    const edge = (shard + 1) * buffer.shardNumel;
    const k = SG.lastBelow(buffer.offsets, edge), tensor = buffer.members[k];
    const left = k < 0 ? 0 : this.boundary(tensor, shard)[0];
    if (k >= 0 && left > 0 && left < this.numel(tensor)) return this.cutOf(tensor, shard);
    let behind = left ? k + 1 : Math.max(0, k);
    let before = behind - 1;
    while (behind < buffer.members.length && !this.numel(buffer.members[behind])) behind++;
    while (before >= 0 && !this.numel(buffer.members[before])) before--;
    return {
      buffer: buffer.index, shard, leftRank: this.rankOf(buffer, shard), rightRank: this.rankOf(buffer, shard + 1),
      tensor: -1, left: 0, right: 0, firstRight: 0,
      before: before >= 0 ? buffer.members[before] : -1,
      after: behind < buffer.members.length ? buffer.members[behind] : -1,
    };
  }

  /** The boundary behind a shard in a tensor that it cuts. */
  cutOf(tensor, shard) {
    const buffer = this.buffers[this.bufferOf[tensor]];
    const [left, firstRight] = this.boundary(tensor, shard);
    return {
      buffer: buffer.index, shard, leftRank: this.rankOf(buffer, shard), rightRank: this.rankOf(buffer, shard + 1),
      tensor, left, right: this.numel(tensor) - left, firstRight, before: tensor, after: tensor,
    };
  }

  /**
   * Every cut, without listing them: owners with a number of cuts each, and `get(i)`.
   * An owner is a boundary of a buffer that is one run (or all of them, if they are very many), or a tensor of another
   * one. Only buffers that `wanted` takes.
   */
  cuts(wanted) {
    const owners = [], starts = [];
    let count = 0;
    const add = (owner, number) => { owners.push(owner); starts.push(count); count += number; };
    for (const buffer of this.buffers) {
      if (buffer.numShards < 2 || !wanted(buffer)) continue;
      if (!buffer.chunks && buffer.numShards > MANY_SHARDS) {
        add({ run: buffer, firstShard: 0, many: true, tensor: buffer.members[0] }, buffer.numShards - 1);
      } else if (!buffer.chunks) {
        for (let shard = 0; shard < buffer.numShards - 1; shard++) add(this.rowInRun(buffer, shard), 1);
      } else {
        for (const tensor of buffer.members) {
          const [first, last] = this.shardsOf(tensor);
          if (last > first) add({ tensor, firstShard: first, many: true, before: tensor, after: tensor }, last - first);
        }
      }
    }
    return new SG.Cuts(this, owners, starts, count);
  }
};

SG.Cuts = class {
  constructor(layout, owners, starts, count) {
    Object.assign(this, { layout, owners, starts, count });
  }

  get(i) {
    const at = SG.lastBelow(this.starts, i), owner = this.owners[at];
    const shard = owner.firstShard + i - this.starts[at];
    if (owner.run) return this.layout.rowInRun(owner.run, shard);
    return owner.many ? this.layout.cutOf(owner.tensor, shard) : owner;
  }

  /** Those whose tensors are among some: a function of the index of a tensor. */
  filter(takes) {
    const owners = [], starts = [];
    let count = 0;
    const add = (owner, number) => { owners.push(owner); starts.push(count); count += number; };
    this.owners.forEach((owner, at) => {
      if (owner.run) {  // too many to look at one by one: those inside of tensors that are taken
        for (const tensor of owner.run.members.filter(takes)) {
          const [first, last] = this.layout.shardsOf(tensor);
          if (last > first) add({ tensor, firstShard: first, many: true }, last - first);
        }
      } else if ((owner.before >= 0 && takes(owner.before)) || (owner.after >= 0 && takes(owner.after))) {
        add(owner, (at + 1 < this.starts.length ? this.starts[at + 1] : this.count) - this.starts[at]);
      }
    });
    return new SG.Cuts(this.layout, owners, starts, count);
  }
};
