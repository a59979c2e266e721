"""Finds models that compute what they give for one sample from others, since they take time as the first dimension."""

from typing import Any

import torch

from ..batches import mapped, tensors_in, undisturbed

_DIFFER = 1e-3  # of the largest element: what sums in another order never reach


def samples_mix(module: torch.nn.Module, inputs: Any, samples: int) -> bool:
    """Return whether a model with layers that take the batch as the second dimension is given it as the first.

    The last half of the samples is run alone, as the model evaluates, and compared. Other models are not run.

    Args:
        module: The model.
        inputs: What it is called with: positional arguments, and those by name.
        samples: How many samples these hold.
    """
    module = getattr(module, "_orig_mod", module)  # what torch.compile has wrapped
    if samples < 2 or not any(map(_takes_batch_second, module.modules())):
        return False
    half = samples // 2

    def last_half(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[half:] if tensor.dim() and len(tensor) == samples else tensor

    def run(arguments: Any) -> list[torch.Tensor]:
        args, kwargs = arguments
        return [one for one in tensors_in(module(*args, **kwargs)) if one.is_floating_point() and one.dim()]

    with undisturbed([module]), torch.no_grad():
        module.eval()
        try:
            whole, again, part = run(inputs), run(inputs), run(mapped(inputs, last_half))
        except Exception:  # a model that takes no part of a batch is told elsewhere
            return False
    for one, same, other in zip(whole, again, part, strict=False):
        if len(one) == samples and len(other) == samples - half and one.shape[1:] == other.shape[1:]:
            scale = max(_DIFFER, 64 * torch.finfo(one.dtype).eps) * float(one.abs().max())
            if torch.equal(one, same) and float((one[half:] - other).abs().max()) > scale:
                return True
    return False


def _takes_batch_second(module: torch.nn.Module) -> bool:
    kinds = (torch.nn.RNNBase, torch.nn.MultiheadAttention)
    return isinstance(module, kinds) and not module.batch_first
