"""The page "What ZeRO does to your model", worked on one model.

Owns the text. Every number in it is a value of a plan; leaves making the plans to ``hf.zero_page``.
"""

from collections.abc import Iterator

from shardglass.plan.fit import gib
from shardglass.plan.partition import CutLine, Partition
from shardglass.plan.plan import Plan
from shardglass.plan.stages import GATHERED

MAKE = "python -m shardglass.hf.zero_page > docs/what-zero-does.md"


def zero_page(two: Plan, four: Plan, two_groups: Plan) -> str:
    """The page in Markdown.

    Args:
        two: DeepSpeed's layout on 2 ranks, all parameters in one optimizer group.
        four: The same on 4 ranks.
        two_groups: On 2 ranks with the Trainer's two groups.
    """
    return "\n".join([*_begin(two), *_cut(two), *_more_ranks(four), *_groups(two_groups), *_memory(two), *_look(two)])


def _begin(plan: Plan) -> Iterator[str]:
    model, rows = plan.model, plan.partition.parts
    yield from (
        "# What ZeRO does to your model",
        "",
        f"<!-- Made by `{MAKE}`; a test holds every number to the plan. -->",
        "",
        f"{model.name} has {model.num_tensors:,} tensors with {model.numel:,} elements, {gib(model.compute_bytes)} in "
        f"{plan.run.dtype}. Fine-tuning it with ZeRO-{plan.run.stage} on {plan.run.world_size} GPUs keeps the whole "
        "weights on each, for forward and backward. What is cut is the work on them: gradients, fp32 master weights "
        "and the optimizer's states.",
        "",
        "## Two equal partitions",
        "",
        "DeepSpeed puts all tensors of an optimizer group in one line, end to end in model order, fills the end up "
        "with padding and cuts the line into as many equal parts as there are ranks "
        "(`shardglass plan qwen1.5-7b --scheme deepspeed-flat --world-size 2 --deepspeed ds_config_zero2.json`):",
        "",
        *_parts(plan.partition),
        "",
        "In a debugger these parts are `optimizer.parallel_partitioned_bit16_groups[0]`: a list of "
        f"{plan.run.world_size} equal tensors. They are partitions of one optimizer group, one for each rank, and not "
        f"{plan.run.world_size} optimizer groups; `optimizer.bit16_groups` has the optimizer groups. The names of rank "
        "0's tensors are those of `params_in_partition[0]`, all others those of `params_not_in_partition[0]`. The two "
        f"add up to {rows[0].num_in + rows[0].num_not_in:,} on every rank; a tensor that is cut is in a partition of "
        "both its ranks.",
        "",
    )


def _parts(partition: Partition) -> Iterator[str]:
    yield "| part | rank | elements | padding | tensors in the partition | not in it |"
    yield "|---|---:|---:|---:|---:|---:|"
    for row in partition.parts:
        yield f"| {row.part} | {row.rank} | {row.numel:,} | {row.padding:,} | {row.num_in:,} | {row.num_not_in:,} |"


def _cuts(partition: Partition) -> Iterator[str]:
    yield "| part | ranks | index | tensor | elements left | right | % left | first behind: row, column |"
    yield "|---|---|---:|---|---:|---:|---:|---|"
    for cut in partition.cuts:
        where = f"{cut.part} | {cut.left_rank} / {cut.right_rank}"
        if cut.tensor is None:
            yield f"| {where} | - | falls between `{cut.before}` and `{cut.after}` | - | - | - | - |"
            continue
        place = "-" if cut.row is None else f"{cut.row:,}, {cut.column:,}"
        yield (
            f"| {where} | {cut.index} | `{cut.tensor}` | {cut.left:,} | {cut.right:,} | {cut.left_percent:.3f} | "
            f"{place} |"
        )


def _cut(plan: Plan) -> Iterator[str]:
    cut = _first_cut(plan)
    yield from (
        "## The cut",
        "",
        "The line is cut where half of its elements end, not where a tensor ends:",
        "",
        *_cuts(plan.partition),
        "",
        f"The index counts from 0: index {cut.index} is tensor number {(cut.index or 0) + 1}. The {cut.index} before "
        f"it are whole on rank {cut.left_rank}. Of `{cut.tensor}` rank {cut.left_rank} updates the first "
        f"{cut.left:,} elements and rank {cut.right_rank} the other {cut.right:,}. Nothing else in the model is "
        "shared. A share this small cannot be seen in a picture drawn to scale, which is why the report marks "
        "every cut with a sign of fixed size.",
        "",
    )


