"""The beginning and the end of a back-propagation, for which torch has no hooks."""

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from ._modes import outside_compiler

_torch_c: Any = torch._C


def in_backward() -> bool:
    """Return whether this thread is inside back-propagation now."""
    return bool(_torch_c._current_graph_task_id() != -1)


def accumulates(parameter: torch.Tensor) -> bool:
    """Return whether the gradient for which a hook of a parameter is called goes to `.grad`.

    `torch.autograd.grad` calls hooks of the parameters that it is asked for, too, also where a function's own backward
    calls it (the adjoint of an ODE): what it gives is not accumulated, and may become a part of what is.
    """
    if not _asked:
        return True
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        _torch_c._will_engine_execute_node(node)
    except RuntimeError as error:  # torch has no other word for it
        return "autograd.grad()" not in str(error)
    return True


def queue_callback(callback: Callable[[], None]) -> None:
    """Have `callback` called when the running back-propagation ends; its exceptions come out of `backward()`."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# By number, so that all ranks call those of several models in one order.
_before_backward: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_OF_GRAD = (
    "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched",
    "materialize_grads",
)  # fmt: skip
_SINGLE = torch.Tensor, GradientEdge
_listeners = itertools.count()
_wrapped: list[Any] = []
_asked: list[None] = []  # one for each torch.autograd.grad that runs now, on any thread
_told = threading.local()  # whether listeners have been told of what this thread computes


def before_backward(listener: Any) -> None:
    """Have `listener.backward_begins(roots)` called before each back-propagation, while the graph still holds all.

    After it `listener.backward_ended()` is called.

    torch has hooks for gradients, which come when the loss's part of the graph is gone, and none for the beginning. So
    the first listener wraps `torch.autograd.backward`, by which `Tensor.backward` goes, too. `torch.autograd.grad`,
    which does not end at `.grad`, has `listener.gradients_of(outputs, inputs)` called before, and after it
    `listener.gradients_made(outputs, inputs, gradients, again)`, where `again` gives them for others of each.
    """
    if not _wrapped:
        _wrapped.append(plain := torch.autograd.backward)
        plain_grad = torch.autograd.grad

        # torch.compile would follow listeners and hooks of gradients, in a step that is compiled as a whole.
        @outside_compiler
        @functools.wraps(plain_grad)
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not _tells():
                return plain_grad(outputs, inputs, *args, **kwargs)
            wanted = [inputs] if isinstance(inputs, _SINGLE) else (inputs := list(inputs))
            roots = [outputs] if isinstance(outputs, _SINGLE) else (outputs := list(outputs))
            given = {**dict(zip(_OF_GRAD, args, strict=False)), **kwargs}
            return _tell_of_gradients(roots, wanted, given, lambda: plain_grad(outputs, inputs, *args, **kwargs))

        @outside_compiler
        @functools.wraps(plain)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not _tells():
                return plain(tensors, *args, **kwargs)
            roots = [tensors] if isinstance(tensors, _SINGLE) else (tensors := list(tensors))
            given = args[0] if args else kwargs.get("grad_tensors")
            given = list(given) if isinstance(given, list | tuple) else [given]  # as torch takes them
            roots = _added_up(roots, given)
            return _tell_of_backward(roots, lambda: plain(tensors, *args, **kwargs))

        torch.autograd.backward = backward
        torch.autograd.grad = grad
        _wrap_engine()
    _before_backward[next(_listeners)] = listener


def _added_up(roots: list[Any], given: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return the one loss whose back-propagation is that of several, or of a tensor that is given one number for all.

    So it is of `losses.backward(torch.ones_like(losses))`. Others are left as they are: ranks, which may be given other
    gradients, have as many roots after it as before, or one.
    """
    if not all(isinstance(one, torch.Tensor) and one.grad_fn is not None for one in roots):
        return roots
    if any(one.is_complex() for one in roots):
        return roots
    if len(roots) > 1:
        if any(one.dim() for one in roots):  # a vector may be of one sample here
            return roots
        given = given if len(given) == len(roots) else [None] * len(roots)
        with torch.enable_grad():
            losses = [one if g is None else one * g.detach().sum() for one, g in zip(roots, given, strict=True)]
            return [functools.reduce(torch.add, (one.to(losses[0]) for one in losses))]
    (root,), by = roots, given[0] if given else None
    if root.numel() < 2 or type(by) is not torch.Tensor or by.layout != torch.strided or by.shape != root.shape:
        return roots
    number = (by := by.detach().reshape(-1))[0]
    if not bool(number) or not bool((by == number).all()):
        return roots
    with torch.enable_grad():
        return [root.sum() if bool(number == 1) else root.sum() * number]


