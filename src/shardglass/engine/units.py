"""Model and optimizer to units and ParamSpecs.

Owns the choice of units and the checks that need names: tied, frozen, missing and foreign parameters. Leaves to
``layout`` where an element lies.

[Note: units] A unit is what is reduced and gathered together. Each block of the model's outermost repeated lists is
one. What lies before, between and behind them in model order are the root units ``root:0``, ``root:1``, ...: the
embedding is needed first and its gradient comes last, the head the other way round, so one unit for both would wait
for everything.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardglass.errors import ModelError, OptimizerError, UsageError, suggestion
from shardglass.layout import ParamSpec
from shardglass.layout.line import DTYPE_WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit of a model.

    Attributes:
        name: The module's dotted name, or ``root:k`` for the k-th run of parameters outside of blocks.
        is_block: Whether ``modules`` is the one module whose parameters it has.
        modules: Modules whose forward needs its parameters: the block, or the direct owners.
        params: Its parameters by full name, in model order; a tied weight is in the unit of its first name.
    """

    name: str
    is_block: bool
    modules: tuple[nn.Module, ...]
    params: Mapping[str, nn.Parameter]

    def __repr__(self) -> str:
        """State in one line: values of parameters would flood a debugger."""
        numel = sum(p.numel() for p in self.params.values())
        dtypes = "+".join(
            dict.fromkeys(DTYPE_WORDS.get(w, w) for w in (dtype_name(p.dtype) for p in self.params.values()))
        )
        frozen = sum(not p.requires_grad for p in self.params.values())
        said = f", {frozen} of them frozen" if frozen else ""
        kind = "block" if self.is_block else "root unit"
        tensors = f"{len(self.params)} tensor{'s' * (len(self.params) != 1)}{said}"
        return f"{kind} {self.name} · {tensors} · {numel:,} elements {dtypes}"


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's own short name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Which memory a tensor lies in, and its first element there; also of fake tensors, which have no address."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the blocks: children of the outermost repeated lists, in model order.

    A repeated list is a ModuleList or Sequential of at least two children of one class that have modules of their
    own and parameters (so a Sequential of Linear layers is none).
    """
    found: list[str] = []

    def walk(module: nn.Module, prefix: str) -> None:
        children = [(f"{prefix}{name}", child) for name, child in module.named_children()]
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and _is_repeated(module):
            found.extend(name for name, _ in children)
            return
        for name, child in children:
            walk(child, f"{name}.")

    walk(model, "")
    return found


def _is_repeated(module: nn.Module) -> bool:
    """Whether a container is a list of like blocks."""
    children = list(module.children())
    return (
        len(children) >= 2
        and len({type(child) for child in children}) == 1
        and all(next(child.children(), None) is not None for child in children)
        and all(next(child.parameters(), None) is not None for child in children)
    )


def build_units(model: nn.Module, chosen: Sequence[str | nn.Module] | None) -> list[Unit]:
    """Cut a model in units, in model order.

    Args:
        model: The model.
        chosen: The user's own blocks, as modules or dotted names; None finds them, see [Note: units].

    Raises:
        ModelError: A chosen unit is not a module of the model, or lies in another one, or parameters share memory
            without being tied.
    """
    blocks = find_blocks(model) if chosen is None else _chosen_names(model, chosen)
    _check_no_hidden_sharing(model)
    modules = dict(model.named_modules())
    members: dict[str, dict[str, nn.Parameter]] = {}
    prefixes = {f"{name}.": name for name in blocks}
    roots, in_root = 0, False
    for name, param in model.named_parameters():
        block = next(iter(_prefixes_of(name, prefixes)), None)
        if block is None and not in_root:
            roots += 1
        in_root = block is None
        members.setdefault(block if block is not None else f"root:{roots - 1}", {})[name] = param
    units = []
    for name, params in members.items():
        is_block = name in modules and name in blocks
        owners = (modules[name],) if is_block else _owners(model, params)
        units.append(Unit(name=name, is_block=is_block, modules=owners, params=params))
    return units


def _prefixes_of(name: str, prefixes: Mapping[str, str]) -> Iterator[str]:
    """The block whose dotted prefix a parameter's name has, if any; costs the depth of the name."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        prefix = ".".join(parts[:depth]) + "."
        if prefix in prefixes:
            yield prefixes[prefix]


def _owners(model: nn.Module, params: Mapping[str, nn.Parameter]) -> tuple[nn.Module, ...]:
    """Every module that has one of the parameters as its own attribute, second names of tied weights included."""
    wanted = {id(p) for p in params.values()}
    return tuple(module for module in model.modules() if any(id(p) in wanted for p in module.parameters(recurse=False)))


