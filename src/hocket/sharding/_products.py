"""Rules of products: matrices, linear layers, sums of products with named dims, attention, tables of vectors."""

from typing import Any

from ._call import Operand, OperatorCall, Outcome
from ._placement import Shard
from ._pointwise import aligned
from ._table import rule


@rule("matmul", "bmm", "mm")
def matmul(call: OperatorCall, input: Any, other: Any = None, *, mat2: Any = None) -> Outcome:
    """Return how a matrix product lies: batches, rows of the first or columns of the second factor may be divided."""
    right = mat2 if other is None else other
    if not isinstance(right, Operand) or min(input.ndim, right.ndim) < 2:
        call.refuse("of a vector")
    ndim = max(input.ndim, right.ndim)
    divided = [(one, one.ndim - one.shard.dim, one.shard) for one in (input, right) if one.shard is not None]
    if any(from_end == (1 if one is input else 2) for one, from_end, _ in divided):
        call.refuse("adds up along the dim that is divided")
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
    """Return how a linear layer's outputs lie, where the features are not divided."""
    shard = call.shard(input)
    if shard.dim == input.ndim - 1 or any(o.shard is not None for o in (weight, bias) if o is not None):
        call.refuse("mixes the dim that is divided")
    return shard


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
    """Return how the vectors of divided indices lie."""
    call.replicated(weight)
    if max_norm is not None or scale_grad_by_freq:
        call.refuse("changes its table, or counts all indices")
    return call.shard(input)


@rule("einsum")
def einsum(call: OperatorCall, equation: Any, *operands: Any) -> Outcome:
    """Return how sums of products lie, of which a letter of the result may be divided."""
    tensors: list[Any] = list(operands[0]) if operands and isinstance(operands[0], list | tuple) else list(operands)
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        call.refuse("in a form whose dims have no names")
    terms, result = equation.replace(" ", "").split("->")
    pairs = list(zip(terms.split(","), tensors, strict=True))
    divided: dict[str, Shard] = {letters[o.shard.dim]: o.shard for letters, o in pairs if o.shard is not None}
    if len(divided) != 1:
        call.refuse("meets tensors that are divided differently")
    letter, shard = next(iter(divided.items()))
    if letter not in result:
        call.refuse("adds up along the dim that is divided")
    if any(letters.count(letter) > 1 for letters, _ in pairs):
        call.refuse("takes a diagonal of the dim that is divided")
    mine = [call.share(o, shard.at(letters.index(letter))) if letter in letters else o for letters, o in pairs]
    call.args, call.kwargs = (equation, *mine), {}
    return shard.at(result.index(letter))


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
