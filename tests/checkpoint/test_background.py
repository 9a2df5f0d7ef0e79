"""A checkpoint written beside training is the one of the moment of the call, and its failure is told to all ranks."""

import threading
import time

import pytest
from models import tiny_causal_lm, tokens
from ranks import run_ranks
from sharded import assert_equal, make

from shardglass import CheckpointError, load_checkpoint, save_checkpoint
from shardglass.checkpoint.background import BackgroundSaver
from shardglass.checkpoint.manifest import damaged_files, read_manifest


def train(model, optimizer, steps, rank):
    for step in steps:
        ids = tokens(step, rank)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(handle, model):
    found = {}
    for name, _ in model.named_parameters():
        found |= {f"{name}|{key}": value.clone() for key, value in handle.state_of(name).items()}
    return found


def beside(rank, world_size, folder, stage):
    """Begin to save, train on while the thread is held up, then let it write; what is stored must be of the call."""
    model = tiny_causal_lm(tied=True)
    handle, optimizer = make(model, stage=stage)
    train(model, optimizer, range(2), rank)
    before = bits(handle, model)
    go_on = threading.Event()
    saver = BackgroundSaver(handle)

    def write(temporary):
        assert go_on.wait(60)
        if rank == 0:
            (temporary / "mine.txt").write_text("of rank 0")

    saver.save(folder + "/first", extra={"which": "first"}, write=write)
    train(model, optimizer, range(2, 5), rank)
    assert saver.is_writing
    after = bits(handle, model)
    go_on.set()
    held = saver.nbytes
    saver.save(folder + "/second", extra={"which": "second"})  # waits for the first, and takes the same buffers
    saver.wait()
    assert saver.nbytes == held > 0
    saver.close()
    save_checkpoint(handle, folder + "/plain")
    for name, expected in (("first", before), ("second", after), ("plain", after)):
        load_checkpoint(handle, f"{folder}/{name}")
        assert_equal(bits(handle, model), expected)
    handle.close()


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 0), (2, 3), (3, 2)])
def test_what_is_written_is_the_state_at_the_call_and_training_goes_on_meanwhile(tmp_path, world_size, stage):
    run_ranks(world_size, beside, str(tmp_path), stage)
    manifest = read_manifest(tmp_path / "first")
    assert manifest.extra == {"which": "first"}
    assert manifest.digests.keys() == manifest.files.keys()
    assert damaged_files(tmp_path / "first", manifest) == []
    assert (tmp_path / "first" / "mine.txt").read_text() == "of rank 0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "plain", "second"]


def failing(rank, world_size, folder):
    """The write fails on one rank; every rank raises it at the same step."""
    model = tiny_causal_lm(tied=True)
    handle, optimizer = make(model, stage=2)
    train(model, optimizer, range(1), rank)
    saver = BackgroundSaver(handle)
    ended = []

    def write(temporary):
        if rank == 1:
            raise OSError(28, "No space left on device")

    saver.save(folder + "/bad", write=write, done=lambda *, complete: ended.append(complete))
    step, told = 1, None
    while told is None and step < 500:
        train(model, optimizer, [step], rank)
        step += 1
        try:
            saver.check()
        except CheckpointError as error:
            told = str(error)
        time.sleep(0.01)
    assert "No space left on device" in told
    assert ended == [False]
    saver.save(folder + "/good")
    saver.close()
    handle.close()
    return step, told


def test_a_failure_is_raised_at_the_same_step_on_all_ranks_and_the_next_save_works(tmp_path):
    told = run_ranks(3, failing, str(tmp_path))
    assert len({step for step, _ in told}) == 1
    assert len({text for _, text in told}) == 1
    assert "rank 1" in told[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_a_changed_byte_is_named(tmp_path):
    run_ranks(1, beside, str(tmp_path), 2)
    manifest = read_manifest(tmp_path / "first")
    victim = next(name for name in manifest.files if name.endswith(".safetensors"))
    content = bytearray((tmp_path / "first" / victim).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "first" / victim).write_bytes(content)
    faults = damaged_files(tmp_path / "first", read_manifest(tmp_path / "first"))
    assert len(faults) == 1
    assert victim in faults[0]
    assert "checksum" in faults[0]
