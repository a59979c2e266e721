"""The one place that names what torch does not document: other modules take these names from here.

torch's own stubs leave out or mistype most of them, hence `Any`.
"""

import _thread
import contextlib
import functools
import importlib
import inspect
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as _distributed
from torch.distributed import distributed_c10d as _c10d

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

_any: Any = _c10d
_public: Any = _distributed
_torch_c: Any = torch._C

Store: Any = _any.Store
PrefixStore: Any = _any.PrefixStore
TCPStore: Any = _public.TCPStore
FileStore: Any = _public.FileStore
HashStore: Any = _public.HashStore
DistNetworkError: Any = _public.DistNetworkError
DistStoreError: Any = _public.DistStoreError

AllgatherOptions: Any = _any.AllgatherOptions
AllreduceCoalescedOptions: Any = _any.AllreduceCoalescedOptions
AllreduceOptions: Any = _any.AllreduceOptions
AllToAllOptions: Any = _any.AllToAllOptions
BarrierOptions: Any = _any.BarrierOptions
BroadcastOptions: Any = _any.BroadcastOptions
GatherOptions: Any = _any.GatherOptions
ReduceOptions: Any = _any.ReduceOptions
ReduceScatterOptions: Any = _any.ReduceScatterOptions
ScatterOptions: Any = _any.ScatterOptions

ProcessGroupBase: Any = _any.ProcessGroup
"""c10d's process group; torch declares overloads for it that no single implementation can match."""

BackendBase: Any = importlib.import_module("torch._C._distributed_c10d").Backend
"""What a process group calls below torch's dispatcher; Python can subclass it where there are hooks."""

CUSTOM_BACKEND: Any = ProcessGroupBase.BackendType.CUSTOM
HAS_HOOKS = hasattr(ProcessGroupBase, "register_pre_hook")
"""Whether torch's dispatcher tells listeners of operations: torch >= 2.14."""

DEFAULT_TIMEOUT: Any = _any.default_pg_timeout
"""The time-out of a process group for which the program names none."""

# Since torch 2.13 these names stand for what was all_gather_into_tensor and reduce_scatter_tensor.
all_gather_single: Any = _public.all_gather_single
reduce_scatter_single: Any = _public.reduce_scatter_single


def process_group_gloo(store: Any, rank: int, size: int, timeout: Any, address: str | None = None) -> Any:
    """Return a bare Gloo backend, at this address of this host if one is given."""
    if address is not None:
        options = _any.ProcessGroupGloo._Options()
        options._devices, options._timeout = [_any.ProcessGroupGloo.create_device(hostname=address)], timeout
        options._threads = 2  # as torch has it
        engine = _any.ProcessGroupGloo(store, rank, size, options)
    else:  # which looks at GLOO_SOCKET_IFNAME, then at the host's name
        engine = _any.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if not HAS_HOOKS:  # torch >= 2.14 counts from 0 by itself
        engine._set_sequence_number_for_group()
    return engine


def process_group_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Return a bare NCCL backend; it connects at its first operation."""
    options = _any.ProcessGroupNCCL.Options()
    options._timeout = timeout
    engine = _any.ProcessGroupNCCL(store, rank, size, options)
    if not HAS_HOOKS:
        engine._set_sequence_number_for_group()
    return engine


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of DTensor's, which is divided among ranks; looks without loading that module."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def replace_rendezvous(scheme: str, handler: Callable[..., Any]) -> None:
    """Have `handler` find the ranks for URLs of this scheme; it gets torch's own handler before the URL."""
    handlers: Any = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    if not isinstance(handlers[scheme], functools.partial):  # else it has been done
        handlers[scheme] = functools.partial(handler, handlers[scheme])


def let_reducers_keep_works() -> None:
    """Have DDP's `join()`, whose reducer keeps a handle after Python has dropped it, keep one that lives below Python.

    Of a handle made in Python it would keep torch's half alone, whose `wait` nobody ends.
    """
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    plain = getattr(c10d.Reducer, "_set_forward_pass_work_handle", None)
    if plain is None or not hasattr(c10d, "_create_work_from_future"):  # a torch that does so otherwise
        return

    def keep(reducer: Any, work: Any, use_static_world_size: bool) -> None:
        plain(reducer, c10d._create_work_from_future(work.get_future()), use_static_world_size)

    c10d.Reducer._set_forward_pass_work_handle = keep


def default_store() -> Any:
    """Return the store by which the ranks of torch's default group have found each other."""
    return _any._get_default_store()


_QUICK_S = 0.03


def wait_for(store: Any, keys: list[str], timeout: timedelta) -> None:
    """Wait for keys of a store; those of a file, at which torch looks every 10 ms, are looked for sooner at first.

    Raises:
        torch.distributed.DistStoreError: they did not come in time, or the store is gone.
    """
    base, begin_s, pause_s = store, time.monotonic(), 1e-4
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    while isinstance(base, FileStore) and time.monotonic() - begin_s < _QUICK_S and not store.check(keys):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1e-3)
    store.wait(keys, timeout)


