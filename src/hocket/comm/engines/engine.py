"""The engines: torch's own process groups, which move bytes between hosts and between GPUs."""

from datetime import timedelta
from typing import Any

import torch

from .. import torch_adapter as c10d
from ..transport import CommError, Flats, ReduceOperator, cut

_BYTES = torch.uint8


def nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """NCCL over the same store, for CUDA tensors of ranks that have a GPU each.

    Raises:
        RuntimeError: this build of torch has no NCCL.
    """
    if not torch.distributed.is_nccl_available():
        raise RuntimeError("collectives on CUDA tensors need NCCL inside torch; this build of torch has none")
    return c10d.process_group_nccl(c10d.PrefixStore("nccl/", store), rank, size, timeout)


class EngineTransport:
    """Collectives of flat CPU tensors through an engine's own collectives.

    Copies travel as bytes, so that every element type passes; averages and scaled sums are built from sums, which all
    engines have.
    """

    def __init__(self, engine: Any, name: str) -> None:
        self._engine = engine
        self._name = name

    def _do(self, timeout_s: float, method: Any, *args: Any) -> str:
        """Do an operation of the engine; raises CommError, whose `peer` is a rank that is known to be gone, if any."""
        try:
            method(*args).wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            failure = CommError(str(error))
            beside = getattr(self._engine, "beside", None)
            failure.peer = min(beside.ended(), default=None) if beside is not None else None
            raise failure from error
        return self._name

    def all_reduce(self, flat: torch.Tensor, op: ReduceOperator, timeout_s: float) -> str:
        """See Transport."""
        flat = flat.view(op.view or flat.dtype)
        options = c10d.AllreduceOptions()
        options.reduceOp = op.engine_operator
        self._do(timeout_s, self._engine.allreduce, [flat], options)
        op.finish(flat, self._engine.size())
        return self._name

    def reduce(self, flat: torch.Tensor, op: ReduceOperator, root: int, timeout_s: float) -> str:
        """See Transport."""
        flat = flat.view(op.view or flat.dtype)
        # Engines leave partial results in the tensors of other ranks; those belong to the user.
        data = flat if self._engine.rank() == root else flat.clone()
        options = c10d.ReduceOptions()
        options.reduceOp, options.rootRank = op.engine_operator, root
        self._do(timeout_s, self._engine.reduce, [data], options)
        if self._engine.rank() == root:
            op.finish(data, self._engine.size())
        return self._name

    def broadcast(self, flat: torch.Tensor, root: int, timeout_s: float) -> str:
        """See Transport."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._do(timeout_s, self._engine.broadcast, [flat.view(_BYTES)], options)

    def all_gather(self, outputs: Flats, flat: torch.Tensor, timeout_s: float) -> str:
        """See Transport."""
        targets = [output.view(_BYTES) for output in outputs]
        return self._do(timeout_s, self._engine.allgather, [targets], [flat.view(_BYTES)])

    def reduce_scatter(self, output: torch.Tensor, inputs: Flats, op: ReduceOperator, timeout_s: float) -> str:
        """See Transport."""
        dtype = op.view or output.dtype
        sources = [i.view(dtype) for i in inputs]
        options = c10d.ReduceScatterOptions()
        options.reduceOp = op.engine_operator
        self._do(timeout_s, self._engine.reduce_scatter, [output.view(dtype)], [sources], options)
        op.finish(output.view(dtype), self._engine.size())
        return self._name

    def all_to_all(self, outputs: Flats, inputs: Flats, timeout_s: float) -> str:
        """See Transport."""
        sent = [i.numel() * i.element_size() for i in inputs]
        received = [o.numel() * o.element_size() for o in outputs]
        target = torch.empty(sum(received), dtype=_BYTES)
        source = torch.cat([i.view(_BYTES) for i in inputs])
        self._do(timeout_s, self._engine.alltoall_base, target, source, received, sent)
        for output, part in zip(outputs, cut(target, received), strict=True):
            output.view(_BYTES).copy_(part)
        return self._name

    def gather(self, outputs: Flats | None, flat: torch.Tensor, root: int, timeout_s: float) -> str:
        """See Transport."""
        options = c10d.GatherOptions()
        options.rootRank = root
        targets = [[output.view(_BYTES) for output in outputs]] if outputs is not None else []
        return self._do(timeout_s, self._engine.gather, targets, [flat.view(_BYTES)], options)

    def scatter(self, flat: torch.Tensor, inputs: Flats | None, root: int, timeout_s: float) -> str:
        """See Transport."""
        options = c10d.ScatterOptions()
        options.rootRank = root
        sources = [[i.view(_BYTES) for i in inputs]] if inputs is not None else []
        return self._do(timeout_s, self._engine.scatter, [flat.view(_BYTES)], sources, options)

    def barrier(self, timeout_s: float) -> str:
        """See Transport."""
        return self._do(timeout_s, self._engine.barrier, c10d.BarrierOptions())
