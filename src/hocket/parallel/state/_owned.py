"""What the optimizer of one rank updates, and how the user's optimizer is made to work on it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._shards import FlatRange, ShardBox, TensorShard

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"}
)
"""Of torch's optimizers those that update each element by its own gradient and state alone."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A tensor that this rank's optimizer updates: a parameter, or this rank's part of one."""

    leaf: torch.nn.Parameter  # the tensor that stands in the optimizer's groups
    parameter: torch.nn.Parameter  # the user's parameter that `leaf` is, or is a shard of
    where: ShardBox | FlatRange  # where `leaf` lies in the model's parameter; a range of its elements where it is flat
    replicas: int  # how many data-parallel ranks hold the same tensor

    @property
    def name(self) -> str:
        """The model's name for the parameter."""
        return self.where.place.name

    def shards(self, values: torch.Tensor) -> list[TensorShard]:
        """Return where `values`, of the shape of `leaf`, lies in a tensor of the shape of the model's parameter."""
        return self.where.shards(values)


def check_elementwise(optimizer: Any, *, rows: bool = False) -> None:
    """Raise ValueError if an update may need more of a parameter than one rank has, or the state is not of the whole.

    An optimizer of one's own that works element by element says so by an attribute `elementwise = True`; one that needs
    norms of whole parameters besides has a method `bind_norms`, see `hocket.parallel.state.optim.LayerWise`. With
    `rows`, a rank has whole rows at least.
    """
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and (
        kind.__name__ in ELEMENTWISE or (rows and kind.__name__ == "SparseAdam")
    )
    if not known and not getattr(optimizer, "elementwise", False) and not hasattr(optimizer, "bind_norms"):
        raise ValueError(
            f"a rank that holds a part of a parameter can update it only if each element's update needs nothing but "
            f"its own gradient and state, and {kind.__name__} is not known to work so. Use one of "
            f"{', '.join(sorted(ELEMENTWISE))}, or hocket.optim's LARS and LAMB, give your optimizer the attribute "
            "elementwise = True if it does, or "
            'choose a plan with shard = "none" and no tensor parallelism'
        )
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if id(parameter) in parameters else ():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"the optimizer's state {key!r} has the shape {list(value.shape)}, and its parameter "
                    f"{list(parameter.shape)}: it is of a part that one rank had, as optimizer.state_dict() under a "
                    "plan that divides parameters gives it. trainer.save keeps all parts, and trainer.load reads them"
                )


def shard_optimizer(optimizer: Any, owned: Sequence[Owned], kept: Collection[torch.nn.Parameter]) -> None:
    """Put what this rank owns in the place of the user's parameters; the optimizer keeps its identity and settings.

    State that the optimizer has already is cut as the parameters are; state of other shapes goes to all parts. `owned`
    is what this rank updates from now on; parameters in `kept` stay as they are though they are not owned.
    """
    parts: dict[int, list[Owned]] = {}
    for item in owned:
        parts.setdefault(id(item.parameter), []).append(item)
    for group in optimizer.param_groups:
        leaves: list[torch.nn.Parameter] = []
        for parameter in group["params"]:
            mine = parts.get(id(parameter), [])
            if any(item.leaf is parameter for item in mine) or parameter in kept:
                leaves.append(parameter)
                continue
            state = optimizer.state.pop(parameter, None)
            for item in mine:
                leaves.append(item.leaf)
                if state is not None:
                    optimizer.state[item.leaf] = {key: _cut(value, item) for key, value in state.items()}
        group["params"] = leaves


def _cut(value: Any, item: Owned) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    where = item.where
    if isinstance(where, ShardBox):
        if value.ndim != len(where.offsets) or value.shape == item.leaf.shape:
            return value.clone()
        box = tuple(slice(at, at + size) for at, size in zip(where.offsets, item.leaf.shape, strict=True))
        return value[box].clone()
    if tuple(value.shape) != where.shape:
        return value.clone()
    return value.permute(where.order).reshape(-1)[where.begin : where.end].clone()
