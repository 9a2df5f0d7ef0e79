"""Makes the page "What ZeRO does to your model": ``python -m shardglass.hf.zero_page > docs/what-zero-does.md``.

Owns which plans it rests on. Leaves its text to ``report.zero_page``.
"""

import sys

from shardglass.config import load_config
from shardglass.hf.meta import facts_of
from shardglass.hf.model_config import find_config
from shardglass.hf.planning import PlanFlags, setup_of
from shardglass.plan.plan import Plan, make_plan
from shardglass.report.zero_page import zero_page

MODEL = "qwen1.5-7b"
ONE_GROUP = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
"""A DeepSpeed JSON whose ``optimizer`` section makes all parameters one group."""


def make_page() -> str:
    """The page, from plans that are made now."""
    return zero_page(_plan(2, one_group=True), _plan(4, one_group=True), _plan(2, one_group=False))


def _plan(world_size: int, *, one_group: bool) -> Plan:
    flags = PlanFlags(model=MODEL, world_size=world_size, stage=2, scheme="deepspeed-flat", host_ram="1TB")
    setup, _ = setup_of(flags, load_config(ONE_GROUP) if one_group else None)
    facts = facts_of(find_config(MODEL), dtype=setup.dtype, num_groups=setup.num_groups)
    return make_plan(facts, setup)


if __name__ == "__main__":
    sys.stdout.write(make_page())
