"""Numbers that belong to all ranks: sums, and means over the global batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..mesh import World
from ..mesh import world as _world
from . import batch as _batch
from .trees import views_like


def total(*values: Any, group: Any = None) -> Any:
    """Sum over ranks; a collective operation.

    Args:
        *values: Numbers or tensors, each of the same kind and shape on every rank.
        group: The ranks; None for torch's default group.

    Returns:
        The sum of each value, of the value's kind: int for int and bool, float for float, a new tensor for a tensor.
        One value gives one result, several a tuple.

    Raises:
        RuntimeError: the last batch of training had fewer samples than ranks, and no evaluation has begun since; on
            every rank alike.

    Example::

        correct = seen = 0
        for x, y in hocket.shard(loader):
            correct += (model(x).argmax(1) == y).sum().item()
            seen += len(y)
        correct, seen = hocket.total(correct, seen)
    """
    if not values:
        raise TypeError("hocket.total needs at least one value")
    note = _batch.current()
    share = None if note is None else note.share
    if share is not None and share.total < share.world:
        raise RuntimeError(
            f"the last batch, of {share.total}, has no sample for some of {share.world} ranks: they get one to keep "
            "step, which hocket.total would count. Leave such batches out (DataLoader(..., drop_last=True)), or choose "
            "batch_size so that the last batch has a sample for each rank"
        )
    sums = _sums(values, _world.current(group))
    return sums[0] if len(values) == 1 else tuple(sums)


def average(*values: Any, group: Any = None) -> Any:
    """Return the mean over the global batch of losses that each rank has as the mean over its own samples.

    Ranks count by the samples that the training loader gave them in its last batch, equally if there is no such loader;
    once `backward()` has been called, by what the loss divided by.
    A collective operation. The result has no gradient and is for reports: the model's gradients are averaged without.

    Args:
        *values: Numbers or tensors.
        group: The ranks; None for torch's default group.

    Returns:
        The mean of each value; one value gives one result, several a tuple.

    Raises:
        RuntimeError: called while iterating over `hocket.shard(...)`, where ranks are not in step; or after such a loop
            with a value that has no graph, for it may be a mean over the samples of that loop; or with a loss of
            `loss_reduction="sum"`, of which each rank has a part; or with a loss of batches of several loaders, of
            which ranks have other parts.
    """
    if not values:
        raise TypeError("hocket.average needs at least one value")
    world = _world.current(group)
    note = _batch.averaged()
    if note is not None and note.share is None:
        if _batch.evaluating():
            raise RuntimeError(
                "hocket.average inside a loop over hocket.shard(...) would wait for ranks that have fewer batches; add "
                "up in the loop and call hocket.total after it"
            )
        if not all(isinstance(one, torch.Tensor) and one.requires_grad for one in values):
            raise RuntimeError(
                "hocket.average after a loop over hocket.shard(...) cannot tell whether this number is of the training "
                "or of that loop, whose ranks count otherwise; of the training: call it before that loop; of that "
                "loop: add up in it and call hocket.total"
            )
        note = _batch.trained()
    notes = [_batch.meant(one) if _batch.contested() else note for one in values]
    weights = [1.0 if one is None else one.weight for one in notes]
    numbers = [one.detach() if isinstance(one, torch.Tensor) else float(one) for one in values]
    summed = [None if one is None else one.summed for one in notes]
    if any(one is not None and _same(number, one) for number, one in zip(numbers, summed, strict=True)):
        raise RuntimeError(
            'this loss is a sum (loss_reduction="sum"), of which each rank has a part: hocket.total(loss) is that of '
            "the batch, and hocket.average would be 1/n of it"
        )
    weighed = (_weighed(one, weight / world.size) for one, weight in zip(numbers, weights, strict=True))
    means = _sums(tuple(weighed), world)
    return means[0] if len(values) == 1 else tuple(means)


def _weighed(number: Any, weight: float) -> Any:
    if weight:
        return number * weight
    # What weighs nothing must not be heard of even if it is not finite.
    return torch.zeros_like(number * 0.0) if isinstance(number, torch.Tensor) else 0.0


def _same(number: Any, loss: torch.Tensor) -> bool:
    single = not isinstance(number, torch.Tensor) or number.numel() == 1
    return single and str(float(number)) == str(float(loss))  # "nan" is itself


def _sums(values: tuple[Any, ...], world: World) -> list[Any]:
    tensors = [
        v.detach().clone() if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=_dtype(v), device=world.device)
        for v in values
    ]
    if world.size > 1:
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same_kind in kinds.values():
            flat = torch.cat([t.reshape(-1) for t in same_kind])
            dist.all_reduce(flat, group=world.group)
            for tensor, part in zip(same_kind, views_like(flat, same_kind), strict=True):
                tensor.copy_(part)
    return [t if isinstance(v, torch.Tensor) else t.item() for v, t in zip(values, tensors, strict=True)]


def _dtype(number: Any) -> torch.dtype:
    if isinstance(number, bool | int):
        return torch.int64
    if isinstance(number, float):
        return torch.float64
    if hasattr(number, "dtype") and hasattr(number, "item"):  # a scalar of numpy
        return _dtype(number.item())
    raise TypeError(f"can add up numbers and tensors over ranks, not {type(number).__name__}")
