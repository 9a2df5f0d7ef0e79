"""The rows of a snapshot: wrappers, storages, parameters, tensors, attributes.

Owns their fields. Leaves the snapshot as a whole, and its JSON form, to ``snapshot``.

[Note: views] Aliasing is told by storage. Every storage has a label, which is the attribute that shows all of it where
there is one, and a tensor is a run of elements of a labelled storage: ``optimizer.bit16_groups_flat[0][3104:4128]``.
"""

from dataclasses import dataclass

LIVE, PLAN = "live", "plan"
"""Where a snapshot's facts come from: memory, or arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """One link of a chain of wrappers, or the object that the chain ends in.

    Attributes:
        where: How it is reached, such as "model_wrapped.module".
        also: Another name of the same object, such as "model"; None if there is none.
        kind: Short name, such as "DDP".
        type: Module and name of its class.
        in_place: Whether the object itself was changed, instead of put in another one.
        does: What it does.
        when: When in ``Trainer.train()`` it is put on.
    """

    where: str
    also: str | None
    kind: str
    type: str
    in_place: bool
    does: str
    when: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One run of memory.

    Attributes:
        label: Its name, see [Note: views].
        device: Such as "cpu" or "cuda:0".
        nbytes: Its size in bytes.
    """

    label: str
    device: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor as a part of a storage, see [Note: views].

    Attributes:
        of: Label of the storage.
        start: First element in the storage, in elements of the tensor's dtype.
        stop: One past the last.
    """

    of: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.of}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRow:
    """One parameter, as it is on this rank now.

    Attributes:
        name: Full dotted name, without what wrappers put into it.
        aliases: Other names of the same Parameter (tied weights).
        shape: Shape of the whole parameter.
        seen: What ``param.shape`` says now.
        dtype: Its dtype by torch's name.
        device: Where it is.
        trainable: Whether it gets a gradient.
        status: "whole", "shard" (it shows this rank's part), or what the engine calls its state.
        data: Memory of ``param.data``; None if it has none.
        shard: Memory of this rank's part where that is not ``param.data``.
        grad: Memory of ``param.grad``; None if there is none, or if it only stands for one that is elsewhere.
        grad_dtype: Its dtype.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    seen: tuple[int, ...]
    dtype: str
    device: str
    trainable: bool
    status: str
    data: View | None
    shard: View | None
    grad: View | None
    grad_dtype: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor on this rank that has elements of one buffer of the layout.

    Attributes:
        buffer: Index of the buffer in the layout.
        kind: "param", "master", "grad", or the optimizer's key, such as "exp_avg".
        dtype: Its dtype by torch's name.
        cut: Whether it belongs to the rank's shard; otherwise to the whole buffer.
        first: Where it begins in the shard, or in the whole buffer.
        numel: Number of elements.
        attribute: Where a debugger finds it; empty in a plan.
        view: Its memory; None in a plan.
    """

    buffer: int
    kind: str
    dtype: str
    cut: bool
    first: int
    numel: int
    attribute: str
    view: View | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeRow:
    """One attribute of a foreign optimizer or parameter, explained.

    Attributes:
        attribute: Where a debugger finds it, such as "optimizer.bit16_groups_flat[0]".
        meaning: What it is.
        form: What the debugger shows: "tensor", "list of 16 parameters", "number", ...
        dtype: dtype of a tensor.
        shape: Shape of a tensor.
        nbytes: Bytes that it shows; memory of its own only if ``view`` begins with its own name.
        view: What it is a view of; None for what has no memory.
        names: Names of the parameters in it, in order.
        number: Its value, if it is a number.
        fact: What the layout says about the same, by name of the function in ``shardglass.layout``; None if nothing.
        group: The optimizer group it is about.
    """

    attribute: str
    meaning: str
    form: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    nbytes: int = 0
    view: str | None = None
    names: tuple[str, ...] | None = None
    number: int | None = None
    fact: str | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One group of the optimizer.

    Attributes:
        index: Its index in ``param_groups``.
        lr: Learning rate now.
        weight_decay: Weight decay.
        num_params: Parameters of the model in it.
        numel: Their elements, over all ranks.
    """

    index: int
    lr: float
    weight_decay: float
    num_params: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Bytes of one category on this rank, each storage counted once, in the first category that has it."""

    category: str
    nbytes: int
