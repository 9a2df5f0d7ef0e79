"""Files of weights that cannot be read: which one, what it is, what to do; on every rank, before anything is loaded."""

import pickle
import random

import pytest
import torch
from gguf_files import write_gguf
from models import tiny_causal_lm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from shardglass import ModelError, open_model
from shardglass.hf.load import load_model

GARBAGE = random.Random(0).randbytes(9000)
COPY = "copy it again, or download it anew"


def pickled(folder, **given):
    """A folder whose weights are in two pickled files."""
    model = tiny_causal_lm()
    model.config.save_pretrained(folder)
    state = list(model.state_dict().items())
    halves = {"pytorch_model-00001-of-00002.bin": dict(state[:9]), "pytorch_model-00002-of-00002.bin": dict(state[9:])}
    for name, half in halves.items():
        torch.save(half, folder / name, **given)
    names = {key: name for name, half in halves.items() for key in half}
    (folder / "pytorch_model.bin.index.json").write_text(str({"metadata": {}, "weight_map": names}).replace("'", '"'))
    return folder / "pytorch_model-00002-of-00002.bin"


def refusals(folder, **options):
    """What each way to open says: rank 0's, another rank's, and a plain load."""
    ways = [lambda main=main: open_model(folder, is_main=main, device="cpu", **options) for main in (True, False)]
    for way in (*ways, lambda: load_model(str(folder), trust_remote_code=False, **options)):
        with pytest.raises(ModelError) as caught:
            way()
        assert len(str(caught.value).splitlines()) == 1
        yield str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not a file that torch.save wrote, or cut off"),
        (b"<html>404</html>", "not a file that torch.save wrote, or cut off"),
        (GARBAGE, "not a file that torch.save wrote, or cut off"),
        (bytes(9000), "not a file that torch.save wrote, or cut off"),
        (pickle.dumps({"a": 1}), "not a file that torch.save wrote, or cut off"),
        (0.5, "a file of torch.save that was cut off"),
        (0.999, "a file of torch.save that was cut off"),
    ],
    ids=["empty", "page", "garbage", "zeros", "plain pickle", "half", "almost whole"],
)
def test_a_pickled_file_that_is_broken_is_named(tmp_path, content, told):
    broken = pickled(tmp_path)
    whole = broken.read_bytes()
    broken.write_bytes(content if isinstance(content, bytes) else whole[: int(len(whole) * content)])
    for text in refusals(tmp_path):
        assert text == f"{broken}: {told}: {COPY}"


def test_a_pickled_file_that_is_missing_or_a_pointer_is_named(tmp_path):
    broken = pickled(tmp_path)
    broken.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    for text in refusals(tmp_path):
        assert text == f"{broken}: only git's pointer to the weights: fetch them with `git lfs pull`"
    broken.unlink()
    for text in refusals(tmp_path):
        assert text == f"{broken}: cannot be read: No such file or directory"
    (tmp_path / "pytorch_model.bin.index.json").write_text("[]")
    for text in refusals(tmp_path):
        assert text.startswith(f"{tmp_path / 'pytorch_model.bin.index.json'}: not an index of weights: ")


def test_an_old_pickle_that_was_cut_off_is_named_by_the_rank_that_reads_it(tmp_path):
    broken = pickled(tmp_path, _use_new_zipfile_serialization=False)
    open_model(tmp_path, device="cpu")
    whole = broken.read_bytes()
    for length in (100, len(whole) // 2, len(whole) - 10):
        broken.write_bytes(whole[:length])
        with pytest.raises(ModelError) as caught:
            open_model(tmp_path, device="cpu")
        assert str(caught.value).startswith(f"{broken}: a file of torch.save that is broken: {COPY} (")


def test_a_pickle_of_something_else_says_what_to_save(tmp_path):
    broken = pickled(tmp_path)
    torch.save(tiny_causal_lm(), broken)
    for text in refusals(tmp_path):
        assert text.startswith(f"{broken}: holds more than tensors, which would run code")
        assert "save model.state_dict()" in text
    torch.save([torch.ones(2)], broken)
    for text in refusals(tmp_path):
        assert text == f"{broken}: holds a list and not tensors by name: save model.state_dict()"


@pytest.mark.parametrize("seed", range(8))
def test_any_changed_bytes_of_a_pickle_are_a_clear_error_or_change_nothing_but_names(tmp_path, seed):
    broken = pickled(tmp_path, _use_new_zipfile_serialization=bool(seed % 2))
    content, draw = bytearray(broken.read_bytes()), random.Random(seed)
    for _ in range(10):
        content[draw.randrange(40, 2500)] = draw.randrange(256)
    broken.write_bytes(content)
    with pytest.raises(ModelError, match=r"pytorch_model-00002-of-00002\.bin: |missing "):
        open_model(tmp_path, device="cpu")


@pytest.mark.parametrize("renames", [False, True])
def test_a_safetensors_file_that_is_broken_is_named_whoever_reads_it(tmp_path, renames):
    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    (Qwen3MoeForCausalLM(config) if renames else tiny_causal_lm()).save_pretrained(tmp_path, max_shard_size="20KB")
    broken = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = broken.read_bytes()
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": "no"}}'
    contents = {
        "not a safetensors file, or cut off": [b"", b"123", GARBAGE, b"<html>404</html>", whole[:100]],
        "not a safetensors file: ": [len(header).to_bytes(8, "little") + header],
        "lies behind the end of the file, which was cut off": [whole[:-10]],
        "only git's pointer to the weights: fetch them": [b"version https://git-lfs.github.com/spec/v1\n"],
    }
    for told, cases in contents.items():
        for content in cases:
            broken.write_bytes(content)
            for text in refusals(tmp_path):
                assert text.startswith(f"{broken}: ")
                assert told in text
                assert COPY in text or "git lfs" in text


def test_a_gguf_file_that_is_broken_is_named(tmp_path):
    broken = tmp_path / "tiny.gguf"
    write_gguf(broken)
    whole = broken.read_bytes()
    for content in (b"", GARBAGE, *(whole[:n] for n in (4, 50, 1000, 3000, len(whole) // 2, len(whole) - 10))):
        broken.write_bytes(content)
        for text in refusals(tmp_path, gguf_file="tiny.gguf"):
            assert text.startswith(f"{broken}: not a GGUF file, or cut off: {COPY} (")
