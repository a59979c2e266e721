"""Hooks on gradients: for one that is complete, to scale one on its way, and those of the program, put off."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from hocket._program import warn

from ..batches import due
from ..batches import trees as _trees


class Receiver(Protocol):
    """Who wants to know that a gradient is complete."""

    due: bool  # whether the back-propagation under way, or about to begin, is of its passes

    def ready(self, number: int, parameter: torch.Tensor) -> None:
        """Take notice that the gradient of parameter `number` is complete."""


class Ready:
    """The hook of one parameter; it does not keep the receiver alive."""

    def __init__(self, receiver: Receiver, number: int) -> None:
        self._receiver = weakref.ref(receiver)
        self._number = number

    def __call__(self, parameter: torch.Tensor) -> None:
        receiver = self._receiver()
        if receiver is not None and (len(_hooks_of(parameter)[1]) == 1 or receiver is self.owner(parameter)):
            receiver.ready(self._number, parameter)

    @staticmethod
    def owner(parameter: torch.Tensor) -> Receiver | None:
        """Return which of those that want to know it is told: models that are trained apart may share parameters.

        Each gradient is averaged once, by the first of those whose passes it comes from.
        """
        hooks = [hook for hook in _hooks_of(parameter)[1].values() if isinstance(hook, Ready)]
        there = [one for hook in hooks if (one := hook._receiver()) is not None]
        return next((one for one in there if one.due), there[0] if there else None)


class Scale:
    """A hook that scales gradients on their way to `.grad`.

    Args:
        factor: By what.
        told: A weak reference to what says whether the gradient of parameter `number` is one to scale.
        number: Of the hook's parameter.
    """

    def __init__(self, factor: float, told: Callable[[], Callable[[int], bool] | None], number: int) -> None:
        self._factor, self._told, self._number = factor, told, number

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        told = self._told()
        if told is None or not told(self._number):
            return gradient
        # What weighs nothing must not be heard of even if it is infinite.
        return gradient * self._factor if self._factor else torch.zeros_like(gradient)


class DeferredHook:
    """A hook of the program on one parameter's gradient, which waits for the average over ranks.

    Args:
        call: The program's hook.
        waits: A weak reference to what tells, when the gradient arrives, whether it must wait.
        aside: What puts the gradient of earlier passes aside then.
    """

    def __init__(
        self, call: Callable[[Any], Any], waits: Callable[[], Callable[[], bool] | None], aside: Callable[[], None]
    ) -> None:
        self.call, self._waits, self._aside = call, waits, aside
        self.linear: bool | None = None  # whether it was seen to be linear; None until it was looked at
        self.changes = False  # whether it was seen to change a gradient, as `note` looks
        self._calls = 0

    def __call__(self, argument: Any) -> Any:
        waits = self._waits()
        if waits is None or not waits():
            return self.call(argument)
        self._aside()
        return None

    def looks(self) -> bool:
        """Count a call with an averaged gradient, and return whether to look if it changes that: not in each."""
        self._calls += 1
        return not self.changes and due(self._calls)

    def note(self, before: torch.Tensor, after: torch.Tensor | None) -> None:
        """Look at a gradient before a call and after it."""
        self.changes = after is None or not torch.equal(before.to_dense().nan_to_num(), after.to_dense().nan_to_num())


class HookDeferrer:
    """Has hooks of the program on parameters called with averaged gradients, as one device would call them.

    Args:
        names: Of the parameters, for messages.
        parameters: The parameters.
        waits: Whether gradients that arrive now will be averaged when back-propagation ends: a bound method, which is
            not kept alive.
        whole: Whether this rank has whole gradients in the end.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        waits: Callable[[], bool],
        *,
        whole: bool = True,
    ) -> None:
        self._names, self._parameters, self._whole = names, parameters, whole
        self._waits = weakref.WeakMethod(waits)
        self._earlier: dict[int, torch.Tensor | None] = {}  # gradients of earlier passes, by the parameter's number
        self._hooked: set[int] = set()

    def find(self, *, averaged: bool) -> None:
        """Look for hooks that the program has registered, and have them wait.

        Unless gradients are `averaged` at once, hooks see this rank's, so that they must be linear.

        Raises:
            RuntimeError: a hook of a pass that is not averaged is not linear, or comes after accumulation; or no rank
                has whole gradients.
        """
        for number, parameter in enumerate(self._parameters):
            before, after = _hooks_of(parameter)
            if not before and not after:
                continue
            if not self._whole and has_own_hooks(parameter):
                raise RuntimeError(
                    f"there is a hook on the gradient of parameter {self._names[number]!r}, and no rank has this "
                    "gradient as a whole, since the plan shards it: take the hook off, or say shard = 'none'"
                )
            for hooks in (before, after):
                for key in own_hooks(hooks):
                    self._hooked.add(number)
                    if not isinstance(hooks[key], DeferredHook):
                        aside = _put_aside(self._earlier, number, parameter) if hooks is before else _nothing
                        hooks[key] = DeferredHook(hooks[key], self._waits, aside)
            if not averaged and is_nonlinear(parameter):
                raise RuntimeError(
                    f"a hook on the gradient of parameter {self._names[number]!r} would see this rank's gradient, "
                    "since it is in no_sync, and what it makes of it is not linear, so that the average would not be "
                    "that of one device: take the hook off and do its work between backward() and optimizer.step()"
                )

    def put_aside(self, numbers: Iterable[int]) -> None:
        """Put the earlier gradients of parameters aside that got none in this back-propagation on this rank."""
        for number in self._hooked.intersection(numbers):
            if not own_hooks(_hooks_of(self._parameters[number])[0]):
                continue
            _put_aside(self._earlier, number, self._parameters[number])()

    def call(self, used: Callable[[int], bool]) -> None:
        """Call the hooks, now that gradients are averaged; `used` tells which parameters have got one on any rank."""
        earlier = dict(self._earlier)
        self._earlier.clear()
        with torch.no_grad():
            self._call(used, earlier)

    def recover(self) -> None:
        """Give earlier gradients back after an exception in back-propagation."""
        for number, gradient in self._earlier.items():
            self._parameters[number].grad = gradient
        self._earlier.clear()

    def _call(self, used: Callable[[int], bool], earlier: dict[int, torch.Tensor | None]) -> None:
        for number in sorted(self._hooked, reverse=True):  # about the order of back-propagation
            parameter, (before, after) = self._parameters[number], _hooks_of(self._parameters[number])
            gradient, old = parameter.grad, earlier.get(number)
            if gradient is None or not used(number):
                if old is not None:
                    parameter.grad = old
                continue
            for key in own_hooks(before):
                given = gradient.clone()  # the program may keep it, or change it in place
                changed = before[key].call(given)
                result = given if changed is None else changed.detach()
                if before[key].looks():
                    before[key].note(gradient, result)
                gradient.copy_(result)
            if old is not None:
                gradient.add_(old)
            for key in own_hooks(after):
                kept = parameter.grad.clone() if parameter.grad is not None and after[key].looks() else None
                after[key].call(parameter)
                if kept is not None:
                    after[key].note(kept, parameter.grad)


