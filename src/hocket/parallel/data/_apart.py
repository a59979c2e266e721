"""Finds what a model computes for a sample from others of its batch: it is run on a batch, and on two parts of it."""

import random
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from hocket.comm import torch_adapter
from hocket.workload.division import seed

from ..batches import (
    Addends,
    Alone,
    Cutter,
    TermValues,
    divisors,
    mapped,
    samples_in,
    tensors_in,
    term_off,
    undisturbed,
)
from ._forward_state import ChangedBuffer, StateProbe
from ._generator_marks import marks
from ._tolerances import Tolerances, distance

PADDED = (
    "the loader's collate_fn, or the loop, pads samples to the longest of them, each rank has its own, and the model "
    "or its loss gives something else for a sample that is padded further ({}): padding is not masked (a recurrent "
    "layer that runs over it, a mean, a convolution), or it is on the left and moves what it pads (in a model that "
    "counts positions from the beginning). Mask it, pad on the right, pad all batches to one length, or pass "
    "an object whose __iter__ gives the DataLoader's batches, of which every rank loads all and keeps its part"
)
"""Format of what is wrong where a rank pads less than one device does."""


@dataclass
class Apart:
    """What a batch gives that its parts do not."""

    # places among the tensors of the output, and then those that are kept, that differ; each with how
    wrong: dict[int, str] = field(default_factory=dict)
    outputs: int = 0  # how many tensors are outputs
    rows: set[int] = field(default_factory=set)  # places of those that have a row for each sample
    padded: dict[int, str] = field(default_factory=dict)  # as `wrong`, of samples that others pad to another length
    length: int = 0  # to which the loop has padded them; see `Alone`
    state: list[ChangedBuffer] = field(default_factory=list)  # buffers that a pass changes
    batch_second: bool = False  # whether a layer of the model takes the batch as the second dimension
    changing: list[str] = field(default_factory=list)  # parameters that each pass changes
    counts: bool = False  # whether a loss that it gives divides by something else than samples

    def relevant(
        self, outputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor | None], loss: torch.Tensor
    ) -> tuple[str, str]:
        """Return how an output differs from which the loss was computed, or which has no gradient that would tell.

        First where samples meet, then where padding changes it; "" where it does not differ. `kept` are those tensors
        that the model keeps in attributes, None for those of which the loop has computed nothing.
        """
        places = {**dict(enumerate(outputs)), **dict(enumerate(kept, self.outputs))}

        def first(found: dict[int, str]) -> str:
            for place, said in found.items():
                one = places.get(place)
                if one is None and place >= self.outputs:
                    continue
                if one is None or one.grad_fn is None or torch_adapter.reaches(loss, torch_adapter.graph_marks([one])):
                    return said
            return ""

        return first(self.wrong), first(self.padded)


class ModelError(Exception):
    """Of a model that takes no part of a batch, or communicates."""


@dataclass
class _ApartRun:
    outputs: list[torch.Tensor]
    given: int  # how many are given, the others kept in attributes
    counts: list[tuple[float, ...]]  # what each scalar divides by
    addends: list[Addends | None]  # what it adds up
    state: list[torch.Tensor | None]
    drawn: list[tuple[int, int]]  # what torch's, Python's and numpy's generators are like after it


