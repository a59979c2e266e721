"""The loss in a calibration: what it keeps and how long it takes, by targets that are made up.

A calibration has the model's inputs and no targets. A loss whose targets can be told from the model's output is run on
ones: numbers of classes, or numbers like the output's. Only such is run as can be seen to change nothing: a loss that
counts its calls would count these.
"""

import dataclasses
import dis
import functools
import inspect
import math
import time
import types
import warnings
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

from hocket.parallel.batches import called, mapped, samples_in
from hocket.parallel.pipeline import in_steps
from hocket.workload import OptimizerMaker, Share, Workload, capture
from hocket.workload.division import unchanged

Target = Callable[[torch.Tensor], torch.Tensor]
LossOfOutput = Callable[[Any, Any], Any]

_TIMES = 5
_DEPTH = 4  # of functions that call functions
_CHANGING = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR"}
_OUTSIDE = {"save", "seed", "manual_seed", "set_rng_state"}  # of torch's functions those that change what is outside
_SPEAKING = {"print", "open", "input", "setattr", "delattr", "exec", "eval", "globals", "vars", "next"}


@dataclasses.dataclass(frozen=True)
class LossOfSample:
    """A loss of a model and a sample, as one of the model's output and of a batch of its inputs."""

    loss: Callable[[Any, Any], Any]
    model: torch.nn.Module
    sample: Any

    def inputs(self) -> Any:
        """Return what it gives the model: positional inputs, or a dict of keywords.

        Raises:
            ValueError: it does not call the model once.
        """
        calls: list[Any] = []
        hook = self.model.register_forward_pre_hook(
            lambda _, args, named: calls.append((args, named)), with_kwargs=True
        )
        try:
            with unchanged(self.model), torch.no_grad():
                self.model.train()
                self.loss(self.model, self.sample)
        finally:
            hook.remove()
        if len(calls) != 1:
            raise ValueError(f"it calls the model {len(calls)} times")
        args, named = calls[0]
        if args and named:
            return dict(inspect.signature(self.model.forward).bind(*args, **named).arguments)
        return named or args

    def __call__(self, output: Any, inputs: Any) -> torch.Tensor:
        few = mapped(self.sample, lambda one: one[: samples_in(inputs)] if one.dim() else one)
        kind, kept = type(self.model), [output]  # a class is garbage for a while, and would keep the output as long
        given: Any = object.__new__(type(kind.__name__, (kind,), {"__call__": lambda *_, **__: kept.pop()}))
        given.__dict__ = self.model.__dict__  # all else is the model's own
        return _scalar(self.loss(given, few))


def loss_by_made_up_targets(loss_fn: Any, model: torch.nn.Module, inputs: Any) -> tuple[LossOfOutput | None, str]:
    """Return what gives the loss of an output and a batch of inputs, or None and why it cannot be run.

    Args:
        loss_fn: Of output and target, as a Trainer has it, or a `LossOfSample`.
        model: The user's; it stays as it is.
        inputs: Positional inputs of a batch, or a dict of keywords: then all of a batch is the target.
    """
    if isinstance(loss_fn, LossOfSample):
        return loss_fn, ""
    if not changes_nothing(loss_fn):
        return None, "it may change what is outside of it"
    few = mapped(inputs, lambda one: one[:2] if one.dim() else one)
    with unchanged(model), torch.no_grad():
        model.train()
        output = called(model, few)
    if _works(loss_fn, output, None):  # the model computes it
        return (lambda out, _: _scalar(loss_fn(out, None))), ""
    if isinstance(inputs, Mapping):
        found: LossOfOutput = lambda out, batch: _scalar(loss_fn(out, batch))  # noqa: E731
        return (found, "") if _works(found, output, few) else (None, "it wants more than the sample has")
    if not isinstance(output, torch.Tensor) or not output.is_floating_point() or not output.dim():
        return None, "the model's output is no tensor from which a target can be told"
    target = _target(loss_fn, output)
    if target is None:
        return None, "its target cannot be told from the model's output"
    return (lambda out, _: _scalar(loss_fn(out, target(out)))), ""


def with_loss(
    workload: Workload, model: torch.nn.Module, inputs: Any, loss: LossOfOutput, optimizer: str | OptimizerMaker
) -> Workload:
    """Return the workload of a model with the memory and the time of a loss, which its last layer has.

    `workload` was captured with the sum of its outputs for a loss; the model, on the device that it trains on, stays as
    it is, and `inputs` are of a rank's part of a batch.
    """
    degrees = sorted({share.degree for layer in workload.layers for share in layer.shares if share.axis == "tensor"})
    counted = capture(
        model, inputs, loss=lambda own, batch: loss(called(own, batch), batch), optimizer=optimizer, degrees=degrees,
        repeats=1,
    )  # fmt: skip
    forward_s, backward_s = _seconds(model, inputs, loss)
    named = {layer.name: layer for layer in counted.layers}
    last = counted.layers[-1].name
    layers = []
    for layer in workload.layers:
        found = named.get(layer.name)
        if found is None:
            layers.append(layer)
            continue
        known = {(share.axis, share.degree, share.sequence): share for share in found.shares}
        shares = [_with_memory_of(one, known.get((one.axis, one.degree, one.sequence))) for one in layer.shares]
        made = dataclasses.replace(
            layer, operations=found.operations, peak_bytes=found.peak_bytes, peak_fixed_bytes=found.peak_fixed_bytes,
            shares=tuple(shares),
        )  # fmt: skip
        if layer.name == last:
            took = layer.forward_s + forward_s, layer.backward_s + backward_s
            made = dataclasses.replace(made, forward_s=took[0], backward_s=took[1])
        layers.append(made)
    changed = dataclasses.replace(workload, layers=tuple(layers), finer=())
    return in_steps(changed, model, inputs) if workload.finer else changed


