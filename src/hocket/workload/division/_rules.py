"""What becomes of cut tensors in functions that compute: element by element, over other dims, products.

A rule gets a `Site` and returns how the outputs are cut (one Split for all, or one for each). It serves twice: to
examine a model, and to run it where the user's code speaks of full sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._call import NeedsSplit, Operand, Part, Site, cut_operand
from ._record import mapped
from ._split import Split

Outcome = Split | None | Sequence[Split | None]
Rule = Callable[[Site], Outcome]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names(
    """add sub mul truediv div true_divide multiply subtract divide floordiv floor_divide remainder fmod mod neg
    negative positive pos pow float_power abs absolute sign exp exp2 expm1 log log1p log2 sqrt rsqrt square
    reciprocal sin cos tan atan atan2 sinh cosh tanh sigmoid logit erf erfc relu relu6 leaky_relu rrelu elu selu
    celu gelu silu swish mish softplus softsign softshrink hardshrink tanhshrink hardswish hardsigmoid hardtanh
    threshold logsigmoid clamp clip clamp_min clamp_max maximum minimum fmax fmin lerp addcmul addcdiv where
    masked_fill eq ne lt le gt ge and or xor invert logical_and logical_or logical_not isnan isinf isfinite
    nan_to_num round floor ceil trunc frac to type float double half bfloat16 long int bool cpu cuda contiguous
    clone detach alias type_as requires_grad zeros_like ones_like full_like empty_like heaviside hypot copysign"""
)
DROPOUT = frozenset(["dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"])
# Which of the arguments is the dim, and whether it stays.
KEEPING = {
    "softmax": 1,
    "log_softmax": 1,
    "softmin": 1,
    "cumsum": 1,
    "cumprod": 1,
    "normalize": 2,
    "flip": 1,
    "sort": 1,
}
REDUCING = dict.fromkeys(_names("sum mean amax amin var std logsumexp prod argmax argmin max min all any norm"), 1)
SPATIAL = {
    **{f"{kind}_pool{n}d": n for n in (1, 2, 3) for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "lp")},
    **{f"max_pool{n}d_with_indices": n for n in (1, 2, 3)},
}
HARMLESS = _names(
    """dim ndimension get_ndim get_dtype get_device get_requires_grad get_is_cuda get_is_cpu get_layout get_is_sparse
    get_is_nested get_is_quantized get_is_meta is_floating_point is_complex is_contiguous element_size get_itemsize
    get_grad_fn get_is_leaf get_grad"""
)


def elementwise(site: Site) -> Outcome:
    """Every element of the result comes from those in the same place (after broadcasting)."""
    found: tuple[int, Split] | None = None
    rank = max(len(o.shape) for o in site.operands())
    for operand in site.operands():
        if operand.split is None:
            continue
        from_end = len(operand.shape) - operand.split.dim
        if found is not None and (found[0] != from_end or found[1].segments != operand.split.segments):
            raise site.impossible("meets parts that are cut differently")
        found = from_end, operand.split
    assert found is not None
    from_end, split = found

    def change(leaf: object) -> object:
        if not isinstance(leaf, Operand) or leaf.split is not None or len(leaf.shape) < from_end:
            return leaf
        if leaf.shape[-from_end] == 1:
            return leaf
        site.aware = True
        return cut_operand(leaf, split.at(len(leaf.shape) - from_end))

    site.args, site.kwargs = mapped(change, site.args), mapped(change, site.kwargs)
    return split.at(rank - from_end)


def dropout(site: Site) -> Outcome:
    """Every rank drops elements of its own part, by random numbers of its own."""
    p, training = site.argument(1, "p", 0.5), site.argument(2, "training", True)
    site.random = bool(training) and p > 0
    site.aware = site.aware or site.random
    if site.name in ("dropout1d", "dropout2d", "dropout3d", "feature_dropout") and site.split_of(site.first()).dim > 1:
        raise site.impossible("drops whole channels, of which every rank has a part")
    return elementwise(site)


def keeping(site: Site) -> Outcome:
    """Works along one dim, which stays."""
    split = site.split_of(site.first())
    if split.dim in _dims(site, KEEPING[site.name]):
        raise site.impossible("works along the dim that is cut")
    return split


def reducing(site: Site) -> Outcome:
    """Works along some dims, which vanish or become one."""
    operand = site.first()
    split = site.split_of(operand)
    dims = _dims(site, REDUCING[site.name])
    if split.dim in dims:
        raise site.impossible("adds up along the dim that is cut")
    if site.argument(2, "keepdim", False):
        return split
    return split.at(split.dim - sum(d < split.dim for d in dims))


def _dims(site: Site, place: int) -> set[int]:
    rank = len(site.first().shape)
    dims = site.argument(place, "dim", site.kwargs.get("dims"))
    if dims is None:
        return set(range(rank))
    if isinstance(dims, Operand):
        raise site.impossible("is given a tensor for a dim")
    return {d % rank for d in ([dims] if isinstance(dims, int) else dims)}


def spatial(site: Site) -> Outcome:
    """Pools over the last dims, channel by channel."""
    operand = site.first()
    split = site.split_of(operand)
    if split.dim >= len(operand.shape) - SPATIAL[site.name]:
        raise site.impossible("works along the dim that is cut")
    return split


def channelwise(site: Site) -> Outcome:
    """Interpolates: all dims but the first two."""
    split = site.split_of(site.first())
    if split.dim > 1:
        raise site.impossible("works along the dim that is cut")
    return split


def pad(site: Site) -> Outcome:
    """Pads the last dims."""
    operand = site.first()
    split = site.split_of(operand)
    if split.dim >= len(operand.shape) - len(site.argument(1, "pad", ())) // 2:
        raise site.impossible("pads the dim that is cut")
    return split


def last_two(site: Site) -> Outcome:
    """Works on the matrices of the last two dims."""
    operand = site.first()
    split = site.split_of(operand)
    if split.dim >= len(operand.shape) - 2:
        raise site.impossible("works along the dim that is cut")
    return split


def glu(site: Site) -> Outcome:
    """The halves of one dim are multiplied; each must be shared out by itself."""
    operand = site.first()
    split = site.split_of(operand)
    dim = site.argument(1, "dim", -1) % len(operand.shape)
    if dim != split.dim:
        return split
    half = split.size // 2
    if len(split.segments) % 2 or split.segments[: len(split.segments) // 2] * 2 != split.segments:
        error = site.impossible("takes halves of the dim that is cut")
        error.segments = ((half, half),)
        raise error
    return Split(dim, split.segments[: len(split.segments) // 2])


def matmul(site: Site) -> Outcome:
    """Matrix products, of which batches, rows of the first or columns of the second factor may be cut."""
    left, right = site.args[0], site.argument(1, "other", site.kwargs.get("mat2"))
    if not isinstance(left, Operand) or not isinstance(right, Operand) or min(len(left.shape), len(right.shape)) < 2:
        raise site.impossible("of a vector")
    rank = max(len(left.shape), len(right.shape))
    from_end = {o: len(o.shape) - o.split.dim for o in (left, right) if o.split is not None}
    if from_end.get(left) == 1 or from_end.get(right) == 2:
        raise site.impossible("adds up along the dim that is cut")
    if min(from_end.values()) <= 2:
        if len(from_end) > 1:
            raise site.impossible("meets parts that are cut differently")
        (operand, place), *_ = from_end.items()
        return site.split_of(operand).at(rank - place)
    return elementwise(site)


def einsum(site: Site) -> Outcome:
    """Sums of products, of which a letter of the result may be cut."""
    equation: Any = site.args[0]
    operands: list[Operand] = list(site.args[1]) if isinstance(site.args[1], list | tuple) else list(site.args[1:])
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        raise site.impossible("in a form whose dims have no names")
    terms, result = equation.replace(" ", "").split("->")
    pairs = list(zip(terms.split(","), operands, strict=True))
    cuts: dict[str, Split] = {name[o.split.dim]: o.split for name, o in pairs if o.split is not None}
    if len(cuts) != 1:
        raise site.impossible("meets parts that are cut differently")
    letter, split = next(iter(cuts.items()))
    if letter not in result:
        raise site.impossible("adds up along the dim that is cut")
    new: list[Operand | Part] = []
    for name, operand in pairs:
        if letter in name and operand.split is None:
            site.aware = True
            new.append(cut_operand(operand, split.at(name.index(letter))))
        elif letter in name and operand.split != split.at(name.index(letter)):
            raise site.impossible("meets parts that are cut differently")
        else:
            new.append(operand)
    site.args = [equation, *new]
    return split.at(result.index(letter))


def attention(site: Site) -> Outcome:
    """scaled_dot_product_attention, whose heads are cut."""
    names = ("query", "key", "value")
    given: list[Operand] = [site.argument(i, name) for i, name in enumerate(names)]
    for operand in given:
        if operand.split is None:
            raise NeedsSplit(operand)
    cuts = [site.split_of(operand) for operand in given]
    split = cuts[0]
    if split.dim >= len(given[0].shape) - 2 or any(c.dim != split.dim or len(c.segments) > 1 for c in cuts):
        raise site.impossible("is cut along something else than heads")
    mask = site.argument(3, "attn_mask")
    if isinstance(mask, Operand):
        from_end = len(given[0].shape) - split.dim
        if mask.split is not None and len(mask.shape) - mask.split.dim != from_end:
            raise site.impossible("has a mask that is cut along something else than heads")
        if mask.split is None and len(mask.shape) >= from_end and mask.shape[-from_end] != 1:
            site.set_argument(3, "attn_mask", Part(mask, split.at(len(mask.shape) - from_end)))
    site.random = site.argument(4, "dropout_p", 0.0) > 0
    site.aware = site.aware or site.random
    return split


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(DROPOUT, dropout),
    **dict.fromkeys(KEEPING, keeping),
    **dict.fromkeys(REDUCING, reducing),
    **dict.fromkeys(SPATIAL, spatial),
    **dict.fromkeys(["interpolate", "upsample"], channelwise),
    **dict.fromkeys(["tril", "triu"], last_two),
    **dict.fromkeys(["matmul", "bmm"], matmul),
    "pad": pad,
    "glu": glu,
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
}
