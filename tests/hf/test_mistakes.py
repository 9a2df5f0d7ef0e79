"""What libraries refuse is one line that names the flag; what we raise ourselves keeps its traceback."""

import shutil

import pytest
import torch
from models import tiny_causal_lm
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainingArguments

from shardglass.errors import ConfigError, ModelError
from shardglass.hf.arguments import parse_command
from shardglass.hf.load import load_config_of, load_model, load_tokenizer
from shardglass.hf.mistakes import MOST_CHARACTERS, flag_meant, mistakes_told, one_line
from shardglass.hf.rehearsal import check_optimizer, check_schedule
from shardglass.words import ON_A_COMMAND_LINE

WHERE = {"cache_dir": None, "trust_remote_code": False, "words": ON_A_COMMAND_LINE}


def message_of(*flags):
    with pytest.raises(ConfigError) as caught:
        parse_command(["--model_name_or_path", "model", "--data_path", "data.json", *flags])
    return str(caught.value)


# ---- the line ----


@pytest.mark.parametrize(
    ("message", "given", "flag"),
    [
        ("You set `use_liger_kernel` to `True`", {"use_liger_kernel": True}, "--use_liger_kernel True"),
        ("AcceleratorConfig got a keyword", {"accelerator_config": "a.json"}, "--accelerator_config a.json"),
        (
            "FlashAttention2 is not there",
            {"attn_implementation": "flash_attention_2"},
            "--attn_implementation flash_at",
        ),
        ("bogus is not supported", {"report_to": ["bogus"], "seed": 3}, "--report_to bogus"),
        ("the seed of all evil", {"seed": 3}, None),
        ("--seed must not be so", {"seed": 3}, "--seed 3"),
        ("a model is missing", {"model_name_or_path": "model"}, None),
        ("both save_steps and eval_steps", {"save_steps": 3, "eval_steps": 2}, None),
        ("nothing of it", {"save_steps": 3}, None),
        ("True is no number", {"bf16": "True"}, None),
    ],
)
def test_the_flag_that_a_message_speaks_of_is_found(message, given, flag):
    found = flag_meant(message, given)
    assert found == flag or (flag is not None and found.startswith(flag))


def test_a_message_becomes_one_line_of_bounded_length():
    assert one_line(ValueError("two\n  lines")) == "two lines"
    assert one_line(KeyError("key")) == "KeyError: 'key'"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("word " * 500))) == MOST_CHARACTERS + 4


def test_what_a_library_raises_is_a_mistake_and_what_we_raise_is_ours():
    with pytest.raises(ConfigError, match=r"^--tf32 True: "), mistakes_told({"tf32": True, "seed": 1}):
        TrainingArguments(use_cpu=True, tf32=True)
    with pytest.raises(ConfigError, match=r"^the Trainer: "), mistakes_told({}, "the Trainer"):
        torch.zeros(2).reshape(shape=(3, "x"))
    with pytest.raises(IndexError), mistakes_told({}):
        [].pop()  # of no kind that answers to a user
    with pytest.raises(ModelError), mistakes_told({}):
        raise ModelError("told already")


def raise_in(module):
    """Raise where a module of this name would."""
    exec(compile("raise ValueError('fault')", "line", "exec"), {"__name__": module})


def test_an_error_of_our_own_lines_is_not_taken_for_the_users():
    with pytest.raises(ValueError, match="fault"), mistakes_told({}):
        raise_in("shardglass.hf.trainer")
    with pytest.raises(ConfigError, match="fault"), mistakes_told({}):
        raise_in("transformers.trainer")


# ---- flags ----


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--eval_strategy", "steps"], "--eval_strategy steps: there is nothing to evaluate on; give --eval_data_path"),
        (["--report_to", "wandbb"], "--report_to wandbb: it must be one of none, all"),
        (["--torch_compile_mode", "maximal"], "--torch_compile_mode maximal: it must be one of default"),
        (["--use_liger_kernel"], "--use_liger_kernel: liger-kernel is not installed"),
        (["--dtype", "bf16"], "--dtype bf16: it must be one of auto, float32, bfloat16, float16"),
        (["--tf32", "True"], "--tf32 True: "),
        (["--debug", "overflow"], "--debug overflow: "),
        (["--load_best_model_at_end"], "--load_best_model_at_end True: "),
        (["--accelerator_config", '{"x": 1}'], "--accelerator_config {"),
    ],
)
def test_flags_that_the_trainer_would_refuse_later_are_named_at_once(flags, part, monkeypatch):
    monkeypatch.setattr("shardglass.hf.rehearsal.is_liger_kernel_available", lambda: False)
    text = message_of(*flags)
    assert part in text
    assert len(text.splitlines()) <= 2


