"""Runs a module-level function on every rank of a gloo group.

One group of processes per world size, started when a test first asks for it and used again by all later ones: they are
forked from a server that has imported torch and transformers once, so a group starts in well under a second and a call
costs milliseconds. A rank that raises, or a call that does not end in time, ends its group; the next call starts a new
one.
"""

import atexit
import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_S = 120.0
"""Time a group may take to come up: the first one pays for importing torch and transformers."""

GRACE_S = 3.0
"""After the first rank failed, how long the others may take to fail too before they are killed."""

_GROUPS: dict[int, "_Group"] = {}


class RankError(AssertionError):
    """A rank raised, died or did not answer; the message has its traceback."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank and return what each returned, by rank.

    ``fn`` must be defined at module level; arguments and results must pickle. Inside it, torch.distributed's default
    group is a gloo group of ``world_size`` ranks, and warnings are errors.

    Raises:
        RankError: With the traceback of the rank that failed first, or the stacks of the ranks that did not answer.
    """
    group = _GROUPS.get(world_size)
    if group is None:
        group = _GROUPS[world_size] = _Group(world_size)
    try:
        return group.call(fn, args, timeout_s)
    except BaseException:
        group.kill()
        del _GROUPS[world_size]
        raise


def run_alone(fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> Any:
    """Call ``fn(0, 1, *args)`` in a process of its own kind: a group of one rank."""
    return run_ranks(1, fn, *args, timeout_s=timeout_s)[0]


class _Group:
    """The parent's end of one group: a process and a pipe per rank."""

    def __init__(self, world_size: int) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when the server imports torch
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "transformers.models.qwen2.modeling_qwen2"])
        self.stacks = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, str(self.stacks / str(rank))), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        try:
            port = self._collect({0: self.pipes[0]}, START_S, "start")[0]
            for pipe in self.pipes[1:]:
                pipe.send_bytes(pickle.dumps(port))
            self._collect(dict(enumerate(self.pipes)), START_S, "start")
        except BaseException:
            self.kill()
            raise

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        module = sys.modules[fn.__module__]
        task = (module.__file__, fn.__module__, fn.__qualname__, pickle.dumps(args))
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps(task))
        results = self._collect(dict(enumerate(self.pipes)), timeout_s, fn.__name__)
        return [results[rank] for rank in range(len(self.pipes))]

    def _collect(self, pending: dict[int, Connection], timeout_s: float, what: str) -> dict[int, Any]:
        """One answer of every pending rank; raises for the rank that failed first."""
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        deadline = time.monotonic() + timeout_s
        while pending:
            limit = deadline if not failures else min(deadline, failures[0][0] + GRACE_S)
            ready = wait(list(pending.values()), timeout=max(0.0, limit - time.monotonic()))
            if not ready:
                break
            for rank in [r for r, pipe in pending.items() if pipe in ready]:
                pipe = pending.pop(rank)
                try:
                    ok, when, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self.processes[rank].join(1.0)
                    died = f"the process died, exit code {self.processes[rank].exitcode}"
                    ok, when, value = False, time.monotonic(), died
                if ok:
                    results[rank] = value
                else:
                    failures.append((when, rank, value))
        if failures:
            _, rank, text = min(failures)
            silent = f"; ranks {sorted(pending)} did not end and were killed" if pending else ""
            raise RankError(f"rank {rank} failed first in {what}{silent}:\n{text}")
        if pending:
            stacks = self._stacks(list(pending))
            raise RankError(f"{what} did not end within {timeout_s} s on ranks {sorted(pending)}\n{stacks}")
        return results

    def _stacks(self, ranks: list[int]) -> str:
        """Where each of these ranks is, read from what faulthandler writes on a signal."""
        for rank in ranks:
            pid = self.processes[rank].pid
            if pid is not None and self.processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)
        files = [(rank, self.stacks / str(rank)) for rank in ranks]
        return "\n".join(f"rank {rank}:\n{path.read_text()}" for rank, path in files if path.exists())

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5.0)
        for pipe in self.pipes:
            pipe.close()
        for path in self.stacks.glob("*"):
            path.unlink()
        self.stacks.rmdir()


@atexit.register
def _stop_all() -> None:
    for group in _GROUPS.values():
        group.kill()
    _GROUPS.clear()


def _serve(pipe: Connection, rank: int, world_size: int, stacks: str) -> None:
    """The child's life: join the group, then answer calls until the parent goes."""
    import torch
    import torch.distributed as dist

    stack_file = open(stacks, "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        pipe.send_bytes(pickle.dumps((True, time.monotonic(), store.port)))
        port = store.port
    else:
        port = pickle.loads(pipe.recv_bytes())
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    # What torchrun would set: libraries look here for the rank.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    pipe.send_bytes(pickle.dumps((True, time.monotonic(), None)))
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(_answer(task, rank, world_size))


def _answer(task: tuple[str, str, str, bytes], rank: int, world_size: int) -> bytes:
    """Run one task; its result, or the text of what it raised with the time."""
    path, module_name, qualname, args = task
    try:
        fn = _function(path, module_name, qualname)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = fn(rank, world_size, *pickle.loads(args))
        return pickle.dumps((True, time.monotonic(), result))
    except BaseException:  # noqa: BLE001 (the process border: the parent raises it)
        return pickle.dumps((False, time.monotonic(), traceback.format_exc()))


def _function(path: str, module_name: str, qualname: str) -> Callable[..., Any]:
    """The parent's function; pytest names test modules in a way that a plain import need not find, so load by path."""
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    value: Any = module
    for part in qualname.split("."):
        value = getattr(value, part)
    return value
