"""The optimiser of both recipes: Muon, for stacks of matrices."""

from __future__ import annotations

import torch


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by its nearest orthogonal matrix (five Newton-Schulz steps)."""

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @staticmethod
    def _orthogonal(m: torch.Tensor) -> torch.Tensor:
        flip = m.shape[-2] > m.shape[-1]
        x = m.transpose(-1, -2) if flip else m
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            square = x @ x.transpose(-1, -2)
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        return x.transpose(-1, -2) if flip else x

    @torch.no_grad()
    def step(self) -> None:
        """Update every stack [n_layers, out, in] from its gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                velocity = state.setdefault("velocity", torch.zeros_like(p))
                velocity.lerp_(p.grad, 1 - group["momentum"])
                update = self._orthogonal(p.grad.lerp(velocity, group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * scale)
