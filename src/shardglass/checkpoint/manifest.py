"""The manifest of a checkpoint: a JSON file that says what is in it.

Owns the file ``shardglass.json`` and the check that everything it lists is there. Its last entry to be written is
itself, so a folder without one is no checkpoint of ours.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardglass.checkpoint.digest import digest_of
from shardglass.errors import CheckpointError
from shardglass.layout import Layout

FORMAT = 1
MANIFEST = "shardglass.json"
LAYOUT = "layout.json"
STATE = "state"
"""Folder of the tensors: safetensors files written by torch.distributed.checkpoint."""

IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")
"""Keys of a param_group that say how it is computed; they are not kept, the present run's hold."""


def stored_name(kind: str, name: str) -> str:
    """The name of a tensor in ``STATE``, see [Note: names] in ``save``."""
    return f"{kind}/{name}" if kind in ("master", "param", "buffer") else f"optimizer.{kind}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        shardglass: Version of the writer.
        torch: Version of torch.
        world_size: Number of ranks that wrote it.
        stage: ZeRO stage then.
        optimizer: Class of the optimizer.
        groups: Options of each param_group but for its parameters.
        states: Keys of the optimizer's state; True for one number a parameter.
        counters: Steps, skipped steps.
        extra: What the caller added, such as the Trainer's batch sizes.
        files: Bytes of every file, by path in the folder.
        digests: Checksum of every file, see ``digest``; nothing of checkpoints before there were any.
    """

    shardglass: str
    torch: str
    world_size: int
    stage: int
    optimizer: str
    groups: tuple[Mapping[str, Any], ...]
    states: Mapping[str, bool]
    counters: Mapping[str, int]
    extra: Mapping[str, Any]
    files: Mapping[str, int]
    digests: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The versioned JSON form."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)


def files_in(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and check that all it lists is there.

    Raises:
        CheckpointError: There is none, it is of another format, or a file is missing or of another size.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint folder")
    if not path.is_file():
        raise CheckpointError(f"{folder}: incomplete, {MANIFEST} is missing; use another checkpoint")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data.pop("format")
        if version != FORMAT:
            raise CheckpointError(f"{path}: format {version}, and format {FORMAT} is understood; use its shardglass")
        manifest = Manifest(**{**data, "groups": tuple(data["groups"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); use another checkpoint") from error
    present = files_in(folder)
    for name, size in manifest.files.items():
        if name not in present:
            raise CheckpointError(f"{folder}: incomplete, {name} is missing; use another checkpoint")
        if present[name] != size:
            raise CheckpointError(
                f"{folder}: {name} has {present[name]} bytes and had {size} when it was written; use another checkpoint"
            )
    return manifest


def damaged_files(folder: Path, manifest: Manifest) -> list[str]:
    """A line for every file whose bytes are others than were written; reads all of them.

    Args:
        folder: The checkpoint.
        manifest: What it says of itself.
    """
    faults = []
    for name, told in manifest.digests.items():
        try:
            found = digest_of(folder / name)
        except OSError as error:
            faults.append(f"{name}: cannot be read: {error.strerror}")
            continue
        if found != told:
            faults.append(f"{name}: checksum {found}, and {told} when it was written")
    return faults


def read_layout(folder: Path) -> Layout:
    """The layout a checkpoint was written with.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return Layout.from_json((folder / LAYOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / LAYOUT}: cannot be read ({error}); use another checkpoint") from error
