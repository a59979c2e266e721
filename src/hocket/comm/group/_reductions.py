"""c10d's reductions in terms of transports; see `_collectives`."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, strided
from torch.distributed import Work

from .. import torch_adapter as c10d
from ..transport import ReduceOperator, Transport, apart, flatten, reducer, split, write_back
from ._arguments import check_alike, check_list, check_root, check_writable, only, only_list, options
from ._device_backend import DeviceBackend
from ._sparse import check_sparse, reduce_sparse


class Reductions(c10d.ProcessGroupBase):  # type: ignore[misc]
    """The collectives that compute; who subclasses it says which backend serves which tensors."""

    _rank: int
    _size: int
    _host: DeviceBackend
    _global_ranks: list[int]

    def _device_backend(self, tensors: Sequence[Tensor]) -> DeviceBackend | None:
        """Return the backend for `tensors`; None if they go to an engine as they are."""
        raise NotImplementedError

    def _elsewhere(self, tensor: Tensor, method: str, *args: Any) -> Work:
        """Pass an operation as it is to the engine for the device of `tensor`."""
        raise NotImplementedError

    def allreduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Work:
        """All-reduce of one tensor in place."""
        tensor = only(tensors)
        opts = options(c10d.AllreduceOptions, opts, *more, **named)
        if tensor.layout is not strided and tensor.is_cpu:
            return self._sparse(tensor, opts)
        if (backend := self._device_backend((tensor,))) is None:
            return self._elsewhere(tensor, "allreduce", [tensor], opts)
        op = reducer(opts.reduceOp, tensor.dtype)
        transport = backend.transport
        # Of one element any stride is contiguous, but transports want 1.
        plain = tensor.is_contiguous() and not tensor.requires_grad and op.factor is None and not tensor.is_neg()
        if plain and (tensor.dim() != 1 or tensor.stride(0) == 1):
            flat = tensor if tensor.dim() == 1 else tensor.view(-1)
            return backend.submit("all_reduce", opts, [tensor], flat, lambda s: transport.all_reduce(flat, op, s))
        check_writable("all_reduce", [tensor])
        return backend.submit("all_reduce", opts, [tensor], tensor, lambda s: _reduce_one(transport, tensor, op, s))

    def _sparse(self, tensor: Tensor, opts: Any) -> Work:
        op = reducer(opts.reduceOp, tensor.dtype)
        check_sparse(tensor, op)
        transport, numbers = self._host.transport, self._global_ranks
        action = partial(reduce_sparse, transport, tensor, op, numbers)
        return self._host.submit("all_reduce", opts, [tensor], tensor.coalesce().values(), action)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """All-reduce of several tensors in place, as one operation."""
        opts = options(c10d.AllreduceCoalescedOptions, opts)
        if (backend := self._device_backend(tensors)) is None:
            return self._elsewhere(tensors[0], "allreduce_coalesced", tensors, opts)
        ops = [reducer(opts.reduceOp, t.dtype) for t in tensors]
        check_writable("all_reduce", tensors)

        def action(timeout_s: float) -> str:
            path, end_s = "", time.monotonic() + timeout_s
            for tensor, op in zip(tensors, ops, strict=True):
                path = _reduce_one(backend.transport, tensor, op, max(0.001, end_s - time.monotonic()))
            return path

        return backend.submit("all_reduce", opts, list(tensors), tensors, action)

    def reduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Work:
        """Reduce to a root; the tensors of other ranks stay as they are."""
        tensor = only(tensors)
        opts = options(c10d.ReduceOptions, opts, *more, **named)
        if (backend := self._device_backend([tensor])) is None:
            return self._elsewhere(tensor, "reduce", [tensor], opts)
        op, root = reducer(opts.reduceOp, tensor.dtype), opts.rootRank
        check_root("reduce", root, self._size)
        if self._rank == root:
            check_writable("reduce", [tensor])

        def action(timeout_s: float) -> str:
            flat = flatten(tensor)
            share = op.share(flat)
            path = backend.transport.reduce(share, op, root, timeout_s)
            if self._rank == root:
                _put(share, flat, tensor)
            return path

        return backend.submit("reduce", opts, [tensor], tensor, action, self._rank == root)

    def reduce_scatter(
        self, outputs: Any, inputs: Sequence[Sequence[Tensor]], opts: Any = None, *more: Any, **named: Any
    ) -> Work:
        """Reduce-scatter of lists of tensors."""
        output, sources = only(outputs), only_list(inputs)
        opts = options(c10d.ReduceScatterOptions, opts, *more, **named)
        if (backend := self._device_backend([output])) is None:
            return self._elsewhere(output, "reduce_scatter", [output], [sources], opts)
        op = reducer(opts.reduceOp, output.dtype)
        check_list("reduce_scatter", "input", sources, output, self._size)
        check_writable("reduce_scatter", [output])

        def action(timeout_s: float) -> str:
            flat = flatten(output)
            path = self._reduce_scatter(backend.transport, flat, [flatten(t) for t in sources], op, timeout_s)
            write_back(flat, output)
            return path

        return backend.submit("reduce_scatter", opts, [output], sources, action)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """Reduce-scatter of one tensor cut into as many parts as there are ranks."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Several reduce-scatters of one tensor each, as one operation."""
        opts = options(c10d.ReduceScatterOptions, opts)
        if (backend := self._device_backend(inputs)) is None:
            if len(inputs) == 1:
                return self._elsewhere(inputs[0], "_reduce_scatter_base", outputs[0], inputs[0], opts)
            return self._elsewhere(inputs[0], "reduce_scatter_tensor_coalesced", outputs, inputs, opts)
        ops = [reducer(opts.reduceOp, t.dtype) for t in outputs]
        check_writable("reduce_scatter", outputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            if tensor.numel() != output.numel() * self._size:
                raise ValueError(
                    f"reduce_scatter: an input of {tensor.numel()} elements cannot be cut into {self._size} outputs "
                    f"of {output.numel()}"
                )
            check_alike("reduce_scatter", "the input", tensor, output)

        def action(timeout_s: float) -> str:
            path = ""
            for output, tensor, op in zip(outputs, inputs, ops, strict=True):
                flat = flatten(output)
                parts = split(flatten(tensor), self._size)
                path = self._reduce_scatter(backend.transport, flat, parts, op, timeout_s)
                write_back(flat, output)
            return path

        return backend.submit("reduce_scatter", opts, list(outputs), inputs, action)

    def _reduce_scatter(
        self, transport: Transport, flat: Tensor, parts: Sequence[Tensor], op: ReduceOperator, timeout_s: float
    ) -> str:
        given = apart([op.share(part) for part in parts], [flat], lambda r, _: r == self._rank)
        return transport.reduce_scatter(flat, given, op, timeout_s)

    # torch before 2.13 and some of its libraries use these names.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _reduce_one(transport: Transport, tensor: Tensor, op: ReduceOperator, timeout_s: float) -> str:
    flat = flatten(tensor)
    share = op.share(flat)
    path = transport.all_reduce(share, op, timeout_s)
    _put(share, flat, tensor)
    return path


def _put(result: Tensor, flat: Tensor, tensor: Tensor) -> None:
    """Put the result into `tensor`, whose flat form `flat` is."""
    if result is not flat:
        flat.copy_(result)
    write_back(flat, tensor)
