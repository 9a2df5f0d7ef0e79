"""The files of a DeepSpeed checkpoint: which folder, which tag, which rank's.

Owns names (sources: ``_get_ckpt_name`` and ``_get_zero_ckpt_name`` in ``runtime/engine.py``,
``checkpoint/constants.py``) and what names alone give away: tensor and pipeline parallelism, experts, rank files that
are missing or too many. Opens nothing but ``latest``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardglass.errors import CheckpointError, suggestion

LATEST = "latest"
ANOTHER = "use another checkpoint"

_OPTIM = re.compile(r"^(?P<prefix>(?:bf16_|fp16_)?)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt$")
_SHARD = re.compile(r"^(?P<prefix>(?:bf16_|fp16_)?)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt$")
_MODEL = re.compile(r"^mp_rank_(?P<mp>\d+)_model_states\.pt$")
_EXPERT = re.compile(r"^(layer_-?\d+_expert_|expert_|expp_rank_)\d+.*_states\.pt$")
_LAYER = re.compile(r"^layer_\d+-model_.*states\.pt$")
_STEP = re.compile(r"^global_step\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of one checkpoint, by name alone.

    Attributes:
        folder: The tag's folder, in which they are.
        model: The file of the whole model; None at stage 3.
        shards: Stage 3: each rank's model file, by rank.
        optim: Each rank's optimizer file, by rank.
    """

    folder: Path
    model: Path | None
    shards: Mapping[int, Path]
    optim: Mapping[int, Path]

    @property
    def first_model(self) -> Path:
        """The model file of rank 0.

        Raises:
            CheckpointError: It is missing.
        """
        if self.model is not None:
            return self.model
        if 0 in self.shards:
            return self.shards[0]
        name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if self.shards else "mp_rank_00_model_states.pt"
        raise CheckpointError(f"{self.folder / name}: the file is missing; the checkpoint is incomplete, {ANOTHER}")

    def check_ranks(self, world_size: int) -> None:
        """See that every rank's files are there, and none of a larger run.

        Raises:
            CheckpointError: They are not; names the files.
        """
        prefix = next(iter(self.optim.values())).name.partition("zero_pp_rank_")[0] if self.optim else "[bf16_]"
        _check_ranks(self.folder, self.optim, prefix + "zero_pp_rank_{}_mp_rank_00_optim_states.pt", world_size)
        if self.model is None:
            _check_ranks(self.folder, self.shards, "zero_pp_rank_{}_mp_rank_00_model_states.pt", world_size)


def is_deepspeed_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like one that DeepSpeed wrote, or like a checkpoint of the Trainer with one in it.

    Args:
        folder: One with ``latest`` in it, with ``global_stepN`` folders, or such a tag's folder itself. Whether it
            can be read is for ``open_deepspeed`` to say.
    """
    if not folder.is_dir():
        return False
    names = [path.name for path in folder.iterdir()]
    if any(pattern.match(name) for name in names for pattern in (_OPTIM, _SHARD, _MODEL)):
        return True
    return (folder / LATEST).is_file() or any(_STEP.match(name) and (folder / name).is_dir() for name in names)


def tag_folder(folder: Path) -> Path:
    """The folder of the tag that is to be read.

    Args:
        folder: A tag's folder, or one with ``latest``.

    Raises:
        CheckpointError: There is none, or ``latest`` names one that is missing.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint folder")
    tags = sorted(path.name for path in folder.iterdir() if path.is_dir() and _holds_states(path))
    if _holds_states(folder):
        return folder
    latest = folder / LATEST
    if not latest.is_file():
        if tags:
            raise CheckpointError(
                f"{folder}: no file {LATEST!r} says which of {', '.join(tags)} is the newest; give one of these folders"
            )
        raise CheckpointError(f"{folder}: no DeepSpeed checkpoint: it has neither {LATEST!r} nor *_states.pt files")
    try:
        tag = latest.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise CheckpointError(f"{latest}: cannot be read ({error}); give the tag's folder instead") from error
    if tag in {"", ".", ".."} or Path(tag).name != tag:
        raise CheckpointError(f"{latest}: {tag!r} is no tag; give the tag's folder instead")
    if not (folder / tag).is_dir():
        instead = f"; there are {', '.join(tags)}: give one of these folders" if tags else f"; {ANOTHER}"
        raise CheckpointError(f"{latest} names {tag!r}{suggestion(tag, tags)}, and there is no such folder{instead}")
    return folder / tag


