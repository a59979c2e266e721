"""Rules of products: matrices, linear layers, sums of products with named dims, attention, tables of vectors."""

import string
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ._call import Local, Operand, OperatorCall, Outcome
from ._placement import REPLICATED, Shard
from ._pointwise import aligned
from ._table import rule


def summed(call: OperatorCall, factors: Any, product: Callable[..., Any], bias: Any = None) -> Outcome:
    """Return how a product with a divided weight lies that adds up along the divided dim: ranks add their addends up.

    A bias is added once, to the sum.
    """
    if call.exchanges or not any(one.weight for one in call.operands() if one.shard is not None):
        call.refuse("adds up along the dim that is divided")
    if isinstance(bias, Operand) and bias.shard is not None:
        call.refuse("meets tensors that are divided differently")
    call.becomes(*factors)
    call.summed = True

    def run(local: Local) -> Any:
        total = local.peers.total(product(*local.tensors(tuple(factors))))
        return total if bias is None else total + (bias.tensor if isinstance(bias, Operand) else bias)

    call.run = run
    return REPLICATED


def layered(
    call: OperatorCall, input: Operand, weight: Operand, bias: Any, dims: tuple[int, int], product: Callable[..., Any],
    channel: int = -1,
) -> Outcome:  # fmt: skip
    """Return how the result of a layer lies whose weight is divided, or whose input along the dim that it mixes.

    `dims` of the weight are that of outputs and that of inputs; `channel`, of input and result, is the dim of features,
    from the end. `product` makes the result of input, weight and bias, or of the first two where a bias is added later.
    """
    made, mixed = weight.shard, input.shard is not None and input.shard.dim == input.ndim + channel
    if made is not None and made.dim == dims[0] and input.shard is None:
        if not all(map(made.length, range(made.ranks))):
            call.refuse("is given an empty shard")
        if isinstance(bias, Operand) and bias.ndim and bias.shape[-1] != 1:
            bias = call.share(bias, made.at(bias.ndim - 1))
        else:
            call.replicated(bias)
        call.becomes(input, weight, bias)
        call.run = lambda local: product(*local.tensors((input, weight, bias)))
        return made.at(input.ndim + channel)
    factors: tuple[Any, Any]
    if mixed and input.shard is not None:
        factors = input, call.share(weight, input.shard.at(dims[1]))
    elif made is not None and made.dim == dims[1] and input.shard is None:
        factors = call.share(input, made.at(input.ndim + channel)), weight
    else:
        call.refuse("meets tensors that are divided differently")
    if bias is not None and channel != -1:
        call.refuse("adds a bias to channels that are divided")
    return summed(call, factors, product, bias)


@rule("matmul", "bmm", "mm")
def matmul(call: OperatorCall, input: Any, other: Any = None, *, mat2: Any = None) -> Outcome:
    """Return how a matrix product lies: batches, rows of the first or columns of the second factor may be divided.

    So may the dim that it adds up along, where one factor is a weight.
    """
    right = mat2 if other is None else other
    if not isinstance(right, Operand) or min(input.ndim, right.ndim) < 2:
        if isinstance(right, Operand) and right.shard is None and call.shard(input).dim < input.ndim - 1:
            return call.shard(input)  # rows by a vector
        call.refuse("of a vector")
    ndim = max(input.ndim, right.ndim)
    divided = [(one, one.ndim - one.shard.dim, one.shard) for one in (input, right) if one.shard is not None]
    inner = next((shard for one, from_end, shard in divided if from_end == (1 if one is input else 2)), None)
    if inner is not None:
        if call.exchanges:
            call.refuse("adds up along the dim that is divided")
        factors = call.share(input, inner.at(input.ndim - 1)), call.share(right, inner.at(right.ndim - 2))
        return summed(call, factors, torch.matmul)
    if min(from_end for _, from_end, _ in divided) <= 2:
        if len(divided) > 1:
            call.refuse("meets tensors that are divided differently")
        _, from_end, shard = divided[0]
        return shard.at(ndim - from_end)
    (input, right), shard, _ = aligned(call, (input, right))
    call.args, call.kwargs = (input, right), {}
    return shard


@rule("linear")
def linear(call: OperatorCall, input: Any, weight: Any, bias: Any = None) -> Outcome:
    """Return how a linear layer's outputs lie."""
    mixed = input.shard is not None and input.shard.dim == input.ndim - 1
    if weight.ndim == 2 and (weight.shard is not None or (mixed and not call.exchanges)):
        return layered(call, input, weight, bias, (0, 1), F.linear)
    shard = call.shard(input)
    if mixed or any(o.shard is not None for o in (weight, bias) if o is not None):
        call.refuse("mixes the dim that is divided")
    return shard


