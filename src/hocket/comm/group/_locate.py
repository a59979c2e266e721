"""Minima and maxima with where they are, over the ranks of a group: what torch's own operators lack."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.aggregator import Operator

from .. import torch_adapter as c10d
from ..aggregated import AggregatedTransport, locate_by_gathering, wire_element
from ..transport import flatten
from ._collectives import Collectives


def minloc(values: Tensor, places: Tensor | None = None, group: Any = None) -> tuple[Tensor, Tensor]:
    """For every element the lowest value of all ranks, and where it is.

    Of equal values the one with the lowest place wins; a NaN wins over every number, as in `torch.argmin`.

    Args:
        values: Tensor of any shape, on the CPU; the same shape and type on all ranks.
        places: Integers of the same shape, what is told about each value; by default the rank in the group.
        group: A process group of the backend "hocket"; the default group if None.

    Returns:
        The values, and the places as int64; both of the shape of `values`. The arguments stay as they are.

    Raises:
        TypeError: values that are not integers or floats of 8 to 64 bits.
        ValueError: a group of another backend, or places of another shape.
        CommError: the group has failed.
    """
    return _locate(values, places, group, Operator.MINLOC)


def maxloc(values: Tensor, places: Tensor | None = None, group: Any = None) -> tuple[Tensor, Tensor]:
    """For every element the highest value of all ranks, and where it is; see `minloc`."""
    return _locate(values, places, group, Operator.MAXLOC)


def _locate(values: Tensor, places: Tensor | None, group: Any, operator: Operator) -> tuple[Tensor, Tensor]:
    name = operator.name.lower()
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, Collectives):
        raise ValueError(f'{name} needs a process group of the backend "hocket", not {group!r}')
    element = wire_element(values.dtype)
    if element is None:
        raise TypeError(f"{name} of {values.dtype}: convert it to an integer or a float of at most 64 bits")
    if places is not None and places.shape != values.shape:
        raise ValueError(f"{name}: places of shape {tuple(places.shape)} for values of {tuple(values.shape)}")
    backend = group._device_backend([values])
    if backend is None or not values.is_cpu:
        raise ValueError(f"{name} takes tensors on the CPU, not on {values.device}; move them")
    flat = flatten(values)
    pairs = torch.zeros(flat.numel(), 2, dtype=torch.int64)
    pairs[:, 1] = group.rank() if places is None else flatten(places)
    pairs[:, :1].view(flat.dtype)[:, 0] = flat
    whole, transport, size = pairs.view(-1), backend.transport, group.size()

    def action(timeout_s: float) -> str:
        if isinstance(transport, AggregatedTransport):
            return transport.locate(whole, element, operator, timeout_s)
        return locate_by_gathering(transport, whole, element, operator, size, timeout_s)

    if flat.numel():
        backend.submit(name, c10d.AllreduceOptions(), [whole], whole, action).wait()
    found = pairs[:, :1].view(flat.dtype)[:, 0].contiguous()
    return found.view(values.shape), pairs[:, 1].contiguous().view(values.shape)
