"""LAMB: Adam whose update is adapted layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._layerwise import LayerWise, check, state_of


class LAMB(LayerWise):
    """Adam with layer-wise adaptation (You et al.: Large batch optimization for deep learning, ICLR 2020, Algorithm 2).

    With weights w of a layer, Adam's bias-corrected averages m of its gradient and v of the square, rate lr, decay b::

        u     = m / (sqrt(v) + eps) + b w
        ratio = phi(|w|) / |u|,  phi(z) = min(max(z, low), high)
        w     = w - lr * ratio * u

    Biases and scales of norms have ratio 1 and no decay; see `LayerWise` for groups that say otherwise by `adapt`.
    The ratio is 1 too where w or u is zero.

    Args:
        params: Parameters or parameter groups.
        lr: The learning rate.
        betas: Decay rates of the averages of the gradient and of its square.
        eps: What is added to the denominator.
        weight_decay: Decay b, of parameters that are adapted.
        norm_limits: Low and high, between which the norm of weights counts as it is.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        norm_limits: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        check("lr", lr, lr >= 0, "0 or more")
        for beta in betas:
            check("betas", beta, 0 <= beta < 1, "0 or more and below 1, both")
        check("eps", eps, eps >= 0, "0 or more")
        check("weight_decay", weight_decay, weight_decay >= 0, "0 or more")
        check("norm_limits", norm_limits[0], 0 <= norm_limits[0] < norm_limits[1], "0 or more, the lower one first")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "norm_limits": tuple(norm_limits),
        }
        super().__init__(params, defaults)

    def _prepare(self, group: dict[str, Any], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        first, second = group["betas"]
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        means, squares = state_of(self, leaves, "exp_avg"), state_of(self, leaves, "exp_avg_sq")
        steps = []
        for leaf in leaves:
            state = self.state[leaf]
            state["step"] = int(state.get("step", 0)) + 1
            steps.append(state["step"])
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        below = torch._foreach_div(squares, [1 - second**step for step in steps])
        torch._foreach_sqrt_(below)
        torch._foreach_add_(below, float(group["eps"]))
        updates = torch._foreach_div(means, below)
        torch._foreach_div_(updates, [1 - first**step for step in steps])
        if group["weight_decay"]:
            torch._foreach_add_(updates, leaves, alpha=float(group["weight_decay"]))
        return list(updates)

    def _ratio(
        self, groups: Sequence[Mapping[str, Any]], weights: torch.Tensor, measured: torch.Tensor
    ) -> torch.Tensor:
        limits = torch.tensor([group["norm_limits"] for group in groups], dtype=torch.float64).reshape(-1, 2)
        return torch.minimum(torch.maximum(weights, limits[:, 0]), limits[:, 1]) / measured

    def _apply(
        self, group: dict[str, Any], leaves: list[torch.Tensor], measured: list[torch.Tensor], ratios: list[float]
    ) -> None:
        torch._foreach_mul_(measured, [-float(group["lr"]) * ratio for ratio in ratios])
        torch._foreach_add_(leaves, measured)
