"""Random numbers that forward passes draw for samples: other ones on every rank, also where all are seeded alike."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hocket._program import warn
from hocket.comm import torch_adapter

from ..batches import mapped, mix, samples_in, undisturbed
from ..mesh import World
from ..state import parameters_of
from ._apart import with_another
from ._generator_marks import Mark, default_generators, digest, marks
from ._own_draws import OwnDraws

_BOTH = (
    "the model draws random numbers for its samples and others that hold for all of a batch, from one generator: ranks "
    "are seeded alike and draw the same of both, so that samples of different ranks get the same dropout or noise. "
    "Draw what holds for all of a batch with Python's or numpy's random numbers, or from a torch.Generator of its own, "
    "and each rank draws its own for its samples"
)
_IN_LOOP = (
    "the loop draws random numbers{} for a batch, and all ranks are seeded alike and draw the same: right for what "
    "holds for all of the batch; but if it is noise for samples (of a diffusion model, say), samples of different "
    "ranks get the same. Draw that by torch in the model's forward, where each rank draws its own, or from a "
    "generator that is seeded by the rank, too"
)
_BY_SAMPLES: Final = (
    "the model's forward draws random numbers{} for its samples, and all ranks are seeded alike and draw the same, so "
    "that samples of different ranks get the same noise: draw them by torch, where each rank draws its own"
)
_KINDS: Final = "", " of Python", " of numpy"  # of default generators: torch's has no name


class SampleNumbers:
    """Has each rank draw its own random numbers for its samples, once it is known that a model draws such.

    Seeded alike, ranks would draw the same dropout and noise, each for other samples. What holds for all of a batch (a
    layer that is left out) has to be alike on all ranks: where a pass draws both, nothing is changed, and one warning
    tells. Nor is anything changed where ranks are one, or a pass draws nothing.

    Args:
        world: Ranks that train one model.
        place: Number of the samples that this rank has; ranks with equal ones draw alike. Its rank by default.
        own: Whether each draws its own whatever a model draws; None while nobody knows.
    """

    def __init__(self, world: World, place: int | None = None, *, own: bool | None = False) -> None:
        self._world, self._place, self._own = world, world.rank if place is None else place, own
        self._first: list[Mark] = []  # what the generators were like when the latest batch came
        self._looped: set[int] = set()  # which of them the loop has drawn from for it, as for samples
        self._owned: set[int] = set()  # what others were like, of the program's own, from which it has

    def look(self) -> None:
        """Note what the generators are like when a batch is there."""
        self._first, self._looped, self._owned = marks(), set(), set()

    def decide(self, draws: "Draws") -> None:
        """Decide by what the first forward pass drew on each rank, and warn; a collective operation."""
        first = [one[:2] for one in self._first]
        mine = first, draws.by_samples, draws.others, draws.elsewhere, self._looped, self._owned
        marks, by_samples, others, elsewhere, looped, owned = zip(*self._world.from_all(mine), strict=True)
        self._own = any(by_samples) and not any(others) and self._world.size > 1
        if self._world.size == 1 or self._world.rank:
            return
        alike = [i for i, found in enumerate(zip(*marks, strict=True)) if len(set(found)) == 1]
        if 0 in alike and any(by_samples) and any(others):
            warn(_BOTH)
        for text, drawn in ((_BY_SAMPLES, elsewhere), (_IN_LOOP, looped)):
            kinds = [_KINDS[i] for i in alike if i in set().union(*drawn)]
            if kinds:
                warn(text.format(kinds[0]))
        if set.intersection(*owned):
            warn(_IN_LOOP.format(" from a generator of its own"))

    @property
    def own(self) -> bool | None:
        """Whether each rank draws its own; None of one rank, where that is the same."""
        return self._own if self._world.size > 1 else None

    def go_on(self, own: bool) -> None:
        """Draw as an earlier run of the program did."""
        self._own = own and self._world.size > 1

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Open a block for a forward pass; after it, ranks whose generators were alike have them alike again."""
        if not self._own or torch.compiler.is_compiling():
            yield
            return
        with _apart(self._place) as drawn:
            yield
        _go_on(drawn)


