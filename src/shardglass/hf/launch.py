"""How `shardglass train` starts its processes, and what it says when they end otherwise than well.

Owns the launcher's flags and torch's elastic launcher. Leaves the flags of training to ``arguments``, the end of a rank
to ``lifeline``.
"""

import dataclasses
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from shardglass.errors import ConfigError
from shardglass.hf.flags import LaunchArguments, flags_error
from shardglass.hf.lifeline import NAMES, PREEMPTED_CODE, STOPS, saved
from shardglass.hf.renamed import ALIASES
from shardglass.hf.scan import Scanned, groups_of, kinds_of, scan

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

USER_FAULT = 2
"""Exit code of a mistake that the user can mend."""

PREEMPTED = "SHARDGLASS_PREEMPTED"
"""Environment variable: a file that rank 0 makes when the run was told to go and has saved."""

SAVING_S = 600
"""Seconds that ranks have to finish a step and to save, after SIGTERM to the launcher; torch's own are 30."""

LAUNCHER = "SHARDGLASS_LAUNCHER"
"""Environment variable with the process id of the launcher, for the ranks that it starts."""

_LAUNCH = {f.name: f for f in dataclasses.fields(LaunchArguments)}


class Stopped(BaseException):
    """A signal that ends the run; no Exception, as nothing is to go on after it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def stops_told(say: Callable[[str], None], output_dir: Path | None) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM inside into one line and an exit code of 128 + the signal's number.

    Args:
        say: Writes the line.
        output_dir: Where the run saves; None says nothing of it.
    """
    began = time.time()
    before = signal.signal(signal.SIGTERM, _raise_stop)
    try:
        yield
    except KeyboardInterrupt:
        number = int(signal.SIGINT)
    except Stopped as stop:
        number = stop.number
    else:
        number = 0
    finally:
        signal.signal(signal.SIGTERM, before)
    if not number:
        return
    for impatient in STOPS:
        signal.signal(impatient, signal.SIG_IGN)
    sys.stderr.write("\n")  # a progress bar may stand on the line
    name = STOPS.get(signal.Signals(number), signal.Signals(number).name)
    say(f"stopped by {name}" + ("" if output_dir is None else f"; {saved(output_dir, began)}"))
    sys.exit(128 + number)


def _raise_stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


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


def launch_options(launch: Scanned) -> LaunchArguments:
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


def launch(
    options: LaunchArguments,
    flags: Sequence[str],
    *,
    on_cpu: bool,
    environment: MutableMapping[str, str],
    say: Callable[[str], None],
) -> int:
    """Start the processes with torch's elastic launcher and wait for them.

    Args:
        options: How many and where.
        flags: Those of training.
        on_cpu: The ranks need no GPU.
        environment: This process's; what the ranks need to know is added.
        say: Writes a line about a rank that failed without a word.

    Returns:
        The exit code: 0, or that of the rank that failed first.

    Raises:
        ConfigError: The processes cannot be started as asked for.
        Stopped: A signal ended them.
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
    environment.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // count)))
    environment[LAUNCHER] = str(os.getpid())
    environment[PREEMPTED] = str(Path(tempfile.gettempdir(), f"shardglass-{os.getpid()}-saved"))
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_S))
    # The failing rank has its say itself; the launcher's log would repeat it in its own form.
    logging.disable(logging.ERROR)
    try:
        run.run(run.parse_args([*words, "-m", "shardglass", "train", *flags]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _failed(rank, failure, say)
    except SignalException as error:
        if Path(environment[PREEMPTED]).exists():
            return PREEMPTED_CODE
        raise Stopped(error.sigval) from None
    except DistError as error:
        raise ConfigError(
            f"the processes could not meet at {options.master_addr or 'this machine'}, port "
            f"{options.master_port or 'chosen freely'}: {_first_line(error)}\n  choose another --master_port"
        ) from None
    finally:
        Path(environment[PREEMPTED]).unlink(missing_ok=True)
    return 0


def _failed(rank: int, failure: "ProcessFailure", say: Callable[[str], None]) -> int:
    """Say in one line who failed, unless that rank has said it in one line of its own; return the exit code."""
    if failure.exitcode in (USER_FAULT, PREEMPTED_CODE):
        return failure.exitcode
    if failure.exitcode < 0:
        hint = ": the machine may have run out of memory" if failure.signal_name() == "SIGKILL" else ""
        say(f"rank {rank} was ended by {failure.signal_name()}{hint}")
        return 128 - failure.exitcode
    if failure.exitcode - 128 in NAMES:
        say(f"rank {rank} was stopped by {signal.Signals(failure.exitcode - 128).name}")
        return failure.exitcode
    told: Any = failure.message  # torch declares str, and gives the record of the error file
    message = told.get("message") if isinstance(told, Mapping) else None
    say(f"rank {rank} failed with exit code {failure.exitcode}" + (f": {message}" if message else ""))
    return failure.exitcode


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
