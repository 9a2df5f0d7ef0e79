"""A DeepSpeed checkpoint of ZeRO stage 1, 2 or 3: what is in it, and runs of its elements.

Owns what a caller sees. Every file is opened once, at the start, so that whatever is wrong with one is told before
anything is loaded; the bytes of weights and states are read when ``run`` copies them, see [Note: what is read of a
file] in ``unpickling``.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardglass.checkpoint.deepspeed import agreement
from shardglass.checkpoint.deepspeed.folder import Files, find_files, tag_folder
from shardglass.checkpoint.deepspeed.model_states import ModelStates, read_model_states
from shardglass.checkpoint.deepspeed.optim_states import Number, OptimStates, read_optim_states
from shardglass.checkpoint.deepspeed.places import (
    Place,
    Places,
    Shape,
    flat_places,
    part_of,
    partitioned_places,
)
from shardglass.checkpoint.deepspeed.unpickling import check_bytes
from shardglass.checkpoint.deepspeed.versions import version_warning
from shardglass.errors import CheckpointError, UsageError, suggestion

logger = logging.getLogger(__name__)

MASTER, WEIGHT = "master", "weight"

SAMPLE = 4096
"""Elements of each parameter that are compared where steps leave a doubt."""


class DeepSpeedCheckpoint:
    """What a DeepSpeed checkpoint holds; made by ``open_deepspeed``.

    Attributes:
        folder: The tag's folder.
        tag: Its name, such as "global_step30".
        version: Release of DeepSpeed that wrote it; empty if it does not say.
        stage: ZeRO stage.
        world_size: Number of ranks that wrote it.
        global_steps: Steps of the engine, skipped ones too.
        skipped_steps: Steps skipped for an overflow.
        global_samples: Samples seen by all ranks.
        lr_scheduler: State of the scheduler that DeepSpeed drove; None if there was none.
        loss_scaler: Attributes of the loss scaler, such as ``cur_scale``; None if there was none.
        config: The DeepSpeed JSON of the run.
        groups: Options of each param_group, without parameters and tensors; empty dicts from ``elastic_checkpoint``.
        params: Shape of each trained parameter by name, in flat order.
        frozen: Shape of each frozen one, and of those without elements; none of a save that left them out.
        shared: Stored name by second name of tied parameters.
        buffers: Persistent buffers by name, rank 0's; mapped from the file, to be copied and not written.
        dtypes: dtype of the model's own weight by name, where the checkpoint tells.
        group_of: param_group of each trained parameter.
        state_keys: Keys of the optimizer's state that ``run`` reads, of all groups together.
        step_of: Steps that the optimizer made on each trained parameter; None where it counts none.
        warnings: What was warned of.
    """

    def __init__(self, files: Files, models: list[ModelStates], optims: list[OptimStates], places: Places) -> None:
        """Put together what the files say; see ``open_deepspeed``."""
        model, optim = models[0], optims[0]
        self.folder, self.tag = files.folder, files.folder.name
        self.version = model.version or ""
        self.stage = _stage(model, optim)
        self.world_size = len(optims)
        self.global_steps, self.skipped_steps = model.global_steps, model.skipped_steps
        self.global_samples = model.global_samples
        self.lr_scheduler, self.config = model.lr_scheduler, model.config
        self.loss_scaler = optim.loss_scaler
        self.groups: list[dict[str, Any]] = list(optim.groups)
        self.params = {name: shape for shapes in model.trained for name, shape in shapes.items()}
        self.frozen: dict[str, Shape] = dict(model.frozen)
        self.shared: dict[str, str] = dict(model.shared)
        self.buffers: dict[str, Tensor] = dict(model.buffers)
        known = {**model.module, **model.pieces}
        self.dtypes = {name: known[name].dtype for name in (*self.params, *self.frozen) if name in known}
        self.group_of = {name: optim.group_of[place.buffer] for name, place in places.of.items()}
        self._keys = agreement.readable_keys(optims, places)
        self.state_keys = tuple(dict.fromkeys(key for keys in self._keys for key in keys))
        self.step_of: dict[str, Number | None] = {
            name: optim.states[place.buffer].step for name, place in places.of.items()
        }
        self._files, self._models, self._optims, self._places = files, models, optims, places
        self.warnings = tuple(self._doubts())

    def __repr__(self) -> str:
        """The numbers."""
        return (
            f"DeepSpeedCheckpoint({self.tag}, stage {self.stage}, {self.world_size} ranks, step {self.global_steps}, "
            f"{len(self.params)} trained, {len(self.frozen)} frozen, DeepSpeed {self.version or 'unknown'})"
        )

    def has(self, kind: str, name: str) -> bool:
        """Whether ``run`` can read a kind of a parameter.

        Args:
            kind: As ``run`` takes it.
            name: Stored or second name.
        """
        return self._missing(kind, self.shared.get(name, name)) is None

    def run(self, kind: str, name: str, start: int, length: int) -> Tensor:
        """Read elements [start, start + length) of a flattened parameter.

        Args:
            kind: "master" for the optimizer's own copy of a trained weight (fp32 unless the run lowered it), "weight"
                for the model's own weight (stages 1 and 2: all of them; stage 3: the frozen ones), or one of
                ``state_keys``.
            name: Its name, or a second name of a tied one.
            start: First element.
            length: Number of elements.

        Returns:
            [length] in memory of its own on the CPU, in the dtype that is stored.

        Raises:
            CheckpointError: The checkpoint has no such parameter, or not this kind of it.
            UsageError: The run does not lie within the parameter.
        """
        stored = self.shared.get(name, name)
        missing = self._missing(kind, stored)
        if missing is not None:
            raise CheckpointError(f"{self.folder}: {missing}")
        numel = math.prod(self.params[stored] if stored in self.params else self.frozen[stored])
        if start < 0 or length < 0 or start + length > numel:
            raise UsageError(f"{name} has {numel} elements, and {start} to {start + length} were asked for")
        if kind != WEIGHT:
            place = self._places.of[stored]
            return _copied(place, start, length, [self._part(kind, rank, place) for rank in range(self.world_size)])
        if stored in self.frozen and self._is_partitioned:
            size = part_of(self.frozen[stored], self.world_size)
            place = Place(buffer=0, base=0, size=size, first=0)
            return _copied(place, start, length, [model.pieces[stored] for model in self._models])
        whole = self._models[0].pieces[stored] if stored in self.frozen else self._models[0].module[stored]
        return whole.detach().reshape(-1)[start : start + length].clone()

    def check_bytes(self, ranks: range | None = None) -> None:
        """Read the files to the end and hold them against their checksums, which ``run`` does not.

        Args:
            ranks: Those whose files are read, so that several processes can share the work; None for all.

        Raises:
            CheckpointError: A byte is not what was written; names the file.
        """
        for rank in range(self.world_size) if ranks is None else ranks:
            paths = [self._files.shards.get(rank), self._files.optim[rank], self._files.model if rank == 0 else None]
            for path in filter(None, paths):
                check_bytes(path)

    @property
    def _is_partitioned(self) -> bool:
        """Whether parameters are cut one by one."""
        return self._optims[0].is_partitioned

    def _part(self, kind: str, rank: int, place: Place) -> Tensor:
        """A rank's part of the buffer that a parameter is in."""
        optim = self._optims[rank]
        return optim.masters[place.buffer] if kind == MASTER else optim.states[place.buffer].elementwise[kind]

    def _missing(self, kind: str, stored: str) -> str | None:
        """Why a kind of a parameter cannot be read; None if it can."""
        is_trained = stored in self.params
        if not is_trained and stored not in self.frozen:
            return f"no parameter {stored!r} in it{suggestion(stored, [*self.params, *self.frozen])}"
        if kind == WEIGHT:
            is_there = not is_trained or self._has_weight(stored)
            return None if is_there else f"no {WEIGHT!r} of {stored}, which was trained; read {MASTER!r} of it"
        if kind != MASTER and kind not in self.state_keys:
            known = ", ".join(map(repr, (MASTER, WEIGHT, *self.state_keys)))
            return f"no {kind!r} in it; there are {known}"
        if not is_trained:
            return f"no {kind!r} of {stored}, which was frozen; read {WEIGHT!r} of it"
        is_there = kind == MASTER or kind in self._keys[self._places.of[stored].buffer]
        return None if is_there else f"no {kind!r} of {stored}: the optimizer kept none in its param_group"

    def _has_weight(self, stored: str) -> bool:
        """Whether the model file has a trained parameter's own weight."""
        weight = self._models[0].module.get(stored)
        return weight is not None and tuple(weight.shape) == self.params[stored]

    def _doubts(self) -> Iterator[str]:
        """What to warn of."""
        about_version = version_warning(self._files.first_model, self.version or None)
        if about_version is not None:
            yield about_version
        for number, state in enumerate(self._optims[0].states):
            left = sorted({*state.others, *state.elementwise} - set(self._keys[number]))
            if left:
                yield (
                    f"{self._optims[0].path}: of the optimizer's state of buffer {number} {', '.join(left)} cannot be "
                    "read: it is not one value for each element"
                )
        made = {step for step in self.step_of.values() if step is not None}
        if made - {self.global_steps - self.skipped_steps}:
            yield (
                f"{self.folder}: the optimizer made {', '.join(f'{step:g}' for step in sorted(made))} steps and the "
                f"engine {self.global_steps} with {self.skipped_steps} skipped, as after a start without the "
                "optimizer's state"
            )


