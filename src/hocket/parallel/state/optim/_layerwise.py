"""What optimizers have in common that scale each parameter's update by norms over the whole parameter."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


@dataclass(frozen=True, slots=True)
class TrustRatios:
    """By what LARS or LAMB multiplied the update of each parameter in the last step."""

    # for each parameter that is adapted, by name: of the whole parameter, wherever its parts are. Without a Trainer the
    # names are those that the optimizer was given with the parameters, or their numbers.
    values: dict[str, float]

    @property
    def least(self) -> float:
        """The smallest."""
        return min(self.values.values())

    @property
    def median(self) -> float:
        """The one in the middle."""
        return statistics.median(self.values.values())

    @property
    def most(self) -> float:
        """The largest."""
        return max(self.values.values())

    def to_json(self) -> dict[str, Any]:
        """Return the summary and each parameter's as JSON values."""
        return {"least": self.least, "median": self.median, "most": self.most, "parameters": dict(self.values)}

    def __str__(self) -> str:
        return f"{self.least:.3g} to {self.most:.3g}, median {self.median:.3g}, of {len(self.values)} parameters"


class Totals(Protocol):
    """Adds up what ranks know of a model's parameters, of which each rank may hold parts only.

    A plan that divides parameters gives one to the optimizer, by `bind_norms`.
    """

    names: Sequence[str]  # names of all parameters that the optimizer updates on any rank; the same on every rank
    groups: Sequence[int]  # number of the parameter group, for each of the names
    # for each tensor in this rank's groups the number of the parameter that it is a part of, and by what its squares
    # count, so that what several ranks hold counts once
    places: Mapping[torch.Tensor, tuple[int, float]]

    def add_up(self, squares: torch.Tensor) -> torch.Tensor:
        """Return (k, parameters), float64, on the CPU, added up over all ranks: one collective operation."""


class _Alone:
    """Totals for a rank that holds whole parameters."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self.names: list[str] = []
        self.groups: list[int] = []
        self.places: dict[torch.Tensor, tuple[int, float]] = {}
        for number, group in enumerate(groups):
            given = group.get("param_names") or ()
            for i, leaf in enumerate(group["params"]):
                self.places[leaf] = len(self.names), 1.0
                self.names.append(given[i] if i < len(given) else str(len(self.names)))
                self.groups.append(number)

    def add_up(self, squares: torch.Tensor) -> torch.Tensor:
        """See Totals."""
        return squares


class _Part(NamedTuple):
    """A parameter group at work: its tensors that have gradients, and those whose norms count beside the weights'."""

    group: dict[str, Any]
    leaves: list[torch.Tensor]
    measured: list[torch.Tensor]