def _tell_of_backward(roots: list[Any], run: Callable[[], Any]) -> Any:
    """Run a back-propagation, of which listeners are told before and after it."""
    for one in list(_before_backward.values()):
        one.backward_begins(roots)
    with _telling():
        given = run()
    for one in list(_before_backward.values()):
        one.backward_ended()
    return given


def _tell_of_gradients(roots: Any, wanted: Any, given: dict[str, Any], run: Callable[[], Any]) -> Any:
    """Return gradients that `run` gives, of which listeners are told before and after it.

    In place of edges of the graph, those of parameters are told of, and no others; nobody is told of theirs after it.
    """
    tensors = [[one for one in map(_tensor, some) if one is not None] for some in (roots, wanted)]
    for one in list(_before_backward.values()):
        one.gradients_of(*tensors)
    with _telling():
        made = run()
    if any(isinstance(one, GradientEdge) for one in (*roots, *wanted)):
        return made
    again = functools.partial(_gradients_again, given)
    for one in list(_before_backward.values()):
        one.gradients_made(roots, wanted, made, again)
    return made


def _tensor(one: Any) -> torch.Tensor | None:
    """Return a tensor as it is, and the leaf of an edge that ends at one; None for another edge."""
    return getattr(one.node, "variable", None) if isinstance(one, GradientEdge) else one


def _tells() -> bool:
    """Return whether listeners are to be told of what this thread begins to compute."""
    return bool(_before_backward) and not in_backward() and not getattr(_told, "now", False)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Open a block in which torch's functions need not tell listeners."""
    before, _told.now = getattr(_told, "now", False), True
    try:
        yield
    finally:
        _told.now = before


def _wrap_engine() -> None:
    """Have listeners told also where a program has `from torch.autograd import grad` of before torch's was wrapped."""
    module: Any = torch.autograd
    engine = getattr(module, "_engine_run_backward", None)
    if engine is None:
        _asked.append(None)  # nobody tells, so that it is always looked at
        return

    @functools.wraps(engine)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("accumulate_grad") or torch.compiler.is_compiling():
            return engine(*args, **kwargs)
        _asked.append(None)
        try:
            return engine(*args, **kwargs)
        finally:
            _asked.pop()

    @functools.wraps(engine)
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) < 4 or not _tells():
            return plain(outputs, *args, **kwargs)
        roots, call = list(outputs), functools.partial(plain, outputs, *args, **kwargs)
        if kwargs.get("accumulate_grad"):
            return _tell_of_backward(roots, call)
        given = {"grad_outputs": args[0], "create_graph": args[2]}
        return _tell_of_gradients(roots, list(args[3]), given, call)

    module._engine_run_backward = run


def _gradients_again(
    given: dict[str, Any], outputs: Any, inputs: Any, other: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """Call `torch.autograd.grad` as the program has, for others of its tensors; it keeps their graph."""
    by = given.get("grad_outputs")
    by = [by] if isinstance(by, torch.Tensor) else by
    given = {**given, "allow_unused": True, "retain_graph": True}
    given["grad_outputs"] = by and [one if one is None else other(one) for one in by]
    with _telling():
        return torch.autograd.grad([other(one) for one in outputs], [other(one) for one in inputs], **given)
