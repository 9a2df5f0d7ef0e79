"""The help text of the training command.

Owns how flags are listed. Reads them from where they are declared, and loads neither torch nor transformers.
"""

import dataclasses

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardglass.hf.flags import (
    DataArguments,
    EngineFlags,
    LaunchArguments,
    LookArguments,
    LoraArguments,
    ModelArguments,
)
from shardglass.hf.scan import kind_of, kinds_in_source

_INTRODUCTION = """\
Usage: shardglass train [--nproc_per_node N] --model_name_or_path PATH --data_path FILE [flags]

Flags are written with _ or -, as --flag value or --flag=value; switches as --flag, --flag True or --no_flag.
Names that transformers has dropped, such as --evaluation_strategy, are understood."""

_SECTIONS = {
    "Processes (of `shardglass train`; torchrun has its own)": LaunchArguments,
    "Model": ModelArguments,
    "Data": DataArguments,
    "Engine": EngineFlags,
    "Looking in": LookArguments,
    "LoRA": LoraArguments,
}


def show_help() -> None:
    """Write all flags to standard output."""
    console = Console()
    console.print(Text(_INTRODUCTION))
    for title, cls in _SECTIONS.items():
        console.print(Text(f"\n{title}", style="bold"))
        table = Table.grid(padding=(0, 2))
        for item in dataclasses.fields(cls):
            table.add_row(Text(f"  --{item.name}"), _value_of(item), Text(item.metadata["help"] + _default_of(item)))
        console.print(table)
    console.print(Text("\nTraining arguments of transformers, with its meanings and defaults", style="bold"))
    console.print(Text("--deepspeed takes the DeepSpeed JSON; DeepSpeed need not be installed."))
    console.print(Text(" ".join(f"--{name}" for name in sorted(kinds_in_source()))))


def _value_of(item: "dataclasses.Field[object]") -> str:
    kind = kind_of(item.type)
    return {"bool": "", "list": "TEXT..."}.get(kind, kind.upper())


def _default_of(item: "dataclasses.Field[object]") -> str:
    default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
    if default is None or default is False or default == "":
        return ""
    return f" [{' '.join(default) if isinstance(default, list) else default}]"
