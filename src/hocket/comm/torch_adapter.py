"""The one place that names what torch does not document: other modules take these names from here.

torch's own stubs leave out or mistype most of them, hence `Any`.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as _distributed
from torch.distributed import distributed_c10d as _c10d

_F = TypeVar("_F", bound=Callable[..., Any])

_any: Any = _c10d
_public: Any = _distributed
_torch_c: Any = torch._C

Store: Any = _any.Store
PrefixStore: Any = _any.PrefixStore
TCPStore: Any = _public.TCPStore
FileStore: Any = _public.FileStore

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


# Since torch 2.13 these names stand for what was all_gather_into_tensor and reduce_scatter_tensor.
all_gather_single: Any = _public.all_gather_single
reduce_scatter_single: Any = _public.reduce_scatter_single


def process_group_gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Return a bare Gloo backend."""
    engine = _any.ProcessGroupGloo(store, rank, size, timeout=timeout)
    engine._set_sequence_number_for_group()
    return engine


def process_group_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Return a bare NCCL backend; it connects at its first operation."""
    options = _any.ProcessGroupNCCL.Options()
    options._timeout = timeout
    engine = _any.ProcessGroupNCCL(store, rank, size, options)
    engine._set_sequence_number_for_group()
    return engine


def default_store() -> Any:
    """Return the store by which the ranks of torch's default group have found each other."""
    return _any._get_default_store()


def queue_callback(callback: Callable[[], None]) -> None:
    """Have `callback` called when the running back-propagation ends; its exceptions come out of `backward()`."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Return whether this thread is inside back-propagation now."""
    return bool(_torch_c._current_graph_task_id() != -1)


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

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(_F, call)
