"""Compares the stages of a model with the model, one after the other in this process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from hocket.sharding import same_values
from hocket.workload.division import seed

from ..batches import trees as _trees
from ..partition.tensor import CutParameters
from ..state import give_back, is_deferred
from . import _micro, _values
from ._flight import Flight
from ._kept_tensors import tensors_unchanged, without_large_gradients
from ._numbers import OtherBranchError
from ._stage import Stage
from ._trace import UNCUT, SplitError

Tensor = torch.Tensor
_FEW: Final = 2  # samples, which batch norm takes
_MOST_CALLS: Final = 50_000  # of torch's functions in a trial of other sizes: some seconds
_MOST_S: Final = 60.0  # of such a trial, which calls none


def compare(
    model: torch.nn.Module, stages: Sequence[Stage], inputs: Any, *, cut: bool = True
) -> tuple[int, tuple[str, ...]]:
    """Run model and stages on the sample, training and evaluating, and compare outputs and gradients.

    A branch that fewer samples take otherwise is no matter where the stages give the model's output all the same.

    Args:
        model: the user's.
        stages: all of it.
        inputs: the sample.
        cut: whether batches will be cut, so that fewer samples must go through, too.

    Returns:
        The fewest samples that the stages can take, and the buffers, but for batch norm's, that a forward changes.

    Raises:
        SplitError: they differ.
    """
    samples = _micro.samples_of(inputs, None) if cut else 1
    fewest = 1
    written: list[str] = []
    for training in (model.training, not model.training):
        modes = [(module, module.training) for module in model.modules()]
        trains = training or training is model.training  # also a model that is trained as it evaluates
        if training is not model.training:
            model.train(training)
        try:
            try:
                ours = _results(model, lambda: chained(stages, inputs), backward=trains)
                theirs = _results(model, lambda: (_trees.called(model, inputs), None), backward=trains)
            except Exception as error:
                raise _failed(model, error) from error
            _compare(model, ours, theirs, training)
            if training:
                kept = _buffers(model)
                written = [name for name in kept if not same_values(theirs[f"buffer {name}"], kept[name])]
            if trains and not training:  # and evaluates without gradients, for which its code may ask
                _hold(model, stages, inputs, training, needed=True, gradients=False, who="evaluation takes")
            # The last batch of a data set has fewer samples.
            for size in sorted({samples // 2, 1} - {0, samples}, reverse=True):
                few = _micro.first(inputs, samples, size)
                if not _hold(model, stages, few, training, needed=size > 1, gradients=trains):
                    fewest = 2
        finally:
            for module, mode in modes:
                module.training = mode
    return fewest, tuple(written)


def sizes_unseen(
    model: torch.nn.Module, stages: Sequence[Stage], inputs: Any, *, cut: bool = True
) -> tuple[tuple[int, int, int], ...]:
    """Return the sizes of the sample by which the stages hold alone, while the model's code takes others too.

    Where a model takes the sample with half or twice as many of something, the stages that give another output then
    have a number in them that was not followed. This is tried on the CPU, where an index out of its range is an error
    and not the end of all work on a device, and where no rank waits for what another one computes.

    Returns:
        Of each such size the tensor of the inputs, in order, its dim, and the size.
    """
    parts = any(
        type(one).__module__.startswith("hocket.") or isinstance(one._parameters, CutParameters)
        for one in model.modules()
    )
    tensors = [*_values.tensors_of(inputs), *model.parameters(), *model.buffers()]
    if parts or any(one.device.type != "cpu" or is_deferred(one) for one in tensors):
        return ()
    samples = _micro.samples_of(inputs, None) if cut else 0
    few = _micro.first(inputs, samples, min(samples, _FEW)) if cut else inputs
    places: dict[int, list[tuple[int, int, int]]] = {}
    for at, tensor in enumerate(_values.tensors_of(few)):
        for dim, size in enumerate(tensor.shape if tensor.layout is torch.strided else ()):
            if size > 1 and (dim or not cut or size != min(samples, _FEW)):
                places.setdefault(size, []).append((at, dim, size))
    found: set[tuple[int, int, int]] = set()
    modes = [(module, module.training) for module in model.modules()]
    for training in (model.training, not model.training):
        trains = training or training is modes[0][1]
        try:
            if training is not model.training:
                model.train(training)
            for some in places.values():
                if not found.issuperset(some) and _unseen(model, stages, few, some, training, gradients=trains):
                    found.update(some)
        finally:
            for module, mode in modes:
                module.training = mode
    return tuple(sorted(found))


def _unseen(
    model: torch.nn.Module,
    stages: Sequence[Stage],
    inputs: Any,
    places: Sequence[tuple[int, int, int]],
    training: bool,
    *,
    gradients: bool,
) -> bool:
    """Return whether stages give another output than the model, and no error, with other sizes at these places."""
    for change in (_halved, _doubled):
        counter = itertools.count()
        dims = [[dim for at, dim, _ in places if at == i] for i in range(len(_values.tensors_of(inputs)))]
        other = _trees.mapped(inputs, lambda tensor: functools.reduce(change, dims[next(counter)], tensor))  # noqa: B023
        try:
            plain = functools.partial(_trees.called, model, other)
            with _bounded():
                theirs = _results(model, lambda: (plain(), None), backward=False, gradients=gradients)  # noqa: B023
        except Exception:  # it does not take such sizes
            continue
        try:
            ours = _results(model, lambda: chained(stages, other), backward=False, gradients=gradients)  # noqa: B023
        except Exception:  # nor do the stages: a batch would end so
            return False
        try:
            _compare(model, ours, theirs, training)
        except SplitError:
            return True
        return False
    return False


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """End a model that goes on for ever with sizes that it was not made for, as `while x.shape[1] != 4` may."""
    thread, lock, over, late = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False, False

    def end() -> None:  # in the other thread, wherever its Python code is
        nonlocal late
        with lock:
            if not over:
                late = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeoutError))

    timer = threading.Timer(_MOST_S, end)
    timer.daemon = True
    timer.start()
    try:
        with _FewCalls():
            yield
    finally:
        timer.cancel()
        with lock:
            over = True
        # What was raised and has not yet arrived does so here. To take it back would leave Python 3.11 looking for it
        # for ever, and whoever traces or profiles this thread then waits as long.
        if late:
            time.sleep(0)


class _FewCalls(TorchFunctionMode):
    """Lets a model call so much of torch, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self._left = _MOST_CALLS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the model calls more of torch than it should")
        return func(*args, **(kwargs or {}))


