"""The process group "hocket": routes every c10d operation to shared memory or to an engine."""

import atexit
import collections
import copy
import os
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from .. import torch_adapter as c10d
from ..aggregated import leave_aggregator
from ..engines import Gloo
from ..engines import engine as _engine
from ..scheduled import CheckedTransport
from ..shm import SharedMemoryTransport
from ..shm import cuda_ipc as _cuda_ipc
from ..timeouts import timeout_setting
from ..transport import CommError, Membership
from ..transport import observers as _observe
from ._arguments import check_root, check_whole, check_writable, only
from ._collectives import Collectives
from ._device_backend import DeviceBackend, HostStagedWork, empty_on_host, on_host
from ._hosts import find_hosts, open_transport, while_all_live
from ._runner import Runner, ending

_lives = 0
_names: "collections.Counter[tuple[int, str]]" = collections.Counter()
_SETTLE_S = 0.5  # for operations that nobody has waited for, when the process ends
_open_groups: "weakref.WeakSet[HocketGroup]" = weakref.WeakSet()
_of_the_parent: list[Any] = []  # engines in a forked child, which has none of their threads and must not end them


class HocketGroup(Collectives):
    """A c10d process group over shared memory on one host and engines elsewhere.

    Args:
        given: Torch's DistributedBackendOptions: store, rank, size, time-out and the ranks' numbers in the world.
    """

    def __init__(self, given: Any) -> None:
        rank, size = given.group_rank, given.group_size
        super().__init__(rank, size)
        self._rank: int = rank
        self._size: int = size
        self._name = str(given.group_id)
        self._description = "undefined"
        self._lock = threading.Lock()
        self._nccl: Any = None
        self._given_store = given.store
        self._global_ranks = list(given.global_ranks_in_group) or list(range(size))
        self._store = c10d.PrefixStore(f"hocket/{_count_lives()}/{_count_namesakes(self._name)}/", given.store)
        timeout = _timeout(given.timeout)
        world = torch.distributed.group.WORLD
        dead = world.dead if isinstance(world, HocketGroup) else None
        at = Membership(self._store, self._name, rank, size, timeout, self._global_ranks)
        hosts, called, processes = find_hosts(at, dead)
        self._gloo: Any = Gloo(self._store, rank, size, timeout)
        transport, channel, self._tag_matcher = while_all_live(
            lambda: open_transport(at, self._gloo, hosts, called), at, processes, dead
        )
        self._channel = channel
        self._runner = Runner(self._name, size, channel, timeout)
        self._host = DeviceBackend(transport, self._runner)
        self._gpu: DeviceBackend | None = None  # set at the first CUDA tensor if the ranks share a GPU
        self._gpu_known = False
        self._on_this_gpu: dict[int, bool] = {}  # for each peer that a message was exchanged with
        _observe.members[self._name] = tuple(self._global_ranks)
        _open_groups.add(self)

    # --- what torch asks about a group ------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802, D102  (c10d's names)
        return "hocket"

    def name(self) -> str:  # noqa: D102
        return "hocket"

    def getGroupName(self) -> str:  # noqa: N802, D102
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802, D102
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802, D102
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802, D102
        self._description = _observe.descriptions[self._name] = description

    @property
    def group_name(self) -> str:  # noqa: D102
        return self._name

    @property
    def group_desc(self) -> str:  # noqa: D102
        return self._description

    def rank(self) -> int:  # noqa: D102
        return self._rank

    def size(self) -> int:  # noqa: D102
        return self._size

    def get_group_store(self) -> Any:  # noqa: D102
        return self._given_store

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors the group moves; torch's checkpoints ask, the first is where they meet."""
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> Any:
        return self._nccl_engine() if torch.device(device).type == "cuda" else self._gloo

    def _get_sequence_number_for_group(self) -> int:
        return self._runner.seq

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: sequence numbers start at 1 on every rank, so there is nothing to agree on."""

    @property
    def timeout(self) -> timedelta:
        """Time-out of operations that name none."""
        return timedelta(seconds=self._runner.timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of operations posted from now on."""
        self._runner.timeout_s = timeout.total_seconds()
        if self._tag_matcher is not None:
            self._tag_matcher.timeout_s = timeout.total_seconds()
        self._gloo.set_timeout(timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Run a barrier whose error on rank 0 names the ranks that did not come (torch's own, through Gloo).

        Raises:
            RuntimeError: Not all have come in time; in torch's words, also before Gloo has connected.
        """
        if timeout is None:
            timeout = timedelta(seconds=self._runner.timeout_s)
        missing = self._gloo.missing(timeout)
        if missing:
            took = f"{timeout // timedelta(milliseconds=1)} ms"
            if self._rank:
                raise RuntimeError(
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    "send/recv from rank 0. Please check rank 0 logs for faulty rank."
                )
            if not timeout:
                raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {took}.")
            named = ", ".join(map(str, missing if wait_all_ranks else missing[:1]))
            ranks = "Ranks" if wait_all_ranks else "Rank"
            raise RuntimeError(f"[Rank 0]: {ranks} {named} failed to pass monitoredBarrier in {took}")
        self._gloo.monitored_barrier(timeout, wait_all_ranks)

    # --- point to point ---------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Send to one rank."""
        check_whole(tensor := only(tensors))
        check_root("send", dst, self._size)
        if self._staged_on_host(tensor, dst):
            staged = on_host(tensor)
            return HostStagedWork(self.send([staged], dst, tag), staged, None)
        if self._tag_matcher is not None and _is_plain(tensor):
            return self._tag_matcher.send(tensor, dst, tag)
        return self._elsewhere(tensor, "send", [tensor], dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receive from one rank."""
        tensor = only(tensors)
        check_root("recv", src, self._size)
        check_writable("recv", [tensor])
        if self._staged_on_host(tensor, src):
            staged = empty_on_host(tensor)
            return HostStagedWork(self.recv([staged], src, tag), staged, tensor)
        if self._tag_matcher is not None and _is_plain(tensor):
            return self._tag_matcher.receive(tensor, src, tag)
        return self._elsewhere(tensor, "recv", [tensor], src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive from whichever rank sends first."""
        tensor = only(tensors)
        check_writable("recv", [tensor])
        if self._staged_on_host(tensor, None):
            staged = empty_on_host(tensor)
            return HostStagedWork(self.recv_anysource([staged], tag), staged, tensor)
        if self._tag_matcher is not None and _is_plain(tensor):
            return self._tag_matcher.receive(tensor, None, tag)
        return self._elsewhere(tensor, "recv_anysource", [tensor], tag)

    # --- life -------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group: peers that still wait for this rank are told."""
        _open_groups.discard(self)
        self._say_why()
        for backend in (self._host, self._gpu):
            if backend is not None:
                backend.runner.close()
        if self._tag_matcher is not None:
            self._tag_matcher.close()
        leave_aggregator(self._host.transport)
        if self._nccl is not None:
            self._nccl.shutdown()

    def _say_why(self) -> None:
        if isinstance(self._host.transport, CheckedTransport):
            self._host.transport.leave(ending())

    def fail(self, error: BaseException) -> None:
        """Leave the group in the middle of operations, and tell the peers why: they wait for this rank no longer."""
        for backend in (self._host, self._gpu):
            if backend is not None:
                backend.runner.fail(error)
        if self._tag_matcher is not None:
            self._tag_matcher.leave()
        self._gloo.close()

    def abort(self) -> None:
        """Leave the group at once."""
        _open_groups.discard(self)
        if self._channel is not None:
            self._channel.leave()
        if self._tag_matcher is not None:
            self._tag_matcher.close()
        if self._gpu is not None:
            self._gpu.runner.leave()
        if self._nccl is not None:
            self._nccl.abort()

    def dead(self) -> set[int]:
        """Return the ranks, by their numbers in the world, that are known to have ended; never waits."""
        found = self._channel.dead() if self._channel is not None else set()
        if self._gloo.beside is not None:
            found |= {self._global_ranks[r] for r in self._gloo.beside.ended()}
        return found

    def refuse(self, error: CommError) -> None:
        """Answer all operations from now on with this error, and tell nobody: a child does not speak for the rank."""
        for backend in (self._host, self._gpu):
            if backend is not None:
                backend.runner.refuse(error)
        _of_the_parent.extend((self._gloo, self._tag_matcher))
        self._tag_matcher, self._gloo = None, _Refusing(error)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _device_backend(self, tensors: Sequence[Tensor]) -> DeviceBackend | None:
        for tensor in tensors:
            check_whole(tensor)
            if tensor.is_cuda:
                return self._gpu_backend(tensor.device)
            if not tensor.is_cpu or tensor.layout is not torch.strided:
                return None
        return self._host

    def _gpu_backend(self, device: torch.device) -> DeviceBackend | None:
        with self._lock:
            if not self._gpu_known:
                if self._size > 1:
                    channel = _cuda_ipc.connect(self._at_store(), device)
                    if channel is not None:
                        runner = Runner(f"{self._name}-cuda", self._size, channel, self.timeout)
                        self._gpu = DeviceBackend(SharedMemoryTransport(channel), runner, device)
                self._gpu_known = True
            if self._gpu is not None and self._gpu.device != device:
                raise ValueError(
                    f"group {self._name!r} shares {self._gpu.device} among its ranks: it moves no tensors on {device}"
                )
            return self._gpu

    def _staged_on_host(self, tensor: Tensor, peer: int | None) -> bool:
        """Return whether a message passes through the host: its two ranks share a GPU, which NCCL refuses."""
        if tensor.device.type != "cuda" or self._size == 1:
            return False
        if self._gpu_known or peer is None:
            return self._gpu_backend(tensor.device) is not None
        with self._lock:  # not all ranks of the group need come to a message between two
            if peer not in self._on_this_gpu:
                self._on_this_gpu[peer] = _cuda_ipc.share_gpu(self._at_store(), peer, tensor.device)
            return self._on_this_gpu[peer]

    def _at_store(self) -> Membership:
        store = c10d.PrefixStore("hocket-cuda/", self._store)
        return Membership(store, self._name, self._rank, self._size, self.timeout, self._global_ranks)

    def _nccl_engine(self) -> Any:
        with self._lock:
            if self._nccl is None:
                self._nccl = _engine.nccl(
                    self._store, self._rank, self._size, timedelta(seconds=self._runner.timeout_s)
                )
            return self._nccl

    def _elsewhere(self, tensor: Tensor, method: str, *args: Any) -> Work:
        """Pass an operation as it is to the engine for the device of `tensor`."""
        kind = tensor.device.type
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"the hocket backend has no transport for tensors on {tensor.device}; use cpu or cuda")
        engine = self._nccl_engine() if kind == "cuda" else self._gloo
        work: Work = getattr(engine, method)(*args)
        return work


class _Refusing:
    """Stands for an engine of the process that this one was forked from."""

    def __init__(self, error: CommError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise copy.copy(self._error)


def _timeout(given: timedelta) -> timedelta:
    """Return a group's time-out: torch's default gives way to HOCKET_TIMEOUT (seconds), and to that of the world."""
    if given != c10d.DEFAULT_TIMEOUT:
        return given
    if (seconds := timeout_setting()) is not None:
        return timedelta(seconds=seconds)
    world = torch.distributed.group.WORLD
    return world.timeout if isinstance(world, HocketGroup) else given


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


def _count_lives() -> int:
    """Return how often this process has initialised torch.distributed with this backend.

    A second life finds the keys of the first in the launcher's store. Every rank takes part in every life's first
    group, the world, so all count alike.
    """
    global _lives
    if not torch.distributed.is_initialized():
        _lives += 1
    return _lives


def _count_namesakes(name: str) -> int:
    """Return how many groups of this name this process has been in since it last initialised torch.distributed.

    Torch gives a group of use_local_synchronization the name of one that was destroyed, and with it its place in the
    store. All ranks of a name are in each group of it, so all count alike.
    """
    _names[_lives, name] += 1
    return _names[_lives, name]


# torch.compile traces into these where DDP's forward pass or a compiled function calls them. It replaces all_reduce by
# a functional collective before it comes to that, and every microsecond of that one is felt.
for _name in ("broadcast", "allgather", "gather", "scatter", "reduce", "reduce_scatter", "alltoall", "barrier"):
    setattr(HocketGroup, _name, c10d.outside_compiler(getattr(HocketGroup, _name)))


def _refuse_in_child() -> None:
    """Keep a forked child out of its parent's groups: to the other ranks its operations would be the parent's."""
    for group in list(_open_groups):
        group.refuse(
            CommError(
                f"group {group.getGroupName()!r} belongs to the process that this one was forked from, and only that "
                "one may use it; a child that is to communicate calls dist.init_process_group itself"
            )
        )


os.register_at_fork(after_in_child=_refuse_in_child)


@atexit.register
def _leave_all() -> None:
    groups = list(_open_groups)
    for group in groups:
        group._say_why()
    for runner in (one.runner for group in groups for one in (group._host, group._gpu) if one is not None):
        runner.leave()
    end_s = time.monotonic() + _SETTLE_S
    for runner in (one.runner for group in groups for one in (group._host, group._gpu) if one is not None):
        runner.settle(max(0.0, end_s - time.monotonic()))
