"""The output folder before a run: what is refused, what is said, and that looking leaves no trace."""

import os

import pytest
from transformers import TrainingArguments

from shardglass.errors import ConfigError
from shardglass.hf.output_folder import DEFAULT_OUTPUT, RUN_FILES, check_output_folder


def files_in(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("kept")
    return folder


def refusal(output, model=None, **given):
    with pytest.raises(ConfigError) as caught:
        check_output_folder(str(output), str(model) if model else None, **given)
    return str(caught.value)


@pytest.fixture
def model(tmp_path):
    return files_in(tmp_path / "models" / "tiny", "config.json", "model.safetensors")


@pytest.mark.parametrize(
    ("output", "relation"),
    [
        ("models/tiny", "is"),
        ("models/../models/tiny", "is"),
        ("models/tiny/out/again", "lies in"),
        ("models", "holds"),
        ("link", "is"),
        ("link/out", "lies in"),
        ("link_above", "holds"),
    ],
)
def test_the_models_folder_is_kept_from_the_output(tmp_path, model, output, relation):
    (tmp_path / "link").symlink_to(model, target_is_directory=True)
    (tmp_path / "link_above").symlink_to(model.parent, target_is_directory=True)
    for overwrite in (False, True):
        message = refusal(tmp_path / output, model, overwrite=overwrite)
        assert message.startswith(f"--output_dir: {tmp_path / output} {relation} the model's folder {model}")
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors"]


def test_a_model_reached_through_a_link_is_kept_too(tmp_path, model):
    (tmp_path / "link").symlink_to(model, target_is_directory=True)
    assert " is the model's folder " in refusal(model, tmp_path / "link")


def test_a_model_that_no_run_wrote_is_not_replaced(tmp_path, model):
    other = files_in(tmp_path / "other", "config.json", "model-00001-of-00002.safetensors", "notes.txt")
    message = refusal(other, model)
    assert "would replace them: config.json, model-00001-of-00002.safetensors; give another folder" in message
    assert "--overwrite_output_dir True" in message
    (note,) = check_output_folder(str(other), str(model), overwrite=True)
    assert note.startswith("--overwrite_output_dir: the run replaces files of ")


def test_a_tokenizer_alone_is_not_replaced_either(tmp_path):
    assert "tokenizer.json" in refusal(files_in(tmp_path / "tokens", "tokenizer.json"))


def test_long_lists_are_cut(tmp_path):
    names = [f"model-{k:05}-of-00009.safetensors" for k in range(1, 10)]
    assert "model-00006-of-00009.safetensors and 3 more" in refusal(files_in(tmp_path / "big", *names))


@pytest.mark.parametrize("name", RUN_FILES)
def test_an_earlier_run_is_written_over_and_said(tmp_path, name):
    out = files_in(tmp_path / "out", "config.json", "model.safetensors", name)
    assert check_output_folder(str(out), None) == [
        f"{out} holds an earlier run: its final files are replaced at the end"
    ]
    assert check_output_folder(str(out), None, resumes=True) == []


def test_checkpoints_of_an_earlier_run_stay_and_are_named(tmp_path):
    out = files_in(tmp_path / "out", "model.safetensors")
    (out / "checkpoint-20").mkdir()
    (note,) = check_output_folder(str(out), None)
    assert note.endswith("; its checkpoint-20 stay, unless this run writes the same number")


def test_what_a_run_does_not_touch_does_no_harm(tmp_path):
    out = files_in(tmp_path / "out", "train.log", "data.json", ".gitignore")
    (out / "runs").mkdir()
    assert check_output_folder(str(out), None) == []
    (note,) = check_output_folder(str(out), None, overwrite=True)
    assert note == f"--overwrite_output_dir does nothing here: {out} holds no model of others"


def test_the_default_folder_is_said_and_is_that_of_transformers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_output_folder(None, None) == [
        f"no --output_dir: the run writes to {DEFAULT_OUTPUT}, counted from {tmp_path}"
    ]
    assert TrainingArguments(use_cpu=True).output_dir == DEFAULT_OUTPUT


def test_looking_leaves_no_trace(tmp_path):
    check_output_folder(str(tmp_path / "a" / "b"), None)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("kept")
    assert refusal(tmp_path / "file") == f"--output_dir: {tmp_path / 'file'} is a file; give a folder"
    assert refusal(tmp_path / "file" / "out").startswith(f"--output_dir: {tmp_path / 'file' / 'out'} cannot be made")


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    assert refusal("/proc/nowhere/out").startswith("--output_dir: /proc/nowhere/out cannot be made in /proc: ")
    if os.getuid() == 0:
        return  # root may write everywhere
    tmp_path.chmod(0o500)
    assert f"--output_dir: {tmp_path} cannot be written to" in refusal(tmp_path)


def test_a_file_in_a_checkpoint_s_place_is_told_before_the_run(tmp_path):
    (tmp_path / "checkpoint-2").touch()
    with pytest.raises(ConfigError, match=r"checkpoint-2 is a file, where a checkpoint's folder may have to be"):
        check_output_folder(str(tmp_path), None)
