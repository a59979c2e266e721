"""Random numbers that forward passes draw for samples: other ones on every rank, also where all are seeded alike."""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.comm import torch_adapter

from ..batches import mix, undisturbed
from ..mesh import World

_BOTH = (
    "the model draws random numbers for its samples and others that hold for all of a batch, from one generator: ranks "
    "are seeded alike and draw the same of both, so that samples of different ranks get the same dropout or noise. "
    "Draw what holds for all of a batch with Python's or numpy's random numbers, or from a torch.Generator of its own, "
    "and each rank draws its own for its samples"
)
_IN_LOOP = (
    "the loop draws random numbers between a batch and the model, and all ranks are seeded alike and draw the same: "
    "right for what holds for all of the batch; but if it is noise for samples (of a diffusion model, say), samples of "
    "different ranks get the same. Draw that in the model's forward, where each rank draws its own, or from a "
    "torch.Generator that is seeded by the rank, too"
)


class SampleNumbers:
    """Has each rank draw its own random numbers for its samples, once it is known that a model draws such.

    Seeded alike, ranks would draw the same dropout and noise, each for other samples. What holds for all of a batch (a
    layer that is left out) has to be alike on all ranks: where a pass draws both, nothing is changed, and one warning
    tells. Nor is anything changed where ranks are one, or a pass draws nothing.

    Args:
        world: Ranks that have samples each.
    """

    def __init__(self, world: World) -> None:
        self._world, self._own = world, False
        self._marks: list[int] = []  # of the generators, when the first batch came and when the model was called

    def look(self) -> None:
        """Note what the generators are like: when a batch is there, and when the model is called with it."""
        self._marks.append(_seed(torch.cat([one.get_state() for one in _generators()])))

    def decide(self, draws: "Draws") -> None:
        """Decide by what the first forward pass drew on each rank, and warn; a collective operation."""
        mine = draws.by_samples, draws.others, tuple(self._marks[-2:])
        everyone = self._world.from_all(mine)
        by_samples, others = (any(one[i] for one in everyone) for i in range(2))
        self._own = by_samples and not others and self._world.size > 1
        alike = self._world.size > 1 and all(one[2][:1] == mine[2][:1] for one in everyone)
        if self._world.rank == 0 and alike and by_samples and others:
            warnings.warn(_BOTH, stacklevel=5)
        if self._world.rank == 0 and alike and len(set(mine[2])) > 1:
            warnings.warn(_IN_LOOP, stacklevel=5)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Open a block for a forward pass; after it, ranks whose generators were alike have them alike again."""
        if not self._own or torch.compiler.is_compiling():
            yield
            return
        generators = _generators()
        before = [one.get_state() for one in generators]
        for one, state in zip(generators, before, strict=True):
            one.manual_seed(_seed(state, 1 + self._world.rank))
        begun = [one.get_state() for one in generators]
        try:
            yield
        finally:
            for one, state, first in zip(generators, before, begun, strict=True):
                if torch.equal(one.get_state(), first):  # nothing was drawn
                    one.set_state(state)
                else:
                    one.manual_seed(_seed(state, 0))


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what operators draw from torch's default generators.

    Args:
        modules: The model: what has the shape of one of its parameters is not for samples.
        samples: How many a pass has.

    Attributes:
        by_samples: Whether something was drawn that has a row for each sample.
        others: Whether something else was.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples, self._shapes = samples, {p.shape for one in modules for p in one.parameters()}
        self.by_samples = self.others = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and look whether it has drawn."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = [one.get_state() for one in _generators()]
        result = func(*args, **(kwargs or {}))
        if not all(map(torch.equal, before, (one.get_state() for one in _generators()))):
            first = result[0] if isinstance(result, tuple | list) else result
            self._note(first.shape if isinstance(first, torch.Tensor) else torch.Size())
        return result

    def _note(self, shape: torch.Size) -> None:
        rows = self._samples in shape or (len(shape) > 1 and shape[0] % self._samples == 0)
        if rows and shape.numel() > 1 and shape not in self._shapes:
            self.by_samples = True
        else:
            self.others = True


def draws_of(modules: Sequence[torch.nn.Module], samples: int, run: Callable[[], Any]) -> Draws:
    """Return what a forward pass draws, which leaves nothing behind; nothing where it fails.

    Args:
        modules: The model, as it trains.
        samples: How many the pass has.
        run: Makes it.
    """
    draws = Draws(modules, samples)
    if samples:
        try:
            with undisturbed(modules), torch_adapter.uncompiled(), draws:  # compiled code hides what it draws
                run()
        except Exception:  # the pass of the program itself will meet it
            return Draws((), samples)
    return draws


def draws_apart(module: torch.nn.Module, inputs: Any, samples: int) -> Draws:
    """Return what a model draws that this rank runs alone; nothing if it communicates, or the program has hooked it.

    Args:
        module: The model.
        inputs: What it is called with: positional arguments, and those by name.
        samples: How many samples these hold.
    """
    module = getattr(module, "_orig_mod", module)  # what torch.compile has wrapped
    args, kwargs = inputs
    if not module.training or any(one._forward_hooks for one in module.modules()):
        return Draws((), samples)
    with torch_adapter.without_collectives():
        return draws_of([module], samples, lambda: module(*args, **kwargs))


def _generators() -> list[torch.Generator]:
    found = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def _seed(state: torch.Tensor, *places: int) -> int:
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
    return mix(int.from_bytes(digest, "little"), *places) >> 1
