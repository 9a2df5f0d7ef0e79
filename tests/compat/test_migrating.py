"""docs/migrating.md: what stands under "After" runs, and every new name on the page exists."""

import ast
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from models import save_tiny_qwen, tiny_causal_lm, tokens
from ranks import run_alone
from sharded import make
from trainers import arguments, samples

import shardglass
from shardglass.compat import GatheredParameters, is_zero3_enabled, kept
from shardglass.errors import ConfigError, UsageError
from shardglass.hf.arguments import ZeroTrainingArguments
from shardglass.hf.trainer import ZeroMixin

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+)\n((?:.|\n(?!## ))*)", PAGE, flags=re.MULTILINE))
(ARGUMENTS, CONFIG, GATHERED, SUBCLASS, SAVING, ENGINE, LAUNCH, TABLE) = SECTIONS

TRAINER_BEGIN = """
class Rows:
    def __len__(self):
        return 8
    def __getitem__(self, k):
        ids = torch.randint(1, 29, (6,), generator=torch.Generator().manual_seed(k))
        return {"input_ids": ids, "labels": ids}

dataset, tokenizer = Rows(), range(31)
"""

TRAINER_END = """
import json
from shardglass.compat import is_zero3_enabled

handle = trainer.handle
stage = handle.options.stage
assert is_zero3_enabled() == (stage == 3)
assert handle.world_size == 2 and trainer.state.global_step == 2
assert handle.layout.buffers[-1].params[-1].group == 1, "the optimizer of the subclass was sharded"

safe_save_model_for_hf_trainer(trainer, "by_helper")
trainer.save_model("by_trainer")
head = head_state(model)
ends = {"stage": stage, "rows": len(rows), "head": head["lm_head.weight"][0].tolist()}
with GatheredParameters(rows, modifier_rank=1):
    if torch.distributed.get_rank() == 1:
        rows.data[0] = 5.0
with GatheredParameters(rows):
    ends["changed on rank 1"] = rows[0].tolist()
assert torch.equal(handle.state_of("model.embed_tokens.weight")["master"][0], torch.full((16,), 5.0))
torch.distributed.barrier()
if torch.distributed.get_rank() == 0:
    with open("ends.json", "w") as file:
        json.dump(ends, file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""

ENGINE_BEGIN = """
import os
import torch
from transformers import AutoModelForCausalLM

def batch_of(k):
    ids = torch.randint(1, 29, (2, 6), generator=torch.Generator().manual_seed(10 * k + int(os.environ["RANK"])))
    return {"input_ids": ids, "labels": ids}

loader = [batch_of(k) for k in range(4)]
"""

ENGINE_STAGE = """
stage = {stage}
model = AutoModelForCausalLM.from_pretrained("model")
{after}
assert handle.counters["step"] == 2 and scheduler.last_epoch == 2
moments = handle.state_of("lm_head.weight")
assert moments["master"].dtype == torch.float32 and moments["exp_avg"].abs().sum() > 0
state = handle.full_state_dict()
if handle.rank == 0:
    torch.save(state, f"whole{{stage}}.pt")
    os.rename("checkpoints/last", f"checkpoints/{{stage}}")
handle.close()
"""


def blocks(section, heading):
    """The Python blocks of a section under "Before" or "After"."""
    return re.findall(rf"^{heading}:\n\n```python\n(.*?)```", SECTIONS[section], flags=re.MULTILINE | re.DOTALL)


def after(section):
    found = blocks(section, "After")
    assert len(found) == 1, section
    return found[0]


def trainer_script():
    imports = "import torch\n"
    parts = [after(ARGUMENTS), imports + TRAINER_BEGIN, *map(after, (CONFIG, GATHERED, SUBCLASS, SAVING)), TRAINER_END]
    return "\n".join(parts)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def prepared(folder, stage, script):
    save_tiny_qwen(folder / "model", vocabulary=29)
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    (folder / "ds_config.json").write_text(json.dumps(config))
    (folder / "script.py").write_text(script)


def launch(folder, launcher, *arguments, **env):
    command = [sys.executable, "-m", *launcher, "script.py", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(folder), **env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
FLAGS = (
    *("--output_dir", "out", "--deepspeed", "ds_config.json", "--max_steps", "2", "--learning_rate", "1e-2"),
    *("--per_device_train_batch_size", "2", "--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "True"),
)


def accelerate(*flags):
    port = ("--main_process_port", str(free_port()))
    return ("accelerate.commands.accelerate_cli", "launch", *flags, "--num_processes", "2", *port)


@pytest.mark.parametrize(("stage", "by"), [(2, "accelerate"), (3, "torchrun")])
def test_the_trainer_script_of_the_page_runs(tmp_path, stage, by):
    from safetensors.torch import load_file

    prepared(tmp_path, stage, trainer_script())
    launcher = TORCHRUN if by == "torchrun" else accelerate("--multi_gpu")
    code, said = launch(tmp_path, launcher, *FLAGS)
    assert code == 0, said
    ends = json.loads((tmp_path / "ends.json").read_text())
    saved = load_file(tmp_path / "by_trainer" / "model.safetensors")
    helped = load_file(tmp_path / "by_helper" / "model.safetensors")
    assert saved.keys() == helped.keys()
    assert all(torch.equal(saved[name], helped[name]) for name in saved)
    assert saved["model.embed_tokens.weight"].shape == (31, 16)
    assert saved["lm_head.weight"][0].tolist() == ends["head"]
    assert (ends["stage"], ends["rows"], ends["changed on rank 1"]) == (stage, 31, [5.0] * 16)


def test_the_engine_loop_of_the_page_trains_alike_at_stages_2_and_3(tmp_path):
    stages = [ENGINE_STAGE.format(stage=stage, after=after(ENGINE)) for stage in (2, 3)]
    prepared(tmp_path, 3, "\n".join([ENGINE_BEGIN, *stages, "torch.distributed.destroy_process_group()"]))
    code, said = launch(tmp_path, TORCHRUN)
    assert code == 0, said
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
    second, third = (torch.load(tmp_path / f"whole{stage}.pt", weights_only=True) for stage in (2, 3))
    assert second["lm_head.weight"].dtype == torch.bfloat16
    assert second.keys() == third.keys()
    assert all(torch.equal(second[name], third[name]) for name in second)


def test_accelerate_s_own_engine_is_refused_in_one_line_before_the_model_is_loaded(tmp_path):
    prepared(tmp_path, 3, after(ARGUMENTS) + "\nprint('went on', flush=True)\n")
    code, said = launch(tmp_path, accelerate("--use_fsdp"), *FLAGS)
    assert code != 0
    assert "went on" not in said
    lines = [line for line in said.splitlines() if "Accelerate's FSDP plugin is on" in line]
    assert lines
    assert all("turn Accelerate's off. Leave --use_fsdp out of `accelerate launch`" in line for line in lines)


# ---- the page itself ----


def test_every_section_with_python_shows_both_sides_and_they_are_python():
    for section in (ARGUMENTS, CONFIG, GATHERED, SUBCLASS, SAVING, ENGINE):
        assert len(blocks(section, "Before")) == len(blocks(section, "After")) == 1, section
        for heading in ("Before", "After"):
            ast.parse(blocks(section, heading)[0])


def test_what_stands_under_after_imports_nothing_of_deepspeed():
    for section in (ARGUMENTS, CONFIG, GATHERED, SUBCLASS, SAVING, ENGINE):
        imports = [line for line in after(section).splitlines() if re.match(r"(import|from) ", line)]
        assert imports, section
        assert not any(re.match(r"(import|from) (deepspeed|transformers.integrations)", line) for line in imports)


def test_every_new_name_in_the_table_exists():
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", SECTIONS[TABLE], flags=re.MULTILINE)[1:]
    named = [name for _, new in rows for name in re.findall(r"`([\w.]+)", new)]
    assert len(rows) > 20
    homes = {"handle": shardglass.Handle, "trainer": ZeroMixin}
    for name in named:
        first, _, rest = name.partition(".")
        if first == "shardglass":
            module, _, attribute = name.rpartition(".")
            assert hasattr(import_module(module), attribute), name
        elif first in homes and rest not in ("model", "handle"):
            assert hasattr(homes[first], rest), name
    assert {"shardglass.shard", "handle.gathered", "trainer.save_model"} <= set(named)


# ---- arguments ----


@pytest.mark.parametrize(
    ("given", "enabled"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, True),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, False),
        ({"zero_stage": 3}, True),
        ({}, False),
    ],
)
def test_arguments_say_whether_zero3_is_enabled(tmp_path, monkeypatch, given, enabled):
    import gc

    monkeypatch.setattr(kept, "_KEPT", [])  # arguments of other tests may still be alive
    args = ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **given)
    assert is_zero3_enabled() == enabled
    del args
    gc.collect()
    assert not is_zero3_enabled()


def test_arguments_with_a_config_that_cannot_be_read_are_an_error_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "_KEPT", [])
    args = ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", deepspeed="missing.json")
    with pytest.raises(ConfigError, match="missing.json"):
        is_zero3_enabled()
    assert args.deepspeed == "missing.json"


class Hides(ZeroMixin, transformers.Trainer):
    """A Trainer's own create_optimizer() in the wrong order of classes."""

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        return self.optimizer


def training_unsharded(rank, world_size):
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(ZeroTrainingArguments, folder, per_device_train_batch_size=1)
        with pytest.raises(UsageError) as caught:
            Hides(model=tiny_causal_lm(), args=args, train_dataset=samples()).train()
    return str(caught.value)


def test_a_trainer_that_hides_the_mixin_is_told_which_class_comes_first():
    said = run_alone(training_unsharded)
    assert said.startswith("the model of this Hides is not sharded")
    assert "class Sharded(ZeroMixin, YourTrainer)" in said


def resizing(rank, world_size, stage):
    model = tiny_causal_lm()
    handle, _ = make(model, stage=stage)
    with pytest.raises(UsageError) as caught, GatheredParameters(model, modifier_rank=0):
        model.resize_token_embeddings(101, mean_resizing=False)
    with pytest.raises(UsageError) as again:
        model(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    assert str(again.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_embedding_that_is_resized_after_training_began_is_refused(stage):
    said = run_alone(resizing, stage)
    assert said.startswith("lm_head.weight was replaced; model.embed_tokens.weight does not lie in the engine's buffer")
    assert "resize_token_embeddings()" in said
    assert said.endswith("call handle.close(), change it then, make the optimizer anew and shard() again")
