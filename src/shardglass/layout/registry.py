"""The schemes by name.

Owns names, aliases and which options a scheme reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from shardglass.errors import UsageError, suggestion
from shardglass.layout.buffer import ParamSpec
from shardglass.layout.deepspeed import deepspeed_flat_layout, deepspeed_param_layout
from shardglass.layout.scheme_options import DEFAULTS, SchemeOptions
from shardglass.layout.schemes import dim0_layout, replicated_layout, units_layout
from shardglass.layout.spec import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One rule that puts parameters in buffers.

    Attributes:
        name: As ``Layout.scheme`` has it.
        used_by: Who lays out so.
        build: Parameters, world size and options in, layout out.
        aliases: Other names it is found by.
        reads: The options it reads; another one must keep its default.
    """

    name: str
    used_by: str
    build: Callable[[Sequence[ParamSpec], int, SchemeOptions], Layout]
    aliases: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


def _units(params: Sequence[ParamSpec], world_size: int, _: SchemeOptions) -> Layout:
    return units_layout(params, world_size)


def _replicated(params: Sequence[ParamSpec], world_size: int, _: SchemeOptions) -> Layout:
    return replicated_layout(params, world_size)


SCHEMES = (
    Scheme(name="units", used_by="the native engine", build=_units),
    Scheme(
        name="deepspeed-flat",
        used_by="DeepSpeed ZeRO-1 and ZeRO-2",
        build=deepspeed_flat_layout,
        reads=("round_robin_gradients", "parameter_alignment", "expert_parallel"),
    ),
    Scheme(name="deepspeed-param", used_by="DeepSpeed ZeRO-3", build=deepspeed_param_layout, reads=("sub_group_size",)),
    Scheme(name="dim0", used_by="FSDP2", build=dim0_layout, aliases=("fsdp2",), reads=("shard_dims",)),
    Scheme(name="replicated", used_by="DDP, or one process", build=_replicated, aliases=("ddp",)),
)


def find_scheme(name: str) -> Scheme:
    """The scheme of a name or alias.

    Raises:
        UsageError: There is none; the message has the nearest name and all of them.
    """
    known = {word: scheme for scheme in SCHEMES for word in (scheme.name, *scheme.aliases)}
    if name not in known:
        raise UsageError(f"no layout scheme is named {name!r}{suggestion(name, known)}; there are {', '.join(known)}")
    return known[name]


def make_layout(scheme: str, params: Sequence[ParamSpec], world_size: int, options: SchemeOptions = DEFAULTS) -> Layout:
    """The layout of parameters by a scheme.

    Args:
        scheme: Name or alias.
        params: In model order; for DeepSpeed's schemes those of a group in the order the optimizer has them.
        world_size: Number of ranks.
        options: What the scheme can be told beside.

    Raises:
        UsageError: There is no such scheme, it does not read an option that is given, or it refuses a parameter.
    """
    found = find_scheme(scheme)
    defaults = asdict(DEFAULTS)
    for key, value in asdict(options).items():
        if key not in found.reads and value != defaults[key]:
            readers = ", ".join(s.name for s in SCHEMES if key in s.reads)
            raise UsageError(f"{key} is {value!r}, which scheme {found.name} does not read; {readers} does")
    return found.build(params, world_size, options)
