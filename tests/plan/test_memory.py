"""The memory plan, held against the engine's own account to the byte, and its arithmetic by hand on a small layout."""

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from models import Perceptron, points, tiny_causal_lm, tokens
from ranks import run_ranks

from shardglass.engine.optim import SCALAR_STATES
from shardglass.engine.shard import shard
from shardglass.errors import InvariantError
from shardglass.layout import ParamSpec, units_layout
from shardglass.options import SUM_CHUNK, EngineOptions
from shardglass.plan import OptimizerKind, StepShape, heaviest_rank, memory, planned_bytes, unknown_state
from shardglass.plan.kinds import SCALARS, STATES

ADAMW = OptimizerKind(name="AdamW")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training setup; ``steps`` are the numbers of micro-batches of its steps."""

    options: EngineOptions
    steps: tuple[int, ...] = (1, 1)
    locally: bool = False
    optimizer: str = "AdamW"
    arguments: dict = field(default_factory=dict)
    model: str = "blocks"
    groups: int = 1

    def __str__(self):
        o = self.options
        extra = [f"reduce {o.reduce_dtype}" * bool(o.reduce_dtype), f"accum {o.accum_dtype}", "local" * self.locally]
        named = [f"stage {o.stage}", str(o.param_dtype), self.model, self.optimizer, *extra]
        return ", ".join([*filter(None, named), f"steps {self.steps}", str(self.arguments), f"{self.groups} groups"])


def covered(world_size):
    """Stage, dtype and accumulation in every combination; other settings one after the other, some on 2 ranks alone."""
    stages = (0, 1, 2, 3) if world_size == 2 else (0, 2, 3)
    runs = [
        Run(options=EngineOptions(stage=stage, param_dtype=dtype), steps=steps, locally=locally)
        for stage in stages
        for dtype in ("float32", "bfloat16")
        for steps, locally in (((1, 1), False), ((3, 3), False), ((3, 3), True))
    ]
    for stage in stages:
        bf16 = EngineOptions(stage=stage, param_dtype="bfloat16")
        wide = EngineOptions(stage=stage, param_dtype="bfloat16", reduce_dtype="float32")
        narrow = EngineOptions(stage=stage, param_dtype="bfloat16", accum_dtype="bfloat16")
        for options in (wide, narrow):
            runs += [Run(options=options, steps=(2, 2), locally=locally) for locally in (False, True)]
        runs += [
            Run(options=bf16, steps=(3, 1), locally=True),  # an epoch whose last step has one micro-batch
            Run(options=wide, steps=(1, 2), locally=True),
            Run(options=bf16, model="frozen", groups=3),
            Run(options=bf16, model="tied Qwen2"),
            Run(options=bf16, model="untied Qwen2", groups=2, steps=(2, 2), locally=True),
            Run(options=EngineOptions(stage=stage), model="two dtypes", groups=2),
            Run(options=EngineOptions(stage=stage), model="big", steps=(1, 2)),  # sums longer than a piece of scratch
        ]
    if world_size != 2:
        return runs
    options = EngineOptions(stage=1, param_dtype="bfloat16")
    for name in STATES:
        runs.append(Run(options=options, optimizer=name, groups=2))
    for name, arguments in (
        ("AdamW", {"amsgrad": True}),
        ("AdamW", {"fused": True}),
        ("SGD", {"momentum": 0.9}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
    ):
        runs.append(Run(options=options, optimizer=name, arguments=arguments))
    return runs


class Cast(torch.nn.Module):
    """A linear map in bf16, of and to fp32."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(7, 7).bfloat16()

    def forward(self, x):
        return self.linear(x.bfloat16()).float()


