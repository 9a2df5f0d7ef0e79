"""A training state larger than what a process may have: stage 3 trains it, stage 0 cannot, and the plan says so."""

import sys

import pytest
import torch
from process_memory import bytes_of, give_freed_runs_back
from ranks import RankError, run_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from shardglass import open_model, shard
from shardglass.hf.meta import facts_of
from shardglass.hf.model_config import find_config
from shardglass.plan.plan import make_plan
from shardglass.plan.setup import GIB, Setup
from shardglass.plan.stages import PROCESS_BYTES

ALLOWED = GIB
"""Bytes that a process may have beside its code's."""

LENGTH = 64


def data_bytes():
    """What RLIMIT_DATA counts: private memory that can be written, whether it was touched or not."""
    return bytes_of("VmData")


def train_within(rank, world_size, folder, stage):
    import resource

    open_model(str(folder))  # imports the model's code, which is 250 MiB of libraries' data
    give_freed_runs_back()  # the limit would count what is free
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + ALLOWED, before[1]))
    try:
        model = open_model(str(folder))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        handle = shard(model, optimizer, stage=stage)
        losses = []
        for _ in range(3):
            ids = torch.arange(LENGTH)[None] % 97 + rank
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        handle.close()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return losses


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA bounds anonymous memory on Linux only")
def test_what_one_rank_cannot_hold_trains_at_stage_3_on_four_and_the_plan_says_so_beforehand(tmp_path):
    config = LlamaConfig(
        vocab_size=8000, hidden_size=640, intermediate_size=1920, num_hidden_layers=19, num_attention_heads=8
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    facts = facts_of(find_config(str(tmp_path / "model")), dtype="float32")
    run = {"dtype": "float32", "world_size": 4, "device": "cpu", "ranks_per_node": 4, "length": LENGTH}
    free = 4 * (ALLOWED + PROCESS_BYTES)
    plans = {stage: make_plan(facts, Setup(stage=stage, host_free=free, **run)) for stage in (0, 3)}
    assert plans[0].verdict.startswith("does not fit")
    assert plans[3].verdict.startswith("fits")
    state = sum(p.numel for p in facts.params) * 16  # weights, gradients and two moments in fp32
    assert state > ALLOWED * 1.5
    with pytest.raises(RankError, match="can't allocate memory"):
        run_ranks(4, train_within, tmp_path / "model", 0, timeout_s=180)
    for losses in run_ranks(4, train_within, tmp_path / "model", 3, timeout_s=180):
        assert losses[2] < losses[0]