def _halved(tensor: Tensor, dim: int) -> Tensor:
    return tensor.narrow(dim, 0, tensor.shape[dim] // 2).clone(memory_format=torch.contiguous_format)


def _doubled(tensor: Tensor, dim: int) -> Tensor:
    return torch.cat([tensor, tensor], dim)


def _buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the buffers, but for those of batch norm."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._NormBase)]
    known = {id(buffer) for norm in norms for buffer in norm.buffers()}
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in known}


def _hold(
    model: torch.nn.Module,
    stages: Sequence[Stage],
    inputs: Any,
    training: bool,
    *,
    needed: bool,
    gradients: bool,
    who: str = "fewer samples take",
) -> bool:
    """Return whether stages hold for fewer samples than they were made with; raise an error if they need to."""
    try:
        theirs = _results(model, lambda: (_trees.called(model, inputs), None), backward=False, gradients=gradients)
    except Exception as error:
        if not needed:  # the model does not take a single sample, whoever runs it
            return True
        raise SplitError(
            f"{type(model).__name__} runs on the sample and not on a part of it ({type(error).__name__}: {error}), so "
            f"a batch of it cannot be cut into micro-batches. {UNCUT}"
        ) from error
    widened: list[OtherBranchError] = []
    while True:
        try:
            ours = _results(model, lambda: chained(stages, inputs), backward=False, gradients=gradients)
            _compare(model, ours, theirs, training)
            return True
        except OtherBranchError as error:
            error.check.allowed.append(error.value)
            widened.append(error)
        except Exception as error:
            for branch in widened:
                branch.check.allowed.remove(branch.value)
            if not needed:
                return False
            if isinstance(error, SplitError) and not widened:
                raise
            if not widened:
                raise _failed(model, error) from error
            raise SplitError(f"{who} another way through {type(model).__name__}: {widened[-1]}. {UNCUT}") from error


def _failed(model: torch.nn.Module, error: Exception) -> SplitError:
    return SplitError(
        f"the stages of {type(model).__name__} do not run where the model does: {type(error).__name__}: {error}. "
        "Say pipeline_parallel_degree = 1 (data, sharded and tensor parallelism do not split the model); if the place "
        "of a cut is at fault, split= (names of modules that begin a stage) moves it"
    )