def _first_cut(plan: Plan) -> CutLine:
    return next(cut for cut in plan.partition.cuts if cut.tensor is not None)


def _more_ranks(plan: Plan) -> Iterator[str]:
    yield from (
        f"## {plan.run.world_size} GPUs",
        "",
        f"The same line in {plan.run.world_size} parts:",
        "",
        *_parts(plan.partition),
        "",
        *_cuts(plan.partition),
        "",
        "The cut in the middle is the one from above: parts of twice as many ranks halve the old ones.",
        "",
    )


def _groups(plan: Plan) -> Iterator[str]:
    yield from (
        "## Two optimizer groups",
        "",
        "With an `optimizer` section in the JSON all parameters are one group, as above. Without one the Trainer "
        "makes two, so that norms and biases do not decay. Each group is a line of its own and cut by itself, so each "
        "rank has a part of both:",
        "",
        *_parts(plan.partition),
        "",
        *_cuts(plan.partition),
        "",
    )


def _memory(plan: Plan) -> Iterator[str]:
    names = dict.fromkeys(c.name for stage in plan.stages for c in stage.engine if c.bytes >= 1 << 20)
    yield from (
        "## What that saves",
        "",
        f"Bytes that shardglass's own engine keeps on one of {plan.run.world_size} ranks, stage by stage (stage 0 cuts "
        "nothing, 1 the optimizer's states and master weights, 2 also gradients, 3 also the weights):",
        "",
        "| | " + " | ".join(f"stage {stage.stage}" for stage in plan.stages) + " |",
        "|---|" + "---:|" * len(plan.stages),
    )
    for name in names:
        sizes = [sum(c.bytes for c in stage.engine if c.name == name) for stage in plan.stages]
        yield f"| {name} | " + " | ".join(gib(size) for size in sizes) + " |"
    yield "| in all | " + " | ".join(gib(stage.engine_bytes) for stage in plan.stages) + " |"
    yield from (
        "",
        "At stage 3 a weight that is not in use is nowhere but in the ranks' master weights, and is gathered from them "
        "block by block. While a step runs, the block in use and the next one are whole: "
        f"{gib(_gathered(plan))} on top at most.",
        "",
        "Activations come on top and are cut by no stage; `shardglass plan` has them, and `--simulate` runs a step of "
        "the engine on tensors without memory to find the peak. Our engine cuts each block by itself instead of one "
        "line, so that a block's gradients can travel while the next block is still in backward: the bytes are the "
        "same, the boundaries are others (`--scheme units`).",
        "",
    )


def _gathered(plan: Plan) -> int:
    """Bytes of weights that are whole at a time at the stage that shards them."""
    return sum(term.bytes for stage in plan.stages for term in stage.terms if term.name == GATHERED)


def _look(plan: Plan) -> Iterator[str]:
    cut = _first_cut(plan)
    yield from (
        "## What `model_wrapped` is",
        "",
        "`trainer.model` is the Transformers model. `trainer.model_wrapped` is the outermost wrapper around it, which "
        "`train()` puts on: with DeepSpeed the `DeepSpeedEngine`, under DDP a `DistributedDataParallel`, with "
        "shardglass the model itself, whose modules have hooks. `look(model, optimizer)` names the chain and says "
        "what each part does and when it is put on.",
        "",
        "## See it in VS Code",
        "",
        "```",
        "shardglass debug-config --ranks 0,1 -- torchrun --nproc_per_node 2 finetune.py …",
        "```",
        "",
        "adds an entry to `.vscode/launch.json`. Set a breakpoint in `optimizer.step` and read `handle`, a unit or a "
        "snapshot in the variables pane; each is one line that says the rank, its share and the last tensor that is "
        "cut. Without a debugger, `--look 1` has a run write down what every rank holds, and",
        "",
        "```",
        f"shardglass where RUN_DIR {cut.tensor}",
        "```",
        "",
        "says rank by rank where that tensor is. See the README.",
        "",
    )
