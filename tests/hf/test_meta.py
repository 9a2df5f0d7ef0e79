"""Models without weights: presets against public figures, the same specs as a real run's, mistakes in a line each."""

import json
from pathlib import Path

import pytest
import torch
from models import tiny_causal_lm
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from shardglass.engine.units import build_units, param_specs
from shardglass.errors import ModelError
from shardglass.hf.meta import facts_of, geometry_of, group_parameters
from shardglass.hf.model_config import FoundConfig, find_config
from shardglass.plan.presets import preset_config, preset_names

PARAMETERS = {  # of the models that the presets are named after, as their makers' checkpoints have them
    "llama-2-7b": 6_738_415_616,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen1.5-0.5b": 463_987_712,
    "qwen1.5-1.8b": 1_836_828_672,
    "qwen1.5-7b": 7_721_324_544,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "smollm2-1.7b": 1_711_376_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
}

TINY = {
    "model_type": "qwen2",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_as_many_parameters_as_the_model_it_is_named_after(name):
    facts = facts_of(find_config(name), dtype="bfloat16")
    assert facts.numel == PARAMETERS[name]
    assert facts.geometry is not None
    assert facts.stored_dtype == "bfloat16"
    assert (facts.name, facts.source) == (name, "preset")


def test_presets_are_found_in_capitals_too_and_their_files_are_plain_configs():
    assert find_config("Qwen1.5-7B").name == "qwen1.5-7b"
    assert preset_config("qwen9") is None
    assert all(preset_config(name)["architectures"] for name in preset_names())


# ---- the same as in a run ----


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_facts_are_the_specs_of_the_real_model_under_the_trainers_optimizer(tmp_path, tied, num_groups):
    model = tiny_causal_lm(tied=tied)
    if num_groups == 2:
        args = TrainingArguments(output_dir=str(tmp_path), weight_decay=0.1, report_to="none", use_cpu=True)
        optimizer = Trainer(model=model, args=args).create_optimizer()
    else:
        optimizer = torch.optim.AdamW(model.parameters())
    found = FoundConfig(name="tiny", source="file", config=model.config)
    facts = facts_of(found, dtype="bfloat16", num_groups=num_groups)
    assert list(facts.params) == param_specs(build_units(model, None), optimizer, torch.bfloat16)
    assert facts.tied == ((("lm_head.weight", "model.embed_tokens.weight"),) if tied else ())
    assert facts.buffer_bytes == sum(b.numel() * b.element_size() for b in model.buffers())
    assert len(group_parameters(model, num_groups).param_groups) == num_groups


def test_a_saved_model_is_planned_from_its_folder_and_from_its_config(tmp_path):
    model = tiny_causal_lm()
    model.save_pretrained(tmp_path)
    folder, file = find_config(str(tmp_path)), find_config(str(tmp_path / "config.json"))
    assert (folder.source, file.source) == ("folder", "file")
    facts = facts_of(folder, dtype="float32")
    assert facts.params == facts_of(file, dtype="float32").params
    assert facts.numel == sum(p.numel() for p in model.parameters())
    assert (facts.stored_dtype, facts.max_length) == ("float32", 64)


# ---- sizes of blocks ----


def geometry(kind, **values):
    config = AutoConfig.for_model(kind, **{**{k: v for k, v in TINY.items() if k != "model_type"}, **values})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return geometry_of(model, config)


def test_sizes_are_read_off_the_model():
    dense = geometry("qwen3", head_dim=16)
    assert (dense.hidden, dense.query, dense.key, dense.intermediate) == (32, 64, 32, 56)
    assert (dense.vocabulary, dense.num_layers, dense.has_qk_norm) == (97, 2, True)
    experts = geometry("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    assert (experts.num_experts, experts.num_active, experts.intermediate) == (4, 2, 24)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),  # other blocks
        ("gemma", {"head_dim": 8}),  # the same parameters, norms of another form
        ("gemma2", {"head_dim": 8}),  # more norms
        ("olmo2", {}),  # queries are normalized across heads
        ("qwen3_moe", {"num_experts": 4, "mlp_only_layers": [0]}),  # blocks that differ
    ],
)
def test_models_of_another_form_are_not_taken_for_known_ones(kind, values):
    assert geometry(kind, **values) is None


def test_a_model_that_is_no_language_model_has_no_sizes():
    assert geometry_of(nn.Linear(2, 2), None) is None


# ---- mistakes ----


def written(folder: Path, tree) -> str:
    path = folder / "config.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return str(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, 'no "model_type"'),
        ({"model_type": "qwen7"}, "transformers knows no model type 'qwen7' (did you mean 'qwen"),
        ({"model_type": "mine", "auto_map": {}}, "--trust-remote-code runs it"),
        (
            {"hidden_size": None, "vocab_size": None},
            "without vocab_size, hidden_size the size of the model is not known",
        ),
        ({"hidden_size": "wide"}, "Qwen2Config refuses it"),
        ({"hidden_act": "none of them"}, "transformers makes no causal language model of it"),
    ],
)
def test_a_config_that_makes_no_model_is_told_in_a_line(tmp_path, change, message):
    path = written(tmp_path, {**TINY, **change})
    with pytest.raises(ModelError) as caught:
        facts_of(find_config(path), dtype="float32")
    text = str(caught.value)
    assert message in text
    assert "\n" not in text


def test_names_of_older_models_count_as_the_keys_they_stand_for(tmp_path):
    path = written(tmp_path, {"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4})
    assert len(facts_of(find_config(path), dtype="float32").params) == 28


@pytest.mark.parametrize(
    ("text", "message"),
    [("{'a': 1}", ":1:2: not JSON: single quotes"), ("[]", "it must be an object"), ("", "the file is empty")],
)
def test_a_config_that_is_no_object_names_the_place(tmp_path, text, message):
    with pytest.raises(ModelError) as caught:
        find_config(written(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen1.5-7", "no preset has this name (did you mean 'qwen1.5-7b'?)"),
        ("./nowhere", "there is no such file or folder"),
        ("a/b/c", "there is no such file or folder"),
    ],
)
def test_a_name_that_is_nothing_suggests_the_nearest(name, message):
    with pytest.raises(ModelError) as caught:
        find_config(name)
    assert message in str(caught.value)


def test_a_folder_without_config_and_a_path_beside_a_like_one(tmp_path):
    with pytest.raises(ModelError, match="this folder has no config.json"):
        find_config(str(tmp_path))
    (tmp_path / "smollm").mkdir()
    with pytest.raises(ModelError, match="did you mean 'smollm'"):
        find_config(str(tmp_path / "smolm"))


def test_a_name_on_the_hub_that_cannot_be_read_is_told(monkeypatch):
    def offline(name, **_):
        raise OSError(f"cannot reach the hub for {name}\nmore advice")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    with pytest.raises(ModelError) as caught:
        find_config("Qwen/Qwen1.5-7b")
    assert str(caught.value).endswith("cannot reach the hub for Qwen/Qwen1.5-7b (did you mean 'qwen1.5-7b'?)")
