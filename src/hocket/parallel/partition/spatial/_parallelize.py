"""Makes a model work on shards of its samples, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.sharding import Shard, WholeBatchNorms, cut, gathered, guard_torch, note, noted

from ...batches import mapped, tensors_in
from ...mesh import World
from ...state import broadcast_tensors, check_model
from ..tensor import align
from ._peers import SpatialGroups, SpatialPeers

_FEWEST_DIMS = 4  # samples, channels, and two spatial dims
_DIVIDED_DIM = 2  # the first spatial one: height of images, depth of volumes


class SpatialDecision(NamedTuple):
    """What became of a layer or of a function."""

    name: str  # of the layer, or of the function where it has no parameters
    form: str  # "divided", or "gathered" for what every rank does as a whole
    reason: str  # why it was gathered


class SpatialParallel:
    """A model whose samples are divided among ranks.

    Called by itself, `model(x)` takes whole tensors and returns whole tensors. Inside `running()` it returns shards,
    and functions of them (a loss) are made as if they were whole.

    Attributes:
        model: the user's model; its parameters and buffers stay what they are.
        world: the ranks that share each sample.
        decisions: what became of each layer and function, in the order in which they were first called.
        refused: (name, reason) of those for which shards were gathered.
    """

    def __init__(self, model: nn.Module, groups: SpatialGroups) -> None:
        self.model = model
        self.world = groups.spatial
        self.decisions: list[SpatialDecision] = []
        self._peers = SpatialPeers(groups, self._hear)
        self._depth = 0
        self._seen: set[tuple[str, str]] = set()
        self._names = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}

    @property
    def refused(self) -> list[tuple[str, str]]:
        return [(one.name, one.reason) for one in self.decisions if one.form == "gathered"]

    def __str__(self) -> str:
        width = max((len(one.name) for one in self.decisions), default=0)
        return "\n".join(f"{one.name:{width}}  {one.form:8}  {one.reason}".rstrip() for one in self.decisions)

    def __deepcopy__(self, memo: dict[int, Any]) -> SpatialParallel:
        return self

    @contextmanager
    def running(self) -> Iterator[None]:
        """Open a block in which the model and functions of its output work on shards."""
        self._depth += 1
        try:
            with WholeBatchNorms(self._peers) if self._depth == 1 else nullcontext():
                yield
        finally:
            self._depth -= 1

    def shard(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor that all ranks have; with fewer than two spatial dims it stays whole."""
        if tensor.ndim < _FEWEST_DIMS or noted(tensor) is not None:
            return tensor
        shard = Shard.even(_DIVIDED_DIM, tensor.shape[_DIVIDED_DIM], self.world.size)
        return note(cut(tensor, shard, self.world.rank).contiguous(), shard, self._peers)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of which this is a shard; a collective operation."""
        whole: torch.Tensor = gathered(tensor)
        return whole

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's own forward on shards of its inputs. Raises ValueError: no input can be divided."""
        inside = self._depth > 0
        shards_of = mapped((args, kwargs), self.shard)
        found = tensors_in(shards_of)
        if not any(noted(tensor) is not None for tensor in found):
            raise ValueError(
                f"no input of the model can be divided among {self.world.size} ranks: they have the shapes "
                f"{[list(tensor.shape) for tensor in found]}, and one of (N, C, H, W) or (N, C, D, H, W) is needed; "
                "say spatial_parallel_degree = 1"
            )
        with self.running():
            output = forward(*shards_of[0], **shards_of[1])
        return output if inside else mapped(output, self.whole)

    def _hear(self, function: str, args: Any, form: str, why: str) -> None:
        owner = next((self._names[id(t)] for t in tensors_in(args) if id(t) in self._names), function)
        if (owner, form) in self._seen:
            return
        self._seen.add((owner, form))
        if owner != function or form == "gathered":
            self.decisions.append(SpatialDecision(owner or "(the model)", form, why))


class DividedModule(nn.Module):
    """Has the forward of a user's model work on shards; stands before the model's own class."""

    spatial: SpatialParallel

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward."""
        return self.spatial.call(super().forward, args, kwargs)


def parallelize(
    model: nn.Module,
    world: World,
    *,
    statistics: World | None = None,
    samples: World | None = None,
    aligned: bool = False,
) -> SpatialParallel:
    """Divide each sample that goes through `model` among the ranks of `world`, in place; a collective operation.

    Inputs with two or more spatial dims are divided along the first: the height of images (N, C, H, W), the depth of
    volumes (N, C, D, H, W). Convolutions and poolings fetch what rows their outputs need from the ranks that own them;
    batch norm adds up its statistics; what has no rule is made by every rank on gathered tensors. Outputs and loss are
    those of one process up to rounding. The gradients of parameters have to be summed over the ranks.

    Args:
        model: an ordinary module, built alike on all ranks.
        world: the ranks that share each sample.
        statistics: who shares batch norm's statistics; None for `world`.
        samples: those of `statistics` with the same place in `world`, for batch norm of whole tensors; None for this
            rank alone.
        aligned: whether the ranks are known to hold the same model, with the same weights.

    Raises:
        ValueError: the ranks' models differ.
    """
    groups = SpatialGroups(world, statistics or world, samples or World(0, 1, None))
    form = SpatialParallel(model, groups)
    if world.size == 1:
        return form
    if not aligned:
        check_model(model, world)
        broadcast_tensors([*model.parameters(), *model.buffers()], world)
    align(world, next((p.device for p in model.parameters()), torch.device("cpu")))
    become_divided(model, form)
    return form


def become_divided(model: nn.Module, form: SpatialParallel) -> None:
    """Put the forward of shards before the model's own class."""
    old: Any = type(model)
    about = {"__module__": __name__, "__doc__": old.__doc__}
    divided: Any = type(old.__name__, (DividedModule, old), about)
    guard_torch()
    model.spatial = form  # type: ignore[assignment]
    model.__class__ = divided