class LayerWise(torch.optim.Optimizer):
    """An optimizer that multiplies each parameter's update by a trust ratio made of norms over the whole parameter.

    A parameter group says by `adapt` whether it is so. One that does not say falls in two: matrices and kernels, and
    those of one dimension at most (biases; scales of norms), which are neither adapted nor decayed, as the papers have
    it. The two are groups of their own in `param_groups`, in this order.

    Under a plan that divides parameters, `Trainer` gives `bind_norms` what adds up squares over ranks: one collective
    operation for all parameters of a step. An optimizer of one's own that has this method is taken by every plan.

    Args:
        params: Parameters, named parameters, or groups, as every torch optimizer takes them.
        defaults: Settings of parameter groups.
    """

    _totals: Totals | None = None
    _ratios: TrustRatios | None = None

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, "adapt": None})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, or two; see the class."""
        if param_group.get("adapt") is not None:
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        items = [given] if isinstance(given, torch.Tensor) else list(given)
        small = [item for item in items if _tensor(item).ndim <= 1]
        large = [item for item in items if _tensor(item).ndim > 1]
        if large or not items:
            super().add_param_group({**param_group, "params": large, "adapt": True})
        if small:
            super().add_param_group({**param_group, "params": small, "adapt": False, "weight_decay": 0.0})

    def bind_norms(self, totals: Totals) -> None:
        """Have norms made over ranks from now on."""
        self._totals = totals

    @property
    def trust_ratios(self) -> TrustRatios | None:
        """Those of the last step; None before the first, or where no parameter is adapted."""
        return self._ratios

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; a collective operation where a plan divides them.

        Args:
            closure: A function that computes the loss anew, with its gradients.

        Raises:
            TypeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = []
        for group in self.param_groups:
            leaves = [leaf for leaf in group["params"] if leaf.grad is not None]
            if any(leaf.grad.is_sparse for leaf in leaves):
                raise TypeError(
                    f"a gradient is sparse, and {type(self).__name__} needs the norm of the whole parameter in each "
                    "step: say sparse=False to the embedding"
                )
            work.append(_Part(group, leaves, self._prepare(group, leaves) if leaves else []))
        ratios = self._adapt([part for part in work if part.group["adapt"]])
        for part in work:
            if part.leaves:
                self._apply(part.group, part.leaves, part.measured, [ratios.get(leaf, 1.0) for leaf in part.leaves])
        return loss

    def _adapt(self, work: list[_Part]) -> dict[torch.Tensor, float]:
        """Return the trust ratio of each tensor of the groups that are adapted."""
        totals = self._totals or _Alone(self.param_groups)
        leaves = [leaf for part in work for leaf in part.leaves]
        squares = torch.zeros(2, len(totals.names), dtype=torch.float64)
        if leaves:
            found = torch.stack([_squares(leaves), _squares([t for part in work for t in part.measured])]).cpu()
            places, shares = zip(*(totals.places[leaf] for leaf in leaves), strict=True)
            squares.index_add_(1, torch.tensor(places), found * torch.tensor(shares, dtype=torch.float64))
        norms = totals.add_up(squares).sqrt()
        groups = [self.param_groups[number] for number in totals.groups]
        made = self._ratio(groups, norms[0], norms[1])
        known = (norms > 0).all(0)  # a weight or an update of zeros has no direction to trust
        values = torch.where(known, made, torch.ones_like(made)).tolist()
        adapted = {
            name: value for name, value, group in zip(totals.names, values, groups, strict=True) if group["adapt"]
        }
        self._ratios = TrustRatios(adapted) if adapted else None
        return {leaf: values[totals.places[leaf][0]] for leaf in leaves}

    # --- what each method is ----------------------------------------------------------------------------------------

    def _prepare(self, group: dict[str, Any], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """Per tensor the one whose norm stands beside the weight's."""
        raise NotImplementedError

    def _ratio(
        self, groups: Sequence[Mapping[str, Any]], weights: torch.Tensor, measured: torch.Tensor
    ) -> torch.Tensor:
        """Trust ratios, for norms of whole parameters, each with its group's settings; whatever for zero norms."""
        raise NotImplementedError

    def _apply(
        self, group: dict[str, Any], leaves: list[torch.Tensor], measured: list[torch.Tensor], ratios: list[float]
    ) -> None:
        """Update the weights."""
        raise NotImplementedError


def settings(groups: Sequence[Mapping[str, Any]], key: str) -> torch.Tensor:
    """One setting of each of some groups, as float64."""
    return torch.tensor([float(group[key]) for group in groups], dtype=torch.float64)


def state_of(optimizer: torch.optim.Optimizer, leaves: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    """Return the optimizer's state `key` for each tensor; zeros where there is none yet."""
    found = []
    for leaf in leaves:
        state = optimizer.state[leaf]
        if key not in state:
            state[key] = torch.zeros_like(leaf, memory_format=torch.preserve_format)
        found.append(state[key])
    return found


def check(name: str, value: float, fine: bool, wanted: str) -> None:
    """Raise ValueError for a setting that makes no sense."""
    if not fine:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def _tensor(item: Any) -> torch.Tensor:
    """Return the parameter of an entry of a group, which may come with its name."""
    tensor: torch.Tensor = item[1] if isinstance(item, tuple) else item
    return tensor


def _squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Squared norms, in float64, of tensors of any types."""
    wide = any(tensor.dtype is torch.float64 for tensor in tensors)
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64 if wide else torch.float32)
    device = norms[0].device
    return torch.stack([norm.to(device) for norm in norms]).double().square()
