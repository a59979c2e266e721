"""c10d's collectives in terms of transports: users' tensors in, flat tensors across the seam, results back."""

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import Work

from .. import torch_adapter as c10d
from ..transport import Transport, apart, flatten, split, write_back
from ._arguments import (
    check_alike,
    check_list,
    check_root,
    check_splits,
    check_writable,
    only,
    only_list,
    options,
    split_rows,
)
from ._reductions import Reductions


class Collectives(Reductions):
    """All collectives of a process group; who subclasses it says which backend serves which tensors."""

    def broadcast(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Work:
        """Broadcast from a root."""
        tensor = only(tensors)
        opts = options(c10d.BroadcastOptions, opts, *more, **named)
        if (backend := self._device_backend([tensor])) is None:
            return self._elsewhere(tensor, "broadcast", [tensor], opts)
        root = opts.rootRank
        check_root("broadcast", root, self._size)
        if self._rank != root:
            check_writable("broadcast", [tensor])

        def action(timeout_s: float) -> str:
            flat = flatten(tensor)
            path = backend.transport.broadcast(flat, root, timeout_s)
            if self._rank != root:
                write_back(flat, tensor)
            return path

        return backend.submit("broadcast", opts, [tensor], tensor, action, self._rank != root)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Any, opts: Any = None, *more: Any, **named: Any
    ) -> Work:
        """All-gather into lists of tensors."""
        targets, tensor = only_list(outputs), only(inputs)
        opts = options(c10d.AllgatherOptions, opts, *more, **named)
        if (backend := self._device_backend([tensor])) is None:
            return self._elsewhere(tensor, "allgather", [targets], [tensor], opts)
        check_list("all_gather", "output", targets, tensor, self._size)
        check_writable("all_gather", targets)
        return backend.submit(
            "all_gather",
            opts,
            list(targets),
            targets,
            lambda s: self._gather_lists(backend.transport, targets, tensor, s),
        )

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """All-gather of several tensors into lists; `outputs[r]` belongs to rank r."""
        opts = options(c10d.AllgatherOptions, opts)
        if (backend := self._device_backend(inputs)) is None:
            return self._elsewhere(inputs[0], "allgather_coalesced", outputs, inputs, opts)
        for i, tensor in enumerate(inputs):
            check_list("all_gather", "output", [of_rank[i] for of_rank in outputs], tensor, self._size)
        everything = [t for of_rank in outputs for t in of_rank]
        check_writable("all_gather", everything)

        def action(timeout_s: float) -> str:
            path = ""
            for i, tensor in enumerate(inputs):
                path = self._gather_lists(backend.transport, [of_rank[i] for of_rank in outputs], tensor, timeout_s)
            return path

        return backend.submit("all_gather", opts, everything, everything, action)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """All-gather into one tensor, the ranks' inputs one after the other."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Several all-gathers into one tensor each, as one operation."""
        opts = options(c10d.AllgatherOptions, opts)
        if (backend := self._device_backend(inputs)) is None:
            if len(inputs) == 1:
                return self._elsewhere(inputs[0], "_allgather_base", outputs[0], inputs[0], opts)
            return self._elsewhere(inputs[0], "allgather_into_tensor_coalesced", outputs, inputs, opts)
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.numel() != tensor.numel() * self._size:
                raise ValueError(
                    f"all_gather: an output of {output.numel()} elements cannot hold {self._size} inputs of "
                    f"{tensor.numel()}"
                )
            check_alike("all_gather", "the output", output, tensor)
        check_writable("all_gather", outputs)

        def action(timeout_s: float) -> str:
            path = ""
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = flatten(output)
                path = self._all_gather(backend.transport, split(flat, self._size), flatten(tensor), timeout_s)
                write_back(flat, output)
            return path

        return backend.submit("all_gather", opts, list(outputs), outputs, action)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        *more: Any,
        **named: Any,
    ) -> Work:
        """All-to-all of parts of one tensor along its first axis; no sizes means equal parts."""
        opts = options(c10d.AllToAllOptions, opts, *more, **named)
        received, sent = list(output_split_sizes or ()), list(input_split_sizes or ())
        if (backend := self._device_backend([tensor])) is None:
            return self._elsewhere(tensor, "alltoall_base", output, tensor, received, sent, opts)
        check_splits("output", output, received, self._size)
        check_splits("input", tensor, sent, self._size)
        check_alike("all_to_all", "the output", output, tensor)
        check_writable("all_to_all", [output])

        def action(timeout_s: float) -> str:
            flat = flatten(output)
            parts = split_rows(flat, output, received, self._size)
            given = apart(split_rows(flatten(tensor), tensor, sent, self._size), parts, operator.eq)
            path = backend.transport.all_to_all(parts, given, timeout_s)
            write_back(flat, output)
            return path

        return backend.submit("all_to_all", opts, [output], tensor, action)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None, *more: Any, **named: Any
    ) -> Work:
        """All-to-all of lists of tensors."""
        opts = options(c10d.AllToAllOptions, opts, *more, **named)
        if (backend := self._device_backend(inputs)) is None:
            return self._elsewhere(inputs[0], "alltoall", outputs, inputs, opts)
        if len(inputs) != self._size or len(outputs) != self._size:
            raise ValueError(f"all_to_all: {len(outputs)} outputs and {len(inputs)} inputs for {self._size} ranks")
        for tensor in (*outputs, *inputs):
            check_alike("all_to_all", "one of the tensors", tensor, inputs[0])
        check_writable("all_to_all", outputs)

        def action(timeout_s: float) -> str:
            flats = [flatten(t) for t in outputs]
            given = apart([flatten(t) for t in inputs], flats, operator.eq)
            path = backend.transport.all_to_all(flats, given, timeout_s)
            for flat, output in zip(flats, outputs, strict=True):
                write_back(flat, output)
            return path

        return backend.submit("all_to_all", opts, list(outputs), inputs, action)

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Any, opts: Any = None, *more: Any, **named: Any
    ) -> Work:
        """Gather to a root."""
        tensor = only(inputs)
        opts = options(c10d.GatherOptions, opts, *more, **named)
        if (backend := self._device_backend([tensor])) is None:
            return self._elsewhere(tensor, "gather", outputs, [tensor], opts)
        root = opts.rootRank
        check_root("gather", root, self._size)
        targets = only_list(outputs) if self._rank == root else None
        if targets is not None:
            check_list("gather", "output", targets, tensor, self._size)
            check_writable("gather", targets)

        def action(timeout_s: float) -> str:
            flats = [flatten(t) for t in targets] if targets is not None else None
            flat = flatten(tensor)
            if flats is not None:
                (flat,) = apart([flat], flats, lambda _, r: r == root)
            path = backend.transport.gather(flats, flat, root, timeout_s)
            for flat, target in zip(flats or (), targets or (), strict=True):
                write_back(flat, target)
            return path

        return backend.submit("gather", opts, list(targets or ()), tensor, action)

    def scatter(
        self, outputs: Any, inputs: Sequence[Sequence[Tensor]], opts: Any = None, *more: Any, **named: Any
    ) -> Work:
        """Scatter from a root."""
        tensor = only(outputs)
        opts = options(c10d.ScatterOptions, opts, *more, **named)
        if (backend := self._device_backend([tensor])) is None:
            return self._elsewhere(tensor, "scatter", [tensor], inputs, opts)
        root = opts.rootRank
        check_root("scatter", root, self._size)
        sources = only_list(inputs) if self._rank == root else None
        if sources is not None:
            check_list("scatter", "input", sources, tensor, self._size)
        check_writable("scatter", [tensor])

        def action(timeout_s: float) -> str:
            flat = flatten(tensor)
            given = None
            if sources is not None:
                given = apart([flatten(t) for t in sources], [flat], lambda r, _: r == root)
            path = backend.transport.scatter(flat, given, root, timeout_s)
            write_back(flat, tensor)
            return path

        return backend.submit("scatter", opts, [tensor], tensor, action)

    def barrier(self, opts: Any = None, *more: Any, **named: Any) -> Work:
        """Wait until all ranks have called it."""
        opts = options(c10d.BarrierOptions, opts, *more, **named)
        return self._host.submit("barrier", opts, [], (), self._host.transport.barrier)

    # torch before 2.13 and some of its libraries use these names.
    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_lists(self, transport: Transport, targets: Sequence[Tensor], tensor: Tensor, timeout_s: float) -> str:
        flats = [flatten(t) for t in targets]
        path = self._all_gather(transport, flats, flatten(tensor), timeout_s)
        for flat, target in zip(flats, targets, strict=True):
            write_back(flat, target)
        return path

    def _all_gather(self, transport: Transport, parts: Sequence[Tensor], flat: Tensor, timeout_s: float) -> str:
        (given,) = apart([flat], parts, lambda _, r: r == self._rank)
        return transport.all_gather(parts, given, timeout_s)
