"""Where one parameter is: rank by rank, from a snapshot of one of them.

Owns the rows and their text. The layout says which rank holds which elements; what each rank keeps of them (kinds,
dtypes) is the same on all, so one rank's snapshot tells for all. The attributes that show them are those of the
snapshot's rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardglass.errors import UsageError, suggestion
from shardglass.layout import Buffer, slices_in
from shardglass.lens.rows import Held
from shardglass.options import DTYPE_BYTES

if TYPE_CHECKING:
    from shardglass.lens.snapshot import Snapshot

WRAPPED = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What wrappers put into names of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A run of elements of one parameter on some ranks.

    Attributes:
        kind: What is there: "param", "master", "grad", or the optimizer's key.
        ranks: The ranks that hold it: first, one past the last, distance.
        start: First element, counted in the flattened parameter.
        stop: One past the last.
        buffer: Name of the buffer in the layout.
        offset: Where it starts in a rank's shard of the buffer, or in the whole buffer.
        cut: Whether ``offset`` counts in the shard.
        dtype: Its dtype by torch's name.
        nbytes: Bytes of the run on each of the ranks.
        attribute: The run in the snapshot's own process, such as "optimizer.bit16_groups_flat[0][0:128]"; None if that
            rank is not one of them.
    """

    kind: str
    ranks: tuple[int, int, int]
    start: int
    stop: int
    buffer: str
    offset: int
    cut: bool
    dtype: str
    nbytes: int
    attribute: str | None

    @property
    def ranks_text(self) -> str:
        """Such as "rank 1", "ranks 0 to 3" or "ranks 0, 2, 4"."""
        ranks = range(*self.ranks)
        if len(ranks) == 1:
            return f"rank {ranks[0]}"
        if ranks.step == 1:
            return f"ranks {ranks[0]} to {ranks[-1]}"
        listed = ", ".join(map(str, ranks[:4]))
        return f"ranks {listed}" + (f", … {ranks[-1]}" if len(ranks) > 4 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where one parameter is.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: dtype the model computes with.
        trainable: Whether it is trained.
        group: Its optimizer group.
        seen: What ``param.shape`` says in the snapshot's process; None in a plan.
        status: What state it is in there; None in a plan.
        engine: Whose layout it is.
        scheme: Name of the layout's scheme.
        holdings: What the ranks hold of it, kind by kind, then by element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group: int | None
    seen: tuple[int, ...] | None
    status: str | None
    engine: str
    scheme: str
    holdings: tuple[Holding, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds elements of it in any kind."""
        return tuple(sorted({rank for h in self.holdings for rank in range(*h.ranks)}))

    def __repr__(self) -> str:
        """The whole table: it is what somebody who asks wants to read."""
        numel = 1
        for size in self.shape:
            numel *= size
        group = "frozen" if not self.trainable else "in no group" if self.group is None else f"group {self.group}"
        shown = "" if self.seen == self.shape else f"param.shape is {self.seen} "
        seen = "" if self.status in (None, "whole") else f"; {shown}here: {self.status}"
        lines = [f"{self.name}  {self.shape} = {numel:,} elements, {self.dtype}, {group}, {self.scheme}{seen}"]
        for h in self.holdings:
            place = "shard" if h.cut else "buffer"
            line = (
                f"  {h.kind:<10} {h.ranks_text}: elements {h.start:,} to {h.stop - 1:,} at {h.offset:,} of the {place} "
                f"{h.buffer}, {h.dtype}, {h.nbytes:,} bytes"
            )
            lines.append(line + (f"; here {h.attribute}" if h.attribute else ""))
        return "\n".join(lines)


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for part in WRAPPED[1:]:
        name = name.replace(part, "")
    return name.removeprefix(WRAPPED[0])


def whereabouts(snapshot: "Snapshot", name: str) -> Whereabouts:
    """Where one parameter is.

    Args:
        snapshot: Of any rank, or planned.
        name: Its full dotted name; what wrappers put before or into it does not matter, nor which of the names of a
            tied weight it is.

    Raises:
        UsageError: No parameter has this name; the message has the nearest one.
    """
    layout = snapshot.layout
    known = known_name(snapshot, name)
    row = next((r for r in snapshot.params if r.name == known), None)
    b, k = layout.find(known)
    buffer = layout.buffers[b]
    spec = buffer.params[k]
    kinds = _kinds(snapshot, b) or {("param", spec.dtype, True): []}
    runs = (
        _holding(snapshot, buffer, kind, run, found)
        for kind, found in kinds.items()
        for run in _runs(buffer, k, cut=kind[2], world_size=snapshot.world_size)
    )
    return Whereabouts(
        name=known,
        shape=spec.shape,
        dtype=spec.dtype,
        trainable=spec.trainable,
        group=spec.group,
        seen=None if row is None else row.seen,
        status=None if row is None else row.status,
        engine=snapshot.engine,
        scheme=layout.scheme,
        holdings=tuple(runs),
    )


def _kinds(snapshot: "Snapshot", b: int) -> dict[tuple[str, str, bool], list[Held]]:
    """What the ranks keep of a buffer, and this rank's tensors of each kind.

    A rank without elements of the buffer may lack tensors that others have: it keeps the same of buffers like this one.
    """
    buffers = snapshot.layout.buffers
    alike = {b}
    if not slices_in(snapshot.layout, b, snapshot.rank):
        form = (buffers[b].trainable, buffers[b].dtype)
        alike = {i for i, other in enumerate(buffers) if (other.trainable, other.dtype) == form}
    kinds: dict[tuple[str, str, bool], list[Held]] = {}
    for held in snapshot.held:
        if held.buffer in alike:
            found = kinds.setdefault((held.kind, held.dtype, held.cut), [])
            found += [held] if held.buffer == b else []
    return kinds


def known_name(snapshot: "Snapshot", name: str) -> str:
    """The name that the layout has for what somebody calls a parameter.

    Raises:
        UsageError: None; the message has the nearest one.
    """
    layout = snapshot.layout
    aliases = {alias: row.name for row in snapshot.params for alias in row.aliases}
    for word in (name, clean_name(name)):
        if layout.has(word):
            return word
        if word in aliases:
            return aliases[word]
    hint = suggestion(clean_name(name), [*layout.names, *aliases])
    raise UsageError(f"no parameter is named {name!r}{hint}; names are those of model.named_parameters()")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run of elements and the ranks that hold it."""

    ranks: range
    start: int
    length: int
    offset: int


def _runs(buffer: Buffer, k: int, *, cut: bool, world_size: int) -> Iterator[_Run]:
    """The runs of parameter ``k``, by element."""
    numel = buffer.params[k].numel
    if not cut:
        offset = buffer.offsets[k] if buffer.chunks is None else 0
        if numel:
            yield _Run(ranks=range(world_size), start=0, length=numel, offset=offset)
        return
    for start, length, place in buffer.pieces(k, 0, numel):
        ranks = buffer.holders.ranks_of(place.shard)
        yield _Run(ranks=ranks, start=start, length=length, offset=place.offset)


def _holding(snapshot: "Snapshot", buffer: Buffer, kind: tuple[str, str, bool], run: _Run, held: list[Held]) -> Holding:
    """The row of one run."""
    name, dtype, cut = kind
    here = None
    if snapshot.rank in run.ranks:
        here = next((_shown(h, run) for h in held if _has(h, run) and h.attribute), None)
    return Holding(
        kind=name,
        ranks=(run.ranks.start, run.ranks.stop, run.ranks.step),
        start=run.start,
        stop=run.start + run.length,
        buffer=buffer.key,
        offset=run.offset,
        cut=cut,
        dtype=dtype,
        nbytes=run.length * DTYPE_BYTES[dtype],
        attribute=here,
    )


def _has(held: Held, run: _Run) -> bool:
    """Whether a tensor has all of a run."""
    return held.first <= run.offset and run.offset + run.length <= held.first + held.numel


def _shown(held: Held, run: _Run) -> str:
    """The run as a slice of the tensor that has it."""
    low = run.offset - held.first
    whole = low == 0 and run.length == held.numel
    return held.attribute if whole else f"{held.attribute}[{low}:{low + run.length}]"
