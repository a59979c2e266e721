"""Process groups, their stores and options, of torch.distributed."""

import _thread
import functools
import importlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as _distributed
from torch.distributed import distributed_c10d as _c10d

_T = TypeVar("_T")

_any: Any = _c10d
_public: Any = _distributed

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


def read_whole_numbers() -> None:
    """Have a DTensor of one element that is read as a number (`item`, `float`) give the whole's, as a collective.

    torch gives what this rank holds: its part of a sum, a norm or a maximum.
    """
    module: Any = importlib.import_module("torch.distributed.tensor")
    handlers = getattr(getattr(module.DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if handlers is None:  # a torch that does so otherwise
        return

    def read(_: Any, args: Any, __: Any) -> Any:
        (number,) = args
        if all(one.is_replicate() for one in number.placements):
            return number.to_local().item()
        try:
            with torch.no_grad():
                return number.full_tensor().item()
        except Exception as error:
            error.add_note(
                "A number of weights or gradients of which ranks have parts is read by every rank, or by none: compute "
                "it before `if rank == 0`."
            )
            raise

    handlers[torch.ops.aten._local_scalar_dense.default] = read


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
