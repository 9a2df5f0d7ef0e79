"""The schedulers of the DeepSpeed JSON as a torch scheduler.

Owns one class over ``schedules``. Leaves the formulas to ``schedules``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shardglass.schedules import Schedule, betas_at, lr_at


class ConfigSchedule(LRScheduler):
    """Sets every param_group to the rate of the config's ``scheduler`` section, one step per optimizer step."""

    def __init__(self, optimizer: torch.optim.Optimizer, spec: Schedule) -> None:
        self._spec = spec
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Where it is; the formula is the config's."""
        return {key: value for key, value in super().state_dict().items() if key != "_spec"}

    def get_lr(self) -> list[float | Tensor]:
        """The rate of the present step, in fp64, for every group.

        Where the schedule has Adam's decay rates too, they are set here, as torch's OneCycleLR does.
        """
        betas = betas_at(self._spec, self.last_epoch)
        for group in self.optimizer.param_groups if betas is not None else ():
            if "betas" in group:
                group["betas"] = betas
        return [lr_at(self._spec, self.last_epoch)] * len(self.optimizer.param_groups)
