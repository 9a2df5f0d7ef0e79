"""FSDP2 (``fully_shard``), and other models whose parameters are DTensors, read live.

Owns where a DTensor's elements are: on a mesh of one dimension, or of two of which the first only copies (HSDP). The
layout is computed by ``shardglass.layout`` from shapes and placements; ``check`` holds it against what is read here.

[Note: two tensors] Around forward and backward FSDP2 puts an unsharded parameter in the place of the sharded one. The
optimizer has the sharded one, so that is what is read; the other is what the model shows now.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardglass.engine.inventory import HeldTensor
from shardglass.errors import UsageError
from shardglass.layout import Buffer, Holders, Layout, ParamSpec, SchemeOptions, make_layout
from shardglass.layout.buffer import own_buffer
from shardglass.lens.chains import is_kind
from shardglass.lens.reading import ParamTensor, Reading, named, own_grad, spec
from shardglass.lens.whole import group_of, held_states, step_of
from shardglass.lens.wrappers import MODEL_CHANGES


def is_sharded(owner: nn.Module) -> bool:
    """Whether a model has parameters that are DTensors."""
    return any(isinstance(p, DTensor) for p in owner.parameters()) or bool(_sharded_params(owner))


def read_fsdp2(owner: nn.Module, optimizer: Any) -> Reading:
    """What this rank holds of a model of DTensors.

    Args:
        owner: The module.
        optimizer: The innermost optimizer over its parameters; None if there is none.

    Raises:
        UsageError: A parameter is cut over more than one dimension of its mesh, or meshes differ.
    """
    found = list(named(owner, _sharded_params(owner)))
    shown = {names[0]: param for names, param in named(owner)}
    mesh = _mesh([(names[0], param) for names, param in found])
    groups = group_of(optimizer)
    layout = _layout([(names[0], param, groups.get(id(param))) for names, param in found], mesh)
    params, held, scalars = [], [], []
    for names, param in found:
        name, (b, _) = names[0], layout.find(names[0])
        params.append(_param(names, param, shown[name]))
        local = _local(param)
        path = f"{name}.to_local()" if isinstance(param, DTensor) else f"{name}.data"
        held.append(HeldTensor(buffer=b, kind="param", cut=True, first=0, tensor=local, attribute=path))
        if param.grad is not None:
            grad = _local(param.grad)
            held.append(HeldTensor(buffer=b, kind="grad", cut=True, first=0, tensor=grad, attribute=f"{name}.grad"))
        of_state, numbers = held_states(optimizer, param, b, numel=local.numel(), cut=True)
        held += of_state
        scalars += numbers
    return Reading(
        engine="fsdp2" if any(is_kind(m, MODEL_CHANGES["FSDP2"].cls) for m in owner.modules()) else "dtensor",
        stage=None,
        rank=mesh.rank,
        world_size=mesh.size,
        step=step_of(optimizer),
        layout=layout,
        params=params,
        held=[h for h in held if h.tensor.numel()],
        scalars=scalars,
        param_groups=[] if optimizer is None else optimizer.param_groups,
        group=mesh.group,
        device=_local(found[0][1]).device,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mesh:
    """The ranks that parameters are cut and copied over.

    Attributes:
        mesh: The DeviceMesh; None if no parameter is a DTensor.
        rank: This process's place in it, row by row.
        size: Number of ranks.
        shards: Ranks along the dimension that cuts.
        group: Its process group; None for the default one.
    """

    mesh: Any
    rank: int
    size: int
    shards: int
    group: Any


def _mesh(params: Iterable[tuple[str, Tensor]]) -> _Mesh:
    """The one mesh of all parameters.

    Raises:
        UsageError: There are several, or it is of a form that is not read.
    """
    meshes = {p.device_mesh: name for name, p in params if isinstance(p, DTensor)}
    mesh, name = next(iter(meshes.items()))
    if len(meshes) > 1:
        other = list(meshes.values())[1]
        raise UsageError(f"{name} and {other} lie on different meshes; the lens reads models on one mesh")
    if mesh.ndim > 2:
        raise UsageError(
            f"{name} lies on a mesh of {mesh.ndim} dimensions; the lens reads one, or two of which one copies"
        )
    if mesh.ndim == 2 and mesh.size() != dist.get_world_size():
        raise UsageError(
            f"{name} lies on a mesh of two dimensions that is not over all ranks, which the lens does not read"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(f"this process is not in the mesh of {name}")
    rank = coordinate[0] if mesh.ndim == 1 else coordinate[0] * mesh.size(1) + coordinate[1]
    group = mesh.get_group() if mesh.ndim == 1 else None
    return _Mesh(mesh=mesh, rank=rank, size=mesh.size(), shards=mesh.size(mesh.ndim - 1), group=group)


def _layout(params: Iterable[tuple[str, Tensor, int | None]], mesh: _Mesh) -> Layout:
    """The layout by arithmetic: scheme dim0 for what is cut, whole copies for the rest; in model order."""
    holders = Holders(num_shards=mesh.shards, copies=mesh.size // mesh.shards)
    buffers: list[Buffer] = []
    for name, param, group in params:
        made = spec(name, param.shape, param.dtype, trainable=param.requires_grad, group=group, unit=name)
        dim = _cut_dim(name, param)
        if dim is None:
            buffers.append(own_buffer(made, Holders(num_shards=1, copies=mesh.size)))
        else:
            buffers += [replace(buffer, holders=holders) for buffer in _cut(made, dim, mesh.shards)]
    return Layout(scheme="dim0", world_size=mesh.size, buffers=tuple(buffers))


def _cut(made: ParamSpec, dim: int, shards: int) -> tuple[Buffer, ...]:
    """The buffer of one parameter that is cut."""
    return make_layout("dim0", [made], shards, SchemeOptions(shard_dims={made.name: dim})).buffers


def _cut_dim(name: str, param: Tensor) -> int | None:
    """The dimension a parameter is cut along; None if every rank has it whole.

    Raises:
        UsageError: It is placed in a way that no layout says.
    """
    if not isinstance(param, DTensor):
        return None
    placements = param.placements
    last = placements[-1]
    if all(type(p) is Replicate for p in placements):
        return None
    if type(last) is not Shard or any(type(p) is not Replicate for p in placements[:-1]):
        shown = ", ".join(map(repr, placements))
        raise UsageError(
            f"{name} is placed as ({shown}); the lens reads Shard on the last dimension of a mesh, and Replicate"
        )
    return last.dim % param.dim()


def _local(param: Tensor) -> Tensor:
    """This rank's part."""
    if isinstance(param, DTensor):
        local: Tensor = param.to_local()
        return local.detach()
    return param.detach()


