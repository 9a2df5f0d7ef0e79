"""Models that no rank loads whole: the numbers of a plain load, read in parts, or loaded by rank 0 and spread."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from models import tiny_causal_lm
from process_memory import bytes_of, give_freed_runs_back
from ranks import run_alone, run_ranks
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from shardglass import EngineOptions, new_model, shard
from shardglass.checkpoint.weight_files import FileWeights, stored_tensors
from shardglass.errors import ModelError
from shardglass.hf.load import load_model
from shardglass.hf.sharded_start import open_model

WHERE = {"cache_dir": None, "trust_remote_code": False}


def save(folder, *, dtype=torch.float32, **given):
    model = tiny_causal_lm(seed=3).to(dtype)
    model.save_pretrained(folder, max_shard_size="20KB", **given)
    return folder


def opened(folder, rank, **options):
    return open_model(str(folder), device=torch.device("cpu"), is_main=rank == 0, **WHERE, **options)


def sharded(model, stage, param_dtype=None):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return shard(model, optimizer, options=EngineOptions(stage=stage, param_dtype=param_dtype)), optimizer


def masters_and_logits(rank, world_size, folder, stage, param_dtype, starts_sharded, freezes):
    model = opened(folder, rank) if starts_sharded else load_model(str(folder), **WHERE)
    if freezes:
        model.get_input_embeddings().requires_grad_(False)
    handle, optimizer = sharded(model, stage, param_dtype)
    ids = torch.arange(12)[None] % 90
    logits = model(ids).logits.detach().clone()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    states = {name: handle.state_of(name) for name in handle.layout.names}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    handle.close()
    return (logits, states, buffers), model.generation_config.to_json_string()


@pytest.mark.parametrize(
    ("stage", "dtype", "param_dtype", "freezes"),
    [
        (3, "float32", None, False),
        (3, "bfloat16", None, True),
        (3, "float32", "bfloat16", False),
        (2, "float32", "bfloat16", True),
    ],
)
def test_ranks_that_read_their_parts_have_the_numbers_of_a_plain_load(tmp_path, stage, dtype, param_dtype, freezes):
    folder = save(tmp_path / "model", dtype=getattr(torch, dtype))
    assert len(list(folder.glob("*.safetensors"))) > 2
    plain, parts = (run_ranks(2, masters_and_logits, folder, stage, param_dtype, way, freezes) for way in (False, True))
    for rank in (0, 1):
        torch.testing.assert_close(parts[rank][0], plain[rank][0], rtol=0, atol=0)
        assert parts[rank][1] == plain[rank][1]


def test_pickled_weights_and_fused_experts_are_loaded_by_rank_0_and_spread(tmp_path):
    pickled = save(tmp_path / "pickled")
    torch.save(AutoModelForCausalLM.from_pretrained(pickled).state_dict(), pickled / "pytorch_model.bin")
    for file in pickled.glob("*.safetensors*"):
        file.unlink()
    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "experts")
    for folder in (pickled, tmp_path / "experts"):
        plain, spread = (run_ranks(2, masters_and_logits, folder, 3, None, way, False) for way in (False, True))
        for rank in (0, 1):
            torch.testing.assert_close(spread[rank][0], plain[rank][0], rtol=0, atol=0)
            assert spread[rank][1] == plain[rank][1]


def use_too_early(rank, world_size, folder):
    model = opened(folder, rank)
    assert model.lm_head.weight.shape[0] == model.get_input_embeddings().weight.shape[0]
    with pytest.raises(ModelError, match=r"linear of model\.layers\.0\.self_attn\.q_proj\.weight|embedding of model"):
        model(torch.arange(4)[None])
    with pytest.raises(ModelError, match=r"clone of lm_head\.weight: its values are not loaded yet"):
        model.lm_head.weight.clone()


def test_a_use_of_values_before_they_are_there_is_an_error_that_names_the_parameter(tmp_path):
    run_alone(use_too_early, save(tmp_path / "model"))


def with_a_head_of_its_own(rank, world_size, folder, stage, replaces):
    model = opened(folder, rank)
    torch.manual_seed(rank)
    head = torch.nn.Linear(32, 96 if replaces else 4)
    if replaces:
        model.lm_head = head
    else:
        model.score = head
    given = {name: p.detach().clone() for name, p in head.named_parameters()}
    handle, _ = sharded(model, stage)
    name = "lm_head" if replaces else "score"
    held = {key: handle.state_of(f"{name}.{key}")["param"] for key in given}
    other = handle.state_of("model.norm.weight")["param"]
    handle.close()
    return held, given, other


@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("pickled", [False, True])
def test_a_module_put_in_before_the_values_come_keeps_rank_0_s_values(tmp_path, stage, replaces, pickled):
    folder = save(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    if pickled:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        for file in folder.glob("*.safetensors*"):
            file.unlink()
    (held, given, other), (held_1, given_1, _) = run_ranks(2, with_a_head_of_its_own, folder, stage, replaces)
    assert held.keys() == given.keys() == {"weight", "bias"}
    assert not torch.equal(given["weight"], given_1["weight"])
    torch.testing.assert_close((held, held_1), (given, given), rtol=0, atol=0)
    torch.testing.assert_close(other, model.model.norm.weight.detach(), rtol=0, atol=0)


def fails_like(folder, rank, told):
    with pytest.raises(ModelError, match=told):
        opened(folder, rank)


def broken(rank, world_size, folder, told):
    fails_like(folder, rank, told)


def test_missing_and_mismatched_tensors_are_named_before_training(tmp_path):
    folder = save(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    wider = {**config, "intermediate_size": config["intermediate_size"] * 2}
    (folder / "config.json").write_text(json.dumps(wider))
    run_alone(broken, folder, r"not of one model: .*mlp\.\w+_proj\.weight has shape \[.*\] in the files and")
    deeper = {**config, "num_hidden_layers": config["num_hidden_layers"] + 1}
    deeper.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(deeper))
    run_alone(broken, folder, rf"missing model\.layers\.{config['num_hidden_layers']}\.")


def test_a_file_that_was_cut_off_is_named(tmp_path):
    folder = save(tmp_path / "model")
    file = sorted(folder.glob("*.safetensors"))[1]
    whole = file.read_bytes()
    for kept, told in ((len(whole) - 10, "lies behind the end of the file"), (6, "cut off"), (0, "cut off")):
        file.write_bytes(whole[:kept])
        run_alone(broken, folder, rf"{file.name}: .*{told}")
    file.unlink()
    run_alone(broken, folder, rf"{file.name}: cannot be read: No such file")
    (folder / "model.safetensors.index.json").write_text("[]")
    run_alone(broken, folder, r"model\.safetensors\.index\.json: not an index of weights")


def test_any_run_of_elements_is_read(tmp_path):
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)
    )
    model.save_pretrained(tmp_path)
    source = FileWeights(
        stored_tensors([tmp_path / "model.safetensors"]), {n: torch.bfloat16 for n, _ in model.named_parameters()}
    )
    for name, param in model.named_parameters():
        flat = param.detach().reshape(-1).to(torch.bfloat16)
        for start, stop in ((0, flat.numel()), (3, 3), (1, flat.numel() - 1), (flat.numel() - 1, flat.numel())):
            assert torch.equal(source.read(name, start, stop), flat[start:stop])


# ---- memory ----


def anonymous_bytes():
    """Anonymous memory of this process: pages of files do not count."""
    return bytes_of("RssAnon")


class Watched:
    """The highest anonymous memory inside, above that at the start."""

    def __enter__(self):
        self.base, self.peak, self._on = anonymous_bytes(), 0, True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while self._on:
            self.peak = max(self.peak, anonymous_bytes() - self.base)
            time.sleep(0.001)

    def __exit__(self, *error):
        self._on = False
        self._thread.join()


LARGE = LlamaConfig(
    vocab_size=8000, hidden_size=512, intermediate_size=1536, num_hidden_layers=16, num_attention_heads=8
)


def start_and_weigh(rank, world_size, folder, small):
    def start(folder):
        if folder is None:
            return sharded(new_model(LARGE, seed=0, device=torch.device("cpu")), 3)[0]
        return sharded(opened(folder, rank), 3)[0]

    start(small).close()  # what is imported and allocated once is there now
    give_freed_runs_back()
    with Watched() as watched:
        handle = start(folder)
    numels = [b.numel for b in handle.layout.buffers]
    account = handle.memory()
    handle.close()
    return watched.peak, sum(account.values()), max(numels) * 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from Linux's /proc")
@pytest.mark.parametrize("is_random", [False, True], ids=["from files", "of random values"])
def test_a_rank_s_memory_at_the_start_is_its_shards_and_one_unit(tmp_path, is_random):
    whole = 4 * LlamaForCausalLM(LARGE).num_parameters()
    assert whole > 230 << 20
    if not is_random:
        LlamaForCausalLM(LARGE).save_pretrained(tmp_path / "large", max_shard_size="50MB")
    small = save(tmp_path / "small")
    for peak, shards, unit in run_ranks(4, start_and_weigh, None if is_random else tmp_path / "large", small):
        assert peak <= (shards + unit) * 1.1, f"{peak >> 20} MiB; shards {shards >> 20}, the largest unit {unit >> 20}"
        assert peak < whole / 2


def weights_of_gguf(rank, world_size, folder):
    model = opened(folder, rank, gguf_file="tiny.gguf")
    handle, _ = sharded(model, 3)
    state = handle.full_state_dict(rank0_only=True)
    handle.close()
    return state


def test_a_gguf_file_is_loaded_by_rank_0_and_spread(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf").state_dict()
    assert len(plain) == 21
    first, _ = run_ranks(2, weights_of_gguf, tmp_path)
    torch.testing.assert_close(first, dict(plain), rtol=0, atol=0)
