"""The command line.

Owns ``shardglass train`` with its help, how its processes are started, ``plan`` and ``env``, and the border where an
error becomes a message and an exit code. Leaves training to ``hf.train`` and plans to ``hf.planning``. Heavy imports
stand inside the functions that need them, so that help, version and most mistakes are answered before torch is loaded.
"""

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shardglass import __version__
from shardglass.config import load_config
from shardglass.errors import ConfigError, ShardglassError
from shardglass.hf.flags import (
    DataArguments,
    EngineFlags,
    LaunchArguments,
    LoraArguments,
    ModelArguments,
    early_faults,
    flags_error,
)
from shardglass.hf.help import show_help
from shardglass.hf.output_folder import check_output_folder
from shardglass.hf.renamed import ALIASES
from shardglass.hf.scan import Scanned, groups_of, kinds_in_source, kinds_of, scan
from shardglass.versions import check_versions

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

USER_FAULT = 2
"""Exit code of a mistake that the user can mend."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

_LAUNCH = {f.name: f for f in dataclasses.fields(LaunchArguments)}

app = typer.Typer(
    name="shardglass",
    help="ZeRO fine-tuning for Hugging Face models, with glass walls.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script: a ShardglassError becomes a message without a traceback, and exit code 2."""
    try:
        app()
    except ShardglassError as error:
        _say(str(error))
        sys.exit(USER_FAULT)


def finetune(argv: Sequence[str] | None = None, *, defaults: Mapping[str, str] | None = None) -> None:
    """Train in a process that torchrun started, as ``shardglass train`` does in its own.

    Args:
        argv: The flags; None takes the process's own.
        defaults: Values of flags that are not given, such as ``{"label_policy": "qwen"}``.
    """
    try:
        check_versions()
    except ShardglassError as error:
        _say(str(error))
        sys.exit(USER_FAULT)
    from shardglass.hf.train import main as train

    train(argv, defaults=defaults)


def _say(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"shardglass: {text}", style="red", highlight=False, markup=False)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        _show_version()
        raise typer.Exit


@app.command("version")
def _show_version() -> None:
    """Show the version."""
    Console(soft_wrap=True).print(__version__, highlight=False)


@app.command(
    "train",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,  # our own help lists the flags of transformers too
)
def _train(context: typer.Context) -> None:
    """Fine-tune a model; `shardglass train --help` lists its flags."""
    launch, flags = split_launch(context.args)
    early = _early(flags, wants_help=launch.wants_help)
    if early is None:
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if launch.values:
            raise flags_error(
                f"--{name}: this process was started by a launcher already (RANK is set); leave it out"
                for name in launch.values
            )
        check_versions()
        from shardglass.hf.train import main as train

        train(flags)
        return
    options = _launch_options(launch)
    if options.node_rank == 0:
        _check_output(early.values)
    check_versions()
    from shardglass.hf.arguments import parse_command

    parse_command(flags, rehearse=True)  # what only transformers can check, before any process is started
    sys.exit(_launch(options, flags, on_cpu=bool(early.values.get("use_cpu"))))