def test_reporters_without_their_package_are_named(monkeypatch):
    monkeypatch.setattr("shardglass.hf.rehearsal.get_available_reporting_integrations", lambda: ["tensorboard"])
    text = message_of("--report_to", "tensorboard", "wandb", "mlflow")
    assert [name for name in ("tensorboard", "wandb", "mlflow") if f"--report_to {name}: its pack" in text] == [
        "wandb",
        "mlflow",
    ]


def test_pushing_while_the_hub_is_switched_off_is_named(monkeypatch):
    monkeypatch.setattr("shardglass.hf.rehearsal.is_offline_mode", lambda: True)
    assert "--push_to_hub: the hub is switched off" in message_of("--push_to_hub")


@pytest.mark.parametrize(
    ("kind", "kwargs", "part"),
    [
        ("cosine_with_min_lr", None, "min_lr or min_lr_rate"),
        ("warmup_stable_decay", None, "num_decay_steps"),
        ("cosine", {"bogus": 1}, "bogus"),
    ],
)
def test_a_scheduler_that_needs_other_kwargs_is_named(kind, kwargs, part):
    with pytest.raises(ConfigError, match=f"^--lr_scheduler_type {kind}: .*{part}.*--lr_scheduler_kwargs"):
        check_schedule(TrainingArguments(use_cpu=True, lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs))


def test_schedulers_and_optimizers_that_can_be_made_pass():
    check_schedule(TrainingArguments(use_cpu=True, lr_scheduler_type="polynomial", learning_rate=0.0))
    kwargs = {"min_lr_rate": 0.1}
    check_schedule(TrainingArguments(use_cpu=True, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs=kwargs))
    check_optimizer(TrainingArguments(use_cpu=True, optim="sgd", optim_args="momentum=0.9"))
    with pytest.raises(ConfigError, match=r"^--optim_args momentum: .* as name=value"):
        check_optimizer(TrainingArguments(use_cpu=True, optim="sgd", optim_args="momentum"))


# ---- models ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model and a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "whole"
    tiny_causal_lm().save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_bytes = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=by_bytes).save_pretrained(folder)
    return folder


def refused(load, name, **options):
    with pytest.raises(ModelError) as caught:
        load(str(name), **WHERE, **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_whole_folder_loads(saved):
    assert len(load_tokenizer(str(saved), **WHERE)) >= 256
    assert load_model(str(saved), **WHERE) is not None


def test_weights_that_are_cut_off_are_one_line(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert refused(load_model, tmp_path / "cut").startswith(f"{weights}: lm_head.weight lies behind the end")
    weights.write_bytes(weights.read_bytes()[:500])
    assert refused(load_model, tmp_path / "cut").startswith(f"{weights}: not a safetensors file, or cut off: copy it")


def test_attention_that_is_not_installed_names_its_flag(saved):
    for kind in ("flash_attention_2", "bogus"):
        assert refused(load_model, saved, attn_implementation=kind).startswith(f"--attn_implementation {kind}: ")


def test_a_folder_without_tokenizer_files_is_named_with_them(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    text = refused(load_tokenizer, tmp_path / "mute")
    assert text.startswith(f"--model_name_or_path: {tmp_path / 'mute'} has no tokenizer files (tokenizer.json")


def test_a_tokenizer_file_that_is_broken_is_not_called_missing(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    text = refused(load_tokenizer, tmp_path / "broken")
    assert text.startswith(f"--model_name_or_path: the tokenizer of {tmp_path / 'broken'} cannot be read: ")


def test_a_name_that_is_nowhere_says_so_of_folder_and_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modle").mkdir()
    assert refused(load_config_of, "model") == (
        f"--model_name_or_path: there is no folder model (did you mean 'modle'?) in {tmp_path}, and the hub, where it "
        "could be a model's name, cannot be reached"
    )
