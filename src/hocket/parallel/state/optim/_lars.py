"""LARS: momentum SGD whose rate is adapted layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._layerwise import LayerWise, check, settings, state_of


class LARS(LayerWise):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg: Large batch training of convolutional networks, 2017).

    With weights w and gradient g of a layer, rate lr, momentum m, decay b and trust coefficient eta::

        ratio = eta |w| / (|g| + b |w|)
        v     = m v + lr * ratio * (g + b w)
        w     = w - v

    Biases and scales of norms have ratio 1 and no decay; see `LayerWise` for groups that say otherwise by `adapt`.
    The ratio is 1 too where w or g is zero.

    Args:
        params: Parameters or parameter groups.
        lr: The learning rate; the paper's are large (some tens for ResNet-50, batch 32,000), because ratios are small.
        momentum: Momentum m.
        weight_decay: Decay b, of parameters that are adapted.
        trust_coefficient: Trust coefficient eta.
        eps: What is added to the denominator of the ratio.

    Raises:
        ValueError: a setting is negative.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
    ) -> None:
        check("lr", lr, lr >= 0, "0 or more")
        check("momentum", momentum, 0 <= momentum < 1, "0 or more and below 1")
        check("weight_decay", weight_decay, weight_decay >= 0, "0 or more")
        check("trust_coefficient", trust_coefficient, trust_coefficient > 0, "positive")
        check("eps", eps, eps >= 0, "0 or more")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
        }
        super().__init__(params, defaults)

    def _prepare(self, group: dict[str, Any], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def _ratio(
        self, groups: Sequence[Mapping[str, Any]], weights: torch.Tensor, measured: torch.Tensor
    ) -> torch.Tensor:
        decayed = settings(groups, "weight_decay") * weights
        return settings(groups, "trust_coefficient") * weights / (measured + decayed + settings(groups, "eps"))

    def _apply(
        self, group: dict[str, Any], leaves: list[torch.Tensor], measured: list[torch.Tensor], ratios: list[float]
    ) -> None:
        updates = torch._foreach_add(measured, leaves, alpha=float(group["weight_decay"]))
        torch._foreach_mul_(updates, [float(group["lr"]) * ratio for ratio in ratios])
        if group["momentum"]:
            buffers = state_of(self, leaves, "momentum_buffer")
            torch._foreach_mul_(buffers, float(group["momentum"]))
            torch._foreach_add_(buffers, updates)
            torch._foreach_sub_(leaves, buffers)
        else:
            torch._foreach_sub_(leaves, updates)
