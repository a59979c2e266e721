"""A model run as in training that is afterwards as it was."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ._share import WorkloadError
from ._unchanged import unchanged

_NEAR = 256  # nodes of the graph between a loss and what it is computed of


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
    try:
        return summed(model(*batch) if isinstance(batch, tuple) else model(batch))
    except (TypeError, AttributeError) as error:
        if not isinstance(batch, list):
            raise
        rule = f"{type(model).__name__} gets the list that is its sample as one argument, and fails: {error}"
        raise WorkloadError(f"capture: {rule}; what it takes one by one is given as a tuple") from error


def summed(output: Any) -> Tensor:
    """Return a model's own loss, or the sum of all floating-point numbers of its output.

    A loss is named `loss` in it, or is the one number of a tuple that is computed of all else there, as of the logits.

    Args:
        output: A tensor, or any tree of them.

    Raises:
        WorkloadError: there is no tensor of such numbers.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad and not own.dim():
        return own
    if isinstance(output, tuple | list) and (own := _computed_of_others(output)) is not None:
        return own
    found = [one for one in tree_flatten(output)[0] if isinstance(one, Tensor) and one.is_floating_point()]
    if not found:
        kind = type(output).__name__
        raise WorkloadError(f"capture: the model's output, of type {kind}, has no floating-point tensor; give `loss`")
    return torch.stack([one.float().sum() for one in found]).sum()


def _computed_of_others(output: Sequence[Any]) -> Tensor | None:
    """Return the one number among outputs that is computed of the others; None if there is none such, or it is far."""
    trained = [one for one in output if isinstance(one, Tensor) and one.requires_grad]
    numbers = [one for one in trained if not one.dim()]
    if len(numbers) != 1 or len(trained) < 2:
        return None
    nodes, known = deque([numbers[0].grad_fn]), {numbers[0].grad_fn}
    missing = {one.grad_fn for one in trained} - known
    while nodes and missing and len(known) < _NEAR:
        node = nodes.popleft()
        fresh = {one for one, _ in (node.next_functions if node is not None else ())} - known
        known |= fresh
        missing -= fresh
        nodes += fresh
    return None if missing else numbers[0]
