"""Optimizers, and linear algebra that torch has for compressed gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import torch


def foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, in one call."""
    torch._foreach_copy_(list(targets), list(sources))


def orthogonalize(matrix: torch.Tensor, epsilon: float) -> None:
    """Make the columns of a matrix orthonormal in place, as torch's PowerSGD does."""
    _power_sgd()._orthogonalize(matrix[None], epsilon)


def pays_low_rank(rows: int, columns: int, rank: int, least_rate: float) -> bool:
    """Return whether two factors of `rank` columns hold fewer elements than the matrix, by more than `least_rate`."""
    return bool(_power_sgd()._should_compress(rows, columns, rank, least_rate)[0])


@functools.cache
def _power_sgd() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    return powerSGD_hook


def steps_of(optimizer: Any) -> Any:
    """Return the optimizer on which hooks on steps can be registered; None if there is none.

    It is the inner one of a wrapper that is an `Optimizer` by name alone, and has not called its constructor, whatever
    it calls that (`optimizer`, `base_optimizer`), if it has only one.
    """
    for one in (optimizer, getattr(optimizer, "optimizer", None)):
        if _has_hooks(one):
            return one
    inner = {id(one): one for one in getattr(optimizer, "__dict__", {}).values() if _has_hooks(one)}
    return next(iter(inner.values())) if len(inner) == 1 else None


def _has_hooks(one: Any) -> bool:
    return hasattr(one, "_optimizer_step_pre_hooks") and hasattr(one, "_optimizer_step_post_hooks")
