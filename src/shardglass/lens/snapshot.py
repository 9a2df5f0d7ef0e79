"""What one rank holds at one moment, as plain values.

Owns Snapshot and its JSON form. Leaves its rows to ``rows``, how it is read from live objects to ``look`` and the
readers, where an element is to ``whereabouts``, what differs from another one to ``changes``, and what contradicts its
own layout to ``check``.
"""

import json
from dataclasses import dataclass
from typing import Any

from shardglass.errors import UsageError
from shardglass.json_form import from_tree, to_tree
from shardglass.layout import Layout, params_in_partition, params_not_in_partition
from shardglass.layout.line import rank_line
from shardglass.lens.changes import SnapshotChange, changes
from shardglass.lens.check import check
from shardglass.lens.rows import AttributeRow, GroupRow, Held, MemoryRow, ParamRow, Storage, Wrapper
from shardglass.lens.whereabouts import Whereabouts, whereabouts

SNAPSHOT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Snapshot:
    """What one rank holds at one moment.

    Attributes:
        source: "live", or "plan" for what arithmetic says.
        engine: "shardglass", "deepspeed", "fsdp2", "ddp", or "none".
        stage: ZeRO stage, for engines that have one.
        rank: The rank in the group of processes it is sharded over.
        world_size: Size of that group.
        step: Optimizer steps taken; None if nothing tells.
        layout: Which rank holds which elements of what the engine cuts.
        model_chain: From the outermost wrapper of the model to the model.
        optimizer_chain: The same for the optimizer; empty if none was given.
        scheduler_chain: The same for the scheduler.
        params: Every parameter, in model order.
        held: Every tensor with elements of the layout's buffers.
        attributes: The foreign optimizer's attributes explained.
        groups: The optimizer's groups.
        memory: Bytes by category.
        storages: Every storage that a row of this snapshot shows.
    """

    source: str
    engine: str
    stage: int | None
    rank: int
    world_size: int
    step: int | None
    layout: Layout
    model_chain: tuple[Wrapper, ...] = ()
    optimizer_chain: tuple[Wrapper, ...] = ()
    scheduler_chain: tuple[Wrapper, ...] = ()
    params: tuple[ParamRow, ...] = ()
    held: tuple[Held, ...] = ()
    attributes: tuple[AttributeRow, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    storages: tuple[Storage, ...] = ()

    @property
    def optimizes_all(self) -> bool:
        """Whether this rank keeps master weights or optimizer states of all elements, whatever the layout cuts."""
        state = [h for h in self.held if h.kind not in ("param", "grad")]
        return bool(state) and not any(h.cut for h in state)

    @property
    def params_in_partition(self) -> dict[int, tuple[str, ...]]:
        """Names of the parameters of which this rank optimizes elements, by optimizer group, in memory order."""
        return params_in_partition(self.layout, self.rank, whole=self.optimizes_all)

    @property
    def params_not_in_partition(self) -> dict[int, tuple[str, ...]]:
        """Names of the other parameters that are optimized, by optimizer group, in memory order."""
        return params_not_in_partition(self.layout, self.rank, whole=self.optimizes_all)

    def where(self, name: str) -> Whereabouts:
        """Where one parameter is, rank by rank.

        Raises:
            UsageError: No parameter has this name; the message has the nearest one.
        """
        return whereabouts(self, name)

    def diff(self, other: "Snapshot") -> tuple[SnapshotChange, ...]:
        """What differs in another one: a later moment, another rank, or the run that this one is the plan of."""
        return changes(self, other)

    def check(self) -> tuple[SnapshotChange, ...]:
        """Every place where memory is not as the layout says; empty if what runs is what is shown."""
        return check(self)

    def to_json(self) -> str:
        """Return the versioned JSON form; ``from_json`` gives back an equal snapshot."""
        tree = to_tree(self, without=("layout",))
        return json.dumps({"version": SNAPSHOT_VERSION, **tree, "layout": json.loads(self.layout.to_json())})

    @staticmethod
    def from_json(text: str, *, where: str = "snapshot") -> "Snapshot":
        """Read what ``to_json`` wrote.

        Args:
            text: The JSON.
            where: What it is, for the message, such as the name of its file.

        Raises:
            UsageError: The text is no snapshot, or one of another version; says what is wrong.
        """
        try:
            tree = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"{where} is no JSON (line {error.lineno}, column {error.colno}): {error.msg}") from None
        if not isinstance(tree, dict) or "version" not in tree:
            raise UsageError(f"{where} is no snapshot: it has no version; give a file that Snapshot.to_json() wrote")
        version = tree.pop("version")
        if version != SNAPSHOT_VERSION:
            raise UsageError(
                f"{where} is a snapshot of version {version!r}, and version {SNAPSHOT_VERSION} is understood; read it "
                "with the shardglass that wrote it"
            )
        return from_tree(Snapshot, tree, where, layout=_layout_of(tree.pop("layout", None), where))

    def __repr__(self) -> str:
        """One line, without a collective."""
        return rank_line(self.layout, self.rank, whole=self.optimizes_all)


def _layout_of(tree: Any, where: str) -> Layout:
    """The layout in a snapshot's JSON.

    Raises:
        UsageError: There is none, or it is damaged.
    """
    try:
        return Layout.from_json(json.dumps(tree))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{where}.layout is missing or damaged ({error!r})") from None