@app.command("plan", context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
def _plan(  # noqa: PLR0913  # a flag each
    model: Annotated[str, typer.Argument(help="A preset, a folder, a config.json, or a name on the hub.")],
    world_size: Annotated[
        int | None, typer.Option(help="Number of ranks. Without it --gpu finds the smallest.")
    ] = None,
    stage: Annotated[int | None, typer.Option("--stage", "--zero-stage", help="ZeRO stage, 0 to 3.")] = None,
    scheme: Annotated[
        str, typer.Option(help="Layout of the partition: units, deepspeed-flat, deepspeed-param, dim0, replicated.")
    ] = "units",
    deepspeed: Annotated[str | None, typer.Option(help="DeepSpeed JSON of the run.")] = None,
    dtype: Annotated[str | None, typer.Option(help="dtype to compute in: bf16 (default), fp32, fp16.")] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option("--micro-batch", "--per-device-train-batch-size", help="Sequences at once on a rank. Default: 1."),
    ] = None,
    accumulation: Annotated[
        int | None,
        typer.Option("--accumulation", "--gradient-accumulation-steps", help="Micro-batches of a step. Default: 1."),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", "--model-max-length", help="Tokens of a sequence. Default: 2048.")
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute activations in backward.")
    ] = False,
    attention: Annotated[
        str, typer.Option("--attention", "--attn-implementation", help="sdpa, flash-attention-2 or eager.")
    ] = "sdpa",
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", "--optim", help="Class of torch.optim. Default: AdamW, fused.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Memory of a GPU, such as 24GB.")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a machine.")] = 8,
    host_ram: Annotated[str | None, typer.Option(help="Free RAM of a machine. Default: this one's.")] = None,
    reserve: Annotated[
        str | None, typer.Option(help="Memory for what no formula knows, such as 2GB. Default: an assumption, shown.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Plan for ranks on this machine's CPU.")] = False,
    json: Annotated[str | None, typer.Option(help="Write the plan as JSON to a file, or to - alone.")] = None,
    cache_dir: Annotated[str | None, typer.Option(help="Folder that keeps what is downloaded.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Say which rank will hold what, and what memory a run will need, before any weight is loaded."""
    check_versions()
    from shardglass.hf.planning import PlanFlags, plan_from_flags
    from shardglass.report.plan_terminal import render_plan

    plan = plan_from_flags(
        PlanFlags(
            model=model,
            world_size=world_size,
            stage=stage,
            scheme=scheme,
            deepspeed=deepspeed,
            dtype=dtype,
            micro_batch=micro_batch,
            accumulation=accumulation,
            length=seq_len,
            recomputes=gradient_checkpointing,
            attention=attention,
            optimizer=optimizer,
            gpu=gpu,
            gpus_per_node=gpus_per_node,
            host_ram=host_ram,
            reserve=reserve,
            on_cpu=cpu,
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
        )
    )
    if json == "-":
        typer.echo(plan.to_json())
        return
    if json is not None:
        _write(json, plan.to_json())
    render_plan(plan, Console())


def _write(path: str, text: str) -> None:
    """Write a file that the user named.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        Path(path).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error.strerror}") from None


@app.command("env")
def _env() -> None:
    """Show versions, devices and backends, and what was ever tested on such hardware; for bug reports."""
    from shardglass.hf.environment import environment_rows

    for heading, lines in environment_rows().items():
        for k, line in enumerate(lines):
            typer.echo(f"{heading if k == 0 else '':<12}{line}")


def split_launch(argv: Sequence[str]) -> tuple[Scanned, list[str]]:
    """Separate the launcher's flags from those of training.

    Returns:
        The launcher's flags, read; the other ones in one of the ways in which they can be written.
    """
    launch: list[str] = []
    flags: list[str] = []
    for name, values in groups_of(argv):
        is_launch = name in ("h", "help", *_LAUNCH) or ALIASES.get(name) in _LAUNCH
        is_dashed = len(values) == 1 and values[0].startswith("--")
        words = [f"--{name}={values[0]}"] if is_dashed else [f"--{name}", *values]
        (launch if is_launch else flags).extend(words if name else values)
    return scan(launch, kinds_of(LaunchArguments)), flags


def _early(flags: Sequence[str], *, wants_help: bool) -> Scanned | None:
    """Check all that can be checked without torch; None if help was asked for and shown.

    Raises:
        ConfigError: A flag, its value or the DeepSpeed JSON cannot be used.
    """
    if wants_help:
        show_help()
        return None
    theirs = kinds_in_source()
    known = {**theirs, **kinds_of(ModelArguments, DataArguments, LoraArguments, EngineFlags)}
    scanned = scan(flags, known)
    faults = [*scanned.faults, *early_faults(scanned.values)]
    if theirs and faults:  # without transformers' names half of the flags would be unknown here
        raise flags_error(faults)
    if config := scanned.values.get("deepspeed"):
        load_config(config, allow_unknown=bool(scanned.values.get("allow_unknown_config")))
    return scanned


def _check_output(values: Mapping[str, Any]) -> None:
    """Judge the output folder; what there is to know of it, rank 0 says."""
    check_output_folder(
        values.get("output_dir"),
        values.get("model_name_or_path"),
        overwrite=bool(values.get("overwrite_output_dir")),
    )


def _launch_options(launch: Scanned) -> LaunchArguments:
    """Check the launcher's flags together.

    Raises:
        ConfigError: Names all that cannot be used.
    """
    faults = list(launch.faults)
    options = LaunchArguments(**launch.values)
    count = options.nproc_per_node
    if count not in ("auto", "gpu", "cpu") and not (count.isdecimal() and int(count) > 0):
        faults.append(f"--nproc_per_node {count}: it must be a number of at least 1, or gpu, cpu or auto")
    nodes = options.nnodes.split(":")
    if len(nodes) > 2 or not all(part.isdecimal() and int(part) > 0 for part in nodes):
        faults.append(f"--nnodes {options.nnodes}: it must be a number of at least 1, or least:most")
    elif options.nnodes != "1" and options.master_addr is None and options.rdzv_endpoint is None:
        faults.append(f"--nnodes {options.nnodes}: machines find each other by --master_addr or --rdzv_endpoint")
    if options.master_port is not None and not 0 < options.master_port < 65536:
        faults.append(f"--master_port {options.master_port}: a port is at least 1 and at most 65535")
    if faults:
        raise flags_error(faults)
    return options


def _launch(options: LaunchArguments, flags: Sequence[str], *, on_cpu: bool) -> int:
    """Start the processes with torch's elastic launcher and wait for them.

    Returns:
        The exit code: 0, or that of the rank that failed first.

    Raises:
        ConfigError: The processes cannot be started as asked for.
    """
    import torch
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    given = {name: value for name, value in dataclasses.asdict(options).items() if value is not None}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    try:
        count = run.determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        raise flags_error([f"--nproc_per_node {options.nproc_per_node}: {error}"]) from None
    devices = torch.cuda.device_count()
    if devices and not on_cpu and count > devices:
        raise flags_error([f"--nproc_per_node {count}: there are {devices} GPUs, and each process needs one"])
    # Threads of all processes together fill the machine once; torchrun would give each process one thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // count)))
    # The failing rank has its say itself; the launcher's log would repeat it in its own form.
    logging.disable(logging.ERROR)
    try:
        run.run(run.parse_args([*words, "-m", "shardglass.hf.train", *flags]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _failed(rank, failure)
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    except DistError as error:
        raise ConfigError(
            f"the processes could not meet at {options.master_addr or 'this machine'}, port "
            f"{options.master_port or 'chosen freely'}: {_first_line(error)}\n  choose another --master_port"
        ) from None
    return 0


def _failed(rank: int, failure: "ProcessFailure") -> int:
    """Say in one line who failed, unless that rank has said it in one line of its own; return the exit code."""
    if failure.exitcode == USER_FAULT:
        return USER_FAULT
    if failure.exitcode < 0:
        hint = ": the machine may have run out of memory" if failure.signal_name() == "SIGKILL" else ""
        _say(f"rank {rank} was ended by {failure.signal_name()}{hint}")
        return 128 - failure.exitcode
    told: Any = failure.message  # torch declares str, and gives the record of the error file
    message = told.get("message") if isinstance(told, Mapping) else None
    _say(f"rank {rank} failed with exit code {failure.exitcode}" + (f": {message}" if message else ""))
    return failure.exitcode


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