def _chosen_names(model: nn.Module, chosen: Sequence[str | nn.Module]) -> list[str]:
    """Dotted names of the user's units, checked."""
    names = {name: module for name, module in model.named_modules() if name}
    by_id = {id(module): name for name, module in names.items()}
    found: list[str] = []
    if isinstance(chosen, str):
        raise ModelError(f"units: {chosen!r}: give a list of names or modules")
    for unit in chosen:
        name = unit if isinstance(unit, str) else by_id.get(id(unit))
        if name is None or name not in names:
            shown = name if name is not None else type(unit).__name__
            hint = suggestion(shown, names)
            raise ModelError(f"units: {shown!r} is not a module of the model{hint}")
        found.append(name)
    for a in found:
        inside = next((b for b in found if a != b and a.startswith(f"{b}.")), None)
        if inside or found.count(a) > 1:
            raise ModelError(f"units: {a!r} is in {inside or a!r}, which is a unit too; name one of them")
    return found


def _check_no_hidden_sharing(model: nn.Module) -> None:
    """Refuse two Parameter objects over one memory: cutting them apart would untie them in silence.

    Raises:
        ModelError: Names the two.
    """
    seen: dict[tuple[int, int, int, torch.dtype], str] = {}
    for name, param in model.named_parameters():
        if param.numel() == 0 or param.is_meta:
            continue
        key = (*place_of(param), param.numel(), param.dtype)
        if key in seen:
            raise ModelError(
                f"{name} and {seen[key]} are two Parameters over the same memory; tie them by assigning one "
                "Parameter to both modules (module_b.weight = module_a.weight) before shard()"
            )
        seen[key] = name


def param_specs(
    units: Sequence[Unit], optimizer: torch.optim.Optimizer, param_dtype: torch.dtype | None
) -> list[ParamSpec]:
    """The ParamSpecs of a model under an optimizer, in model order.

    Args:
        units: From ``build_units``.
        optimizer: Its param_groups give every trainable parameter its group.
        param_dtype: dtype floating-point parameters are cast to; None keeps each one's own.

    Raises:
        OptimizerError: A trainable parameter is in no group, or a group has a tensor that is not a parameter of the
            model; all of them are named.
    """
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    specs, missing, known = [], [], set()
    for unit in units:
        for name, p in unit.params.items():
            known.add(id(p))
            if p.requires_grad and id(p) not in group_of:
                missing.append(name)
            dtype = param_dtype if param_dtype is not None and p.is_floating_point() else p.dtype
            specs.append(
                ParamSpec(
                    name=name,
                    shape=tuple(p.shape),
                    dtype=dtype_name(dtype),
                    trainable=p.requires_grad,
                    group=group_of.get(id(p)) if p.requires_grad else None,
                    unit=unit.name,
                )
            )
    if missing:
        raise OptimizerError(
            f"{len(missing)} trainable parameters are in no param_group of the optimizer: {_listed(missing)}; "
            "freeze them with requires_grad_(False) or give them to the optimizer"
        )
    foreign = [
        f"param_groups[{g}]['params'][{k}] of shape {tuple(p.shape)}"
        for g, group in enumerate(optimizer.param_groups)
        for k, p in enumerate(group["params"])
        if id(p) not in known
    ]
    if foreign:
        raise OptimizerError(
            f"the optimizer has {len(foreign)} tensors that are no parameters of this model: {_listed(foreign)}; "
            "make the optimizer from this model's parameters, after any change to the model"
        )
    return specs


Named = nn.Module | nn.Parameter | str | Sequence[str | nn.Parameter] | None
"""Parameters as a caller gives them: a module's, themselves, or by names of parameters and modules; None is all."""


def parameters_named(model: nn.Module, what: Named) -> list[str]:
    """Full names of parameters.

    Raises:
        UsageError: A module or parameter is not one of the model's, or a name is of none.
    """
    modules, first_name = dict(model.named_modules()), {id(p): name for name, p in model.named_parameters()}
    if what is None:
        return list(first_name.values())
    if isinstance(what, nn.Module):
        if all(module is not what for module in modules.values()):
            raise UsageError(f"this {type(what).__name__} is no module of the sharded model")
        return [first_name[id(p)] for p in what.parameters()]
    found: dict[str, None] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    if not isinstance(what, (str, nn.Parameter, Iterable)):
        raise UsageError(f"{what!r} is no module, no parameter and no name of one")
    for name in [what] if isinstance(what, (str, nn.Parameter)) else what:
        if isinstance(name, nn.Parameter):
            if id(name) not in first_name:
                raise UsageError(f"this parameter of shape {list(name.shape)} is none of the sharded model")
            found[first_name[id(name)]] = None
        elif name in params:
            found[first_name[id(params[name])]] = None
        elif name in modules:
            found |= dict.fromkeys(first_name[id(p)] for p in modules[name].parameters())
        else:
            hint = suggestion(name, [*params, *modules])
            raise UsageError(f"the model has no parameter or module {name!r}{hint}")
    return list(found)


def _listed(names: Sequence[str], most: int = 8) -> str:
    """The first names and a count of the rest."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
