"""``generate()`` of a model whose parameters are sharded: on all ranks, with texts of unequal length."""

import copy
import pickle
import tempfile

import pytest
import torch
from models import tiny_causal_lm
from ranks import run_ranks
from trainers import arguments, samples

from shardglass import ZeroTrainer, ZeroTrainingArguments
from shardglass.hf.data import PadToLongest

PROMPT = [[5, 6, 7], [11, 12, 13]]


def texts(model, rank, **how):
    """Greedy texts that are longer on rank 1 than on rank 0."""
    return model.generate(
        torch.tensor(PROMPT), max_new_tokens=3 + 5 * rank, do_sample=False, pad_token_id=0, use_cache=True, **how
    )


def generate(rank, world_size, given):
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_causal_lm(tied=True, seed=0)
        args = arguments(ZeroTrainingArguments, folder, zero_stage=3, max_steps=2, **given)
        trainer = ZeroTrainer(
            model=model, args=args, train_dataset=samples(), data_collator=PadToLongest(pad_token_id=0)
        )
        trainer.train()
        model.eval()
        plain = tiny_causal_lm(tied=True, seed=1).eval()
        for param in plain.parameters():  # and no buffer: rotary tables stay in fp32
            param.data = param.data.to(model.dtype)
        plain.load_state_dict(trainer.handle.full_state_dict())
        for how in ({}, {"num_beams": 2}):
            found = texts(model, rank, **how)
            assert found.shape == (2, 6 + 5 * rank)
            assert torch.equal(found, texts(plain, rank, **how)), how
        trainer.accelerator.free_memory()
        trainer.handle.close()
        if rank == 0:  # nobody waits for the others any more
            texts(model, rank)
            texts(copy.deepcopy(model), rank)
            assert pickle.loads(pickle.dumps(model._is_fsdp_managed_module)) is False
        return bool(model._is_fsdp_managed_module)


@pytest.mark.parametrize("given", [{}, {"bf16": True, "activation_checkpointing": True}], ids=["", "bf16"])
def test_ranks_whose_texts_end_early_go_on_with_the_others(given):
    assert run_ranks(2, generate, given) == [False, False]


def alone_at_another_stage(rank, world_size):
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_causal_lm(tied=True, seed=0)
        args = arguments(ZeroTrainingArguments, folder, zero_stage=2, max_steps=1)
        trainer = ZeroTrainer(
            model=model, args=args, train_dataset=samples(), data_collator=PadToLongest(pad_token_id=0)
        )
        trainer.train()
        if rank == 0:
            texts(model.eval(), rank)
        trainer.accelerator.free_memory()
        trainer.handle.close()


def test_where_parameters_are_whole_a_rank_can_generate_alone():
    run_ranks(2, alone_at_another_stage)