def begun(work: Callable[[], _T]) -> Future[_T]:
    """Begin some work in a thread of its own, which no exit waits for; torch may wait in it without end."""
    made: Future[_T] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    try:
        _thread.start_new_thread(run, ())  # Thread.start() waits for ever for one that finds no memory
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}: allow this user more threads (`ulimit -u`), or its container (pids.max)"
        ) from None
    return made


def ask(question: Callable[[], _T], timeout_s: float) -> _T:
    """Return what `question`, which speaks with a store, returns; torch waits without end for one that is stopped.

    Raises:
        TimeoutError: The store does not answer; the thread that has asked it is left behind.
    """
    return begun(question).result(timeout_s)


def queue_callback(callback: Callable[[], None]) -> None:
    """Have `callback` called when the running back-propagation ends; its exceptions come out of `backward()`."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# By number, so that all ranks call those of several models in one order.
_before_backward: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_OF_GRAD = (
    "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched",
    "materialize_grads",
)  # fmt: skip
_listeners = itertools.count()
_wrapped: list[Any] = []
_told = threading.local()  # whether listeners have been told of what this thread computes


def before_backward(listener: Any) -> None:
    """Have `listener.backward_begins(roots)` called before each back-propagation, while the graph still holds all.

    torch has hooks for gradients, which come when the loss's part of the graph is gone, and none for the beginning. So
    the first listener wraps `torch.autograd.backward`, by which `Tensor.backward` goes, too. `torch.autograd.grad`,
    which calls no hooks of parameters, has `listener.gradients_of(outputs, inputs)` called before, and after it
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
            wanted = [inputs] if isinstance(inputs, torch.Tensor) else (inputs := list(inputs))
            roots = [outputs] if isinstance(outputs, torch.Tensor) else (outputs := list(outputs))
            given = {**dict(zip(_OF_GRAD, args, strict=False)), **kwargs}
            return _tell_of_gradients(roots, wanted, given, lambda: plain_grad(outputs, inputs, *args, **kwargs))

        @outside_compiler
        @functools.wraps(plain)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not _tells():
                return plain(tensors, *args, **kwargs)
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            return _tell_of_backward(roots, lambda: plain(tensors, *args, **kwargs))

        torch.autograd.backward = backward
        torch.autograd.grad = grad
        _wrap_engine()
    _before_backward[next(_listeners)] = listener


def _tell_of_backward(roots: list[torch.Tensor], run: Callable[[], Any]) -> Any:
    """Run a back-propagation, of which listeners are told before."""
    for one in list(_before_backward.values()):
        one.backward_begins(roots)
    with _telling():
        return run()


def _tell_of_gradients(roots: Any, wanted: Any, given: dict[str, Any], run: Callable[[], Any]) -> Any:
    """Return gradients that `run` gives, of which listeners are told before and after it."""
    for one in list(_before_backward.values()):
        one.gradients_of(roots, wanted)
    with _telling():
        made = run()
    again = functools.partial(_gradients_again, given)
    for one in list(_before_backward.values()):
        one.gradients_made(roots, wanted, made, again)
    return made


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
        return

    @functools.wraps(engine)
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) < 4 or not _tells():
            return engine(outputs, *args, **kwargs)
        roots, call = list(outputs), functools.partial(engine, outputs, *args, **kwargs)
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


