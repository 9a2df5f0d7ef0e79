"""Which kind of checkpoint a folder is.

Owns the signs by which each writer's folder is known. Opening reads no weights.
"""

from pathlib import Path

from shardglass.checkpoint.fsdp import DCP_METADATA, DcpCheckpoint
from shardglass.checkpoint.known import KnownModel
from shardglass.checkpoint.manifest import LAYOUT, MANIFEST, STATE
from shardglass.checkpoint.own import OwnCheckpoint
from shardglass.checkpoint.source import Source
from shardglass.checkpoint.trainer import OPTIMIZER, TrainerCheckpoint
from shardglass.errors import CheckpointError

KINDS = (
    "checkpoints of shardglass, of the Hugging Face Trainer (optimizer.pt), of DeepSpeed (ZeRO 1 to 3), and those that "
    "torch.distributed.checkpoint wrote of a sharded model"
)


def kind_of(folder: Path) -> str:
    """The kind of a folder: "own", "deepspeed", "dcp" or "trainer".

    Raises:
        CheckpointError: It is none.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint folder")
    if (folder / MANIFEST).is_file():
        return "own"
    if (folder / DCP_METADATA).is_file():
        return "dcp"
    if (folder / OPTIMIZER).is_file():
        return "trainer"
    if (folder / LAYOUT).is_file() or (folder / STATE).is_dir():
        raise CheckpointError(f"{folder}: incomplete, {MANIFEST} is missing; use another checkpoint")
    if any(folder.glob("model*.safetensors")):
        raise CheckpointError(
            f"{folder}: a saved model without a training state; begin anew from it as the model, or resume from another"
        )
    raise CheckpointError(f"{folder}: no checkpoint to resume from; what can be read are {KINDS}")


def open_checkpoint(folder: Path, known: KnownModel) -> Source:
    """Open a checkpoint of any known writer.

    Args:
        folder: The folder.
        known: The model that it is read for.

    Raises:
        CheckpointError: It is no checkpoint, incomplete or damaged.
    """
    kind = kind_of(folder)
    if kind == "own":
        return OwnCheckpoint(folder)
    if kind == "dcp":
        return DcpCheckpoint(folder, known)
    return TrainerCheckpoint(folder, known)
