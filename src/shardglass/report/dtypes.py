"""The dtype of every kind of tensor at every stop on its way.

Owns the table. The dtypes follow from layout and options by the rules that ``plan`` and the engine share.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardglass.layout import Layout
from shardglass.options import EngineOptions
from shardglass.plan.memory import accum_dtype, master_dtype, wire_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeRow:
    """One kind of tensor; None where it does not pass. Several dtypes are joined by a comma.

    Attributes:
        kind: "parameters", "frozen parameters", "gradients", "master weights", "optimizer state" or "buffers".
        stored: dtype it lies in memory in between steps; parameters that the stage shards are then in their master
            weights alone.
        computed: dtype forward and backward use or make it in.
        reduced: dtype it travels between ranks in.
        accumulated: dtype ranks and micro-batches are added up in.
        updated: dtype of the optimizer's step; parameters are then cast from the master weights.
        saved: dtype in the saved model.
    """

    kind: str
    stored: str | None = None
    computed: str | None = None
    reduced: str | None = None
    accumulated: str | None = None
    updated: str | None = None
    saved: str | None = None


def dtype_rows(
    layout: Layout, options: EngineOptions, *, saved: str | None, buffers: Sequence[str] = ()
) -> tuple[DtypeRow, ...]:
    """The table of a run.

    Args:
        layout: Gives the dtypes of trainable and frozen parameters.
        options: Gives the dtypes of reduction and accumulation.
        saved: dtype the model is saved in; None to say for each parameter its own.
        buffers: dtypes of the model's buffers, such as rotary tables; they keep their own.

    Returns:
        A row for each kind of tensor that the run has.
    """
    trainable = _joined(b.dtype for b in layout.buffers if b.trainable)
    frozen = _joined(b.dtype for b in layout.buffers if not b.trainable)
    dtypes = [b.dtype for b in layout.buffers if b.trainable]
    master = _joined(master_dtype(d) for d in dtypes)
    is_sharded = options.rules.shards_params
    copied = _joined(master_dtype(d) for d in dtypes if master_dtype(d) != d or is_sharded)
    accum = _joined(accum_dtype(d, options) for d in dtypes)
    rows = [
        DtypeRow(
            kind="parameters",
            stored=None if is_sharded else trainable,
            computed=trainable,
            updated=master,
            saved=saved or trainable,
        ),
        DtypeRow(kind="frozen parameters", stored=frozen, computed=frozen, saved=frozen and (saved or frozen)),
        DtypeRow(
            kind="gradients",
            stored=accum,
            computed=trainable,
            reduced=_joined(wire_dtype(d, options) for d in dtypes),
            accumulated=accum,
        ),
        DtypeRow(kind="master weights", stored=copied, updated=copied),
        DtypeRow(kind="optimizer state", stored=master, updated=master),
        DtypeRow(kind="buffers", stored=_joined(buffers), computed=_joined(buffers)),
    ]
    return tuple(row for row in rows if (row.stored, row.computed) != (None, None))


def _joined(dtypes: Iterable[str]) -> str | None:
    """Each dtype once, in order of appearance; None if there are none."""
    return ", ".join(dict.fromkeys(dtypes)) or None