def graph_marks(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return what tells the places of tensors in the graph of automatic differentiation, and keeps nothing alive."""
    return {one.grad_fn._sequence_nr() for one in tensors if one.grad_fn is not None}


def reaches(root: Any, marks: set[int]) -> bool:
    """Return whether a tensor, or a node of the graph, was computed from one of the tensors that the marks are of.

    Numbers grow as a graph is made, so that only what was computed after the first of them is looked at.
    """
    seen: set[Any] = set()
    todo = [getattr(root, "grad_fn", root)] if marks else []
    while todo:
        node = todo.pop()
        if node is None or node in seen or node._sequence_nr() < min(marks):
            continue
        if node._sequence_nr() in marks:
            return True
        seen.add(node)
        todo += [below for below, _ in node.next_functions]
    return False


def is_compiled(loss: torch.Tensor) -> bool:
    """Return whether torch.compile has made what is last in a tensor's graph, so that operators are hidden in it."""
    todo, seen = [loss.grad_fn], set[Any]()
    while todo and len(seen) < _NEAR_THE_END:
        node: Any = todo.pop(0)
        if node is None or node in seen:
            continue
        if "CompiledFunction" in node.name():
            return True
        seen.add(node)
        todo += [below for below, _ in node.next_functions]
    return False


_NEAR_THE_END: Final = 64  # nodes of a graph: a loss is computed of fewer operators


def _nodes(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield the nodes of a tensor's graph, each once."""
    seen: set[Any] = set()
    todo: list[Any] = [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [below for below, _ in node.next_functions]


def leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors whose `.grad` a back-propagation from this one fills."""
    if tensor.is_leaf:
        return [tensor] if tensor.requires_grad else []
    return [node.variable for node in _nodes(tensor) if hasattr(node, "variable")]


def readers(tensor: torch.Tensor, ids: set[int]) -> set[int]:
    """Return the places in a tensor's graph of the operators that read leaves of these identities."""

    def reads(node: Any) -> bool:
        return any(id(getattr(below, "variable", None)) in ids for below, _ in node.next_functions)

    return {node._sequence_nr() for node in _nodes(tensor) if reads(node)}


def result_sizes(node: Any) -> tuple[int, ...]:
    """Return the shape of what an operator in the graph has given, the first if there are several."""
    return tuple(node.variable.shape if hasattr(node, "variable") else node._input_metadata[0].shape)


def sums_over_ranks(node: Any, ranks: int) -> bool:
    """Return whether an operator in the graph is torch's own collective of so many ranks that sums their gradients."""
    name = node.name()
    summed = "all_reduce_default" in name or (name == "_AllReduceBackward" and node.op == _public.ReduceOp.SUM)
    if not summed and "_AllGather" not in name and "all_gather_into_tensor_default" not in name:
        return False
    group = _any._resolve_process_group(node.group_name) if hasattr(node, "group_name") else node.group
    return bool(_public.get_world_size(group) == ranks)


def in_backward() -> bool:
    """Return whether this thread is inside back-propagation now."""
    return bool(_torch_c._current_graph_task_id() != -1)


@contextlib.contextmanager
def hearing_collectives(hear: Callable[[], None]) -> Iterator[None]:
    """Open a block in which `hear` is called before this rank talks to others."""

    def heard(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            hear()
            return function(*args, **kwargs)

        return call

    functional: Any = sys.modules.get("torch.distributed._functional_collectives")
    seams = [(_any, "_rank_not_in_group"), *((functional, "_resolve_group"),) * hasattr(functional, "_resolve_group")]
    plain = [(owner, name, getattr(owner, name)) for owner, name in seams]
    try:
        for owner, name, function in plain:
            setattr(owner, name, heard(function))
        yield
    finally:
        for owner, name, function in plain:
            setattr(owner, name, function)


_AROUND = ("wrapper", "handle_torch_function", "__torch_function__", "all_reduce")
"""What calls `all_reduce` for the program: what logs its exceptions, and modes that see functions."""


def reduced() -> torch.Tensor | None:
    """Return, where `hearing_collectives` calls, what the program sums over ranks or averages; None for all else."""
    call = sys._getframe(3)  # of torch.distributed.all_reduce, below those of `hear`, of `call` and of this
    by = call.f_back
    while by is not None and by.f_code.co_name in _AROUND:
        by = by.f_back
    sums = call.f_code.co_name == "all_reduce" and str(call.f_locals.get("op")) in ("RedOpType.SUM", "RedOpType.AVG")
    own = by is not None and not str(by.f_globals.get("__name__")).startswith("hocket.")
    return call.f_locals.get("tensor") if sums and own else None


_DEEP = 16  # calls between a collective operation and who wants it, and more


def called_by(*modules: str) -> bool:
    """Return, where `hearing_collectives` calls, whether one of these modules, or one within, has called."""
    call: Any = sys._getframe(2)
    for _ in range(_DEEP):
        if call is None:
            break
        name = str(call.f_globals.get("__name__"))
        if any(name == one or name.startswith(f"{one}.") for one in modules):
            return True
        call = call.f_back
    return False


def without_collectives() -> contextlib.AbstractContextManager[None]:
    """Open a block in which this rank runs something alone: what would talk to other ranks raises RuntimeError."""

    def refuse() -> None:
        raise RuntimeError("a collective operation in what a rank runs alone")

    return hearing_collectives(refuse)


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


def foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, in one call."""
    torch._foreach_copy_(list(targets), list(sources))


def orthogonalize(matrix: torch.Tensor, epsilon: float) -> None:
    """Make the columns of a matrix orthonormal in place, as torch's PowerSGD does."""
    _power_sgd()._orthogonalize(matrix[None], epsilon)


def pays_low_rank(rows: int, columns: int, rank: int, least_rate: float) -> bool:
    """Return whether two factors of `rank` columns hold fewer elements than the matrix, by more than `least_rate`."""
    return bool(_power_sgd()._should_compress(rows, columns, rank, least_rate)[0])


@functools.cache
def _power_sgd() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    return powerSGD_hook


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


def steps_of(optimizer: Any) -> Any:
    """Return the optimizer on which hooks on steps can be registered; None if there is none.

    It is the inner one of a wrapper that is an `Optimizer` by name alone, and has not called its constructor.
    """
    for one in (optimizer, getattr(optimizer, "optimizer", None)):
        if hasattr(one, "_optimizer_step_pre_hooks") and hasattr(one, "_optimizer_step_post_hooks"):
            return one
    return None