@rule("addmm")
def addmm(call: OperatorCall, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Outcome:
    """Return how a linear layer's outputs lie whose weight is transposed."""
    if beta != 1 or alpha != 1:
        call.refuse("scales what it adds")
    mixed = mat1.shard is not None and mat1.shard.dim == 1
    if mat2.shard is not None or (mixed and not call.exchanges):
        return layered(
            call, mat1, mat2, input, (1, 0), lambda x, w, b=None: x @ w if b is None else torch.addmm(b, x, w)
        )
    shard = call.shard(mat1)
    if mixed:
        call.refuse("mixes the dim that is divided")
    bias = call.share(input, shard) if input.ndim == 2 and input.shape[0] != 1 else input
    if bias is input:
        call.replicated(input)
    call.becomes(bias, mat1, mat2)
    return shard


@rule("grouped_mm")
def grouped_mm(call: OperatorCall, mat_a: Any, mat_b: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return how products of groups of rows lie, each with its own of several matrices."""
    if mat_a.ndim != 2 or mat_b.ndim != 3 or any(isinstance(one, Operand) and one.shard is not None for one in args):
        call.refuse("has no rule but for groups of rows")
    function: Callable[..., Any] = call.func
    return layered(
        call,
        mat_a,
        mat_b,
        None,
        (2, 1),
        lambda a, b, _=None: function(a.contiguous(), b, *Local.given(args), **Local.given(kwargs)),
    )


@rule("embedding")
def embedding(
    call: OperatorCall,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Outcome:
    """Return how vectors lie: of divided indices, or of a table whose features are divided."""
    if max_norm is not None or scale_grad_by_freq:
        call.refuse("changes its table, or counts all indices")
    if weight.shard is not None and input.shard is None and weight.shard.dim == 1:
        table: Shard = weight.shard
        return table.at(input.ndim)
    call.replicated(weight)
    return call.shard(input)


@rule("weight_norm")
def weight_norm(call: OperatorCall, v: Any, g: Any, dim: int = 0) -> Outcome:
    """Return how a weight lies that is made of directions and lengths, where whole rows are on one rank."""
    shard: Shard = next(one.shard for one in (v, g) if one.shard is not None)
    if dim == -1 or shard.dim != dim % v.ndim:
        call.refuse("normalises over the dim that is divided")
    if not all(map(shard.length, range(shard.ranks))):
        call.refuse("is given an empty shard")
    v, g = call.share(v, shard), call.share(g, shard)
    call.becomes(v, g, dim)
    return shard


@rule("einsum")
def einsum(call: OperatorCall, equation: Any, *operands: Any) -> Outcome:
    """Return how sums of products lie, of which a letter of the result may be divided."""
    tensors: list[Any] = list(operands[0]) if operands and isinstance(operands[0], list | tuple) else list(operands)
    if not isinstance(equation, str) or "->" not in equation:
        call.refuse("in a form whose dims have no names")
    equation = _spelled(equation.replace(" ", ""), [one.ndim for one in tensors])
    terms, result = equation.split("->")
    pairs = list(zip(terms.split(","), tensors, strict=True))
    divided: dict[str, Shard] = {letters[o.shard.dim]: o.shard for letters, o in pairs if o.shard is not None}
    if len(divided) != 1:
        call.refuse("meets tensors that are divided differently")
    letter, shard = next(iter(divided.items()))
    if letter not in result and call.exchanges:
        call.refuse("adds up along the dim that is divided")
    if any(letters.count(letter) > 1 for letters, _ in pairs):
        call.refuse("takes a diagonal of the dim that is divided")
    mine = [call.share(o, shard.at(letters.index(letter))) if letter in letters else o for letters, o in pairs]
    if letter not in result:
        return summed(call, mine, lambda *factors: torch.einsum(equation, *factors))
    call.args, call.kwargs = (equation, *mine), {}
    return shard.at(result.index(letter))


def _spelled(equation: str, ndims: list[int]) -> str:
    """Return an equation with letters for the dims that "..." stands for, the last ones of each tensor alike."""
    terms, result = equation.split("->")
    free = "".join(sorted(set(string.ascii_letters) - set(equation)))
    hidden = [ndim + 3 - len(one) if "..." in one else 0 for one, ndim in zip(terms.split(","), ndims, strict=True)]
    counts = [*hidden, max(hidden)]
    spelled = [
        one.replace("...", free[len(free) - n :]) for one, n in zip([*terms.split(","), result], counts, strict=True)
    ]
    return ",".join(spelled[:-1]) + "->" + spelled[-1]


@rule("scaled_dot_product_attention")
def attention(
    call: OperatorCall, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any,
    **kwargs: Any,
) -> Outcome:  # fmt: skip
    """Return how attention lies whose heads or samples are divided."""
    given = (query, key, value, attn_mask)
    shard: Shard = next(one.shard for one in given if one is not None and one.shard is not None)
    ndim = query.ndim
    if any(one.ndim != query.ndim or not 0 <= shard.dim < query.ndim - 2 for one in (key, value)):
        call.refuse("is divided along something else than heads")
    if len(shard.bounds) > 1 or (isinstance(attn_mask, Operand) and attn_mask.shard is shard):
        call.refuse("is divided along something else than heads")
    if kwargs.get("enable_gqa") and shard.equal and shard.dim == ndim - 3:  # several heads of queries for one of keys
        if any(o.shard is None or not o.shard.equal or o.shard.segments != o.shape[-3:-2] for o in (query, key, value)):
            call.refuse("is divided along something else than heads")
    else:
        query, key, value = (call.share(one, shard) for one in (query, key, value))
    call.args, call.kwargs = (query, key, value, attn_mask, dropout_p, *args), kwargs
    if isinstance(attn_mask, Operand):
        from_end = ndim - shard.dim
        dim = attn_mask.ndim - from_end
        if attn_mask.shard is not None and attn_mask.shard.dim != dim:
            call.refuse("has a mask that is divided along something else than heads")
        if dim >= 0 and attn_mask.shape[dim] != 1:
            mask = call.share(attn_mask, shard.at(dim))
            call.args, call.kwargs = (query, key, value, mask, dropout_p, *args), kwargs
    call.random = dropout_p > 0
    call.changed = call.changed or call.random
    return shard
