"""The specification the engine is held against: plain PyTorch, one process, no sharding, nothing clever.

It keeps fp32 master weights and an optimizer over them. Every rank's every micro-batch is a forward and a backward of
the model in its own dtype; gradients are summed over ranks in fp32 in rank order, multiplied by one over their number,
and added up over micro-batches.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Groups = Callable[[list[tuple[str, nn.Parameter]]], list[dict]]
"""Makes the param_groups of an optimizer from (name, parameter) pairs of a model."""

Optimizers = Callable[[list[dict]], torch.optim.Optimizer]


def one_group(named: list[tuple[str, nn.Parameter]]) -> list[dict]:
    return [{"params": [p for _, p in named]}]


def adamw(groups: list[dict], lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.1, foreach=False)


class Oracle:
    """Unsharded training of ``model`` as ``world_size`` data-parallel ranks would do it."""

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        *,
        optimizers: Optimizers = adamw,
        groups: Groups = one_group,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.world_size = model, world_size
        named = list(model.named_parameters())
        self.masters = {
            name: nn.Parameter(p.detach().float().clone(), requires_grad=p.requires_grad) for name, p in named
        }
        self.optimizer = optimizers(groups([(name, self.masters[name]) for name, _ in named]))
        for _, p in named:
            p.data = p.data.to(param_dtype or p.dtype)
        self.trained = {name: p for name, p in named if p.requires_grad}
        self.gradients: dict[str, Tensor] = {}
        self.zero_grad()
        self.norm: float | None = None  # before clipping, in float64

    def zero_grad(self) -> None:
        self.gradients = {name: torch.zeros(p.shape) for name, p in self.trained.items()}

    def backward(self, losses: Iterable[Callable[[nn.Module], Tensor]]) -> list[float]:
        """One micro-batch: ``losses`` has each rank's loss as a function of the model. Returns the values."""
        values, total = [], {name: torch.zeros(p.shape) for name, p in self.trained.items()}
        for loss_of in losses:
            self.model.zero_grad()
            loss = loss_of(self.model)
            loss.backward()
            values.append(loss.item())
            for name, p in self.trained.items():
                if p.grad is not None:
                    total[name] += p.grad.float()
        self.model.zero_grad()
        for name, t in total.items():
            self.gradients[name] += t * (1.0 / self.world_size)
        return values

    def clip(self, max_norm: float | None = None) -> float:
        """The norm in float64; gradients are scaled as torch's clip_grad_norm_ does if ``max_norm`` is given."""
        self.norm = sum(g.double().square().sum().item() for g in self.gradients.values()) ** 0.5
        if max_norm is not None:
            scale = min(1.0, max_norm / (self.norm + 1e-6))
            self.gradients = {name: g * scale for name, g in self.gradients.items()}
        return self.norm

    def step(self) -> None:
        for name, g in self.gradients.items():
            self.masters[name].grad = g.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, p in self.trained.items():
                p.copy_(self.masters[name])
        self.zero_grad()

    def states(self) -> dict[str, Tensor]:
        """Master weights and optimizer states of trained parameters as "name|key", without scalar step counts."""
        found = {}
        for name in self.trained:
            master = self.masters[name]
            found[f"{name}|master"] = master.detach().clone()
            for key, value in self.optimizer.state[master].items():
                if key != "step" and isinstance(value, Tensor):
                    found[f"{name}|{key}"] = value.clone()
        return found
