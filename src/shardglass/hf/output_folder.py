"""The output folder before a run: what may lie there, and whether it can be written to.

Owns the judgement that keeps a user's files from being replaced. Leaves writing to the Trainer and ``checkpoints``.
Loads neither torch nor transformers, so that it speaks before anything is loaded.

[Note: what a run replaces] At its end a run puts a model, a tokenizer and its own records in the folder, file by file
over those of the same name, and on its way it replaces ``checkpoint-N`` folders of the same number. Anything else in
the folder is left alone, and does no harm here.
"""

import os
import re
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from shardglass.errors import ConfigError

DEFAULT_OUTPUT = "trainer_output"
"""Where transformers writes without ``--output_dir``."""

CONFIG_FILE = "shardglass_config.json"
"""The resolved config as JSON."""

SUMMARY_FILE = "shardglass_summary.json"
"""The run summary as JSON, the last thing a run writes."""

RUN_FILES = (CONFIG_FILE, SUMMARY_FILE, "trainer_state.json", "training_args.bin")
"""Files that only a Trainer's run leaves behind."""

_CHECKPOINT = re.compile(r"^checkpoint-\d+$")

_MODEL_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.model",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "additional_chat_templates",
)
"""Names of a saved model and its tokenizer, see [Note: what a run replaces]."""

MOST_NAMED = 6
"""Files that one message names; the rest is a number."""


def check_output_folder(
    output_dir: str | None, model: str | None, *, overwrite: bool = False, resumes: bool = False
) -> list[str]:
    """Refuse an output folder in which a run would replace what is not its own.

    Args:
        output_dir: As given; None means ``DEFAULT_OUTPUT``.
        model: The model's folder, or its name on the hub.
        overwrite: The user wants a model that no run wrote to be replaced.
        resumes: The run goes on from a checkpoint, so an earlier run in the folder is meant.

    Returns:
        What the user should know, one sentence each.

    Raises:
        ConfigError: The folder is the model's, lies in it or holds it; is a file; holds another model; or cannot be
            written to.
    """
    folder = Path(output_dir or DEFAULT_OUTPUT).expanduser()
    notes = [] if output_dir else [f"no --output_dir: the run writes to {folder}, counted from {Path.cwd()}"]
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output_dir: {folder} is a file; give a folder")
    files = [name for name in _names_in(folder) if _CHECKPOINT.match(name) and not (folder / name).is_dir()]
    if files:
        raise ConfigError(
            f"--output_dir: {folder / files[0]} is a file, where a checkpoint's folder may have to be; move it away"
        )
    if model:
        _keep_from_model(folder, Path(model).expanduser())
    _try_to_write(folder)
    names = _names_in(folder)
    models = model_files(folder)
    checkpoints = [name for name in names if _CHECKPOINT.match(name)]
    is_run = bool(checkpoints) or any(name in RUN_FILES for name in names)
    if overwrite and (is_run or not models):
        notes.append(f"--overwrite_output_dir does nothing here: {folder} holds no model of others")
    if is_run:
        return [*notes, *([] if resumes else [_earlier_run(folder, checkpoints)])]
    if not models:
        return notes
    if overwrite:
        return [*notes, f"--overwrite_output_dir: the run replaces files of {folder}: {_listed(models)}"]
    raise ConfigError(
        f"--output_dir: {folder} holds files that no run wrote, and the run would replace them: {_listed(models)}; "
        "give another folder, or --overwrite_output_dir True"
    )


def model_files(folder: Path) -> list[str]:
    """The names in a folder that are those of a saved model or its tokenizer."""
    return [name for name in _names_in(folder) if any(fnmatch(name, pattern) for pattern in _MODEL_FILES)]


def _names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _keep_from_model(folder: Path, model: Path) -> None:
    """Keep the output out of the model's folder and the model out of the output's, whatever links lead there."""
    if not model.is_dir():
        return
    output, source = Path(os.path.realpath(folder)), Path(os.path.realpath(model))
    if _same(output, source):
        relation = "is"
    elif any(_same(parent, source) for parent in output.parents):
        relation = "lies in"
    elif any(_same(parent, output) for parent in source.parents):
        relation = "holds"
    else:
        return
    raise ConfigError(
        f"--output_dir: {folder} {relation} the model's folder {model}, whose files the run would replace; give another"
    )


def _same(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def _try_to_write(folder: Path) -> None:
    """Make an entry in the folder, or in the nearest one above it that exists, and remove it."""
    above = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path())
    if not above.is_dir():
        raise ConfigError(f"--output_dir: {folder} cannot be made: {above} is a file")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".shardglass-", dir=above))
    except OSError as error:
        what = "cannot be written to" if above == folder else f"cannot be made in {above}"
        raise ConfigError(f"--output_dir: {folder} {what}: {error.strerror or error}; give another folder") from None


def _earlier_run(folder: Path, checkpoints: list[str]) -> str:
    stay = f"; its {_listed(checkpoints)} stay, unless this run writes the same number" if checkpoints else ""
    return f"{folder} holds an earlier run: its final files are replaced at the end{stay}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