def _param(names: list[str], param: Tensor, seen: Tensor) -> ParamTensor:
    """One parameter; ``seen`` is what the model has now, see [Note: two tensors]."""
    if not isinstance(param, DTensor):
        status = "whole"
    elif seen is param:
        status = "shard" if any(isinstance(p, Shard) for p in param.placements) else "whole, a DTensor"
    else:
        status = "gathered"
    return ParamTensor(
        name=names[0],
        aliases=tuple(names[1:]),
        param=seen,
        shape=tuple(param.shape),
        status=status,
        shard=_local(param) if isinstance(param, DTensor) else None,
        grad=own_grad(param),
    )


def _sharded_params(owner: nn.Module) -> dict[tuple[int, str], Tensor]:
    """FSDP2's sharded parameters, by id of the module and the name there."""
    found: dict[tuple[int, str], Tensor] = {}
    for fsdp_param in _fsdp_params(owner):
        info = fsdp_param._module_info
        modules = [info.module, *info.shared_modules]
        names = [info.param_name, *info.shared_param_names]
        for module, name in zip(modules, names, strict=True):
            found[id(module), name] = fsdp_param.sharded_param
    return found


def _fsdp_params(owner: nn.Module) -> Iterator[Any]:
    """FSDP2's own records of parameters."""
    for module in owner.modules():
        if is_kind(module, MODEL_CHANGES["FSDP2"].cls):
            for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator]
                yield from group.fsdp_params