class WatchedHooks(TorchFunctionMode):
    """Tells of hooks on activations, registered while it is on, that do not scale with the gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        return func(*watched(func, args), **(kwargs or {}))


def watched(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a function; one that registers a hook on an activation gets it watched."""
    if func is not torch.Tensor.register_hook or len(args) != 2 or args[0].is_leaf:
        return args
    tensor, hook = args
    if _is_ours(hook) or str(getattr(hook, "__module__", "")).startswith("torch."):
        return args
    return tensor, _watching(hook)


@contextmanager
def watched_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Open a block for a forward pass whose hooks on activations' gradients are watched: of tensors, and of layers."""
    tables = [one for inner in module.modules() for one in (inner._backward_hooks, inner._backward_pre_hooks) if one]
    put_back = []
    for table in tables:
        for key, hook in table.items():
            if not _is_ours(hook) and not str(getattr(hook, "__module__", "")).startswith("torch."):
                table[key] = mine = _watching(hook)
                put_back.append((table, key, mine, hook))
    try:
        with WatchedHooks():
            yield
    finally:
        for table, key, mine, hook in put_back:
            if table.get(key) is mine:
                table[key] = hook


def _watching(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that tells once, on one rank, if what it makes of gradients is not that of one device."""
    seen = False

    def once(*given: Any) -> Any:
        nonlocal seen
        before = None if seen else _trees.mapped(given, torch.clone)
        result = hook(*given)
        if before is not None and result is not None and torch.distributed.get_rank() == 0:
            if not _alike(
                hook(*_trees.mapped(before, lambda one: 2 * one)), _trees.mapped(result, lambda one: 2 * one)
            ):
                warn(
                    "a hook on an activation does not scale with its gradient (it clips or normalises it), which is "
                    "that of a mean over this rank's samples, and larger than on one device: clip by hooks on "
                    "parameters, or after backward()",
                )
            elif _mixes(hook, before, result):
                warn(
                    "a hook on an activation gives the gradient of a sample something of other samples' (it subtracts "
                    "their mean, say), and this rank has only some of them: one device takes those of all samples. "
                    "Treat each sample by itself, or take hocket.average of the statistic",
                )
        seen = True
        return result

    return once


def _mixes(hook: Callable[..., Any], given: tuple[Any, ...], result: Any) -> bool:
    """Return whether a hook gives the first samples other gradients where those of others are zero."""
    samples = next((len(one) for one in _trees.tensors_in(given) if one.dim()), 0)
    some = samples // 2

    def first(one: torch.Tensor) -> torch.Tensor:
        return torch.cat([one[:some], torch.zeros_like(one[some:])]) if one.shape[:1] == (samples,) else one

    def shown(one: torch.Tensor) -> torch.Tensor:
        return one[:some] if one.shape[:1] == (samples,) else one

    return some > 0 and not _alike(
        _trees.mapped(hook(*_trees.mapped(given, first)), shown), _trees.mapped(result, shown)
    )


def _alike(one: Any, other: Any) -> bool:
    pairs = zip(_trees.tensors_in(one), _trees.tensors_in(other), strict=False)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, equal_nan=True) for a, b in pairs)


def own_hooks(hooks: dict[int, Any]) -> list[int]:
    """Return the keys of those hooks of a parameter that are the program's."""
    return [key for key, hook in hooks.items() if isinstance(hook, DeferredHook) or not _is_ours(hook)]


def has_own_hooks(parameter: torch.Tensor) -> bool:
    """Return whether the program has registered hooks on a parameter's gradient."""
    return any(map(own_hooks, _hooks_of(parameter)))


def is_nonlinear(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a hook of the program that is not linear, or that comes after accumulation."""
    before, after = _hooks_of(parameter)
    return bool(own_hooks(after)) or not all(_is_linear(before[key], parameter) for key in own_hooks(before))


def changes_gradient(parameter: torch.Tensor) -> bool:
    """Return whether a hook of the program gives a parameter another gradient, from one that is made up.

    One that comes after accumulation is not tried: it would find no gradient.
    """
    before, _ = _hooks_of(parameter)
    probe = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(parameter)
    with torch.no_grad():
        for hook in map(before.__getitem__, own_hooks(before)):
            given = probe.clone()
            result = (hook.call if isinstance(hook, DeferredHook) else hook)(given)
            if not torch.equal(given if result is None else result, probe):
                return True
    return False


def has_changed_gradients(parameter: torch.Tensor) -> bool:
    """Return whether a hook of the program was seen to give a parameter another gradient than the average."""
    hooks = (hook for table in _hooks_of(parameter) for hook in table.values())
    return any(isinstance(hook, DeferredHook) and hook.changes for hook in hooks)


def _hooks_of(parameter: torch.Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks of a parameter, by key: those before its gradient is accumulated, and those after."""
    return parameter._backward_hooks or {}, getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def _is_ours(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.split(".")[0] == __name__.split(".")[0]


def _nothing() -> None:
    """Have nothing to put aside: such hooks see all that has added up."""


def _put_aside(earlier: dict[int, torch.Tensor | None], number: int, parameter: torch.Tensor) -> Callable[[], None]:
    reference = weakref.ref(parameter)

    def aside() -> None:
        tensor = reference()
        if tensor is not None and number not in earlier:
            earlier[number], tensor.grad = tensor.grad, None

    return aside


def _is_linear(hook: Any, parameter: torch.Tensor) -> bool:
    """Return whether a hook multiplies gradients by what does not depend on them, from three made-up ones."""
    if not isinstance(hook, DeferredHook):
        return _seems_linear(hook, parameter)
    if hook.linear is None:
        hook.linear = _seems_linear(hook.call, parameter)
    return hook.linear


def _seems_linear(hook: Callable[[Any], Any], parameter: torch.Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        probe = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
        results = []
        for factor in (1.0, -1.0, 1024.0):  # exact in binary
            given = probe * factor
            result = hook(given)
            results.append((given if result is None else result) / factor)
    tolerance = 8 * torch.finfo(parameter.dtype).eps
    return all(torch.allclose(one, results[0], rtol=tolerance, atol=0.0) for one in results[1:])


def weak_hook(call: Callable[..., None], *arguments: Any) -> Callable[..., None]:
    """Return a hook that calls a bound method with `arguments` alone, and does not keep the method's object alive."""
    reference = weakref.WeakMethod(call)

    def hook(*_: Any) -> None:
        method = reference()
        if method is not None:
            method(*arguments)

    return hook


def remove(hooks: dict[int, Any]) -> None:
    """Take hooks off their parameters."""
    for hook in hooks.values():
        hook.remove()


class _ScaledByHocket(torch.autograd.Function):  # by this name what is said of a loss goes on below it
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: Callable[[], float]) -> torch.Tensor:
        ctx.factor = factor
        return tensor.clone()  # a loop may go on to change the output in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), factor = gradients, ctx.factor()
        if factor == 1.0:
            return gradient, None
        return (gradient * factor if factor else torch.zeros_like(gradient)), None


def scale_gradients(output: Any, factor: float) -> Any:
    """Return a structure like `output` whose tensors have the same values and `factor` times the gradient.

    Raises:
        TypeError: there is no tensor with a gradient in `output` that could be reached.
    """
    if not any(one.requires_grad for one in _trees.tensors_in(output)):
        raise TypeError(
            f"found no tensor that requires a gradient in the model's output of type {type(output).__name__}; "
            "return tensors in tuples, lists, mappings or dataclasses, so that hocket can weigh their gradients"
        )
    return scale_gradients_by(output, lambda: factor)


def scale_gradients_by(output: Any, factor: Callable[[], float]) -> Any:
    """Return a structure like `output`, whose gradients are multiplied by what `factor` gives when they arrive."""

    def scale(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        result: torch.Tensor = _ScaledByHocket.apply(tensor, factor)  # type: ignore[no-untyped-call]
        return result

    return _trees.mapped(output, scale)
