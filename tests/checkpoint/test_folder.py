"""Whatever a kill leaves behind, a name without a dot in front is a complete checkpoint."""

import os
import shutil
from pathlib import Path

import pytest

from shardglass.checkpoint import folder


class Killed(BaseException):
    """Stands for a SIGKILL: nothing after it runs."""


def written(target, text):
    temporary = folder.begin(target)
    for name in ("a", "b"):
        (temporary / name).write_text(text)


def is_whole(path):
    texts = {(path / name).read_text() for name in ("a", "b")}
    return len(texts) == 1


def kill_at(monkeypatch, count):
    """Kill at the ``count``-th change of the file system, before it happens; removals go file by file."""
    left = [count]

    def step():
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    rename = Path.rename
    unlink, rmdir = os.unlink, os.rmdir

    def renamed(self, target):
        step()
        return rename(self, target)

    def removed(path, *args, **kwargs):
        for root, _, names in os.walk(path, topdown=False):
            for name in names:
                step()
                unlink(os.path.join(root, name))
            step()
            rmdir(root)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(shutil, "rmtree", removed)
    return left


def states_of(tmp_path, monkeypatch, work):
    """Run ``work`` with a kill at every place it can have; yields after each one, tidied."""
    for count in range(100):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run = tmp_path / "run"
        run.mkdir()
        with monkeypatch.context() as patch:
            left = kill_at(patch, 10**6)
            work(run, before=True)
            left[0] = count
            try:
                work(run, before=False)
            except Killed:
                killed = True
            else:
                killed = False
        for path in run.iterdir():
            if not path.name.startswith("."):
                assert is_whole(path), f"{path.name} is incomplete after kill {count}"
        folder.tidy(run)
        yield run, count
        if not killed:
            return
    raise AssertionError("the work never ended")


def test_a_kill_while_a_checkpoint_is_published_leaves_the_old_or_the_new(tmp_path, monkeypatch):
    def work(run, *, before):
        target = run / "checkpoint-3"
        if before:
            written(target, "old")
            folder.publish(target)
        else:
            written(target, "new")
            folder.publish(target)

    ends = []
    for run, _ in states_of(tmp_path, monkeypatch, work):
        assert [path.name for path in run.iterdir()] == ["checkpoint-3"]
        ends.append((run / "checkpoint-3" / "a").read_text())
    assert ends[0] == "old"
    assert ends[-1] == "new"
    assert ends == sorted(ends, reverse=True), "once new, always new"


def test_a_kill_while_a_checkpoint_is_deleted_leaves_it_whole_or_gone(tmp_path, monkeypatch):
    def work(run, *, before):
        target = run / "checkpoint-3"
        if before:
            written(target, "old")
            folder.publish(target)
        else:
            folder.delete(target)

    ends = [sorted(path.name for path in run.iterdir()) for run, _ in states_of(tmp_path, monkeypatch, work)]
    assert ends[0] == ["checkpoint-3"]
    assert ends[-1] == []


def test_tidy_tells_what_it_did_and_touches_nothing_else(tmp_path):
    for name in ("checkpoint-1", ".checkpoint-2.replaced", ".checkpoint-3.saving", ".checkpoint-1.replaced", ".cache"):
        (tmp_path / name).mkdir()
    told = folder.tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache", "checkpoint-1", "checkpoint-2"]
    assert any("checkpoint-2 is back" in line for line in told)
    assert any("unfinished checkpoint-3" in line for line in told)
    assert folder.tidy(tmp_path / "absent") == []


def test_numbered_counts_by_number_and_knows_no_other_folder(tmp_path):
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-x", ".checkpoint-11.saving", "checkpoint-12-old"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-13").write_text("a file")
    assert [number for number, _ in folder.numbered(tmp_path)] == [9, 10]


@pytest.mark.parametrize(
    ("limit", "best", "gone"),
    [
        (None, None, []),
        (0, None, []),
        (4, None, []),
        (2, None, [1, 2]),
        (1, None, [1, 2, 3]),
        (1, 2, [1, 3]),
        (2, 1, [2, 3]),
        (3, 1, [2]),
        (3, 4, [1]),
    ],
)
def test_rotation_deletes_the_oldest_and_never_the_newest_or_the_best(limit, best, gone):
    mine = [Path(f"checkpoint-{n}") for n in (1, 2, 3, 4)]
    chosen = folder.to_delete(mine, limit=limit, best=None if best is None else mine[best - 1])
    assert chosen == [mine[n - 1] for n in gone]
