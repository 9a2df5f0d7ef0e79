"""Schemes by name and alias, and the options they read."""

import pytest

from shardglass.errors import UsageError
from shardglass.layout import SCHEMES, ParamSpec, SchemeOptions, find_scheme, make_layout

W = ParamSpec(name="w", shape=(4, 3), dtype="float32", trainable=True, group=0, unit="u")


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("units", "units"),
        ("deepspeed-flat", "deepspeed-flat"),
        ("deepspeed-param", "deepspeed-param"),
        ("dim0", "dim0"),
        ("fsdp2", "dim0"),
        ("replicated", "replicated"),
        ("ddp", "replicated"),
    ],
)
def test_a_scheme_is_found_by_name_and_alias(word, name):
    assert find_scheme(word).name == name
    assert make_layout(word, [W], 2) == find_scheme(name).build([W], 2, SchemeOptions())
    assert make_layout(word, [W], 2).scheme == name


def test_names_and_aliases_are_unique():
    words = [word for scheme in SCHEMES for word in (scheme.name, *scheme.aliases)]
    assert len(set(words)) == len(words)


def test_an_unknown_scheme_is_answered_with_the_nearest_and_all():
    with pytest.raises(UsageError) as failure:
        make_layout("deepspeed_flat", [W], 2)
    assert str(failure.value) == (
        "no layout scheme is named 'deepspeed_flat' (did you mean 'deepspeed-flat'?); there are units, "
        "deepspeed-flat, deepspeed-param, dim0, fsdp2, replicated, ddp"
    )
    with pytest.raises(UsageError, match=r"'fsdp' \(did you mean 'fsdp2'\?\)"):
        find_scheme("fsdp")


def test_every_option_is_read_by_some_scheme_and_refused_by_the_others():
    given = {
        "round_robin_gradients": True,
        "parameter_alignment": True,
        "expert_parallel": {0: 2},
        "sub_group_size": 5,
        "shard_dims": {"w": 1},
    }
    assert sorted(given) == sorted(option for scheme in SCHEMES for option in scheme.reads)
    for key, value in given.items():
        for scheme in SCHEMES:
            if key not in scheme.reads:
                with pytest.raises(UsageError, match=f"{key} is .*, which scheme {scheme.name} does not read; "):
                    make_layout(scheme.name, [W], 2, SchemeOptions(**{key: value}))
