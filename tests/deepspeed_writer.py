"""Writes checkpoint folders as DeepSpeed 0.19.8 does, without DeepSpeed, at any world size.

A naive version of the format, written from its description and held against recorded folders: it lays out whole flat
tensors and cuts them, where the reader computes places. ``Written`` says what lies in the folder.
"""

import math
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from unittest import mock

import torch

VERSION = "0.19.8"


class ZeroStageEnum(int, Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class fragment_address:  # noqa: N801 (DeepSpeed's name)
    def __init__(self, numel, start):
        self.numel, self.start = numel, start


class LossScaler:
    def __init__(self):
        self.cur_scale, self.dynamic = 1.0, False


class DynamicLossScaler:
    def __init__(self):
        self.cur_scale, self.dynamic, self.cur_iter, self.dtype = 65536.0, True, 7, torch.float16


HOMES = {
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment": fragment_address,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
}


def save(data, path):
    """``torch.save`` of objects whose classes pickle under DeepSpeed's names."""
    homes = {home: types.ModuleType(home) for home in HOMES}
    for home, kind in [*HOMES.items(), ("deepspeed.runtime.fp16.loss_scaler", DynamicLossScaler)]:
        kind.__module__ = home
        setattr(homes[home], kind.__name__, kind)
    parents = {".".join(home.split(".")[:end]) for home in homes for end in range(1, len(home.split(".")))}
    with mock.patch.dict(sys.modules, {**{name: types.ModuleType(name) for name in parents}, **homes}):
        torch.save(data, path)


@dataclass(kw_only=True)
class Case:
    """What is written.

    Attributes:
        groups: Shape by name of each param_group.
        frozen: Shape by name.
        buffers: Shape by name.
        shared: Stored name by second name.
        writer: "zero" (stages 1 and 2), "bf16" (BF16_Optimizer), "elastic" or "zero3".
        stage: ZeRO stage.
        dtype: That of the model.
        round_robin: ``round_robin_gradients``.
        aligned: ``parameter_alignment``.
        sub_group: ``sub_group_size``.
        excludes_frozen: ``exclude_frozen_parameters``.
        states: Keys of the optimizer's state.
        steps: Its step.
        seed: Of the values.
    """

    groups: list[dict]
    frozen: dict = field(default_factory=dict)
    buffers: dict = field(default_factory=dict)
    shared: dict = field(default_factory=dict)
    writer: str = "zero"
    stage: int = 2
    dtype: torch.dtype = torch.bfloat16
    round_robin: bool = False
    aligned: bool = False
    sub_group: int = 10**9
    excludes_frozen: bool = False
    states: tuple = ("exp_avg", "exp_avg_sq")
    steps: int = 3
    seed: int = 0
    scaler: type = LossScaler


@dataclass(kw_only=True)
class Written:
    """What lies in a folder: whole tensors by kind and name, and the names in flat order."""

    folder: Path
    values: dict
    order: list


class Writer:
    """Writes one case at one world size."""

    def __init__(self, case, world_size, folder):
        self.case, self.world_size, self.folder = case, world_size, Path(folder)
        self.tag = self.folder / f"global_step{case.steps}"
        self.random = torch.Generator().manual_seed(case.seed)
        self.values = {}
        for name, shape in {name: shape for group in case.groups for name, shape in group.items()}.items():
            master = self.draw(shape, torch.float32)
            self.values["master", name] = master
            for key in case.states:
                self.values[key, name] = self.draw(shape, torch.float32)
            if case.stage < 3:
                self.values["weight", name] = master.to(case.dtype)
        if not case.excludes_frozen:
            for name, shape in case.frozen.items():
                self.values["weight", name] = self.draw(shape, case.dtype)

    def draw(self, shape, dtype):
        return torch.randn(shape, generator=self.random).to(dtype)

    def write(self):
        self.tag.mkdir(parents=True, exist_ok=True)
        (self.folder / "latest").write_text(self.tag.name)
        (self.write_partitioned if self.case.stage == 3 else self.write_flat)()
        order = [name for group in self.flat_order() for name in group]
        return Written(folder=self.folder, values=self.values, order=order)

    # ---- stages 1 and 2 ----

    def flat_order(self):
        w, found = self.world_size, []
        for group in self.case.groups:
            names = list(group)
            if self.case.round_robin:
                names = [name for first in range(w) for name in names[first::w]]
            found.append(names)
        return found

    def zeros_behind(self, names):
        """What ``parameter_alignment`` puts behind each parameter."""
        if not self.case.aligned:
            return [0] * len(names)
        multiple = 16 // self.case.dtype.itemsize
        zeros = [-self.numel(name) % multiple for name in names]
        return [*zeros[:-1], 0]

    def numel(self, name):
        return self.values["master", name].numel()

    def flat(self, kind, names):
        """One group as DeepSpeed flattens it, padded to a multiple of two elements a rank, and the padding's length."""
        runs = []
        for name, zeros in zip(names, self.zeros_behind(names), strict=True):
            runs += [self.values[kind, name].flatten(), torch.zeros(zeros)]
        flat = torch.cat(runs)
        padding = -flat.numel() % (2 * self.world_size)
        return torch.cat([flat, torch.zeros(padding)]), padding

    def write_flat(self):
        order = self.flat_order()
        save(self.model_state(order), self.tag / "mp_rank_00_model_states.pt")
        for rank in range(self.world_size):
            self.save_optim(rank, self.flat_optim(rank, order))

    def flat_optim(self, rank, order):
        case, masters, states, paddings = self.case, [], [], []
        for names in order:
            whole, padding = self.flat("master", names)
            size = whole.numel() // self.world_size
            begin, end = rank * size, (rank + 1) * size
            inside = min(size, max(0, end - (whole.numel() - padding)))
            if case.writer == "bf16":
                paddings.append(padding if rank == self.world_size - 1 else 0)
                inside = 0
            else:
                paddings.append(inside)
            masters.append(whole[begin:end].clone()[: size - inside])
            cut = inside if case.writer == "elastic" else 0
            states.append({"step": torch.tensor(float(case.steps))} if case.states else {})
            for key in case.states:
                states[-1][key] = self.flat(key, names)[0][begin:end].clone()[: size - cut]
        held = {
            "base_optimizer_state": states if case.writer == "elastic" else self.torch_state(states, self.indices()),
            "single_partition_of_fp32_groups": masters,
            "group_paddings": paddings,
            "partition_count": [self.world_size] * len(order),
            "ds_version": VERSION,
            "param_slice_mappings": [OrderedDict(wrong=fragment_address(1, 2)) for _ in order],
            "clip_grad": 1.0,
        }
        if case.writer != "bf16":
            held["zero_stage"] = ZeroStageEnum(case.stage)
            held["param_alignment_paddings"] = [self.zeros_behind(names) for names in order]
            held |= {"loss_scaler": case.scaler(), "dynamic_loss_scale": False, "overflow": False}
        return held

    def indices(self):
        return [[number] for number in range(len(self.case.groups))]

    # ---- stage 3 ----

    def part(self, name_or_numel):
        numel = name_or_numel if isinstance(name_or_numel, int) else self.numel(name_or_numel)
        return math.ceil(numel / self.world_size)

    def sub_groups(self):
        """(group, names) of each sub-group."""
        found = []
        for number, group in enumerate(self.case.groups):
            names, total = [], 0
            for name in group:
                names.append(name)
                total += self.part(name)
                if total >= self.case.sub_group:
                    found.append((number, names))
                    names, total = [], 0
            if names:
                found.append((number, names))
        return found

    def piece(self, value, rank, *, garbage):
        """A rank's part of a flattened tensor; what lies in the padding is undefined."""
        size = self.part(value.numel())
        padded = torch.full((size * self.world_size,), garbage, dtype=value.dtype)
        padded[: value.numel()] = value.flatten()
        return padded[rank * size : (rank + 1) * size].clone()

    def write_partitioned(self):
        subs = self.sub_groups()
        indices = [[s for s, (number, _) in enumerate(subs) if number == g] for g in range(len(self.case.groups))]
        for rank in range(self.world_size):
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            save(self.model_state([names for _, names in subs], rank), self.tag / name)
            joined = {
                kind: [torch.cat([self.piece(self.values[kind, n], rank, garbage=9.0) for n in ns]) for _, ns in subs]
                for kind in ("master", *self.case.states)
            }
            states = [
                {"step": torch.tensor(float(self.case.steps)), **{key: joined[key][s] for key in self.case.states}}
                for s in range(len(subs))
            ]
            held = {
                "zero_stage": ZeroStageEnum.weights,
                "loss_scaler": self.case.scaler(),
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": self.world_size,
                "optimizer_state_dict": self.torch_state(states, indices),
                "fp32_flat_groups": joined["master"],
            }
            self.save_optim(rank, held)

    # ---- both ----

    def torch_state(self, states, indices):
        groups = [
            {"lr": 0.01 * (g + 1), "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": params}
            for g, params in enumerate(indices)
        ]
        return {"state": {number: state for number, state in enumerate(states) if state}, "param_groups": groups}

    def save_optim(self, rank, held):
        prefix = "bf16_" if self.case.dtype == torch.bfloat16 else ""
        data = {"optimizer_state_dict": held, "ds_config": self.config(), "ds_version": VERSION}
        save(data, self.tag / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")

    def config(self):
        return {"zero_optimization": {"stage": self.case.stage}, "bf16": {"enabled": self.case.dtype == torch.bfloat16}}

    def module(self):
        case, module = self.case, OrderedDict()
        for name in [name for group in case.groups for name in group]:
            module[name] = self.values["weight", name] if case.stage < 3 else torch.empty(0, dtype=case.dtype)
        if not case.excludes_frozen:
            for name in case.frozen:
                module[name] = self.values["weight", name] if case.stage < 3 else torch.empty(0, dtype=case.dtype)
        for name, stored in case.shared.items():
            module[name] = module[stored]
        for number, (name, shape) in enumerate(case.buffers.items()):
            module[name] = torch.full(shape, float(number))
        return module

    def model_state(self, order, rank=0):
        case = self.case
        shapes = {name: torch.Size(shape) for group in case.groups for name, shape in group.items()}
        keeps = case.stage >= 2 and not case.excludes_frozen
        fragments = OrderedDict()
        for name in case.frozen if keeps else ():
            value = self.values["weight", name]
            fragments[name] = value if case.stage == 2 else self.piece(value, rank, garbage=7.0)
        return {
            "module": self.module(),
            "buffer_names": list(case.buffers),
            "optimizer": None,
            "param_shapes": [OrderedDict((name, shapes[name]) for name in names) for names in order],
            "frozen_param_shapes": OrderedDict((n, torch.Size(s)) for n, s in case.frozen.items()) if keeps else None,
            "shared_params": dict(case.shared) if rank == 0 else {},
            "frozen_param_fragments": fragments if keeps else None,
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": case.steps,
            "global_samples": case.steps * self.world_size,
            "dp_world_size": self.world_size,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": self.config(),
            "ds_version": VERSION,
        }


def write(case, world_size, folder):
    """Write a case; returns what lies in the folder."""
    return Writer(case, world_size, folder).write()
