"""``shardglass debug-config``: entries for VS Code that debug a run started by torchrun.

Owns the entries and what is said of them. Leaves the file to ``launch_json``, the rank's side to ``hf.debugging``.

[Note: two ways] Under ``launch`` VS Code starts the whole run: debugpy follows into every process, and the main thread
of each is called by its rank. Under ``attach`` the run is started in a terminal with ``--debugpy_rank R``, and VS Code
joins that one rank.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shardglass.commands.launch_json import add_entries
from shardglass.errors import ConfigError
from shardglass.hf.debugging import DEBUGGED, HOST
from shardglass.hf.flags import DEBUGPY_PORT

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "shardglass")
"""Modules that start ranks."""

_EXAMPLE = "shardglass debug-config -- torchrun --nproc_per_node 2 finetune.py --model_name_or_path …"


def debug_config_command(
    command: Annotated[list[str] | None, typer.Argument(help="Behind --: the command that starts the run.")] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Ranks at whose breakpoints the run stops, such as 0,1. Default: all.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Join this rank alone, in a run started in a terminal.")] = None,
    port: Annotated[int, typer.Option(help="With --rank: where it listens.")] = DEBUGPY_PORT,
    file: Annotated[Path, typer.Option(help="The file that gets the entry.")] = Path(".vscode/launch.json"),
) -> None:
    """Add an entry to .vscode/launch.json that debugs a run; what is in the file stays, comments too.

    Without --rank VS Code starts the run and follows into all of its processes. With --rank R the run is started in a
    terminal, with the flags that this command says, and VS Code joins rank R, which waits for it.
    """
    if rank is not None and ranks is not None:
        raise ConfigError("--rank and --ranks: give one of them; --rank joins one rank of a run, --ranks starts it")
    words = command or []
    started = read_command(words)
    if rank is None:
        entry = launch_entry(started, None if ranks is None else _ranks(ranks))
        how = "start it with F5; every rank waits for up to a day for one that a breakpoint holds"
    else:
        if rank < 0 or not 0 < port < 65536:
            raise ConfigError(f"--rank {rank} --port {port}: a rank is at least 0, a port at least 1 and at most 65535")
        entry = attach_entry(rank, port)
        flags = [*words, "--debugpy_rank", str(rank), "--debugpy_port", str(port)]
        how = f"first start in a terminal: {shlex.join(flags)}"
    (name,) = add_entries(file, [entry])
    typer.echo(f"{file}: {name}; {how}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A command, taken apart.

    Attributes:
        environment: Variables given before it.
        python: The interpreter it names; None for the one that VS Code has chosen.
        module: The module it runs; None if it runs a file.
        program: The file it runs; None if it runs a module.
        args: What follows.
    """

    environment: dict[str, str]
    python: str | None
    module: str | None
    program: str | None
    args: tuple[str, ...]


def read_command(words: Sequence[str]) -> Started:
    """Take a command apart that starts a run.

    Raises:
        ConfigError: It starts none, as far as can be told.
    """
    rest = list(words)
    environment: dict[str, str] = {}
    while rest and "=" in rest[0] and rest[0].partition("=")[0].isidentifier():
        name, _, value = rest.pop(0).partition("=")
        environment[name] = value
    if not rest:
        raise ConfigError(f"the command of the run is missing, such as: {_EXAMPLE}")
    first, called = rest[0], Path(rest[0]).name
    python = module = program = None
    if called in ("torchrun", "shardglass"):
        module = "torch.distributed.run" if called == "torchrun" else "shardglass"
        args = rest[1:]
        beside = Path(first).parent / "python"
        python = str(beside) if len(Path(first).parts) > 1 and beside.exists() else None
    elif called.startswith("python") and len(rest) > 1:
        python = first if len(Path(first).parts) > 1 else None
        if rest[1] == "-m" and len(rest) > 2:
            module, args = rest[2], rest[3:]
        else:
            program, args = rest[1], rest[2:]
    else:
        raise ConfigError(
            f"{first}: the run must be started by torchrun, python -m torch.distributed.run, shardglass train or "
            f"python, such as: {_EXAMPLE}"
        )
    if (module is not None and module not in LAUNCHERS) or (program or "").startswith("-"):
        raise ConfigError(f"{module or program}: this starts no ranks; use one of {', '.join(LAUNCHERS)}")
    return Started(environment=environment, python=python, module=module, program=program, args=tuple(args))


def launch_entry(started: Started, ranks: tuple[int, ...] | None) -> dict[str, Any]:
    """The entry that starts a run under the debugger.

    Args:
        started: The command.
        ranks: Those at whose breakpoints it stops; None for all.
    """
    script = next((word for word in started.args if word.endswith(".py")), started.program or "train")
    whose = "every rank" if ranks is None else f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
    what = {"program": started.program} if started.module is None else {"module": started.module}
    return {
        "name": f"shardglass: {Path(script).name}, {whose}",
        "type": "debugpy",
        "request": "launch",
        **({} if started.python is None else {"python": started.python}),
        **what,
        "args": list(started.args),
        "cwd": str(Path.cwd()),
        "env": {**started.environment, DEBUGGED: "all" if ranks is None else ",".join(map(str, ranks))},
        "console": "integratedTerminal",
        "subProcess": True,
        "justMyCode": False,
    }


def attach_entry(rank: int, port: int) -> dict[str, Any]:
    """The entry that joins one rank."""
    return {
        "name": f"shardglass: rank {rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": HOST, "port": port},
        "justMyCode": False,
    }


def _ranks(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and word.isascii() for word in words):
        raise ConfigError(f"--ranks {text}: it must be ranks with commas between them, such as 0,1")
    return tuple(sorted({int(word) for word in words}))
