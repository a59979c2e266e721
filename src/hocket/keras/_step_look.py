"""A look at a step of the model's own before its first batch: whether ranks may put together what it computes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hocket.comm import torch_adapter
from hocket.parallel.batches import BatchShard, Cutter, mapped, samples_in, tensors_in, undisturbed

from . import _metrics, _private, _random
from ._graph import put_back
from ._look import FEW, by_moving_averages, in_single_precision, kept_by, kept_of_data, unlike

_ROUNDING = {torch.float64: 1e-4, torch.float32: 2e-3}
"""How far a gradient may be off, relative to its norm; `_COARSE` in other precisions."""

_COARSE = 5e-2
_MIXED = 1e-2
"""The same where layers of mixed precision compute in single precision for the look, but what casts by itself."""

_COARSER = 5
"""How many times further metrics and logs may be off than gradients."""

_SMALL = 1e-3
"""Gradients this much smaller than all together may be nothing but rounding."""

Gradients = list[torch.Tensor | None]


class StepLook:
    """What a model's train_step back-propagates, or its test_step, and what it tells, for a batch and for two parts.

    Optimizers update nothing meanwhile, and all else is as in `BatchLook`. As in training, what follows a
    back-propagation of a part goes on with the gradients of the batch.

    Args:
        model: A built Keras model.
        data: A batch, as train_step takes it.
        shapes: What is known of the shapes that the model draws; learns what this look finds.
        gathers: A function that tells whether the compiled loss of an output is computed of the whole batch.
        summed: Variables of metrics that ranks add up.
        unsummed: Variables of metrics that `compute_metrics` alone may change, as it sees the whole batch.
        step: "train_step" or "test_step".

    Attributes:
        wrong: How gradients are none that ranks can average; "" where they are.
        untold: What metric or log ranks cannot put together; "" for none.
        unknown: Why nothing was found out; "" where something was.
        whole_loss: Whether the model's own `compute_loss` has to be computed of the whole batch.
        draws: What draws random numbers that are not those of one process.
        state: The path of a variable in which the model keeps what it has seen of a batch; "" for none.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        shapes: _random.DrawnShapes,
        gathers: Callable[[Any], bool],
        summed: list[Any],
        unsummed: list[Any],
        step: str,
    ) -> None:
        self.wrong = self.untold = self.unknown = self.state = ""
        self._summed, self._unsummed, self._step = summed, unsummed, step
        self.whole_loss = False
        self.draws = unlike(model)
        self._model = model
        self._gathers = gathers
        self._samples = min(FEW, samples_in(data))
        self._batch = Cutter(None).cut(data, 0, self._samples)
        self._shapes = shapes
        self._share: BatchShard | None = None
        self._runs: dict[int, list[tuple[int, ...]]] = {}
        rounding = [_ROUNDING.get(v.value.dtype, _COARSE) for v in model.trainable_variables]
        with in_single_precision(model) as mixed:
            half = any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers())
        self._rounding = _COARSE if half else max([*rounding, _MIXED if mixed else _ROUNDING[torch.float32]])
        try:
            found = self._difference(self._calm)
            if any(found) and type(model).compute_loss is not _private.TorchTrainer.compute_loss:
                self.whole_loss = not any(self._difference(self._calm, whole_loss=True))
            if not self.whole_loss:
                self.wrong, self.untold = found
            if shapes.learn(self._runs):
                self.draws.add(_random.OTHER_AXIS)
            told = self.wrong or self.untold or self.unknown or self.draws or not any(self._runs.values())
            shared = partial(_random.of_whole_batch, lambda: self._share, shapes)
            if not told and any(self._difference(shared, whole_loss=self.whole_loss)):
                self.draws.add(_random.MIXED)
        except _Refused as refused:
            self.wrong = str(refused)
        except _Untold as untold:
            self.untold = str(untold)
        except Exception as error:  # told where the step itself is run, if it is not for the look
            self.unknown = f"{type(error).__name__}: {error}"
        every = [*_metrics.compiled_metrics(model), *_metrics.other_metrics(model)]
        self.untold = next((m.name for m in every for v in m.variables if v.path == self.untold), self.untold)

    def error(self, name: str) -> str:
        """Return what refuses the step, of that name; "" for nothing."""
        if self.wrong:
            return (
                f"{name} back-propagates what ranks, which have parts of the batch, cannot average: {self.wrong}. Make "
                "the loss a mean over samples of what each gives alone, by loss.backward(); or compute it by "
                "self.compute_loss, of which a loss given to compile, or the model's own, sees the whole batch; and "
                "shuffle or mix samples (MixUp) in the data"
            )
        if self.untold:
            return (
                f"{name} tells of a batch in {self.untold!r} what cannot be put together of what it tells of parts of "
                "it, and a rank has a part. Logs must be numbers that are means over samples, and what metrics keep is "
                "added up: give keras.metrics.Mean the mean over the batch, others a number for each sample; or "
                "compute it in a metric that is given to compile and updated by self.compute_metrics, which sees the "
                "whole batch"
            )
        return ""

    # --- gradients of a batch and of its parts ----------------------------------------------------------------------

    def _difference(self, numbers: Callable[[], Any], *, whole_loss: bool = False) -> tuple[str, str]:
        samples = self._samples
        cut = max(1, samples // 2 - (samples >= 6))  # uneven, so that weights matter
        batch, state, told = self._run(numbers, whole_loss, 0, samples)
        again, _, retold = self._run(numbers, whole_loss, 0, samples, batch, seed=int(numbers == self._calm))
        if not batch and self._step == "train_step":
            raise _Refused("it calls no backward()")
        if self._off(batch, again) or self._unlike({v.path: told[v.path] for v in self._summed}, [retold]):
            self.unknown = "it draws random numbers in another way than by keras.random"
            return "", ""
        parts = [(0, cut), (cut, samples)]
        some = [self._run(numbers, whole_loss, *part, batch) for part in parts]
        mean: list[Gradients] = [
            [_combined(ones, parts, samples) for ones in zip(*each, strict=True)]
            for each in zip(*(found for found, *_ in some), strict=True)
        ]
        self.state = self.state or kept_of_data(state, [one for _, one, _ in some])
        told = {name: value for name, value in told.items() if not self._unlike({name: value}, [retold])}  # no times
        return self._off(batch, mean), self._unlike(told, [one for *_, one in some])

    def _unlike(self, told: dict[str, torch.Tensor], parts: list[dict[str, torch.Tensor]]) -> str:
        """Return the name of what is other than the sum of what parts have; "" for none."""
        for name, value in told.items():
            each = [one.get(name, torch.zeros_like(value)) for one in parts]
            off = (value - torch.stack(each).sum(0)).abs()
            bound = self._rounding * torch.stack([one.abs() for one in each]).sum(0).maximum(value.abs())
            if bool((off > _COARSER * bound + 1e-6).any()):
                return name
        return ""

    def _off(self, batch: list[Gradients], other: list[Gradients]) -> str:
        """Say how gradients differ; "" where they do not."""
        if len(batch) != len(other):
            return f"it calls backward() {len(batch)} times for a batch, and {len(other)} times for a part"
        variables = self._model.trainable_variables
        for one, two in zip(batch, other, strict=True):
            norm = torch.stack([g.double().norm() for g in one if g is not None] or [torch.zeros(())]).norm()
            for variable, a, b in zip(variables, one, two, strict=True):
                if a is None and b is None:
                    continue
                a, b = (torch.zeros_like(variable.value) if g is None else g for g in (a, b))
                scale = torch.stack([a.double().norm(), b.double().norm(), _SMALL * norm]).max()
                off = float((a.double() - b.double()).norm() / scale.clamp(min=1e-30))
                if not off <= self._rounding and bool(a.isfinite().all()):
                    return f"the gradient of {variable.path!r} is {off:.2g} off, relative"
        return ""

    # --- runs -------------------------------------------------------------------------------------------------------

    def _run(
        self,
        numbers: Callable[[], Any],
        whole_loss: bool,
        begin: int,
        end: int,
        given: list[Gradients] | None = None,
        seed: int = 0,
    ) -> tuple[list[Gradients], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the gradients after each back-propagation, what the model keeps of the data, by path, and `_told`."""
        model, found = self._model, list[Gradients]()
        self._share = BatchShard(begin, end, self._samples, 1)
        values, weights = [v.value for v in model.trainable_variables], len(model.weights)
        before = [value.grad for value in values]

        def backward(plain: Callable[[Any], None], tensors: Any) -> None:
            plain(tensors)
            found.append([None if value.grad is None else value.grad.detach().clone() for value in values])
            if given is not None and len(found) <= len(given):
                for value, gradient in zip(values, given[len(found) - 1], strict=True):
                    value.grad = None if gradient is None else gradient.clone()

        kept = {id(v): v for v in [*model.variables, *model.metrics_variables]}
        with ExitStack() as stack:
            stack.enter_context(undisturbed(list(model._flatten_layers())))
            stack.enter_context(put_back(kept.values()))
            stack.enter_context(torch_adapter.without_collectives())
            stack.enter_context(numbers())
            stack.enter_context(by_moving_averages(model))
            stack.enter_context(in_single_precision(model))
            stack.enter_context(_without_updates(model))
            stack.enter_context(backwards(backward))
            for metric in _metrics.other_metrics(model):
                stack.enter_context(_metrics.by_samples(metric, lambda: self._share))
            stack.enter_context(torch.set_grad_enabled(self._step == "train_step"))
            model.__dict__["compute_loss"] = self._compute_loss(model.compute_loss, whole_loss)
            if self._unsummed:
                model.__dict__["compute_metrics"] = lambda *_, **__: model.get_metrics_result()
            for variable in self._summed:
                variable.value.detach().zero_()
            before_step = [variable.value.detach().clone() for variable in self._unsummed]
            torch.manual_seed(seed)
            try:
                logs = getattr(model, self._step)(mapped(Cutter(None).cut(self._batch, begin, end), torch.clone))
            finally:
                for value, gradient in zip(values, before, strict=True):
                    value.grad = gradient
            if len(model.weights) != weights:
                raise _Refused("it builds layers, which is to be done before, by keras.Input, build() or a call")
            for variable, old in zip(self._unsummed, before_step, strict=True):
                if not torch.equal(variable.value, old):
                    raise _Untold(variable.path)
            return found, kept_by(model), self._told(logs, (end - begin) / self._samples)

    def _told(self, logs: Any, part: float) -> dict[str, torch.Tensor]:
        """Return what metrics have added up, by path, and logs that are no metrics, as those of a part of a batch."""
        values, others = _metrics.logs_apart(logs, self._model.get_metrics_result)
        for name in others:
            if values[name].numel() != 1:
                raise _Untold(name)
        return {name: values[name] * part for name in others} | {
            v.path: v.value.detach().double().clone() for v in self._summed
        }

    def _calm(self) -> Any:
        assert self._share is not None
        drawn = self._runs[self._share.samples] = []
        return _random.calm(drawn.append, self.draws.add)

    def _compute_loss(self, plain: Callable[..., Any], whole_loss: bool) -> Callable[..., Any]:
        """Put a mean over samples in the place of a loss that is computed of all ranks' outputs."""

        def compute_loss(x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not whole_loss and not self._gathers(y_pred):
                return plain(x, y, y_pred, *args, **kwargs)
            rows = [t.reshape(len(t), -1) for t in tensors_in(y_pred) if t.is_floating_point()]
            return torch.stack([(one * torch.arange(one.shape[1]).to(one).cos()).mean() for one in rows]).sum()

        return compute_loss


class _Refused(Exception):
    pass


class _Untold(Exception):
    pass


def _combined(
    gradients: tuple[torch.Tensor | None, ...], parts: list[tuple[int, int]], samples: int
) -> torch.Tensor | None:
    weighted = [g * ((e - b) / samples) for g, (b, e) in zip(gradients, parts, strict=True) if g is not None]
    return torch.stack(weighted).sum(0) if weighted else None


@contextmanager
def backwards(change: Callable[[Callable[[Any], None], Any], Any]) -> Iterator[None]:
    """Open a block in which `change` does each back-propagation: it is given what does it, and the tensors to begin at.

    Those that are nested in another (activation checkpointing) are left alone.
    """
    plain = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if torch_adapter.in_backward():
            plain(tensors, *args, **kwargs)
        else:
            change(lambda changed: plain(changed, *args, **kwargs), tensors)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = plain


@contextmanager
def _without_updates(model: Any) -> Iterator[None]:
    """Open a block in which Keras' optimizers update nothing, and others may not."""

    def apply(_: Any, gradients: Any, variables: Any = None) -> None:
        for gradient, variable in zip(gradients, variables or (), strict=False):
            if gradient is not None and variable.value.grad is None:
                raise _Refused(f"the gradient of {variable.path!r} is not from backward(), which averages it")

    def stepped(*_: Any) -> None:
        raise RuntimeError("it updates weights by an optimizer of torch")

    owners = (_private.BaseOptimizer, _private.LossScaleOptimizer)
    plain = [vars(owner)["apply"] for owner in owners]
    own = getattr(model.optimizer, "__dict__", {})
    sharded = own.pop("apply", None)
    handle = register_optimizer_step_pre_hook(stepped)
    try:
        for owner in owners:
            owner.apply = apply
        yield
    finally:
        handle.remove()
        for owner, function in zip(owners, plain, strict=True):
            owner.apply = function
        if sharded is not None:
            own["apply"] = sharded