def look_apart(
    module: torch.nn.Module,
    inputs: Any,
    samples: int,
    *,
    summed: bool | None,
    alone: Alone | None = None,
    drawn: set[int] | None = None,
) -> Apart | None:
    """Compare what a model gives for a batch with what it gives for two parts of it.

    Dropout and batch norm evaluate, and all of the model where it draws random numbers; those that it draws all the
    same, as a VAE does, are made alike for all samples. Buffers, attributes and random
    states are put back. A model that communicates, or whose layers the program has hooked, is left alone. `inputs` are
    a pair of positional arguments and those by name, of so many `samples`; of one, it gets another beside it. `summed`
    says whether a loss is a sum over samples, None where the program has said by what it is weighted; `alone` is what
    some samples are if others do not pad them; `drawn` gets the places (among `marks`) of generators from which more is
    drawn for more samples.

    Returns:
        None where nothing was found out.
    """
    module = getattr(module, "_orig_mod", module)  # what torch.compile has wrapped
    hooks = [hook for one in module.modules() for hook in one._forward_hooks.values()]
    hooked = any(not getattr(hook, "__module__", "").startswith("torch.") for hook in hooks)  # or observers
    if samples < 1 or samples_in(inputs, samples) != samples or hooked:
        return None
    if samples == 1:
        inputs, samples = mapped(inputs, with_another), 2
        if samples_in(inputs, samples) != samples:
            return None
    cut = max(1, samples // 2 - (samples >= 6))  # uneven, so that weights matter
    parts = [(0, cut), (cut, samples)]
    tolerances = Tolerances(module)
    found = Apart(batch_second=any(map(_takes_batch_second, module.modules())))
    left: dict[str, str] = {}
    cutter = Cutter(samples)

    def run(begin: int, end: int) -> _ApartRun:
        return run_apart(module, probe, cutter.cut(inputs, begin, end, samples), 0, end - begin)

    def run_parts() -> list[_ApartRun]:
        nonlocal cutter
        try:
            return [run(*part) for part in parts]
        except ModelError:
            if any(len(one) != samples for one in tensors_in(inputs) if one.dim()):
                raise
            cutter = Cutter(0)  # lists may have an entry for each field, and as many as there are samples
            return [run(*part) for part in parts]

    with ExitStack() as stack:
        stack.enter_context(undisturbed([module]))
        stack.enter_context(torch_adapter.without_collectives())
        stack.enter_context(tolerances.watching())
        probe = StateProbe([(module, {})], lambda one: isinstance(one, torch.nn.modules.batchnorm._BatchNorm))
        try:
            for calm, quiet in LESS_RANDOM:
                calm([module])
                stack.enter_context(quiet())
                whole = run_apart(module, probe, inputs, 0, samples)
                left = left or _sums(module)
                again = run_apart(module, probe, inputs, 1, samples)
                steady = all(tolerances.close(a, b, 1e-2) for a, b in zip(whole.outputs, again.outputs, strict=True))
                if not steady and calm is not as_trained:
                    continue
                some = run_parts() if steady else []
                with suppress(ModelError):
                    pairs = [zip(whole.drawn, one.drawn, strict=True) for one in some or [run(*part) for part in parts]]
                    by_samples = {i for pair in pairs for i, (a, b) in enumerate(pair) if a != b}
                    if drawn is not None and calm is as_trained:
                        drawn |= by_samples
                if steady and not by_samples - {0}:  # else parts have other numbers of Python or numpy
                    break
            else:
                found.changing = _changed(left, module)
                return found if found.changing else None
        except ModelError:
            return None
        with suppress(ModelError):
            if alone is not None:
                mine = run(alone.begin, alone.end).outputs
                theirs = run_apart(module, probe, alone.batch, 0, alone.end - alone.begin).outputs
                unlike = [_unlike_padded(a, b, tolerances) for a, b in zip(mine, theirs, strict=False)]
                found.length = alone.length
                found.padded = {i: one for i, one in enumerate(unlike) if one}
    found.changing, found.outputs = _changed(left, module), whole.given
    if any(len(one.outputs) != len(whole.outputs) for one in some):
        return found
    weights = [(b - a) / samples for a, b in parts]
    found.state = probe.changed(whole.state, [one.state for one in some], weights)
    for i, one in enumerate(whole.outputs):
        if not one.is_floating_point():
            continue
        theirs = [run.outputs[i] for run in some]
        if one.dim() and len(one) == samples and [len(t) for t in theirs] == [b - a for a, b in parts]:
            found.rows.add(i)
            joined = torch.cat(theirs) if all(t.shape[1:] == one.shape[1:] for t in theirs) else one
            if not tolerances.close(one, joined):
                found.wrong[i] = f"what it gives for the samples is {distance(one, joined):.2g} off, relative"
            continue
        if (
            one.dim()
            and (each := len(one) // samples) > 1
            and [len(t) for t in (one, *theirs)] == [each * n for n in (samples, *(b - a for a, b in parts))]
        ):  # several for each sample, in any order
            if said := _unlike_sums(one, theirs, tolerances):
                found.wrong[i] = said
            continue
        if one.numel() != 1 or not one.requires_grad:
            continue
        by = [
            (run.counts[i] or (0.0,))[0] / (b - a)
            for run, (a, b) in zip((whole, *some), ((0, samples), *parts), strict=True)
        ]
        found.counts |= all(by) and max(by) - min(by) > 1e-6 * max(by)
        if summed is not None and all(t.numel() == 1 for t in theirs):
            said = _added_up(i, whole, some, weights, tolerances, summed=summed)
            if said:
                found.wrong[i] = said
    return found


def padded_apart(
    module: torch.nn.Module, inputs: Any, alone: Alone, samples: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[int, str]]:
    """Compare what a model gives for some of its samples, as it evaluates, with what it gives where they are `alone`.

    Returns:
        The tensors of both outputs, and how those in some places differ; nothing where it does not take parts of a
        batch, draws random choices, or the program has hooked it.
    """
    module = getattr(module, "_orig_mod", module)  # what torch.compile has wrapped
    hooked = any(one._forward_hooks for one in module.modules())
    if hooked or samples_in(inputs, samples) != samples:
        return [], [], {}
    tolerances, cutter = Tolerances(module), Cutter(samples)
    with undisturbed([module]), torch_adapter.without_collectives(), tolerances.watching(), NoNoise():
        as_evaluated([module])
        probe = StateProbe([(module, {})], lambda _: True)
        some, size = cutter.cut(inputs, alone.begin, alone.end, samples), alone.end - alone.begin
        try:
            mine, again = (run_apart(module, probe, some, number, size).outputs for number in range(2))
            theirs = run_apart(module, probe, alone.batch, 0, size).outputs
        except ModelError:
            return [], [], {}
    if len(mine) != len(theirs) or not all(tolerances.close(a, b, 1e-2) for a, b in zip(mine, again, strict=True)):
        return [], [], {}
    unlike = [_unlike_padded(a, b, tolerances) for a, b in zip(mine, theirs, strict=True)]
    return mine, theirs, {i: one for i, one in enumerate(unlike) if one}


def with_another(one: torch.Tensor) -> torch.Tensor:
    """Return the row of a sample, and that of another made of it: numbers are smaller, whole ones in another order."""
    if one.shape[:1] != (1,):
        return one
    floats = one.is_floating_point() or one.is_complex()
    return torch.cat([one, 0.5 * one if floats else one.flip(-1) if one.dim() > 1 else one]).detach()


def _sums(module: torch.nn.Module) -> dict[str, str]:
    """Return the sum of each parameter, which tells whether it has changed."""
    found = {}
    for name, p in module.named_parameters():
        own = p.to_local() if hasattr(p, "to_local") else p
        found[name] = str(own.detach().sum(dtype=torch.complex128 if p.is_complex() else torch.float64).tolist())
    return found


def _changed(before: dict[str, str], module: torch.nn.Module) -> list[str]:
    after = _sums(module)
    return [name for name, one in before.items() if after.get(name) != one]


def as_trained(modules: Sequence[torch.nn.Module]) -> None:
    """Have dropout and batch norm alone evaluate."""
    kinds = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)
    for module in modules:
        for inner in module.modules():
            if isinstance(inner, kinds):
                inner.training = False


def as_evaluated(modules: Sequence[torch.nn.Module]) -> None:
    """Have everything evaluate."""
    for module in modules:
        module.eval()


class NoNoise(TorchFunctionMode):
    """Has what is drawn at random be the same number for all samples in each pass: noise, and times of a diffusion."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; what it draws and is no permutation, choice or dropout is replaced."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _NOISE and isinstance(result, torch.Tensor):
            result.detach().fill_(0.5)
        elif func in (torch.randint, torch.randint_like):
            ends = [one for one in args if isinstance(one, int)]
            result.fill_(ends[0] if len(ends) + ("high" in kwargs) > 1 else kwargs.get("low", 0))
        return result


LESS_RANDOM: Any = ((as_trained, nullcontext), (as_evaluated, nullcontext), (as_evaluated, NoNoise))
"""Ways to run a model, each less random than that before: what is done to it, and a block for passes."""

_NOISE = {
    "rand", "randn", "rand_like", "randn_like", "normal", "normal_", "uniform_", "exponential_", "log_normal_",
    "cauchy_", "_standard_gamma", "poisson",
}  # fmt: skip


def _unlike_padded(one: torch.Tensor, other: torch.Tensor, tolerances: Tolerances) -> str:
    """Return how padding changes an output; "" where it does not, or, of one that is longer for it, not in all samples.

    What is given for padding itself may be anything, and the longest of the samples has none.
    """
    if not one.is_floating_point() or one.shape[:1] != other.shape[:1] or one.dim() != other.dim():
        return ""
    if one.shape == other.shape:
        return "" if tolerances.close(one, other) else f"{distance(one, other):.2g} off, relative"
    sizes = [min(a, b) for a, b in zip(one.shape[1:], other.shape[1:], strict=True)]

    def cropped(row: torch.Tensor, *, end: bool) -> torch.Tensor:
        ends = [n if end else size for n, size in zip(row.shape, sizes, strict=True)]
        return row[tuple(slice(n - size, n) for n, size in zip(ends, sizes, strict=True))]

    pairs = list(zip(one, other, strict=True))
    rows = [(cropped(a, end=end), cropped(b, end=end)) for a, b in pairs for end in (False, True)]
    if any(tolerances.close(*pair) for pair in rows):
        return ""
    return f"{min(distance(*pair) for pair in rows):.2g} off, relative"


def run_apart(module: torch.nn.Module, probe: StateProbe, arguments: Any, number: int, samples: int) -> _ApartRun:
    """Run a model as it is, with copies of what it is given; raise `ModelError` if it cannot be."""
    args, kwargs = mapped(arguments, lambda one: one.detach().clone().requires_grad_(one.requires_grad))  # for itself
    with undisturbed([module]), torch.enable_grad():
        seed(number)
        random.seed(0)  # alike in all passes: a choice for the whole batch stays
        np.random.seed(number)
        try:
            with TermValues() as values:
                given = tensors_in(module(*args, **kwargs))
            drawn = [one[:2] for one in marks()]
        except Exception as error:
            raise ModelError from error
        outputs = given + kept_in(module)
        counts = [divisors(one, samples) if one.numel() == 1 else () for one in outputs]
        addends = [
            Addends.of(one, samples, values) if one.numel() == 1 and one.requires_grad else None for one in outputs
        ]
        apart = [one.detach().requires_grad_(one.requires_grad) for one in outputs]
        return _ApartRun(apart, len(given), counts, addends, probe.now(), drawn)


def kept_in(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return what modules keep in attributes and has a graph: a loop adds such terms to its loss."""
    values = (value for one in module.modules() for value in vars(one).values())
    return [one for value in values for one in tensors_in(value) if one.grad_fn is not None]


def _added_up(
    place: int,
    whole: _ApartRun,
    parts: Sequence[_ApartRun],
    weights: Sequence[float],
    tolerances: Tolerances,
    *,
    summed: bool,
) -> str:
    """Return how the losses of parts do not add up to that of the batch; "" where they do."""
    value, *theirs = (one.outputs[place].detach().reshape(()) for one in (whole, *parts))
    if not all(bool(torch.isfinite(one).all()) for one in (value, *theirs)):
        return ""
    total = torch.stack(theirs).sum()
    scale = max(float(one.abs()) for one in (value, *theirs))
    rounding = max((one.rounding for run in (whole, *parts) if (one := run.addends[place]) is not None), default=0.0)

    def equal(other: torch.Tensor) -> bool:
        return float((value - other).abs()) <= max(tolerances.of(value) * scale, rounding)

    ways = [[1.0] * len(parts) if summed else weights]
    counts = [one.counts[place] for one in parts]
    if (mine := whole.counts[place]) and all(len(one) == len(mine) for one in counts) and sum(c[0] for c in counts):
        ways += [] if summed else [[one[0] / sum(c[0] for c in counts) for one in counts]]
    for by in reversed(ways):
        mean = torch.stack([one * w for one, w in zip(theirs, by, strict=True)]).sum()
        if equal(mean):
            adds, *others = (one.addends[place] for one in (whole, *parts))
            known = [one for one in others if one is not None]
            return "" if adds is None else term_off(adds, known, by, tolerances.of(value))
    said = f"its loss of the batch is {float(value):.6g}, and that of two parts of it combined {float(mean):.6g}"
    return said + (", as a sum over samples is" if not summed and equal(total) else "")


def _unlike_sums(one: torch.Tensor, parts: Sequence[torch.Tensor], tolerances: Tolerances) -> str:
    """Return how rows of parts are none of the batch's in another order, as sums show; "" where they are."""
    if any(t.shape[1:] != one.shape[1:] for t in parts):
        return ""
    joined = torch.cat(list(parts))
    for power in (1, 2):
        mine, theirs = (t.detach().double().abs().pow(power).sum(0) for t in (one, joined))
        if not tolerances.close(mine, theirs):
            return f"what it gives for the samples is {distance(mine, theirs):.2g} off, relative"
    return ""


def _takes_batch_second(module: torch.nn.Module) -> bool:
    kinds = (torch.nn.RNNBase, torch.nn.MultiheadAttention)
    return isinstance(module, kinds) and not module.batch_first
