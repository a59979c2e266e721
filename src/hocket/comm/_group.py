"""The process group "hocket": routes every c10d operation to shared memory or to an engine."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from . import _bootstrap, _engine
from . import torch_adapter as c10d
from ._arguments import check_splits, only, only_list, options, split_rows
from ._flat import flatten, split, write_back
from ._reduce import Reducer, reducer
from ._runner import Runner
from ._shm import SharedMemoryTransport
from ._transport import Transport

Tensor = torch.Tensor

_open_groups: weakref.WeakSet[HocketGroup] = weakref.WeakSet()


class HocketGroup(c10d.ProcessGroupBase):  # type: ignore[misc]
    """A c10d process group over shared memory on one host and engines elsewhere.

    Args:
        given: torch's DistributedBackendOptions: store, rank, size, time-out and the ranks' numbers in the world.
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
        self._store = given.store
        global_ranks = list(given.global_ranks_in_group) or list(range(size))
        store = c10d.PrefixStore("hocket/", given.store)
        channel = None
        if size > 1:
            channel = _bootstrap.connect(store, self._name, rank, size, given.timeout, global_ranks)
        self._channel = channel
        self._gloo: Any = _engine.gloo(store, rank, size, given.timeout)
        self._cpu: Transport = (
            SharedMemoryTransport(channel) if channel is not None else _engine.EngineTransport(self._gloo, "gloo")
        )
        self._runner = Runner(self._name, size, channel, given.timeout)
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
        self._description = description

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
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        return self._nccl_engine() if torch.device(device).type == "cuda" else self._gloo

    def _get_sequence_number_for_group(self) -> int:
        return self._runner.seq

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers start at 1 on every rank; there is nothing to agree on."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time-out of operations posted from now on."""
        self._runner.timeout_s = timeout.total_seconds()
        self._gloo.set_timeout(timeout)

    # --- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """All-reduce of one tensor in place."""
        tensor = only(tensors)
        opts = options(c10d.AllreduceOptions, opts, timeout)
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return self._elsewhere(tensor, "allreduce", [tensor], opts)
        op = reducer(opts.reduceOp, tensor.dtype)
        if tensor.is_contiguous() and not tensor.requires_grad:
            flat = tensor.view(-1)
            return self._runner.submit("all_reduce", opts, [tensor], flat, lambda s: self._cpu.all_reduce(flat, op, s))
        return self._runner.submit("all_reduce", opts, [tensor], tensor, lambda s: self._reduce_one(tensor, op, s))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """All-reduce of several tensors in place, as one operation."""
        opts = options(c10d.AllreduceCoalescedOptions, opts)
        if not self._on_cpu(tensors):
            return self._elsewhere(tensors[0], "allreduce_coalesced", tensors, opts)
        ops = [reducer(opts.reduceOp, t.dtype) for t in tensors]

        def action(timeout_s: float) -> str:
            path = ""
            for tensor, op in zip(tensors, ops, strict=True):
                path = self._reduce_one(tensor, op, timeout_s)
            return path

        return self._runner.submit("all_reduce", opts, list(tensors), tensors, action)

    def _reduce_one(self, tensor: Tensor, op: Reducer, timeout_s: float) -> str:
        flat = flatten(tensor)
        path = self._cpu.all_reduce(flat, op, timeout_s)
        write_back(flat, tensor)
        return path

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce to a root; the tensors of other ranks stay as they are."""
        tensor = only(tensors)
        opts = options(c10d.ReduceOptions, opts)
        if not self._on_cpu([tensor]):
            return self._elsewhere(tensor, "reduce", [tensor], opts)
        op, root = reducer(opts.reduceOp, tensor.dtype), opts.rootRank

        def action(timeout_s: float) -> str:
            flat = flatten(tensor)
            path = self._cpu.reduce(flat, op, root, timeout_s)
            if self._rank == root:
                write_back(flat, tensor)
            return path

        return self._runner.submit("reduce", opts, [tensor], tensor, action)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        """Broadcast from a root."""
        tensor = only(tensors)
        opts = options(c10d.BroadcastOptions, opts)
        if not self._on_cpu([tensor]):
            return self._elsewhere(tensor, "broadcast", [tensor], opts)
        root = opts.rootRank

        def action(timeout_s: float) -> str:
            flat = flatten(tensor)
            path = self._cpu.broadcast(flat, root, timeout_s)
            if self._rank != root:
                write_back(flat, tensor)
            return path

        return self._runner.submit("broadcast", opts, [tensor], tensor, action)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Any, opts: Any = None) -> Work:
        """All-gather into lists of tensors."""
        targets, tensor = only_list(outputs), only(inputs)
        opts = options(c10d.AllgatherOptions, opts)
        if not self._on_cpu([tensor]):
            return self._elsewhere(tensor, "allgather", [targets], [tensor], opts)
        return self._runner.submit(
            "all_gather", opts, list(targets), targets, lambda s: self._gather_lists(targets, tensor, s)
        )

    def _gather_lists(self, targets: Sequence[Tensor], tensor: Tensor, timeout_s: float) -> str:
        flats = [flatten(t) for t in targets]
        source = flatten(tensor)
        for r, flat in enumerate(flats):
            if flat.numel() != source.numel():
                raise ValueError(f"all_gather: output {r} has {flat.numel()} elements, the input has {source.numel()}")
        path = self._cpu.all_gather(flats, source, timeout_s)
        for flat, target in zip(flats, targets, strict=True):
            write_back(flat, target)
        return path

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """All-gather of several tensors into lists; `outputs[r]` belongs to rank r."""
        opts = options(c10d.AllgatherOptions, opts)
        if not self._on_cpu(inputs):
            return self._elsewhere(inputs[0], "allgather_coalesced", outputs, inputs, opts)

        def action(timeout_s: float) -> str:
            path = ""
            for i, tensor in enumerate(inputs):
                path = self._gather_lists([of_rank[i] for of_rank in outputs], tensor, timeout_s)
            return path

        everything = [t for of_rank in outputs for t in of_rank]
        return self._runner.submit("all_gather", opts, everything, everything, action)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """All-gather into one tensor, the ranks' inputs one after the other."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Several all-gathers into one tensor each, as one operation."""
        opts = options(c10d.AllgatherOptions, opts)
        if not self._on_cpu(inputs):
            if len(inputs) == 1:
                return self._elsewhere(inputs[0], "_allgather_base", outputs[0], inputs[0], opts)
            return self._elsewhere(inputs[0], "allgather_into_tensor_coalesced", outputs, inputs, opts)
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.numel() != tensor.numel() * self._size:
                raise ValueError(
                    f"all_gather: an output of {output.numel()} elements cannot hold {self._size} inputs of "
                    f"{tensor.numel()}"
                )

        def action(timeout_s: float) -> str:
            path = ""
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = flatten(output)
                path = self._cpu.all_gather(split(flat, self._size), flatten(tensor), timeout_s)
                write_back(flat, output)
            return path

        return self._runner.submit("all_gather", opts, list(outputs), outputs, action)

    def reduce_scatter(self, outputs: Any, inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        """Reduce-scatter of lists of tensors."""
        output, sources = only(outputs), only_list(inputs)
        opts = options(c10d.ReduceScatterOptions, opts)
        if not self._on_cpu([output]):
            return self._elsewhere(output, "reduce_scatter", [output], [sources], opts)
        op = reducer(opts.reduceOp, output.dtype)
        for r, source in enumerate(sources):
            if source.numel() != output.numel():
                raise ValueError(
                    f"reduce_scatter: input {r} has {source.numel()} elements, the output has {output.numel()}"
                )

        def action(timeout_s: float) -> str:
            flat = flatten(output)
            path = self._cpu.reduce_scatter(flat, [flatten(t) for t in sources], op, timeout_s)
            write_back(flat, output)
            return path

        return self._runner.submit("reduce_scatter", opts, [output], sources, action)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """Reduce-scatter of one tensor cut into as many parts as there are ranks."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Several reduce-scatters of one tensor each, as one operation."""
        opts = options(c10d.ReduceScatterOptions, opts)
        if not self._on_cpu(inputs):
            if len(inputs) == 1:
                return self._elsewhere(inputs[0], "_reduce_scatter_base", outputs[0], inputs[0], opts)
            return self._elsewhere(inputs[0], "reduce_scatter_tensor_coalesced", outputs, inputs, opts)
        ops = [reducer(opts.reduceOp, t.dtype) for t in outputs]
        for output, tensor in zip(outputs, inputs, strict=True):
            if tensor.numel() != output.numel() * self._size:
                raise ValueError(
                    f"reduce_scatter: an input of {tensor.numel()} elements cannot be cut into {self._size} outputs "
                    f"of {output.numel()}"
                )

        def action(timeout_s: float) -> str:
            path = ""
            for output, tensor, op in zip(outputs, inputs, ops, strict=True):
                flat = flatten(output)
                path = self._cpu.reduce_scatter(flat, split(flatten(tensor), self._size), op, timeout_s)
                write_back(flat, output)
            return path

        return self._runner.submit("reduce_scatter", opts, list(outputs), inputs, action)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """All-to-all of parts of one tensor along its first axis; no sizes means equal parts."""
        opts = options(c10d.AllToAllOptions, opts)
        received, sent = list(output_split_sizes or ()), list(input_split_sizes or ())
        if not self._on_cpu([tensor]):
            return self._elsewhere(tensor, "alltoall_base", output, tensor, received, sent, opts)
        check_splits("output", output, received, self._size)
        check_splits("input", tensor, sent, self._size)

        def action(timeout_s: float) -> str:
            flat = flatten(output)
            path = self._cpu.all_to_all(
                split_rows(flat, output, received, self._size),
                split_rows(flatten(tensor), tensor, sent, self._size),
                timeout_s,
            )
            write_back(flat, output)
            return path

        return self._runner.submit("all_to_all", opts, [output], tensor, action)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """All-to-all of lists of tensors."""
        opts = options(c10d.AllToAllOptions, opts)
        if not self._on_cpu(inputs):
            return self._elsewhere(inputs[0], "alltoall", outputs, inputs, opts)

        def action(timeout_s: float) -> str:
            flats = [flatten(t) for t in outputs]
            path = self._cpu.all_to_all(flats, [flatten(t) for t in inputs], timeout_s)
            for flat, output in zip(flats, outputs, strict=True):
                write_back(flat, output)
            return path

        return self._runner.submit("all_to_all", opts, list(outputs), inputs, action)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Any, opts: Any = None) -> Work:
        """Gather to a root."""
        tensor = only(inputs)
        opts = options(c10d.GatherOptions, opts)
        if not self._on_cpu([tensor]):
            return self._elsewhere(tensor, "gather", outputs, [tensor], opts)
        root = opts.rootRank
        targets = only_list(outputs) if self._rank == root else None

        def action(timeout_s: float) -> str:
            flats = [flatten(t) for t in targets] if targets is not None else None
            path = self._cpu.gather(flats, flatten(tensor), root, timeout_s)
            for flat, target in zip(flats or (), targets or (), strict=True):
                write_back(flat, target)
            return path

        return self._runner.submit("gather", opts, list(targets or ()), tensor, action)

    def scatter(self, outputs: Any, inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        """Scatter from a root."""
        tensor = only(outputs)
        opts = options(c10d.ScatterOptions, opts)
        if not self._on_cpu([tensor]):
            return self._elsewhere(tensor, "scatter", [tensor], inputs, opts)
        root = opts.rootRank
        sources = only_list(inputs) if self._rank == root else None

        def action(timeout_s: float) -> str:
            flat = flatten(tensor)
            given = [flatten(t) for t in sources] if sources is not None else None
            path = self._cpu.scatter(flat, given, root, timeout_s)
            write_back(flat, tensor)
            return path

        return self._runner.submit("scatter", opts, [tensor], tensor, action)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Returns when all ranks have called it."""
        opts = options(c10d.BarrierOptions, opts, timeout)
        return self._runner.submit("barrier", opts, [], (), self._cpu.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error on rank 0 names the ranks that did not come (torch's own, through Gloo)."""
        self._gloo.monitored_barrier(timeout or timedelta(seconds=self._runner.timeout_s), wait_all_ranks)

    # torch before 2.13 and some of its libraries use these names.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- point to point ---------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Sends to one rank."""
        tensor = only(tensors)
        return self._elsewhere(tensor, "send", [tensor], dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receives from one rank."""
        tensor = only(tensors)
        return self._elsewhere(tensor, "recv", [tensor], src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receives from whichever rank sends first."""
        tensor = only(tensors)
        return self._elsewhere(tensor, "recv_anysource", [tensor], tag)

    # --- life -------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leaves the group: peers that still wait for this rank are told."""
        _open_groups.discard(self)
        self._runner.close()
        if self._nccl is not None:
            self._nccl.shutdown()

    def abort(self) -> None:
        """Leaves the group at once."""
        _open_groups.discard(self)
        if self._channel is not None:
            self._channel.leave()
        if self._nccl is not None:
            self._nccl.abort()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _on_cpu(self, tensors: Sequence[Tensor]) -> bool:
        return all(t.device.type == "cpu" and t.layout is torch.strided for t in tensors)

    def _nccl_engine(self) -> Any:
        with self._lock:
            if self._nccl is None:
                store = c10d.PrefixStore("hocket/", self._store)
                self._nccl = _engine.nccl(store, self._rank, self._size, timedelta(seconds=self._runner.timeout_s))
            return self._nccl

    def _elsewhere(self, tensor: Tensor, method: str, *args: Any) -> Work:
        """Passes an operation as it is to the engine for the device of `tensor`."""
        kind = tensor.device.type
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"the hocket backend has no transport for tensors on {tensor.device}; use cpu or cuda")
        engine = self._nccl_engine() if kind == "cuda" else self._gloo
        work: Work = getattr(engine, method)(*args)
        return work


@atexit.register
def _leave_all() -> None:
    for group in list(_open_groups):
        if group._channel is not None:
            group._channel.leave()