def chained(stages: Sequence[Stage], inputs: Any) -> tuple[Any, Callable[[list[Tensor]], None]]:
    """Return the output of the stages one after the other, and what runs their backwards from its gradients."""
    flights = []
    output: Any = []
    for stage in stages:
        stage.module.training = stage.model.training
        flight = Flight(stage, _values.leaves(output))
        output = flight.forward(stage.module, inputs, split_backward=False)
        flights.append(flight)

    def backward(gradients: list[Tensor]) -> None:
        flights[-1].start_from([t for t in _values.tensors_of(output) if t.requires_grad], gradients)
        found = flights[-1].backward()
        for flight in reversed(flights[:-1]):
            flight.arrived([one.value for one in found])
            found = flight.backward()

    return output, backward


def _results(
    model: torch.nn.Module, run: Callable[[], Any], *, backward: bool, gradients: bool = False
) -> dict[str, Tensor]:
    """Return what a run gives and leaves: with `gradients` one to go back from, which `backward` does."""
    found: dict[str, Tensor] = {}
    few: dict[str, Tensor] = {}
    with tensors_unchanged(model), torch.set_grad_enabled(backward or gradients), without_large_gradients(model, few):
        seed(0)
        output, back = run()
        tensors = _values.tensors_of(output)
        found.update({f"output {i}": tensor.detach().clone() for i, tensor in enumerate(tensors)})
        roots = [tensor for tensor in tensors if tensor.requires_grad]
        if backward and roots:
            given = [
                torch.linspace(-1, 1, root.numel(), dtype=root.dtype).reshape(root.shape).to(root.device)
                for root in roots
            ]
            if back is None:
                torch.autograd.backward(roots, given)
            else:
                back(given)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[f"gradient of {name}"] = parameter.grad
            found.update({f"gradient of {name}": gradient for name, gradient in few.items()})
        found.update({f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()})
        del output, back, tensors, roots
    if any(map(is_deferred, model.parameters())):
        give_back()  # activations
    return found


def _compare(model: torch.nn.Module, ours: dict[str, Tensor], theirs: dict[str, Tensor], training: bool) -> None:
    gradients = [tensor for name, tensor in theirs.items() if name.startswith("gradient")]
    largest = functools.cache(lambda: max(map(_largest, gradients), default=0.0))
    for name in [*theirs, *(n for n in ours if n not in theirs)]:
        mine, expected = ours.get(name), theirs.get(name)
        if mine is None or expected is None:
            zero = expected if mine is None else mine
            if zero is not None and not zero.any():
                continue  # nothing flowed back, and nothing is what a cut passes on as zeros
            difference = "is missing"
        elif mine.shape != expected.shape or mine.dtype != expected.dtype:
            difference = f"is {tuple(mine.shape)} {mine.dtype} and not {tuple(expected.shape)} {expected.dtype}"
        elif same_values(mine, expected):  # as a rule, which is seen much faster
            continue
        elif mine.layout is not torch.strided or expected.layout is not torch.strided:
            difference = "is another one"
        elif torch.allclose(
            mine.double(), expected.double(), rtol=1e-3, atol=_tolerance(expected, name, largest), equal_nan=True
        ):
            continue
        else:
            difference = f"differs by up to {float((mine.double() - expected.double()).abs().max()):.3g}"
        raise SplitError(
            f"{name} of the stages of {type(model).__name__} {difference}, {'training' if training else 'evaluating'} "
            "on the sample: its forward does something that following it once cannot see (a branch on isinstance, a "
            "value changed in place across a cut, state of its own). Keep that code in one submodule inside one stage, "
            "with split= (names of modules that begin a stage)"
        )


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def _tolerance(expected: Tensor, name: str, largest: Callable[[], float]) -> float:
    fine = expected.dtype in (torch.float32, torch.float64)
    relative = max(_largest(expected), 1e-30) * (1e-4 if fine else 2e-2)
    # A gradient that is zero but for rounding (of the bias of attention's keys) is as exact as those it is made of.
    rounding = 1e3 * torch.finfo(expected.dtype).eps * largest() if name.startswith("gradient") else 0.0
    return max(relative, rounding)