def open_deepspeed(folder: str | Path) -> DeepSpeedCheckpoint:
    """Open a checkpoint that DeepSpeed wrote with ZeRO stage 1, 2 or 3, at any world size.

    Args:
        folder: What was given to ``save_checkpoint`` (a folder with ``latest``), a tag's folder in it, or the
            Trainer's ``checkpoint-N``.

    Raises:
        CheckpointError: It is incomplete, damaged, mixed of several, or of a kind that cannot be read; says which
            file, and what to do.
    """
    files = find_files(tag_folder(Path(folder)))
    is_partitioned = files.model is None
    model = read_model_states(files.first_model, is_partitioned=is_partitioned)
    files.check_ranks(model.world_size)
    others = [path for rank, path in files.shards.items() if rank > 0]
    models = [model, *(read_model_states(path, is_partitioned=is_partitioned) for path in others)]
    agreement.check_models(models)
    optims = [read_optim_states(path) for path in files.optim.values()]
    agreement.check_optims(optims, model)
    if optims[0].is_partitioned != is_partitioned:
        raise CheckpointError(
            f"{optims[0].path}: not of the stage that {model.path.name} is of: files of two saves are mixed in one "
            "folder; use another checkpoint"
        )
    agreement.check_frozen(models, is_partitioned=is_partitioned)
    places = _places(model, optims[0])
    agreement.check_parts(optims, places, on_nvme=_is_on_nvme(model.config))
    checkpoint = DeepSpeedCheckpoint(files, models, optims, places)
    if any(step not in (None, model.global_steps - model.skipped_steps) for step in checkpoint.step_of.values()):
        agreement.check_same_weights(model.path, optims[0].path, _samples(checkpoint))
    for text in checkpoint.warnings:
        logger.warning("%s", text)
    return checkpoint


