"""The command line.

Owns ``shardglass train``, ``plan`` and ``env``, and the border where an error becomes a message and an exit code.
Leaves starting processes to ``hf.launch``, training to ``hf.train`` and plans to ``hf.planning``. Heavy imports stand
inside the functions that need them, so that help, version and most mistakes are answered before torch is loaded.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardglass import __version__
from shardglass.commands.debug_config import debug_config_command
from shardglass.commands.look import look_command, where_command
from shardglass.commands.report import report_command
from shardglass.config import load_config
from shardglass.errors import ConfigError, ShardglassError
from shardglass.hf.flags import (
    DataArguments,
    EngineFlags,
    LookArguments,
    LoraArguments,
    ModelArguments,
    early_faults,
    flags_error,
)
from shardglass.hf.help import show_help
from shardglass.hf.launch import LAUNCHER, USER_FAULT, launch, launch_options, split_launch, stops_told
from shardglass.hf.lifeline import Lifeline
from shardglass.hf.look_signal import LookSignal, signal_passed_on
from shardglass.hf.output_folder import DEFAULT_OUTPUT, check_output_folder
from shardglass.hf.record_file import check_records_file
from shardglass.hf.scan import Scanned, kinds_in_source, kinds_of, scan
from shardglass.versions import check_versions

app = typer.Typer(
    name="shardglass",
    help="ZeRO fine-tuning for Hugging Face models, with glass walls.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("look")(look_command)
app.command("where")(where_command)
app.command("debug-config")(debug_config_command)
app.command("report")(report_command)


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
        _train_here(argv, defaults)
    except ShardglassError as error:
        _say(str(error))
        sys.exit(USER_FAULT)


def _train_here(argv: Sequence[str] | None, defaults: Mapping[str, str] | None = None) -> None:
    """Train in this process, which ends with its launcher if it has one."""
    check_versions()
    parent = os.getppid()
    is_ours = os.environ.get(LAUNCHER) == str(parent)
    lifeline = Lifeline(
        says_all=os.environ.get("RANK", "0") == "0",
        says_signals=not is_ours,
        parent=parent if is_ours or "TORCHELASTIC_RUN_ID" in os.environ else None,
    )
    lifeline.arm()
    looks = LookSignal()
    looks.arm()
    from shardglass.hf.train import main as train

    train(argv, defaults=defaults, lifeline=lifeline, signal=looks)


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
    launcher, flags = split_launch(context.args)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if launcher.values:
            raise flags_error(
                f"--{name}: this process was started by a launcher already (RANK is set); leave it out"
                for name in launcher.values
            )
        _train_here(["--help"] if launcher.wants_help else flags)
        return
    early = _early(flags, wants_help=launcher.wants_help)
    if early is None:
        return
    options = launch_options(launcher)
    folder = Path(early.values.get("output_dir") or DEFAULT_OUTPUT).expanduser()
    output_dir = folder if options.node_rank == 0 else None
    with stops_told(_say, output_dir), signal_passed_on(_say):
        if output_dir is not None:
            _check_output(early.values)
        for name in ("data_path", "eval_data_path"):
            if early.values.get(name):
                check_records_file(Path(early.values[name]))
        check_versions()
        from shardglass.hf.arguments import parse_command

        parse_command(flags, rehearse=True)  # what only transformers can check, before any process is started
        on_cpu = bool(early.values.get("use_cpu"))
        code = launch(options, flags, on_cpu=on_cpu, environment=os.environ, say=_say)
    sys.exit(code)


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
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also run a step of the engine on tensors without memory: its peak.")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Plan for ranks on this machine's CPU.")] = False,
    json: Annotated[str | None, typer.Option(help="Write the plan as JSON to a file, or to - alone.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the plan as an interactive page that opens offline.")] = None,
    cache_dir: Annotated[str | None, typer.Option(help="Folder that keeps what is downloaded.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Say which rank will hold what, and what memory a run will need, before any weight is loaded."""
    check_versions()
    from shardglass.hf.planning import PlanFlags, planned_from_flags
    from shardglass.report.html_page import check_page
    from shardglass.report.plan_terminal import render_plan
    from shardglass.report.terminal import console

    if html is not None:
        check_page(html)
    planned = planned_from_flags(
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
            simulates=simulate,
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
        )
    )
    if html is not None:
        from shardglass.hf.run_report import write_plan_html

        write_plan_html(planned, html)
    if json == "-":
        typer.echo(planned.plan.to_json())
        return
    if json is not None:
        _write(json, planned.plan.to_json())
    render_plan(planned.plan, console())


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


def _early(flags: Sequence[str], *, wants_help: bool) -> Scanned | None:
    """Check all that can be checked without torch; None if help was asked for and shown.

    Raises:
        ConfigError: A flag, its value or the DeepSpeed JSON cannot be used.
    """
    if wants_help:
        show_help()
        return None
    theirs = kinds_in_source()
    known = {**theirs, **kinds_of(ModelArguments, DataArguments, LoraArguments, LookArguments, EngineFlags)}
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