class ModelNumbers(SampleNumbers):
    """Those of a model in a program's own loop, decided by its first forward pass."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._draws: Draws | None = Draws((), 0)  # of that pass; None once it was decided by them
        self._since: list[Mark] = []  # what the generators were like before what the loop does
        self._own_draws: OwnDraws | None = None  # since then
        self._samples = 0

    @property
    def own(self) -> bool | None:
        """Whether each rank draws its own; None of one rank, where that is the same, and before it is decided."""
        return None if self._draws is not None else super().own

    def go_on(self, own: bool) -> None:
        """Draw as an earlier run of the program did."""
        super().go_on(own)
        self._draws = None

    def batch_began(self, samples: int) -> None:
        """Note what the generators are like when a batch is there, of which this rank has so many samples."""
        if self._draws is not None:
            self.look()
            self._since, self._samples = self._first, samples
            self._own_draws = OwnDraws() if self._world.size > 1 else None

    def pass_begins(self) -> None:
        """Note what the loop has drawn until a forward pass of any model, or a back-propagation."""
        if self._draws is not None and self._first:
            drawn = map(Mark.words, self._since, marks())
            self._looped |= {i for i, words in enumerate(drawn) if words >= max(1, self._samples)}
            if self._own_draws is not None:
                self._owned |= self._own_draws.drawn(max(1, self._samples))

    def pass_ended(self) -> None:
        """Note what the generators are like after a forward pass, which draws by itself."""
        if self._draws is not None and self._first:
            self._since = marks()
            if self._own_draws is not None:
                self._own_draws.again()

    def forward_begins(self, module: torch.nn.Module, inputs: Any, samples: int, drawn: set[int]) -> None:
        """Look what the model draws for these inputs, as `draws_apart` says and the look at parts of them."""
        if self._draws is not None:
            self._draws = draws_apart(module, inputs, samples)
            self._draws.by_samples |= self._draws.others and 0 in drawn  # a number for each sample, one by one
            self._draws.elsewhere = drawn - {0}

    def backward_begins(self) -> None:
        """Decide by the first forward pass; a collective operation then."""
        if self._draws is not None:
            self.pass_begins()
            self.decide(self._draws)
            self._draws = self._own_draws = None


class StageNumbers(SampleNumbers):
    """Has each stage of a pipeline draw its own random numbers, once a step has shown that one of them draws.

    Stages draw unlike. Left to themselves they would drop the same elements of different layers, and have generators
    of unlike states afterwards, from which the loop would draw unlike numbers for the inputs, which the first stage
    takes, and for the targets, which the last one takes.

    Args:
        world: All ranks of the model.
        place: Number of the samples and the stages that this rank has; ranks with equal ones draw alike.
    """

    def __init__(self, world: World, place: int) -> None:
        super().__init__(world, place, own=None if world.size > 1 else False)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Open a block for a step; ranks whose generators were alike have them alike again. The first is collective."""
        if self._own is False:
            yield
            return
        with _apart(self._place) as drawn:
            yield
        if self._own is None:
            self._own = any(self._world.from_all(bool(drawn)))
        if self._own:
            _go_on(default_generators())


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what operators draw from torch's default generators.

    Args:
        modules: The model: what has the shape of one of its parameters is not for samples.
        samples: How many a pass has.

    Attributes:
        by_samples: Whether something was drawn that has a row for each sample.
        others: Whether something else was.
        unsure: Whether that may be for samples: it has a row for each, and the shape of a parameter.
        elsewhere: Default generators of Python (1) and numpy (2) that were drawn from by the number of samples.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples, self._shapes = samples, {p.shape for one in modules for p in parameters_of(one)}
        self.by_samples = self.others = self.unsure = False
        self.elsewhere: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and look whether it has drawn."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = [one.get_state() for one in default_generators()]
        result = func(*args, **(kwargs or {}))
        if not all(map(torch.equal, before, (one.get_state() for one in default_generators()))):
            first = result[0] if isinstance(result, tuple | list) else result
            self._note(first.shape if isinstance(first, torch.Tensor) else torch.Size())
        return result

    def _note(self, shape: torch.Size) -> None:
        rows = self._samples in shape or (len(shape) > 1 and shape[0] % self._samples == 0)
        rows &= shape.numel() > 1
        known = shape in self._shapes
        self.by_samples |= rows and not known
        self.others |= known or not rows
        self.unsure |= rows and known


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
    if not module.training or any(one._forward_hooks for one in module.modules()):
        return Draws((), samples)
    if samples == 1 and samples_in(two := mapped(inputs, with_another), 2) == 2:
        inputs, samples = two, 2  # else what has a row for each sample looks like what holds for a batch
    args, kwargs = mapped(inputs, _for_itself)
    with torch_adapter.without_collectives():
        found = draws_of([module], samples, lambda: module(*args, **kwargs))
        if found.unsure:  # of a number of samples that no parameter has in its shape
            sizes = {size for p in parameters_of(module) for size in p.shape}
            many = next(size for size in itertools.count(samples + 1) if size not in sizes)
            more = mapped(inputs, lambda one: _for_itself(_with_more(one, samples, many)))
            if samples_in(more, many) == many:
                again = draws_of([module], many, lambda: module(*more[0], **more[1]))
                found = again if again.by_samples or again.others else found
    return found


def _with_more(one: torch.Tensor, samples: int, many: int) -> torch.Tensor:
    return torch.cat([one, *[one[:1]] * (many - samples)]) if one.shape[:1] == (samples,) else one


def _for_itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextmanager
def _apart(place: int) -> Iterator[list[torch.Generator]]:
    """Open a block with generators of a place's own; then they are as before, and the list has those drawn from."""
    generators, drawn = default_generators(), list[torch.Generator]()
    before = [one.get_state() for one in generators]
    for one, state in zip(generators, before, strict=True):
        one.manual_seed(_seed(state, 1 + place))
    begun = [one.get_state() for one in generators]
    try:
        yield drawn
    finally:
        drawn.extend(
            one for one, first in zip(generators, begun, strict=True) if not torch.equal(one.get_state(), first)
        )
        for one, state in zip(generators, before, strict=True):
            one.set_state(state)


def _go_on(generators: list[torch.Generator]) -> None:
    for one in generators:
        one.manual_seed(_seed(one.get_state(), 0))


def _seed(state: torch.Tensor, *places: int) -> int:
    return mix(digest(state.numpy().tobytes()), *places) >> 1