def _with_memory_of(one: Share, other: Share | None) -> Share:
    if other is None:
        return one
    peak, fixed = other.peak_bytes, other.peak_fixed_bytes
    return dataclasses.replace(one, operations=other.operations, peak_bytes=peak, peak_fixed_bytes=fixed)


def _seconds(model: torch.nn.Module, inputs: Any, loss: LossOfOutput) -> tuple[float, float]:
    """Return what both passes of a loss take, without those of a sum."""
    with unchanged(model), torch.no_grad():
        model.train()
        output = called(model, inputs)
    tensors: list[torch.Tensor] = []

    def leaf(one: torch.Tensor) -> torch.Tensor:
        made = one.detach().requires_grad_(one.is_floating_point())
        tensors.extend([made] if made.requires_grad else [])
        return made

    given = mapped(output, leaf)

    def settled() -> float:
        if any(one.is_cuda for one in tensors):
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(work: Callable[[], torch.Tensor]) -> tuple[float, float]:
        begun = settled()
        value = work()
        middle = settled()
        torch.autograd.grad(value, tensors, allow_unused=True)
        return middle - begun, settled() - middle

    both = []
    works = (lambda: loss(given, inputs), lambda: torch.stack([one.float().sum() for one in tensors]).sum())
    with unchanged(model):  # a loss may draw random numbers, and other ranks draw none meanwhile
        for work in works:
            rounds = [timed(work) for _ in range(_TIMES + 1)][1:]
            both.append([median(column) for column in zip(*rounds, strict=True)])
    forward_s, backward_s = (max(0.0, own - plain) for own, plain in zip(*both, strict=True))
    return forward_s, backward_s


def _target(loss_fn: Any, output: torch.Tensor) -> Target | None:
    shapes: list[Callable[[torch.Tensor], list[int]]] = [lambda out: [*out.shape[:-1]]]
    if output.dim() > 2:
        shapes.append(lambda out: [out.shape[0], *out.shape[2:]])
    for shape in shapes:
        # What takes numbers of classes takes no others of this form; what takes both is no loss over classes.
        taken = [_works(loss_fn, output, _ones(output, shape, dtype)) for dtype in (torch.long, output.dtype)]
        if taken == [True, False]:
            return functools.partial(_ones, shape=shape, dtype=torch.long)
    return torch.ones_like if _works(loss_fn, output, torch.ones_like(output)) else None


def _ones(out: torch.Tensor, shape: Callable[[torch.Tensor], list[int]], dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(shape(out), dtype=dtype, device=out.device)


def _works(loss_fn: Any, output: Any, target: Any) -> bool:
    """Return whether a loss of these is a finite scalar with a gradient."""
    given = mapped(output, lambda one: one.detach().requires_grad_(one.is_floating_point()))
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".*target size")  # of losses that broadcast one to the other
            value = _scalar(loss_fn(given, target))
            return value.numel() == 1 and value.requires_grad and math.isfinite(float(value))
    except Exception:  # whatever a user's loss raises of a target that is not what it wants
        return False


def _scalar(value: Any) -> torch.Tensor:
    """Return the loss of what a loss function gives: a scalar, or a pair of a sum and its count."""
    if isinstance(value, tuple) and len(value) == 2:
        return torch.as_tensor(value[0] / value[1])
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a loss is a scalar, not {type(value).__name__}")
    return value


def changes_nothing(function: Any, depth: int = _DEPTH) -> bool:
    """Return whether a loss can be seen to change nothing outside of it, and to say nothing.

    Torch's functions and losses do not. A function of the user's does not if it assigns to local names alone, and uses
    modules, plain values, tensors and such functions.
    """
    if depth == 0:
        return False
    module = str(getattr(function, "__module__", None) or "")
    if isinstance(function, torch.nn.Module):
        return type(function).__module__.startswith("torch.nn.") and not [*function.parameters()]
    if isinstance(function, functools.partial):
        values = [function.func, *function.args, *function.keywords.values()]
        return all(_harmless(one, depth) for one in values)
    if isinstance(function, types.BuiltinFunctionType) or module.startswith(("torch.", "hocket.")) or module == "torch":
        return callable(function)
    if not isinstance(function, types.FunctionType):
        return False
    steps = list(_steps(function.__code__))
    free = set(function.__code__.co_freevars)
    if any(one.opname in _CHANGING or (one.opname == "STORE_DEREF" and one.argval in free) for one in steps):
        return False
    methods = {one.argval for one in steps if one.opname in ("LOAD_METHOD", "LOAD_ATTR")}
    if methods & _OUTSIDE or any(
        name.endswith("_") and not name.startswith("_") for name in methods
    ):  # in place, perhaps of what is outside
        return False
    try:
        used = inspect.getclosurevars(function)
    except ValueError:  # a name of the closure has no value yet
        return False
    inside = {one.argval for one in steps if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    outer = {**{name: function.__globals__[name] for name in inside if name in function.__globals__}, **used.nonlocals}
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return not _SPEAKING & (inside | set(used.builtins)) and all(
        _harmless(one, depth) for one in (*outer.values(), *defaults)
    )


def _steps(code: types.CodeType) -> list[dis.Instruction]:
    """Return the instructions of a function and of those inside of it."""
    found = list(dis.get_instructions(code))
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found += _steps(one)
    return found


def _harmless(value: Any, depth: int) -> bool:
    plain = int | float | complex | str | bytes | bool | None | torch.dtype | torch.device | torch.Tensor | torch.Size
    if isinstance(value, plain):
        return True
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in ("torch", "math", "operator")
    if isinstance(value, tuple):
        return all(_harmless(one, depth) for one in value)
    return changes_nothing(value, depth - 1)
