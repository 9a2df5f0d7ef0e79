"""Any change of a valid config gives a run that shows the change, or one error that names it; never anything else."""

import copy
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardglass.config import known_keys, load_config
from shardglass.errors import ConfigError
from shardglass.report import config_json
from shardglass.resolve import RunArguments, resolve

TESTS = Path(__file__).parents[1]
FILES = [
    TESTS.parent / "examples" / "qwen" / "finetune" / "ds_config_zero2.json",
    *(TESTS / "stock_configs" / f"{name}.json" for name in ("z0_monitors", "z2_hand_set", "z2_warmup_decay")),
]
EVERYTHING_OFF = {
    "zero_optimization": {"stage": 1, "zero_quantized_weights": False, "mics_shard_size": -1, "leaf_module": {}},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.99], "adam_w_mode": False}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 10}},
    "bf16": {"enabled": True, "check_grad_overflow": False},
    "amp": {"enabled": "auto", "opt_level": "auto"},
    "data_types": {"grad_accum_dtype": "bf16"},
    "communication_data_type": "fp32",
    "compile": {"disable": False, "backend": "inductor"},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False},
    "tensor_parallel": {"autotp_size": 1},
    "elasticity": {"enabled": False, "max_train_batch_size": 2000},
    "flops_profiler": {"enabled": True, "profile_step": 5, "module_depth": -1},
    "aio": {"block_size": 262144, "single_submit": False},
    "wandb": {"enabled": False, "team": "a"},
    "gradient_predivide_factor": 1.0,
    "sequence_parallel_size": 1,
    "_comment": "anything",
}
SOURCES = [*(json.loads(path.read_text()) for path in FILES), EVERYTHING_OFF]
ARGUMENTS = RunArguments(
    total_steps=100,
    hidden_size=64,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    explicit=frozenset({"per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm"}),
)

NAMES = sorted({name for known in known_keys() for name in known.path})
TEXT = st.text(st.one_of(st.characters(), st.characters(categories=["Cs"])), max_size=6)
WORDS = [
    "auto",
    "none",
    "cpu",
    "2e8",
    "8",
    "-1",
    "",
    "true",
    "False",
    "AdamW",
    "Adam",
    "SGD",
    "log",
    "fp16",
    "1_0",
    "٣",
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 70),
    st.floats(),
    st.sampled_from([*WORDS, "x" * 90, 10**400, "9" * 5000, 2**63, 1e308, "nan", "1e999"]),
    TEXT,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(NAMES), TEXT), inner, max_size=3),
    ),
    max_leaves=4,
)


def paths(tree, path=()):
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from paths(value, (*path, key))


@st.composite
def mutated(draw):
    """A source, and the same with one to three changes."""
    source = draw(st.sampled_from(SOURCES))
    tree = copy.deepcopy(source)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted(paths(source))))
        node = tree
        for part in path[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            _change(draw, tree, node, path[-1])
    return source, tree


def _change(draw, tree, node, key):
    kind = draw(st.sampled_from(["delete", "retype", "rename", "nest", "lift", "add"]))
    old = node.get(key)
    if kind == "delete":
        node.pop(key, None)
    elif kind == "retype":
        node[key] = draw(VALUES)
    elif kind == "rename":
        near = st.sampled_from([key + "s", key.upper(), key[1:], "_" + key, key[::-1]])
        node[draw(st.one_of(near, st.sampled_from(NAMES), TEXT))] = node.pop(key, None)
    elif kind == "nest":
        node[key] = {draw(st.one_of(st.just(key), st.sampled_from(NAMES))): old}
    elif kind == "lift":
        tree[key] = node.pop(key, None)
    else:
        node[draw(st.sampled_from(NAMES))] = draw(VALUES)


def plain(value):
    """The meaning of a value as far as JSON tells it: out of quotes, no comments; null and ``auto`` are no value."""
    if isinstance(value, dict):
        items = {key: plain(item) for key, item in value.items() if not key.startswith("_")}
        return {key: item for key, item in items.items() if item is not None and item != {}}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    word = value.strip().lower() if isinstance(value, str) else value
    known = {"true": True, "false": False, "auto": None, "avg": "mean", "float32": "fp32", "bfloat16": "bf16"}
    if isinstance(word, bool) or word is None or word in known:
        return known.get(word, word)
    try:
        return ("number", float(word))
    except (ValueError, OverflowError):
        return word


def outcome(source):
    """What a run shows of a config: its table and its notes, as they are saved beside it."""
    return config_json(resolve(load_config(source), ARGUMENTS, world_size=2))


def read_or_refused(read, source):
    """What ``read`` gives; None if it is one error that names the config and says something of it."""
    try:
        return read(source)
    except ConfigError as error:
        text = str(error)
    assert re.match(r"the DeepSpeed config(: | contradicts the command line in ).", text)
    return None


def changes_nothing_in_silence(pair):
    source, tree = pair
    shown = read_or_refused(outcome, tree)
    assert shown is None or shown != outcome(source) or plain(tree) == plain(source)


def ends_inside(pair):
    text, length = pair
    with pytest.raises(ConfigError, match=r"^the DeepSpeed config: line \d+, column \d+: .+"):
        load_config(text[: 1 + length % (len(text) - 1)])


def is_damaged(case):
    text, position, inserted, removed = case
    position = 1 + position % len(text)
    read_or_refused(load_config, text[:position] + inserted + text[position + removed :])


def write_twice(tree, path):
    """JSON text in which the key at ``path`` stands twice, with two values."""
    pairs = []
    for key, value in tree.items():
        inner = isinstance(value, dict) and path[:1] == (key,) and len(path) > 1
        text = write_twice(value, path[1:]) if inner else json.dumps(value)
        pairs.append(f"{json.dumps(key)}: {text}")
        if path == (key,):
            pairs.append(f"{json.dumps(key)}: 7")
    return "{" + ", ".join(pairs) + "}"


@pytest.mark.parametrize("source", SOURCES, ids=range(len(SOURCES)))
def test_every_key_given_twice_is_an_error_with_its_path(source):
    for path in paths(source):
        if path[-1].startswith("_"):
            continue
        with pytest.raises(ConfigError) as caught:
            load_config(write_twice(source, path))
        assert f"  {'.'.join(path)}: given twice" in str(caught.value)


TEXTS = st.sampled_from([json.dumps(source, indent=indent) for source in SOURCES for indent in (None, 2)])
DAMAGE = st.tuples(TEXTS, st.integers(0), st.text("{}[]\",:'#/0 \n\\-eé\ud83d", max_size=3), st.integers(0, 3))

FEW = settings(max_examples=200, deadline=None, derandomize=True)
MANY = settings(max_examples=5000, deadline=None)

test_any_change_of_a_valid_config_is_shown_or_refused = FEW(given(mutated())(changes_nothing_in_silence))
test_a_text_that_is_cut_off_names_line_and_column = FEW(given(st.tuples(TEXTS, st.integers(0)))(ends_inside))
test_any_damage_to_the_text_is_read_or_refused = FEW(given(DAMAGE)(is_damaged))

test_thousands_of_changes = pytest.mark.soak(MANY(given(mutated())(changes_nothing_in_silence)))
test_thousands_of_damages = pytest.mark.soak(MANY(given(DAMAGE)(is_damaged)))