def find_files(folder: Path) -> Files:
    """Sort the files of a tag's folder by what they are and by rank, ranks as numbers.

    Raises:
        CheckpointError: There are none, or their names say that they cannot be read here; says why.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    _refuse_kinds(folder, names)
    optim = _by_rank(folder, names, _OPTIM)
    shards = _by_rank(folder, names, _SHARD)
    model = folder / "mp_rank_00_model_states.pt"
    if not optim and not shards and not model.is_file():
        raise CheckpointError(
            f"{folder}: no DeepSpeed checkpoint: it has no *_model_states.pt and no *_optim_states.pt"
        )
    if model.is_file() and shards:
        raise CheckpointError(
            f"{folder}: {model.name} is of stage 1 or 2, {shards[min(shards)].name} of stage 3: two checkpoints are "
            f"mixed in one folder; {ANOTHER}"
        )
    return Files(folder=folder, model=model if model.is_file() else None, shards=shards, optim=optim)


def _holds_states(folder: Path) -> bool:
    """Whether files lie in a folder that DeepSpeed's checkpoints consist of."""
    return any(path.name.endswith("_states.pt") for path in folder.iterdir() if path.is_file())


def _refuse_kinds(folder: Path, names: Sequence[str]) -> None:
    """Refuse what more than plain data parallelism wrote.

    Raises:
        CheckpointError: Names what it is.
    """
    for name in names:
        if _EXPERT.match(name):
            raise CheckpointError(
                f"{folder / name}: a file of experts (MoE), which cannot be read yet; make one fp32 file of the "
                "checkpoint with DeepSpeed and start from that"
            )
        if _LAYER.match(name):
            raise CheckpointError(
                f"{folder / name}: a file of pipeline parallelism, which cannot be read yet; make a plain model of it "
                "with DeepSpeed and start from that"
            )
        match = _OPTIM.match(name) or _SHARD.match(name) or _MODEL.match(name)
        if match and int(match["mp"]) > 0:
            raise CheckpointError(
                f"{folder / name}: a file of tensor parallelism (mp_rank {int(match['mp'])}), which cannot be read "
                "yet; make a plain model of it with DeepSpeed and start from that"
            )
    if (folder / "zero").is_dir() and not any(_OPTIM.match(name) for name in names):
        raise CheckpointError(
            f"{folder}: a universal checkpoint, which cannot be read; give the one it was made of, with its "
            "*_optim_states.pt files"
        )


def _by_rank(folder: Path, names: Sequence[str], pattern: re.Pattern[str]) -> dict[int, Path]:
    """The files that match, by ascending rank.

    Raises:
        CheckpointError: Two are of one rank.
    """
    found: dict[int, Path] = {}
    for match in filter(None, map(pattern.match, names)):
        rank = int(match["rank"])
        if rank in found:
            raise CheckpointError(
                f"{folder}: {found[rank].name} and {match.string} are both of rank {rank}: two checkpoints are mixed "
                f"in one folder; {ANOTHER}"
            )
        found[rank] = folder / match.string
    return dict(sorted(found.items()))


def _check_ranks(folder: Path, found: Mapping[int, Path], form: str, world_size: int) -> None:
    """See that one kind of file is there for the ranks 0 to ``world_size`` - 1 and for no others.

    Raises:
        CheckpointError: Names those that are missing or too many.
    """
    missing = [form.format(rank) for rank in range(world_size) if rank not in found]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{folder}: incomplete: {world_size} ranks wrote it and {', '.join(missing[:3])}{more} "
            f"{'is' if len(missing) == 1 else 'are'} missing; bring every rank's files into this folder, or {ANOTHER}"
        )
    spare = [path.name for rank, path in found.items() if rank >= world_size]
    if spare:
        raise CheckpointError(
            f"{folder}: {world_size} ranks wrote it, and {spare[0]} is of a rank beyond: checkpoints of two world "
            f"sizes are mixed in one folder; {ANOTHER}"
        )
