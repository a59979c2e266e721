"""The two halves of a stage's backward pass add up to the whole, however the stage uses its parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hocket.parallel.pipeline.torch_adapter import backward_of_inputs, backward_of_weights


def again(layer: nn.Linear, scale: Tensor, x: Tensor) -> list[Tensor]:
    for _ in range(3):
        x = x + 0.1 * torch.tanh(layer(x))
    return [x]


def with_transpose(layer: nn.Linear, scale: Tensor, x: Tensor) -> list[Tensor]:
    return [layer(x * scale) @ layer.weight.t()]


def skipping(layer: nn.Linear, scale: Tensor, x: Tensor) -> list[Tensor]:
    first = layer(x)
    return [first, (first * scale).sigmoid()]


def past_the_input(layer: nn.Linear, scale: Tensor, x: Tensor) -> list[Tensor]:
    return [layer(x) + (scale.sum() + layer.bias.square().sum())]


def beside_the_input(layer: nn.Linear, scale: Tensor, x: Tensor) -> list[Tensor]:
    """The next stage uses what is made of a parameter alone, too, as the decay of a state-space layer."""
    decay = torch.exp(-scale)
    return [layer(x) * decay, decay.clone()]


def packed(layer: nn.Linear, scale: Tensor, x: Tensor) -> list[Tensor]:
    """Rows of a weight make keys of the input, and queries of another parameter, which a product brings together."""
    row, *rows = layer.weight.chunk(4)
    keys = [torch.tanh(x @ one.t()) for one in rows]
    return [torch.cat([*keys, keys[0] * (scale @ row.t())], 1) + layer.bias]


def in_turns(layer: nn.Linear, scale: Tensor, x: Tensor) -> list[Tensor]:
    """Between two rows of one parameter the input meets rows of another, and the other way round."""
    (first, last), (low, high) = layer.weight.chunk(2), scale.chunk(2)
    x = torch.tanh((x @ first.t()) * low) @ last
    return [x[:, :2] * high, x + layer.bias]


def beside_a_token(layer: nn.Linear, scale: Tensor, x: Tensor) -> list[Tensor]:
    """A parameter meets the input in two places, as a class token does, and between them lies one that does in one."""
    token = scale.expand(3, 4)
    both = nn.functional.layer_norm(torch.stack([token, x]), [4]) * layer.bias
    return [token + (both @ layer.weight)[0] * both[1]]


STAGES = (again, with_transpose, skipping, past_the_input, beside_the_input, packed, in_turns, beside_a_token)


@pytest.mark.parametrize("stage", STAGES)
def test_halves_add_up_to_the_whole_over_micro_batches(stage: Callable[..., list[Tensor]]) -> None:
    torch.manual_seed(0)
    layer, scale = nn.Linear(4, 4).double(), nn.Parameter(torch.randn(4).double())
    parameters = [scale, *layer.parameters()]
    micros = [torch.randn(3, 4).double().requires_grad_() for _ in range(2)]
    for x in micros:
        outputs = stage(layer, scale, x)
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    expected = [one.grad for one in (*micros, *parameters)]
    for one in (*micros, *parameters):
        one.grad = None
    for x in micros:
        outputs = stage(layer, scale, x)
        _, rest = backward_of_inputs(outputs, [torch.ones_like(one) for one in outputs], [x], parameters)
        backward_of_weights(parameters, rest)
    for one, whole in zip((*micros, *parameters), expected, strict=True):
        torch.testing.assert_close(one.grad, whole, rtol=1e-12, atol=0)
