"""What ``open_model`` and ``new_model`` are given: options of transformers, names and devices."""

import inspect
import os
import shutil

import pytest
import torch
from models import tiny_causal_lm
from ranks import run_alone
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.qwen2 import modeling_qwen2

from shardglass import ModelError, UsageError, new_model, open_model, shard
from shardglass.hf.open_options import OF_A_CONFIG, OF_FILES, REFUSED

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
)  # fmt: skip

CALLS = {"open_model": lambda *a, **k: open_model(*a, **k), "new_model": lambda *a, **k: new_model(*a, seed=0, **k)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model."""
    folder = tmp_path_factory.mktemp("models") / "whole"
    tiny_causal_lm(seed=3).save_pretrained(folder)
    return folder


def first_argument(call, saved):
    return str(saved) if call == "open_model" else CONFIG


def refusal(call, *args, kind=UsageError, **options):
    with pytest.raises(kind) as caught:
        CALLS[call](*args, **options)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert "--" not in text.replace("pip install --upgrade", "")
    return text


# ---- options ----


def test_every_option_that_from_pretrained_names_is_taken_or_refused_with_what_to_do():
    named = set(inspect.signature(PreTrainedModel.from_pretrained).parameters)
    known = {*OF_FILES, *OF_A_CONFIG, *REFUSED}
    assert named - {"pretrained_model_name_or_path", "model_args", "kwargs"} <= known
    assert not set(OF_FILES) & set(REFUSED)


@pytest.mark.parametrize(
    ("call", "option"), [(c, o) for c in CALLS for o in REFUSED if (c, o) != ("new_model", "config")]
)
def test_an_option_that_cannot_be_taken_says_what_to_do(saved, call, option):
    text = refusal(call, first_argument(call, saved), **{option: "auto"})
    assert text.startswith(f"{call} does not take {option}: {REFUSED[option]}. Beside its first argument it takes ")


@pytest.mark.parametrize("call", CALLS)
def test_all_options_that_are_not_taken_are_told_at_once_with_those_that_are(saved, call):
    text = refusal(call, first_argument(call, saved), atn_implementation="eager", device_map="auto", tp_size=None)
    assert "device_map: each rank opens the model for one device" in text
    assert "atn_implementation: unknown (did you mean 'attn_implementation'?)" in text
    assert "tp_size" not in text
    taken = OF_FILES if call == "open_model" else OF_A_CONFIG
    assert all(name in text.partition(" it takes ")[2].split(", ") for name in ("device", *taken))


def state_of(rank, world_size, name, options, stage):
    torch.manual_seed(0)
    model = open_model(name, device="cpu", **options)
    handle = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    state = handle.full_state_dict()
    handle.close()
    return state, model.config._attn_implementation, model.generation_config.max_length


def assert_opened_as(source, name, stage=3, **options):
    """The model has the values of ``source`` under those options, sharded at once and loaded by rank 0."""
    plain = AutoModelForCausalLM.from_pretrained(name, **{"dtype": "auto", **options})
    state, attention, length = run_alone(state_of, name, options, stage)
    expected = plain.state_dict()
    torch.testing.assert_close(state, dict(expected), rtol=0, atol=0)
    assert attention == plain.config._attn_implementation
    assert length == plain.generation_config.max_length
    for key, value in source.state_dict().items():
        assert torch.equal(state[key], value.to(state[key].dtype))


def hub_of(folder, revisions):
    """A cache of the hub with a model of which each revision has other values."""
    for number, (revision, model) in enumerate(revisions.items()):
        commit = f"{number:040x}"
        snapshot = folder / "models--owner--name" / "snapshots" / commit
        model.save_pretrained(snapshot)
        refs = folder / "models--owner--name" / "refs" / revision
        refs.parent.mkdir(exist_ok=True)
        refs.write_text(commit)


@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_revision_is_read_from_a_cache_without_the_hub(tmp_path, is_pickled):
    revisions = {"main": tiny_causal_lm(seed=1), "v2": tiny_causal_lm(seed=2)}
    revisions["v2"].generation_config.max_length = 33
    hub_of(tmp_path, revisions)
    for weights in tmp_path.rglob("*.safetensors") if is_pickled else ():
        torch.save(
            revisions["v2" if "0001" in str(weights) else "main"].state_dict(), weights.parent / "pytorch_model.bin"
        )
        weights.unlink()
    where = {"cache_dir": str(tmp_path), "local_files_only": True, "token": "none"}
    for revision, model in revisions.items():
        assert_opened_as(model, "owner/name", revision=revision, **where)
    assert_opened_as(revisions["main"], "owner/name", **where)
    text = refusal("open_model", "owner/name", kind=ModelError, revision="v3", **where)
    assert text.startswith("open_model: there is no folder owner/name")


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_a_variant_and_a_subfolder_are_read(tmp_path, max_shard_size):
    model, other = tiny_causal_lm(seed=4), tiny_causal_lm(seed=5)
    for variant, source in (("fp16", model), (None, other)):
        source.save_pretrained(tmp_path / str(variant), variant=variant, max_shard_size=max_shard_size)
        shutil.copytree(tmp_path / str(variant), tmp_path / "inner", dirs_exist_ok=True)
    assert_opened_as(model, str(tmp_path), subfolder="inner", variant="fp16")
    assert_opened_as(other, str(tmp_path), subfolder="inner")
    text = refusal("open_model", tmp_path, kind=ModelError, subfolder="iner")
    assert text == f"open_model: {tmp_path} has no folder iner (did you mean 'inner'?)"


def test_the_dtype_has_two_names_and_attention_can_be_chosen(saved):
    for options in ({"dtype": "bfloat16"}, {"torch_dtype": torch.bfloat16}):
        model = open_model(saved, device="cpu", **options)
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert_opened_as(tiny_causal_lm(seed=3), str(saved), torch_dtype=torch.bfloat16, attn_implementation="eager")
    text = refusal("open_model", saved, kind=ModelError, attn_implementation="bogus")
    assert text.startswith("attn_implementation='bogus': ")


CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class OwnConfig(Qwen2Config):
    model_type = "own"

class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_comes_with_a_model_runs_when_it_is_trusted(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    shutil.copytree(saved, folder)
    (folder / "own.py").write_text(CODE)
    config = (folder / "config.json").read_text().replace('"model_type": "qwen2"', '"model_type": "own"')
    maps = '{"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},'
    (folder / "config.json").write_text(maps + config.lstrip("{"))
    text = refusal("open_model", folder, kind=ModelError)
    assert text == f"open_model: {folder} brings its own code: trust_remote_code=True runs it, if you trust it"
    model = open_model(folder, device="cpu", trust_remote_code=True, revision="main")
    assert type(model).__name__ == "OwnModel"
    assert isinstance(model, modeling_qwen2.Qwen2ForCausalLM)
    assert type(new_model(model.config, seed=0, trust_remote_code=True)).__name__ == "OwnModel"


# ---- names and devices ----


@pytest.mark.parametrize("device", ["bogus", "cuda:99", "meta", "cpu:x", 3.5, "", object()])
@pytest.mark.parametrize("call", CALLS)
def test_a_device_that_is_not_there_is_told_before_anything_is_read(call, device):
    first = "/nowhere/at/all" if call == "open_model" else CONFIG
    assert refusal(call, first, device=device).startswith(f"{call}(device={device!r}): ")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_a_device_is_a_name_an_object_or_left_out(saved, device):
    kind = "cpu" if device is not None or not torch.cuda.is_available() else "cuda"
    for call in CALLS:
        model = CALLS[call](first_argument(call, saved), device=device)
        assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {kind}


@pytest.mark.parametrize("name", [None, "", "  ", 5, b"model", ["model"], LlamaConfig])
def test_what_is_no_name_of_a_model_is_told(name):
    assert refusal("open_model", name).startswith(f"open_model({name!r}): ")


def test_a_path_object_and_the_user_s_folder_are_names(saved, monkeypatch):
    monkeypatch.setenv("HOME", str(saved.parent))
    for name in (saved, os.path.join("~", saved.name)):
        assert open_model(name, device="cpu").config.vocab_size == 97


def test_a_folder_without_a_model_says_what_is_missing(saved, tmp_path):
    assert refusal("open_model", tmp_path, kind=ModelError) == (
        f"open_model: {tmp_path} has no config.json; give the folder of a Hugging Face model"
    )
    assert "does not exist (did you mean 'whole'?)" in refusal("open_model", saved.parent / "whloe", kind=ModelError)
    assert "is a file; give the folder" in refusal("open_model", saved / "config.json", kind=ModelError)
    (tmp_path / "tiny.gguf").write_bytes(b"")
    text = refusal("open_model", tmp_path / "tiny.gguf", kind=ModelError)
    assert text.endswith("is a file; give its folder, and gguf_file='tiny.gguf'")
    text = refusal("open_model", tmp_path, kind=ModelError, gguf_file="tyni.gguf")
    assert text == f"open_model: {tmp_path} has no file tyni.gguf (did you mean 'tiny.gguf'?)"
    shutil.copy(saved / "config.json", tmp_path)
    assert "has a config.json but no weights" in refusal("open_model", tmp_path, kind=ModelError)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "3", "null", "\0\1\2", '{"model_type": "bogus"}', '{"model_type": "qwen2", "hidden_size": "x"}'],
)
def test_a_config_that_cannot_be_read_is_told(saved, tmp_path, text):
    shutil.copytree(saved, tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text(text)
    said = refusal("open_model", tmp_path / "broken", kind=ModelError)
    assert said.startswith(f"open_model: the config of {tmp_path / 'broken'} cannot be read: ")
