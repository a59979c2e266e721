"""A model run as in training that is afterwards as it was."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ._share import WorkloadError
from ._unchanged import unchanged


@contextmanager
def trial(model: nn.Module, sample: Any) -> Iterator[Callable[[], None]]:
    """Give a forward and backward pass to be repeated; see `tried_out`.

    Args:
        model: On the device of the sample.
        sample: Its input, or a tuple of its inputs.

    Raises:
        WorkloadError: the model gives nothing that can be back-propagated.
    """
    with tried_out(model):
        yield lambda: sum_of_outputs(model, sample).backward()  # type: ignore[no-untyped-call, unused-ignore]


@contextmanager
def tried_out(model: nn.Module) -> Iterator[None]:
    """While a model is run as in training; what it keeps is then as it was, see `unchanged`."""
    with unchanged(model):
        model.train()
        yield


def sum_of_outputs(model: nn.Module, batch: Any) -> Tensor:
    """Run the model; see `summed`."""
    if isinstance(batch, Mapping):
        return summed(model(**batch))
    return summed(model(*batch) if isinstance(batch, tuple) else model(batch))


def summed(output: Any) -> Tensor:
    """Return a model's own loss, named `loss` in its output, or the sum of all floating-point numbers of that.

    Args:
        output: A tensor, or any tree of them.

    Raises:
        WorkloadError: there is no tensor of such numbers.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad and not own.dim():
        return own
    found = [one for one in tree_flatten(output)[0] if isinstance(one, Tensor) and one.is_floating_point()]
    if not found:
        kind = type(output).__name__
        raise WorkloadError(f"capture: the model's output, of type {kind}, has no floating-point tensor; give `loss`")
    return torch.stack([one.float().sum() for one in found]).sum()
