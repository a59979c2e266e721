"""Modes, versions and compilers of torch: who sees an operator, and who is not to see it."""

import contextlib
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

_torch_c: Any = torch._C


def uncounted() -> contextlib.AbstractContextManager[Any]:
    """Open a block in which this thread writes to tensors without a new version of them, at which autograd looks."""
    guard: Any = _torch_c._ExcludeDispatchKeyGuard(_torch_c.DispatchKeySet(_torch_c.DispatchKey.ADInplaceOrView))
    return guard  # type: ignore[no-any-return]


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Open a block in which what torch.compile has wrapped runs as it was written."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: Any = torch.compiler.set_stance("force_eager")
    return stance  # type: ignore[no-any-return]


def restoring_blocks() -> int:
    """Return in how many blocks this thread is at whose end torch has dispatch modes on or off as at their begin.

    These are calls of what torch.compile has wrapped, and inference mode: a mode must not end there that has begun
    outside, since torch would go on asking for it.
    """
    found = int(torch.is_inference_mode_enabled() or getattr(_left, "inference", 0) > 0)
    if "torch._dynamo" in sys.modules:
        frame = inspect.currentframe()
        while frame is not None:
            found += frame.f_code.co_name == "compile_wrapper" and "_dynamo" in frame.f_code.co_filename
            frame = frame.f_back
    return found


def unsaved() -> contextlib.AbstractContextManager[Any]:
    """Open a block whose operators a program's hooks on saved tensors do not see, as those of torch's checkpoint."""
    if _torch_c._autograd._top_saved_tensors_default_hooks(False) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)


def in_transform() -> bool:
    """Return whether this thread is within a function that torch.func transforms (vmap, grad)."""
    functorch: Any = _torch_c._functorch
    return functorch.peek_interpreter_stack() is not None


def dispatch_mode() -> Any:
    """Return the mode that sees this thread's operators first; None where none does."""
    modes: Any = importlib.import_module("torch.utils._python_dispatch")
    return modes._get_current_dispatch_mode()


def function_mode() -> Any:
    """Return the mode that sees this thread's functions first; None where none does."""
    modes: Any = importlib.import_module("torch.overrides")
    return modes._get_current_function_mode()


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Open a block whose operators no dispatch mode of this thread sees."""
    if not _torch_c._len_torch_dispatch_stack():
        return contextlib.nullcontext()
    modes: Any = importlib.import_module("torch.utils._python_dispatch")
    return modes._disable_current_modes()  # type: ignore[no-any-return]


def outside_compiler(function: _F) -> _F:
    """Return a decorator: torch.compile leaves `function` alone.

    torch.compiler.disable does that too, but it loads the compiler at once, which takes seconds.
    """
    disabled: Any = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it would be inlined
    frames = _torch_c._dynamo.eval_frame  # and where it is called past a break of the graph
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(getattr(call, "__code__"), skip)  # noqa: B009
    return cast(_F, call)


_left = threading.local()  # how many blocks of inference mode this thread has left for the time of a call


def outside_inference_mode(function: _F) -> _F:
    """Return a decorator: in `torch.inference_mode()` what `function` makes is of use in training all the same.

    Elsewhere nothing is entered: at its end torch would have dispatch modes on or off as they were at its begin.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        _left.inference = getattr(_left, "inference", 0) + 1
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled()):
                return function(*args, **kwargs)
        finally:
            _left.inference -= 1

    return cast(_F, call)