class TwoDtypes(torch.nn.Module):
    """Blocks of bf16 matrices around an fp32 norm, as transformers have them: two buffers a unit that fill together."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(Cast(), torch.nn.LayerNorm(7), Cast()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def build(run):
    if run.model.endswith("Qwen2"):
        return tiny_causal_lm(tied=run.model.startswith("tied"), layers=3)
    if run.model == "big":
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(7, 150_001), torch.nn.Linear(150_001, 3, bias=False))
    if run.model == "two dtypes":
        return TwoDtypes()
    model = Perceptron(depth=4)
    if run.model == "frozen":
        model.blocks[1].requires_grad_(False)
        model.blocks[2][0].bias.requires_grad_(False)
    return model


def optimizer_of(run, model):
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trainable[g :: run.groups]} for g in range(run.groups)]
    return getattr(torch.optim, run.optimizer)(groups, lr=1e-3, **run.arguments)


def backward(run, model, key):
    if run.model.endswith("Qwen2"):
        ids = tokens(*key)
        model(input_ids=ids, labels=ids).loss.backward()
    else:
        dtype = next(model.parameters()).dtype if run.model != "two dtypes" else torch.float32
        model(points(*key).to(dtype)).pow(2).mean().backward()


def compare(rank, world_size):
    """(run, planned, measured) of every run in which they differ, and the number of runs."""
    wrong, runs = [], covered(world_size)
    for run in runs:
        model = build(run)
        optimizer = optimizer_of(run, model)
        kind = OptimizerKind(
            name=run.optimizer,
            groups=tuple({k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups),
        )
        handle = shard(model, optimizer, options=run.options)
        for step, micro_batches in enumerate(run.steps):
            for micro in range(micro_batches):
                local = run.locally and micro < micro_batches - 1
                with handle.no_sync() if local else nullcontext():
                    backward(run, model, (step, micro, rank))
            handle.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        measured = handle.memory()
        shape = StepShape(micro_batches=run.steps, accumulates_locally=run.locally)
        planned = planned_bytes(handle.layout, run.options, rank, optimizer=kind, shape=shape)
        if planned != measured:
            wrong.append((str(run), planned, measured))
        handle.close()
    return wrong, len(runs)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_plan_of_every_category_is_what_the_engine_holds_to_the_byte(world_size):
    for rank, (wrong, count) in enumerate(run_ranks(world_size, compare, timeout_s=240.0)):
        shown = "\n".join(f"{run}:\n  plan {planned}\n  real {measured}" for run, planned, measured in wrong)
        assert not wrong, f"rank {rank}: {len(wrong)} of {count} runs differ\n{shown}"
        assert count >= 51


def test_planning_loads_neither_torch_nor_numpy():
    source = Path(memory.__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(source)!r}); import shardglass.plan; "
    code += "sys.exit(3 if {'torch', 'numpy'} & set(sys.modules) else 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def two_blocks(world_size, dtype="bfloat16"):
    """Blocks of 100 and 40 elements, each in a group of its own, behind an embedding of 20."""
    rows = [("embed", 20, 0, "root:0")]
    rows += [
        (f"blocks.{b}.{name}", n, g, f"blocks.{b}") for b in (0, 1) for name, n, g in (("w", 100, 0), ("b", 40, 1))
    ]
    specs = [
        ParamSpec(name=name, shape=(numel,), dtype=dtype, trainable=True, group=group, unit=unit)
        for name, numel, group, unit in rows
    ]
    return units_layout(specs, world_size)


def test_the_formulas_by_hand_at_stage_2_on_two_ranks():
    # Groups and shards start at multiples of 32: a block is w at 0, b at 128, end 168, cut in two shards of 96; embed
    # is two shards of 32.
    layout = two_blocks(2)
    plan = [planned_bytes(layout, EngineOptions(stage=2), rank, optimizer=ADAMW) for rank in (0, 1)]
    assert plan[0]["parameters"] == plan[1]["parameters"] == (192 + 192 + 64) * 2
    assert plan[0]["master weights"] == (96 + 96 + 32) * 4
    # Two flats for the form of the blocks, one for embed, and a mean per shard.
    assert plan[0]["gradients"] == (2 * 192 + 64) * 2 + (96 + 96 + 32) * 4
    # Rank 0: 96 of w in each block and embed, padded to 32. Rank 1: 4 of w, padded to 32, and b, padded to 64.
    assert plan[0]["optimizer exp_avg"] == plan[0]["optimizer exp_avg_sq"] == (96 + 96 + 32) * 4
    assert plan[1]["optimizer exp_avg"] == (32 + 64 + 32 + 64) * 4
    assert (plan[0]["optimizer step"], plan[1]["optimizer step"]) == (3 * 4, 4 * 4)
    # Shards of 96 and of 32 arrive in one buffer each; two pieces of scratch.
    assert plan[0]["communication"] == (96 + 32) * 2 + 2 * SUM_CHUNK * 4


def test_what_each_stage_cuts():
    layout = two_blocks(4)
    whole, cut = (planned_bytes(layout, EngineOptions(stage=s), 0, optimizer=ADAMW) for s in (0, 2))
    assert whole["parameters"] == cut["parameters"]
    assert whole["master weights"] == 4 * cut["master weights"]
    assert whole["optimizer exp_avg"] == (128 + 64 + 128 + 64 + 32) * 4  # each run padded to 32
    assert planned_bytes(layout, EngineOptions(stage=1), 0, optimizer=ADAMW) == cut


def test_stage_3_keeps_master_weights_alone_and_gathers_a_unit_and_the_next():
    layout = two_blocks(2)  # units of 64, 192 and 192 elements
    sharded, whole = (planned_bytes(layout, EngineOptions(stage=s), 0, optimizer=ADAMW) for s in (3, 2))
    means, flats, received = (96 + 96 + 32) * 4, (2 * 192 + 64) * 2, (96 + 32) * 2
    assert whole["gradients"] == means + flats
    communication = whole["communication"] - received
    assert sharded == whole | {"parameters": 0, "gradients": means, "communication": communication}
    assert memory.in_backward_bytes(layout, EngineOptions(stage=3)) == flats + received
    assert memory.in_backward_bytes(layout, EngineOptions(stage=2)) == 0
    fp32 = two_blocks(2, "float32")
    assert planned_bytes(fp32, EngineOptions(stage=3), 0, optimizer=ADAMW)["master weights"] == (96 + 96 + 32) * 4
    for given, numel in (
        ({}, 192 + 192),
        ({"prefetch_units": 0}, 192),
        ({"prefetch_units": 2}, 64 + 192 + 192),
        ({"max_live_numel": 383}, 64 + 192),
        ({"max_live_numel": 0}, 192),
    ):
        assert memory.gathered_bytes(layout, EngineOptions(stage=3, **given)) == numel * 2, given
        assert memory.gathered_bytes(layout, EngineOptions(stage=2, **given)) == 0


def test_a_local_sum_costs_a_whole_gradient_in_the_accumulation_dtype_and_saves_flats():
    layout, options = two_blocks(2), EngineOptions(stage=1)
    shape = StepShape(micro_batches=(4,), accumulates_locally=True)
    means = (96 + 96 + 32) * 4
    direct = planned_bytes(layout, options, 0, optimizer=ADAMW)["gradients"]
    local = planned_bytes(layout, options, 0, optimizer=ADAMW, shape=shape)["gradients"]
    assert direct == means + (2 * 192 + 64) * 2
    assert local == means + (192 + 192 + 64) * 4 + (192 + 64) * 2
    fp32 = two_blocks(2, "float32")  # the sum has the dtype that travels: no flat at all
    numel = sum(b.numel for b in fp32.buffers)
    assert planned_bytes(fp32, options, 0, optimizer=ADAMW, shape=shape)["gradients"] == numel * 4 + numel * 4 // 2


def test_nccl_keeps_neither_receive_buffers_nor_scratch():
    layout = two_blocks(2)
    nccl = StepShape(backend="nccl")
    sharded = planned_bytes(layout, EngineOptions(stage=2), 0, optimizer=ADAMW, shape=nccl)
    whole = planned_bytes(layout, EngineOptions(stage=0), 0, optimizer=ADAMW, shape=nccl)
    assert sharded["communication"] == whole["communication"] == 0


def test_frozen_parameters_cost_themselves_alone():
    specs = [
        ParamSpec(name=f"w{k}", shape=(8,), dtype="bfloat16", trainable=k == 0, group=0 if k == 0 else None, unit="u")
        for k in (0, 1)
    ]
    both = planned_bytes(units_layout(specs, 1), EngineOptions(), 0, optimizer=ADAMW)
    one = planned_bytes(units_layout(specs[:1], 1), EngineOptions(), 0, optimizer=ADAMW)
    sharded = planned_bytes(units_layout(specs, 1), EngineOptions(stage=3), 0, optimizer=ADAMW)
    assert sharded["parameters"] == 32 * 2  # the frozen one; of the other there is the master
    assert both.pop("parameters") == (32 + 32) * 2
    assert one.pop("parameters") == 32 * 2
    assert both == one


def test_the_heaviest_rank_is_the_one_whose_shards_hold_the_least_padding():
    layout, options = two_blocks(2), EngineOptions(stage=2)
    rank, account = heaviest_rank(layout, options, optimizer=ADAMW)
    assert rank == 0
    assert account == planned_bytes(layout, options, 0, optimizer=ADAMW)


def test_an_unknown_optimizer_is_named_and_its_states_are_left_out():
    lion = OptimizerKind(name="Lion")
    assert "Lion" in unknown_state(lion)
    assert unknown_state(ADAMW) is None
    assert not [key for key in planned_bytes(two_blocks(2), EngineOptions(), 0, optimizer=lion) if "optimizer" in key]


def test_options_of_a_group_add_states_to_that_group_alone():
    kind = OptimizerKind(name="AdamW", groups=({"amsgrad": True}, {}))
    plan = planned_bytes(two_blocks(1), EngineOptions(), 0, optimizer=kind)
    assert plan["optimizer exp_avg"] == (128 + 64 + 128 + 64 + 32) * 4
    assert plan["optimizer max_exp_avg_sq"] == (128 + 128 + 32) * 4


def test_impossible_questions_are_refused():
    with pytest.raises(InvariantError, match="ranks 0 to 1"):
        planned_bytes(two_blocks(2), EngineOptions(), 2, optimizer=ADAMW)
    with pytest.raises(InvariantError, match="at least 1"):
        StepShape(micro_batches=(0,))
    with pytest.raises(InvariantError, match="mpi"):
        StepShape(backend="mpi")


def test_the_engine_knows_every_scalar_state_that_plans_count():
    assert {name for names in SCALARS.values() for name in names} | {"step"} == set(SCALAR_STATES)
