"""All-reduce of sparse tensors: every rank gathers all entries, and adds them up itself, in the order of the ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..transport import CollectiveMismatchError, ReduceOperator, Transport

_HEAD_NBYTES = 256


def check_sparse(tensor: Tensor, op: ReduceOperator) -> None:
    """Raise ValueError for a sparse tensor or an operator that entries cannot be added up of."""
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(
            f"all_reduce: a tensor of layout {tensor.layout} is not reduced; convert it with to_sparse_coo()"
        )
    if op.kernel is not torch.add or op.factor is not None:
        raise ValueError("all_reduce: sparse tensors are added up or averaged, since entries that are missing are 0")


def reduce_sparse(
    transport: Transport, tensor: Tensor, op: ReduceOperator, numbers: Sequence[int], timeout_s: float
) -> str:
    """Add up the sparse tensors of all ranks, in place, and return the path.

    Args:
        transport: The group's.
        tensor: This rank's, in coordinate format; entries may be there more than once.
        op: A sum or an average.
        numbers: Of the group's ranks in the world.
        timeout_s: For each of three exchanges: what each rank has, indices, and values.

    Raises:
        CollectiveMismatchError: shapes, types or operators differ; every rank raises it, and the group goes on.
    """
    mine, world = tensor.detach().coalesce(), len(numbers)
    what = f"{mine.dtype} of shape {tuple(mine.shape)}, {mine.sparse_dim()} dims of it sparse, operator {op.number}"
    heads = [torch.zeros(_HEAD_NBYTES, dtype=torch.uint8) for _ in numbers]
    text = what.encode()[: _HEAD_NBYTES - 8].ljust(_HEAD_NBYTES - 8)
    head = torch.cat(
        [torch.tensor([mine._nnz()]).view(torch.uint8), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    )
    path = transport.all_gather(heads, head, timeout_s)
    told = [bytes(one[8:].tolist()).decode().rstrip() for one in heads]
    if len(set(told)) > 1:
        each = "; ".join(f"rank {number}: {one}" for number, one in zip(numbers, told, strict=True))
        raise CollectiveMismatchError(f"all_reduce of sparse tensors: {each}; every rank must call it with equal ones")
    counts = [int(one[:8].view(torch.int64)) for one in heads]
    indices = _gathered(transport, mine.indices().T.contiguous(), counts, timeout_s)
    values = _gathered(transport, mine.values(), counts, timeout_s)
    total = torch.sparse_coo_tensor(indices.T, values, mine.shape, check_invariants=False).coalesce()
    op.finish(total.values(), world)
    with torch.no_grad():
        tensor.copy_(total)
    return path


def _gathered(transport: Transport, rows: Tensor, counts: Sequence[int], timeout_s: float) -> Tensor:
    """Return the rows of all ranks, one rank's after the other's; all send as many as the most have."""
    own = rows.new_zeros((max(counts), *rows.shape[1:]))
    own[: len(rows)] = rows
    parts = [torch.empty_like(own) for _ in counts]
    transport.all_gather([part.view(-1) for part in parts], own.view(-1), timeout_s)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
