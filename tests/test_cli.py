"""The command line: answers without torch, mistakes as one message with exit code 2."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardglass
from shardglass import cli
from shardglass.errors import ConfigError, DataError
from shardglass.hf.flags import LaunchArguments
from shardglass.hf.launch import launch_options, split_launch
from shardglass.plan.plan import Plan

REQUIRED = ["--model_name_or_path", "model", "--data_path", "data.json"]

SOURCE = Path(shardglass.__file__).parents[1]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def run(*argv: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "shardglass", *argv],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def message_of(*argv: str) -> str:
    """Run the command in this process and return the message of its error."""
    with pytest.raises(ConfigError) as caught:
        cli.app(["train", *argv])
    return str(caught.value)


def options_of(*argv: str) -> LaunchArguments:
    launch, _ = split_launch(argv)
    return launch_options(launch)


# ---- without torch ----


def test_help_version_and_unknown_flags_are_answered_without_torch():
    script = (
        "import sys\nfrom shardglass import cli\n"
        "for argv in (['--help'], ['--version'], ['version'], ['train', '--help'], ['train', '--lerning_rate', '1']):\n"
        "    sys.argv = ['shardglass', *argv]\n"
        "    try:\n        cli.main()\n    except SystemExit as stop:\n        print('exit', stop.code)\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("exit")] == ["exit 0"] * 4 + ["exit 2"]
    assert done.stdout.splitlines()[-1] == "False False"
    assert done.stdout.count(shardglass.__version__) >= 2
    assert "--gradient_accumulation_steps" in done.stdout
    assert "did you mean --learning_rate?" in done.stderr


def test_python_m_shardglass_ends_a_mistake_with_one_message_and_code_2():
    done = run("train", *REQUIRED, "--num_train_epochs", "two")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "shardglass: flags: --num_train_epochs two: not a number",
        "  `shardglass train --help` lists all flags",
    ]


def test_commands_are_train_and_version():
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert [name for name in ("train", "version") if name in result.stdout] == ["train", "version"]
    assert CliRunner().invoke(cli.app, ["trian"]).exit_code == 2


# ---- flags of the launcher ----


def test_launcher_flags_are_separated_from_those_of_training():
    argv = ["--nproc", "2", "--learning-rate=1e-5", "--master-port=6819", "--max_steps", "-1", "--run_name=--x"]
    launch, flags = split_launch(argv)
    assert launch.values == {"nproc_per_node": "2", "master_port": 6819}
    assert flags == ["--learning_rate", "1e-5", "--max_steps", "-1", "--run_name=--x"]


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--nproc", "0"], "--nproc_per_node 0: it must be a number of at least 1, or gpu, cpu or auto"),
        (["--nnodes", "1:2:3"], "--nnodes 1:2:3"),
        (["--nnodes", "2"], "by --master_addr or --rdzv_endpoint"),
        (["--master_port", "70000"], "--master_port 70000"),
        (["--master_port", "x"], "--master_port x: not a whole number"),
    ],
)
def test_launcher_flags_that_cannot_be_used_are_refused(argv, part):
    with pytest.raises(ConfigError) as caught:
        options_of(*argv)
    assert part in str(caught.value)


def test_launcher_flags_keep_the_names_of_torchrun():
    options = options_of("--nproc_per_node", "gpu", "--nnodes", "2", "--node_rank", "1", "--master_addr", "host")
    assert (options.nproc_per_node, options.nnodes, options.node_rank) == ("gpu", "2", 1)
    assert (options.master_addr, options.master_port) == ("host", None)


def test_launcher_flags_in_a_launched_process_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--nproc_per_node: this process was started by a launcher already" in message_of(*REQUIRED, "--nproc", "2")


# ---- what is checked before processes start ----


def test_deepspeed_json_is_checked_before_processes_start(tmp_path):
    assert "ds.json" in message_of(*REQUIRED, "--deepspeed", str(tmp_path / "ds.json"))
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"gradient_clipp1ng": 1.0}))
    assert "gradient_clipping" in message_of(*REQUIRED, "--deepspeed", str(config))


def test_values_that_only_transformers_knows_are_checked_before_processes_start(tmp_path, monkeypatch):
    (tmp_path / "data.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    text = message_of(*REQUIRED, "--lr_scheduler_type", "cosin", "--ddp_backend", "gloo")
    assert "--lr_scheduler_type cosin: it must be one of linear, cosine" in text


def test_the_models_own_folder_is_refused_as_output_without_torch(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "shardglass.hf.arguments", None)  # importing it would fail
    assert "model is the model's folder model" in message_of(*REQUIRED, "--output_dir", "model")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--data_path", "data.json: there is no such file (did you mean 'dato.json'?)"),
        ("--eval_data_path", ".: this is a folder; give the JSON file in it"),
    ],
)
def test_data_that_is_not_there_is_told_without_torch(tmp_path, monkeypatch, flag, message):
    (tmp_path / "dato.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "shardglass.hf.arguments", None)  # importing it would fail
    given = REQUIRED if flag == "--data_path" else [*REQUIRED, "--data_path", "dato.json", flag, "."]
    with pytest.raises(DataError) as caught:
        cli.app(["train", *given])
    assert str(caught.value) == message


# ---- plan and env ----


def planned(*argv: str) -> "tuple[int, str]":
    """Exit code and standard output of ``shardglass plan`` in this process."""
    done = CliRunner().invoke(cli.app, ["plan", *argv], env={"COLUMNS": "132"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_help_of_plan_and_of_all_commands_load_no_torch():
    code = "import sys; from shardglass import cli; from typer.testing import CliRunner\n"
    code += "for argv in (['--help'], ['plan', '--help'], ['env', '--help']):\n"
    code += "    assert CliRunner().invoke(cli.app, argv).exit_code == 0, argv\n"
    code += "sys.exit(3 if {'torch', 'transformers'} & set(sys.modules) else 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("flags", [["nosuch"], ["smollm2-135m", "--stage", "7"], ["smollm2-135m", "--dtype", "int8"]])
def test_wrong_values_of_plan_are_told_before_torch_is_imported(flags):
    code = "import sys\nfrom shardglass import cli\ntry:\n    cli.main()\nexcept SystemExit as end:\n"
    code += "    sys.exit(3 if {'torch', 'transformers'} & set(sys.modules) else end.code)"
    done = subprocess.run([sys.executable, "-c", code, "plan", *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("shardglass: ")


def test_the_flags_of_plan_are_these():
    text = CliRunner().invoke(cli.app, ["plan", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    flags = {word.split(",")[0] for line in text.splitlines() for word in line.split() if word.startswith("--")}
    assert flags == {
        "--accumulation",
        "--attention",
        "--cache-dir",
        "--cpu",
        "--deepspeed",
        "--dtype",
        "--gpu",
        "--gpus-per-node",
        "--gradient-checkpointing",
        "--help",
        "--host-ram",
        "--html",
        "--json",
        "--micro-batch",
        "--optimizer",
        "--reserve",
        "--scheme",
        "--seq-len",
        "--simulate",
        "--stage",
        "--trust-remote-code",
        "--world-size",
    }


def test_a_plan_is_shown_and_written(tmp_path):
    file = tmp_path / "plan.json"
    code, text = planned("qwen1.5-7b", "--world-size", "2", "--scheme", "deepspeed-flat", "--json", str(file))
    assert code == 0
    assert text.startswith("no verdict: the memory of a GPU was not given")
    assert "387 tensors, 7,721,324,544 elements" in text
    written = Plan.from_json(file.read_text())
    assert (written.run.world_size, written.partition.scheme) == (2, "deepspeed-flat")


def test_a_plan_goes_to_standard_output_as_json_alone():
    code, text = planned("smollm2-135m", "--world_size", "2", "--json", "-")
    assert code == 0
    assert Plan.from_json(text).run.world_size == 2


def test_flags_of_training_have_their_names_in_plan_too():
    code, text = planned(
        "smollm2-135m",
        *("--zero_stage", "1", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"),
        *("--model_max_length", "512", "--attn_implementation", "flash_attention_2", "--optim", "adamw_torch"),
        *("--json", "-"),
    )
    assert code == 0
    run = Plan.from_json(text).run
    assert (run.stage, run.micro_batch, run.accumulation, run.length, run.attention) == (1, 4, 2, 512, "sdpa")


def test_qwen_7b_is_planned_without_the_memory_of_its_weights():
    planned("smollm2-135m")  # what is imported once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, text = planned("qwen1.5-7b", "--gpu", "80GB")
    assert (code, text.partition(" on ")[0]) == (0, "fits: stage 3")
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib * 1024 < 1e9, "the weights are 15.4e9 bytes in bf16"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["qwen1.5-7"], "no preset has this name (did you mean 'qwen1.5-7b'?)"),
        (["qwen1.5-7b", "--json", "/nowhere/plan.json"], "--json /nowhere/plan.json: cannot be written"),
        pytest.param(
            ["qwen1.5-7b", "--world-size", "0"],
            "the world size is 0; it must be at least 1",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            ["qwen1.5-7b", "--deepspeed", "/nowhere.json"],
            "/nowhere.json: there is no such file",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_mistakes_of_a_plan_are_one_line_with_code_2(argv, message):
    done = run("plan", *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_env_names_versions_devices_and_what_was_tested():
    done = run("env")
    assert (done.returncode, done.stderr) == (0, "")
    for text in (shardglass.__version__, "torch 2", "gloo yes", "CUDA GPUs, NCCL: never run: no GPU yet"):
        assert text in done.stdout
