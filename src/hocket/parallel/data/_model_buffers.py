"""Buffers of a replicated model: rank 0's on all ranks, or means over the samples of the global batch."""

import torch

from ..mesh import World
from ..state import FlatBundles
from ._apart import Apart
from ._forward_state import buffers_apart, sizes_of_buffers, tell


class ModelBuffers:
    """Sends a model's buffers from rank 0, and averages those that are means over samples.

    Args:
        module: The model.
        world: The ranks.
        broadcast: Whether buffers are to be rank 0's.
    """

    def __init__(self, module: torch.nn.Module, world: World, broadcast: bool) -> None:
        self._module, self._world, self._broadcast = module, world, broadcast
        self._bundles = FlatBundles(world)
        self._means: list[tuple[torch.nn.Module, str]] = []  # modules and their names for those that are means

    def send(self) -> None:
        """Broadcast rank 0's to all ranks; a collective operation."""
        # Sent even if they seem unchanged: batch norm writes its statistics without raising their version counters, and
        # ranks would have to agree on it first, which costs as much as sending what most models have.
        self._bundles.broadcast(self._module.buffers())

    def find(self, apart: Apart | None) -> None:
        """Have buffers averaged that are means over samples; tell of those that no rank has right.

        A collective operation.
        """
        mine = {} if apart is None else {one.name: one for one in apart.state}
        sizes = sizes_of_buffers(self._module) if apart is None and self._broadcast else {}
        everyone = self._world.from_all(({name: one.kind for name, one in mine.items()}, sizes))
        kinds: dict[str, set[str]] = {}
        for name, kind in (pair for one, _ in everyone for pair in one.items()):
            kinds.setdefault(name, set()).add(kind)
        buffers = dict(self._module.named_buffers())
        others = []
        for name in sorted(kinds.keys() & buffers.keys()):
            path, _, local = name.rpartition(".")
            if "other" in kinds[name]:
                others += [mine[name]] if name in mine else []
            elif "mean" in kinds[name] and self._broadcast:
                self._means.append((self._module.get_submodule(path), local))
        others += buffers_apart(self._module, [sizes for _, sizes in everyone])
        tell(others, 0.0, False, [f"{self._world.size} ranks"], speak=self._world.rank == 0)

    @torch.no_grad()
    def average(self, share: float) -> None:
        """Make buffers that are means over samples those of the global batch; a collective operation.

        Args:
            share: The weight by samples of this rank's part of it.
        """
        for owner, local in self._means:
            buffer = owner._buffers[local]
            assert buffer is not None
            if share:
                buffer.mul_(share / self._world.size)
            else:
                buffer.zero_()  # a mean over no samples may be no number
            self._world.all_reduce(buffer)
