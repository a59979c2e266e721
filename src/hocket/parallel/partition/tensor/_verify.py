"""Compares the model with some regions cut with the model as it was: outputs, gradients and buffers on the sample.

Both are run training and evaluating. Dropout is off, and weights are moved a little off what they are, so that zeros
(new biases, say) cannot hide an error. What differs in single precision is compared once more in double precision: in
a deep model with kinks (ReLU) rounding moves some values across them, and what is right is some percent off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hocket.sharding import Shard, cut, operator_name, same_values
from hocket.workload.division import DROPOUTS, Recording, Region, seed, unchanged, without_gradients

from ...batches import called, tensors_in
from ...batches import mapped as with_tensors
from ...mesh import World
from ...state import give_back, is_deferred
from ._apply import Applied, give_data

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_SEED = 20
_DROPOUT = (
    "dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout",
)  # fmt: skip


@dataclass(slots=True)
class _Result:
    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


class Verifier:
    """Finds which regions give what the plain model gives; model and sample are the same on all ranks."""

    def __init__(self, model: nn.Module, sample: Any, recording: Recording, world: World) -> None:
        self._model, self._sample, self._recording, self._world = model, sample, recording, world
        self._evaluating: Any = torch.no_grad
        # Their gradients would be held whole; those of what lies before and behind them tell of errors, too.
        self._large = {name for name, parameter in model.named_parameters() if is_deferred(parameter)}
        self._rtol: float | None = None  # instead of what suits the type of what is compared
        self._by_numbers = False  # whether the last difference is one of values alone, which rounding may make

    def sort_out(
        self, regions: Sequence[Region], base: Sequence[Region] = ()
    ) -> tuple[list[Region], list[tuple[Region, str]]]:
        """Return the regions that are right, and those that are not, with what went wrong; `base` is cut besides.

        All ranks come to the same result. Many right regions cost one comparison.
        """
        self._base = base
        # Gradients that are there have neither the shapes of parts nor double precision.
        with _training(self._model), _moved(self._model, self._world.device), without_gradients(self._model):
            try:
                self._expected = self._run()
            except RuntimeError:  # forces: a forward that takes derivatives does not run without gradients
                self._evaluating = torch.enable_grad
                self._expected = self._run()
            if not regions or self._wrong(list(regions)) is None:
                return list(regions), []
            found = self._sorted_in_double(list(regions)) if self._world.from_root(self._by_numbers) else None
            return found or self._halve(list(regions))

    def _sorted_in_double(self, regions: list[Region]) -> tuple[list[Region], list[tuple[Region, str]]] | None:
        """Return the same in double precision, by the tolerance of the model's own; None where it cannot run so."""
        floating = [p for p in self._model.parameters() if p.is_floating_point()]
        if self._large or any(one.dtype is not torch.float32 for one in floating):
            return None
        plain, sample = self._expected, self._sample
        with ExitStack() as block:
            block.callback(self._compare_with, plain, sample, None)
            failed = None
            try:  # a forward may make tensors of single precision itself, or the device lack memory for both
                block.enter_context(_in_double(self._model))
                doubled = with_tensors(sample, lambda one: one.double() if one.dtype is torch.float32 else one)
                self._compare_with(plain, doubled, _TOLERANCE[torch.float32])
                self._expected = self._run()
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
            return None if self._world.first(failed) is not None else self._halve(regions)

    def _compare_with(self, expected: _Result, sample: Any, rtol: float | None) -> None:
        self._expected, self._sample, self._rtol = expected, sample, rtol

    def _halve(self, regions: list[Region]) -> tuple[list[Region], list[tuple[Region, str]]]:
        if not regions:
            return [], []
        wrong = self._wrong(regions)
        if wrong is None:
            return regions, []
        if len(regions) == 1:
            return [], [(regions[0], wrong)]
        middle = len(regions) // 2
        good, bad = self._halve(regions[:middle])
        more_good, more_bad = self._halve(regions[middle:])
        if not bad and not more_bad:  # each half is right by itself: not together
            return good, [(region, wrong) for region in more_good]
        return good + more_good, bad + more_bad

    def _wrong(self, regions: list[Region]) -> str | None:
        applied = Applied(self._model, [*self._base, *regions], self._recording, self._world)
        self._by_numbers = False
        try:
            try:
                found: str | None = self._difference(self._run(), applied)
            except Exception as error:  # whatever a user's forward raises on parts
                found = f"on the sample: {type(error).__name__}: {error}"
        finally:
            applied.undo()
        return self._world.first(found)

    def _run(self) -> _Result:
        parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad and n not in self._large}
        with unchanged(self._model), torch.enable_grad(), _NoDropout():
            seed(_SEED)
            outputs = tensors_in(called(self._model, self._sample))
            losses = []
            generator = torch.Generator().manual_seed(_SEED)
            for tensor in outputs:
                if tensor.is_floating_point() and tensor.requires_grad:
                    weights = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
                    losses.append((tensor * weights).sum().float())
            gradients: Any = [None] * len(parameters)
            if losses and parameters:
                total = torch.stack(losses).sum()
                gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
            self._model.eval()
            with self._evaluating():
                outputs += tensors_in(called(self._model, self._sample))
            buffers = {n: b.detach().clone() for n, b in self._model.named_buffers()}
        found = _Result([t.detach() for t in outputs], dict(zip(parameters, gradients, strict=True)), buffers)
        del outputs, losses
        if self._large:
            give_back()  # activations
        return found

    def _difference(self, found: _Result, applied: Applied) -> str | None:
        expected = self._expected
        if len(found.outputs) != len(expected.outputs):
            return "the model returns another number of tensors"
        scale = max((_largest(t) for t in expected.outputs), default=0.0)
        for i, (a, b) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
            if not self._close(a, b, scale * 1e-3):
                return f"output {i} differs from the plain model's{_by(a, b)}"
        splits = {n: applied.cuts.get(id(p)) for n, p in self._model.named_parameters()}
        splits.update((n, applied.cuts.get(id(b))) for n, b in self._model.named_buffers())
        scale = max((_largest(g) for g in expected.gradients.values() if g is not None), default=0.0)
        for name, full in expected.gradients.items():
            mine = found.gradients[name]
            if (mine is None) != (full is None):
                return f"the gradient of {name} is {'missing' if mine is None else 'there'}, unlike the plain model's"
            if mine is None or full is None:
                continue
            part = self._part(full, splits[name])
            if not self._close(mine, part, scale * 1e-3):
                return f"the gradient of {name} differs from the plain model's{_by(mine, part)}"
        for name, full in expected.buffers.items():
            if not self._close(found.buffers[name], self._part(full, splits[name]), 1e-6):
                return f"the buffer {name} differs from the plain model's"
        return None

    def _close(self, a: torch.Tensor, b: torch.Tensor, floor: float) -> bool:
        if a.shape != b.shape:
            return False
        if not b.is_floating_point() or b.layout is not torch.strided:
            return same_values(a, b)
        rtol = self._rtol or _TOLERANCE.get(b.dtype, 2e-3)
        if torch.allclose(a, b, rtol=rtol, atol=rtol * max(_largest(b), floor), equal_nan=True):
            return True
        self._by_numbers = True
        return False

    def _part(self, full: torch.Tensor, split: Shard | None) -> torch.Tensor:
        return full if split is None else cut(full, split, self._world.rank)


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _by(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape:
        return f": shape {list(a.shape)}, not {list(b.shape)}"
    return f": by {_largest(a - b):.1e}, where the largest is {_largest(b):.1e}" if b.is_floating_point() else ""


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        called = getattr(func, "__name__", "")
        if "dropout" not in called and "attention" not in called:
            return func(*args, **kwargs)
        name = operator_name(func)
        if name in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args = [*args[:4], 0.0, *args[5:]] if len(args) > 4 else args
            kwargs = {k: (0.0 if k == "dropout_p" else v) for k, v in kwargs.items()}
        if name == "multi_head_attention_forward":
            kwargs["training"] = False
        return func(*args, **kwargs)


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Open a block in which the model is in training mode; afterwards modes are as before."""
    modes = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()
    drops: list[tuple[Any, str, float]] = []
    for module in model.modules():
        name = "dropout" if isinstance(module, nn.MultiheadAttention) else "p"
        if name == "dropout" or type(module) in DROPOUTS:
            drops.append((module, name, getattr(module, name)))
    try:
        for module, name, _ in drops:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, p in drops:
            setattr(module, name, p)
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _moved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Open a block in which weights are a little off, alike on all ranks."""
    generator = torch.Generator().manual_seed(_SEED)
    saved = [(p, p.data) for p in model.parameters() if not is_deferred(p)]
    try:
        for parameter, data in saved:
            if data.is_floating_point():
                noise = torch.randn(data.shape, generator=generator).to(data.device, data.dtype)
                size = float(data.abs().mean()) if data.numel() else 0.0
                parameter.data = data + noise * (0.02 + 0.05 * size)
        yield
    finally:
        for parameter, data in saved:
            parameter.data = data


@contextmanager
def _in_double(model: nn.Module) -> Iterator[None]:
    """Open a block in which weights and buffers of single precision are of double precision."""
    tensors = [*model.parameters(), *model.buffers()]
    saved = [(one, one.data) for one in tensors if one.dtype is torch.float32]
    try:
        for one, data in saved:
            give_data(one, data.double())
        yield
    finally:
        for one, data in saved:
            give_data(one, data)
