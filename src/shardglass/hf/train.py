"""The fine-tuning command: what runs in every process.

Owns the order of things: flags, config, data and tokenizer are checked before any weight is loaded; then train,
save, and show the summary. Leaves starting processes to torchrun or ``cli``.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from shardglass.checkpoint.folder import PREFIX
from shardglass.errors import ShardglassError
from shardglass.hf.arguments import Command, parse_command
from shardglass.hf.data import DataOptions, build_collator, build_dataset, load_conversations
from shardglass.hf.debugging import DEBUGGED, held_note, name_process, run_free, wait_for_debugger
from shardglass.hf.flags import flags_error, look_steps
from shardglass.hf.launch import PREEMPTED
from shardglass.hf.lifeline import PREEMPTED_CODE, Lifeline
from shardglass.hf.load import check_model_path, load_config_of, load_model, load_tokenizer, prepare_for_training
from shardglass.hf.look_signal import LookSignal
from shardglass.hf.looking import LookCallback, clear_snapshots
from shardglass.hf.memory_check import check_memory
from shardglass.hf.mistakes import mistakes_told
from shardglass.hf.model_config import FoundConfig
from shardglass.hf.output_folder import SUMMARY_FILE, check_output_folder
from shardglass.hf.preemption import Preemption
from shardglass.hf.rehearsal import check_optimizer, check_schedule
from shardglass.hf.resolved_file import ResolvedConfigCallback
from shardglass.hf.resuming import check_resume, is_asked_for
from shardglass.hf.run_planning import RunToPlan, planned_engine
from shardglass.hf.sharded_start import open_hollow
from shardglass.hf.summary import SummaryCallback
from shardglass.hf.trainer import ZeroTrainer, resolve_run
from shardglass.options import STAGES
from shardglass.report.terminal import render_summary
from shardglass.resolve import Resolved, note_of_short_data
from shardglass.words import ON_A_COMMAND_LINE

GRACE_S = 5.0
"""Seconds rank 0 has to say a mistake that every rank found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is told to a run from outside while it is under way, and what it tells.

    Attributes:
        lifeline: Told where the run saves; None if nobody waits for its end.
        signal: Says that somebody asked for snapshots.
    """

    lifeline: Lifeline | None = None
    signal: LookSignal | None = None


def main(
    argv: Sequence[str] | None = None,
    *,
    defaults: Mapping[str, str] | None = None,
    lifeline: Lifeline | None = None,
    signal: LookSignal | None = None,
) -> None:
    """Fine-tune as the flags say; the process ends with code 2 on a user's mistake.

    Args:
        argv: The flags; None takes the process's own.
        defaults: Values of flags that are not given, such as ``{"label_policy": "qwen"}``.
        lifeline: Told where the run saves.
        signal: Asks for snapshots.
    """
    rank = int(os.environ.get("RANK", "0"))
    _set_up_logging(is_main=rank == 0)
    name_process(rank)
    told = Told(lifeline=lifeline, signal=signal)
    _run(sys.argv[1:] if argv is None else list(argv), defaults or {}, told, is_main=rank == 0)


@record
def _run(argv: Sequence[str], defaults: Mapping[str, str], told: Told, *, is_main: bool) -> None:
    """The command; ``record`` writes an exception that is no user's mistake to torchrun's error file."""
    try:
        debugged = os.environ.get(DEBUGGED)
        run_free(int(os.environ.get("RANK", "0")), debugged)
        command = parse_command(argv, defaults=defaults, is_debugged=debugged is not None)
        if told.lifeline is not None:
            told.lifeline.output_dir = Path(str(command.training.output_dir))
        notes = [*command.notes, *(_check_output(command) if is_main else []), *_meet_debugger(command, debugged)]
        notes += _clear_snapshots(command)
        trainer, found = build_trainer(command, is_main=is_main, signal=told.signal)
    except ShardglassError as error:
        _fail(error, shared=True)
    try:
        _train(trainer, [*notes, *found], told.lifeline, Console(soft_wrap=True) if is_main else None)
    except ShardglassError as error:
        _fail(error, shared=error.is_shared)


def _meet_debugger(command: Command, debugged: str | None) -> list[str]:
    """Wait for a debugger if this rank is to; returns what the user should know.

    Raises:
        ConfigError: There is no such rank, or it cannot listen.
    """
    wanted, rank = command.look.debugpy_rank, int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if wanted is None:
        return [] if debugged is None else [held_note("a debugger may hold a rank")]
    if wanted >= world_size:
        raise flags_error([f"--debugpy_rank {wanted}: there are ranks 0 to {world_size - 1}"])
    if wanted == rank:
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a page of warnings on frozen modules
        wait_for_debugger(rank, command.look.debugpy_port, _say)
    return [held_note(f"--debugpy_rank {wanted}")]


def _clear_snapshots(command: Command) -> list[str]:
    """Begin with no snapshots of an earlier run, unless this one goes on from it; returns what was done."""
    if is_asked_for(command.training.resume_from_checkpoint) or int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return []
    return clear_snapshots(Path(str(command.training.output_dir)))


def _say(text: str) -> None:
    """One line on stderr, from whichever rank."""
    Console(stderr=True, soft_wrap=True).print(f"shardglass: {text}", highlight=False, markup=False)


def _check_output(command: Command) -> list[str]:
    """Judge the output folder; returns what the user should know of it."""
    training, given = command.training, "output_dir" in command.given
    return check_output_folder(
        str(training.output_dir) if given else None,
        command.model.model_name_or_path,
        overwrite=training.overwrite_output_dir,
        resumes=is_asked_for(training.resume_from_checkpoint),
    )


def _train(trainer: ZeroTrainer, notes: Sequence[str], lifeline: Lifeline | None, console: Console | None) -> None:
    """Train, save, show; or save and end, if the run is told to go."""
    if console is not None:
        for note in notes:
            console.print(f"note: {note}", highlight=False, markup=False)
    callback = SummaryCallback(trainer, notes)
    for each in (callback, ResolvedConfigCallback(trainer)):
        trainer.add_callback(each)
    preemption = Preemption(trainer)
    trainer.add_callback(preemption)
    _train_until_told(trainer, preemption, lifeline)
    if preemption.step is not None:
        _end_preempted(preemption.step, Path(str(trainer.args.output_dir)), console)
    trainer.save_model()
    summary = callback.summary()
    if console is not None:
        render_summary(summary, console)
        folder = str(trainer.args.output_dir)
        Path(folder, SUMMARY_FILE).write_text(summary.to_json(), encoding="utf-8")
        console.print(f"saved model: {folder}", highlight=False, markup=False)
    torch.distributed.destroy_process_group()


def _train_until_told(trainer: ZeroTrainer, preemption: Preemption, lifeline: Lifeline | None) -> None:
    """Train to the end, or to the step after a wish to go; a signal after a failure ends the process at once."""
    if lifeline is not None:
        lifeline.preempt = preemption.ask
    try:
        trainer.train()
    finally:
        if lifeline is not None:
            lifeline.preempt = None


def _end_preempted(step: int, output_dir: Path, console: Console | None) -> NoReturn:
    """End with a code of its own: all ranks have saved."""
    torch.distributed.barrier()
    if console is not None:
        found = output_dir / f"{PREFIX}-{step}"
        where = f"it is saved as {found}" if found.is_dir() else "it could not be saved"
        _say(f"stopped after step {step}; {where}; go on with --resume_from_checkpoint True")
        if PREEMPTED in os.environ:
            Path(os.environ[PREEMPTED]).touch()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(PREEMPTED_CODE)


def build_trainer(
    command: Command, *, is_main: bool, signal: LookSignal | None = None
) -> tuple[ZeroTrainer, list[str]]:
    """Everything between the flags and ``train()``.

    Args:
        command: The flags.
        is_main: Whether this is rank 0, which speaks.
        signal: Asks for snapshots.

    Returns:
        The trainer, and what the user should know of config and data.

    Raises:
        ShardglassError: Flags, config, data, tokenizer or model cannot be used; nothing was written.
    """
    model_args, data_args, training = command.model, command.data, command.training
    options = _data_options(command)
    words, name = ON_A_COMMAND_LINE, model_args.model_name_or_path
    check_model_path(name, words=words)
    where: dict[str, Any] = {"cache_dir": model_args.cache_dir, "trust_remote_code": model_args.trust_remote_code}
    config = load_config_of(name, words=words, **where)
    records = load_conversations(data_args.data_path, skip_bad_records=options.skip_bad_records, is_main=is_main)
    tokenizer = load_tokenizer(name, words=words, **where)
    train_data = build_dataset(records, tokenizer, options, is_main=is_main)
    eval_path = data_args.eval_data_path
    eval_data = build_dataset(eval_path, tokenizer, options, is_main=is_main) if eval_path else None
    check_resume(training.resume_from_checkpoint, Path(str(training.output_dir)))
    # The Trainer resolves it again; here a wrong config is found before the weights are read.
    resolved = resolve_run(training)
    if resolved.optimizer is None:
        check_optimizer(training)
    if resolved.scheduler is None:
        check_schedule(training)
    short = note_of_short_data(len(train_data), resolved.batch, drops_last=training.dataloader_drop_last)
    run = _run_to_plan(command, resolved, config, train_data.longest)
    check_memory(
        run,
        skip=training.skip_memory_check,
        decides=training.device.type == "cuda" or int(os.environ.get("LOCAL_RANK", "0")) == 0,
        console=Console(soft_wrap=True) if is_main else None,
    )
    model = _load(command, where, hollow=STAGES[resolved.stage].shards_params, is_main=is_main)
    if "log_level_replica" not in command.given:
        training.log_level_replica = "error"  # the Trainer sets transformers' verbosity anew: rank 0 alone speaks
    prepare_for_training(model, tokenizer, recomputes=_recomputes(training))
    with mistakes_told(command.given, "the Trainer"):
        trainer = ZeroTrainer(
            model=model,
            args=training,
            train_dataset=train_data,
            eval_dataset=eval_data,
            data_collator=build_collator(tokenizer, options),
            processing_class=tokenizer,
        )
    steps, say = look_steps(command.look.look), _say if is_main else None
    trainer.add_callback(
        LookCallback(trainer, steps=steps, signal=signal, engine=partial(planned_engine, run), say=say)
    )
    return trainer, [*trainer.resolved.notes, *([short] if short else [])]


def _data_options(command: Command) -> DataOptions:
    """How the data file becomes batches."""
    return DataOptions(
        label_policy=command.data.label_policy,
        model_max_length=command.training.model_max_length,
        lazy=command.data.lazy_preprocess,
        skip_bad_records=command.data.skip_bad_records,
    )


def _load(command: Command, where: Mapping[str, Any], *, hollow: bool, is_main: bool) -> Any:
    """The model, or with ``hollow`` without values until it is sharded."""
    model, words = command.model, ON_A_COMMAND_LINE
    given = {"attn_implementation": model.attn_implementation, "dtype": model.dtype, **where}
    if hollow:
        return open_hollow(model.model_name_or_path, words, command.training.device, is_main=is_main, **given)
    return load_model(model.model_name_or_path, words=words, **given)


def _run_to_plan(command: Command, resolved: Resolved, config: Any, longest: int | None) -> RunToPlan:
    """What the memory plan must know of this run."""
    training = command.training
    return RunToPlan(
        config=FoundConfig(name=command.model.model_name_or_path, source="run", config=config),
        resolved=resolved,
        optim=str(getattr(training.optim, "value", training.optim)),
        dtype_as_loaded=command.model.dtype,
        attention=command.model.attn_implementation,
        longest=longest,
        model_max_length=training.model_max_length,
        recomputes=_recomputes(training),
        device=training.device.type,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def _recomputes(training: Any) -> bool:
    """Whether activations are recomputed in backward; the argument's name depends on the release of transformers."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    return any(bool(getattr(training, name, False)) for name in names)


def _set_up_logging(*, is_main: bool) -> None:
    """Only rank 0 speaks; the others when they fail."""
    logging.basicConfig(
        level=logging.WARNING if is_main else logging.ERROR, format="%(levelname)s %(name)s: %(message)s"
    )
    transformers.utils.logging.disable_propagation()  # on, where CI is in the environment: each line would come twice
    if not is_main:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()


def _fail(error: ShardglassError, *, shared: bool) -> NoReturn:
    """One clear line, no traceback, exit code 2; torchrun turns it into its own code 1.

    Args:
        error: What happened.
        shared: Whether every rank finds the same mistake by itself, as in flags, config and data. Then rank 0 says
            it and the others give it time to, before they say that they have one of their own.
    """
    rank = int(os.environ.get("RANK", "0"))
    if shared and rank != 0:
        time.sleep(GRACE_S)
    where = f"rank {rank}: " if rank != 0 or not shared else ""
    text = str(error) if str(error).startswith("rank ") else f"{where}{error}"
    Console(stderr=True, soft_wrap=True).print(f"shardglass: {text}", style="red", highlight=False, markup=False)
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: destructors of a process group may wait for ranks that do not come.
    os._exit(2)