def _places(model: ModelStates, optim: OptimStates) -> Places:
    """The layout that follows from names, shapes and the zeros between parameters.

    Raises:
        CheckpointError: The files do not fit one another.
    """
    if optim.is_partitioned:
        return partitioned_places(model.trained, model.world_size)
    paddings = optim.paddings or tuple((0,) * len(shapes) for shapes in model.trained)
    if [len(zeros) for zeros in paddings] != [len(shapes) for shapes in model.trained]:
        raise CheckpointError(
            f"{optim.path}: its param_alignment_paddings are not of the parameters that {model.path.name} lists: files "
            "of two saves are mixed in one folder; use another checkpoint"
        )
    return flat_places(model.trained, paddings, model.world_size)


def _stage(model: ModelStates, optim: OptimStates) -> int:
    """The ZeRO stage; BF16_Optimizer, which does not write it, is that of stage 1."""
    if optim.stage is not None:
        return optim.stage
    section = model.config.get("zero_optimization")
    written = section.get("stage") if isinstance(section, Mapping) else None
    return written if isinstance(written, int) else 1


def _is_on_nvme(config: Mapping[str, Any]) -> bool:
    """Whether a DeepSpeed JSON keeps the optimizer on NVMe."""
    section: Any = config.get("zero_optimization")
    section = section.get("offload_optimizer") if isinstance(section, Mapping) else None
    return isinstance(section, Mapping) and section.get("device") == "nvme"


def _copied(place: Place, start: int, length: int, parts: list[Tensor]) -> Tensor:
    """The run [start, start + length) of a parameter, out of the ranks' parts."""
    runs = [parts[rank].detach()[offset : offset + count] for rank, offset, count in place.pieces(start, length)]
    return torch.cat(runs) if runs else parts[0].new_empty(0)


def _samples(checkpoint: DeepSpeedCheckpoint) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, weights and masters of the first elements of each trained parameter that has both."""
    for name, shape in checkpoint.params.items():
        if checkpoint.has(WEIGHT, name):
            count = min(SAMPLE, math.prod(shape))
            yield name, checkpoint.run(WEIGHT, name, 0, count), checkpoint.run(MASTER, name, 0, count)
