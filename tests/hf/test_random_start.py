"""Models of random values that no rank draws whole: the values of one process with the same seed."""

import pytest
import torch
from ranks import run_alone, run_ranks
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen3MoeConfig,
)

from shardglass import EngineOptions, new_model, shard
from shardglass.errors import CollectiveError, ModelError, UsageError
from shardglass.hf.random_start import RandomWeights
from shardglass.hf.sharded_start import empty_model

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2, tied": Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "gpt2, tied": GPT2Config(vocab_size=96, n_embd=32, n_layer=3, n_head=2, n_positions=16),
    "experts": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=16, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2
    ),
}


def drawn_by_one(config, dtype, seed):
    """Made on the meta device, then initialised."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device="cpu")
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)
    torch.manual_seed(seed)
    model.init_weights()
    return {name: param.detach() for name, param in model.named_parameters()}


def draw(rank, world_size, config, dtype, stage, seed):
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    model = new_model(config, seed=seed, dtype=dtype, device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = shard(model, optimizer, options=EngineOptions(stage=stage))
    assert torch.equal(torch.get_rng_state(), before)
    values = {name: handle.state_of(name)["param"] for name in handle.layout.names}
    ids = torch.arange(12)[None] % 90
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    handle.close()
    return values, loss.item()


@pytest.mark.parametrize(
    ("kind", "stage", "ranks"),
    [
        *((kind, 3, 3) for kind in CONFIGS),
        *(("llama", stage, ranks) for stage, ranks in ((0, 2), (1, 3), (2, 4), (3, 4))),
    ],
)
def test_each_rank_s_slices_are_those_of_one_process_with_the_same_seed(kind, stage, ranks):
    dtype = torch.bfloat16 if kind == "llama" else torch.float32
    expected = drawn_by_one(CONFIGS[kind], dtype, 7)
    for values, loss in run_ranks(ranks, draw, CONFIGS[kind], dtype, stage, 7):
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
        assert 4 < loss < 5.5  # ln 96 = 4.56
    other = drawn_by_one(CONFIGS[kind], dtype, 8)
    assert any(not torch.equal(other[name], value) for name, value in expected.items())


def source_of(cls, config):
    model = empty_model("test", config, torch.float32)
    model.__class__ = cls
    if cls is Forgetful:  # the inner model initialises what it has
        model.model._init_weights = model._init_weights
    return RandomWeights(model, 7)


def test_parts_are_drawn_again_in_any_order():
    config = CONFIGS["qwen2, tied"]
    expected = drawn_by_one(config, torch.float32, 7)
    source = RandomWeights(empty_model("test", config, torch.float32), 7)
    for name in [*reversed(expected), *expected]:
        flat = expected[name].reshape(-1)
        torch.testing.assert_close(source.read(name, 3, 9), flat[3:9], rtol=0, atol=0)


class Forgetful(LlamaForCausalLM):
    def _init_weights(self, module):
        if not isinstance(module, nn.Embedding):
            super()._init_weights(module)


class Reaching(GPT2LMHeadModel):
    def is_custom_code(self):
        return False  # else transformers skips a module that has no parameters of its own

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            nn.init.zeros_(self.transformer.h[1].attn.c_attn.weight)


def test_a_parameter_without_a_first_value_is_named():
    source = source_of(Forgetful, CONFIGS["llama"])
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight: Forgetful gives it no first value"):
        source.read("model.embed_tokens.weight", 0, 5)


def test_a_model_that_initialises_its_blocks_from_outside_is_refused():
    source = source_of(Reaching, CONFIGS["gpt2, tied"])
    last = len(source._parts) - 1
    for k in range(last):
        source._draw(k)
    with pytest.raises(ModelError, match="Reaching initialises parameters of its blocks from outside"):
        source._draw(last)


def use_too_early(rank, world_size):
    model = new_model(CONFIGS["llama"], seed=0, device=torch.device("cpu"))
    with pytest.raises(ModelError, match="its values are not loaded yet"):
        model(torch.arange(4)[None])


def test_a_use_before_the_values_are_there_is_an_error():
    run_alone(use_too_early)


def other_seed(rank, world_size):
    model = new_model(CONFIGS["llama"], seed=rank, device=torch.device("cpu"))
    with pytest.raises(CollectiveError, match="rank 1 has weights read by each rank = .*seed 1.*rank 0 has .*seed 0"):
        shard(model, torch.optim.SGD(model.parameters(), lr=0.1), options=EngineOptions(stage=3))


def test_a_seed_that_differs_by_rank_is_told_before_anything_is_drawn():
    run_ranks(2, other_seed)


def test_the_dtype_is_chosen_as_transformers_does():
    def dtype(config=CONFIGS["llama"], **given):
        return new_model(config, seed=0, device=torch.device("cpu"), **given).lm_head.weight.dtype

    assert dtype() == torch.float32
    assert dtype(dtype="bfloat16") == dtype(torch_dtype=torch.bfloat16) == torch.bfloat16
    assert dtype(LlamaConfig(**SIZES, dtype="bfloat16")) == torch.bfloat16
    with pytest.raises(ModelError, match="dtype 'float99': no dtype of torch"):
        dtype(dtype="float99")


@pytest.mark.parametrize("seed", ["0", 1.5, True, None, -1, 2**63])
def test_what_is_no_seed_is_refused(seed):
    with pytest.raises(UsageError, match=r"new_model\(seed=.*not a whole number"):
        new_model(CONFIGS["llama"], seed=seed)


def test_what_is_no_config_is_refused():
    for config in ("folder", None, LlamaConfig, {}):
        with pytest.raises(UsageError, match="not a config; AutoConfig"):
            new_model(config, seed=0)
