"""What works element by element: on slabs as it is, once all operands are divided alike."""

from __future__ import annotations

from typing import Any

import torch

from ...batches import mapped, tensors_in
from ..tensor import own_numbers
from ._register import rule
from ._site import CannotDivide, Site, note, noted
from ._slabs import Slabs

_NAMES = """
abs absolute add addcdiv addcmul and acos asin atan atan2 bernoulli bitwise_and bitwise_not bitwise_or bitwise_xor
bool ceil celu clamp clamp_max clamp_min clip clone contiguous copysign cos cosh cpu cuda detach div divide double elu
empty_like eq erf erfc exp exp2 expm1 float floor floor_divide floordiv fmod frac full_like ge gelu greater
greater_equal gt half hardshrink hardsigmoid hardswish hardtanh heaviside int invert isclose isfinite isinf isnan
isneginf isposinf le leaky_relu lerp less less_equal log log10 log1p log2 logaddexp logical_and logical_not logical_or
logical_xor logit logsigmoid long lt masked_fill maximum minimum mish mod mul multiply nan_to_num ne neg negative not
not_equal ones_like or pos positive pow reciprocal relu relu6 remainder requires_grad round rrelu rsqrt selu sgn
sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink
threshold to truediv true_divide trunc type type_as where xlogy xor zeros_like dropout2d dropout3d feature_dropout
"""
# Of dropout2d, which drops whole channels, every rank draws the same numbers from the ranks' common generator.
_RANDOM = ("dropout", "alpha_dropout", "rand_like", "randn_like", "bernoulli", "rrelu")


def alike(site: Site, args: Any) -> tuple[Any, Slabs]:
    """The arguments with all tensors as the first divided one is divided, and how that is.

    A tensor that has one entry along the divided dim, or lacks the dim, goes with every slab.

    Raises:
        CannotDivide: their shapes do not go together.
    """
    tensors = tensors_in(args)
    slabs = next(found for one in tensors if (found := noted(one)) is not None)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        found = noted(tensor)
        if found == slabs:
            return tensor
        if found is None:
            if tensor.ndim < -slabs.dim or (tensor.shape[slabs.dim] == 1 and slabs.size > 1):
                return tensor
            if tensor.shape[slabs.dim] != slabs.size:
                raise CannotDivide(f"a tensor of {tensor.shape[slabs.dim]} meets slabs of {slabs.size}")
        return site.moved(tensor, slabs)

    return mapped(args, change), slabs


@rule(*_NAMES.split(), *_RANDOM)
def elementwise(site: Site, *args: Any, **kwargs: Any) -> Any:
    """Any function of the list."""
    (mine, named), slabs = alike(site, (args, kwargs))
    if site.in_place and mine[0] is not args[0]:
        raise CannotDivide("it changes a tensor that is divided in another way than the operand")
    if site.name in _RANDOM and named.get("training", True):
        with own_numbers(site.world, tensors_in(mine)[0].device):
            return note(site.func(*mine, **named), slabs)
    return note(site.func(*mine, **named), slabs)


@rule("prelu")
def prelu(site: Site, input: torch.Tensor, weight: torch.Tensor) -> Any:  # noqa: A002
    """torch.nn.functional.prelu, whose weight belongs to channels."""
    slabs = site.slabs(input, input.ndim - 2)
    return note(site.func(input, weight), slabs)


@rule("linear")
def linear(site: Site, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:  # noqa: A002
    """torch.nn.functional.linear, where the divided dim is not the last.

    Raises:
        CannotDivide: it is.
    """
    slabs = site.slabs(input)
    if slabs.dim == -1:
        raise CannotDivide("it mixes the divided dim")
    return note(site.func(input, weight, bias), slabs)
