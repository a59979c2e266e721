"""Runs a call on shards, by ranks in one process, and holds it to the call on full tensors: results and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from hocket.sharding import (
    CannotShard,
    Shard,
    ShardingError,
    WholeBatchNorms,
    as_local,
    cut,
    join,
    leaves,
    mapped,
    note,
    noted,
)

from .memory_peers import MemoryPeers, in_ranks
from .samples import Sample

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 4e-2}

_HALVES = (torch.bfloat16, torch.float16)
_Spread = tuple[list[float], list[float]]


@dataclass
class Trial:
    """A call with how its tensors are divided.

    Attributes:
        sample: the call.
        shards: by place among the tensors.
        ranks: how many.
        exchanges: whether they fetch rows of each other.
        order: by place, an order of dims in which the tensor's elements lie in memory.
    """

    sample: Sample
    shards: dict[int, Shard]
    ranks: int
    exchanges: bool
    order: dict[int, tuple[int, ...]] = field(default_factory=dict)


@st.composite
def trials(draw: st.DrawFn, sample: Sample) -> Trial | None:
    """Any operand divided along any dim into any shares, others like it or replicated, and any strides."""
    tensors = [leaf for leaf in leaves((sample.args, sample.kwargs)) if isinstance(leaf, torch.Tensor)]
    places = [(i, d) for i, t in enumerate(tensors) for d in range(t.dim()) if t.shape[d]]
    if not places:
        return None
    exchanges = draw(st.booleans())
    i, dim = draw(st.sampled_from(places))
    size = tensors[i].shape[dim]
    if exchanges:
        ranks = draw(st.integers(2, 3))
        inner = sorted(draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1)))
        shard = Shard(dim, ((0, *inner, size),))
    else:
        divisors = [one for one in (2, 3, 5) if size % one == 0]
        if not divisors:
            return None
        ranks = draw(st.sampled_from(divisors))
        shares = draw(st.sampled_from([n for n in (1, 2, 3) if size % (n * ranks) == 0]))
        shard = Shard.even(dim, (size // shares,) * shares, ranks)
    shards = {i: shard}
    from_end = tensors[i].dim() - dim
    for j, other in enumerate(tensors):
        if j != i and other.dim() >= from_end and other.shape[-from_end] == size and draw(st.booleans()):
            shards[j] = shard.at(other.dim() - from_end)
    order = {j: tuple(draw(st.permutations(range(t.dim())))) for j, t in enumerate(tensors) if draw(st.booleans())}
    return Trial(sample, shards, ranks, exchanges, order)


def compare(trial: Trial) -> bool:
    """Whether the call was made on shards; fails where results or gradients differ from those on full tensors."""
    with as_local():  # this thread compares shards; ranks are other threads
        return _compare(trial)


def _compare(trial: Trial) -> bool:
    sample, place = trial.sample, iter(range(10_000))
    tensors: list[torch.Tensor] = []

    def leaf(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        j = next(place)
        made = one.detach().clone()
        if j in trial.order:
            order = trial.order[j]
            inverse = [order.index(d) for d in range(len(order))]
            made = made.permute(order).contiguous().permute(inverse)
        tensors.append(made.requires_grad_(one.requires_grad))
        return len(tensors) - 1, "tensor"

    marked = mapped(leaf, (sample.args, sample.kwargs))
    marked = _numbers(marked)

    def call(given: list[torch.Tensor]) -> Any:
        args, kwargs = mapped(lambda one: given[one.place] if isinstance(one, _Place) else one, marked)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sample.function(*args, **kwargs)

    try:
        whole = call([t.view_as(t) for t in tensors])
    except Exception:  # strides with which torch itself does not make the call
        return False
    said: list[str] = []

    def run(peers: MemoryPeers) -> Any:
        mine = [t.view_as(t) for t in tensors]
        for j, shard in trial.shards.items():
            part = cut(tensors[j], shard, peers.rank)
            mine[j] = note(part.view_as(part), shard, peers)
        peers.heard = lambda name, args, form, why: said.append(form)
        with WholeBatchNorms(peers):
            return call(mine)

    try:
        parts = in_ranks(trial.ranks, trial.exchanges, run)
    except (CannotShard, ShardingError, NotImplementedError):
        return False
    expected = [t for t in leaves(whole) if isinstance(t, torch.Tensor)]
    spreads = _spreads(call, tensors) if any(t.dtype in _HALVES for t in tensors) else ()
    ranks = [[t for t in leaves(one) if isinstance(t, torch.Tensor)] for one in parts]
    found: list[torch.Tensor] = []
    for i, full in enumerate(expected):
        shard = noted(ranks[0][i])
        assert all(noted(one[i]) == shard for one in ranks)
        found.append(ranks[0][i] if shard is None else join([one[i] for one in ranks], shard))
        for one in ranks:
            spread = [of[0][i] for of in spreads]
            _close(one[i], full if shard is None else cut(full, shard, noted_rank(ranks, one)), spread)
    rest = [one for one in leaves(whole) if not isinstance(one, torch.Tensor)]
    assert all([one for one in leaves(part) if not isinstance(one, torch.Tensor)] == rest for part in parts)
    leaves_with_grad = [t for t in tensors if t.requires_grad]
    try:
        wanted = _gradients(expected, leaves_with_grad)
    except RuntimeError:  # an operator without a derivative, or with strides for which torch has none
        return "divided" in said and "gathered" not in said
    for i, (a, b) in enumerate(zip(_gradients(found, leaves_with_grad), wanted, strict=True)):
        if a is None or b is None:
            assert all(one is None or not one.any() for one in (a, b))
        else:
            _close(a, b, [of[1][i] for of in spreads])
    return "divided" in said and "gathered" not in said


def noted_rank(ranks: list[Any], one: Any) -> int:
    return next(r for r, other in enumerate(ranks) if other is one)


@dataclass
class _Place:
    place: int


def _numbers(tree: Any) -> Any:
    """The tree with places where `compare` has marked tensors."""
    if isinstance(tree, tuple) and len(tree) == 2 and tree[1] == "tensor" and isinstance(tree[1], str):
        return _Place(tree[0])
    if isinstance(tree, tuple | list):
        made = [_numbers(one) for one in tree]
        return made if isinstance(tree, list) else tuple(made)
    return {key: _numbers(one) for key, one in tree.items()} if isinstance(tree, dict) else tree


def _gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    losses = []
    for i, one in enumerate(outputs):
        if one.is_floating_point() and one.requires_grad:
            weights = torch.randn(one.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
            losses.append((one.double() * weights).sum())
    if not losses or not inputs:
        return []
    return list(torch.autograd.grad(torch.stack(losses).sum(), inputs, retain_graph=True, allow_unused=True))


def _spreads(call: Callable[[list[torch.Tensor]], Any], tensors: list[torch.Tensor]) -> list[_Spread]:
    """How far one unit in the last place of half-precision inputs moves the results and gradients of the whole call.

    Sums that cancel and variances near zero magnify rounding. No order of additions is better than this.
    """
    runs = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        moved = []
        for t in tensors:
            made = t.detach()
            if seed and t.dtype in _HALVES:
                signs = torch.randint(0, 2, t.shape, generator=generator) * 2 - 1
                made = (
                    (made.double() * (1 + signs * torch.finfo(t.dtype).eps))
                    .to(t.dtype)
                    .as_strided(t.size(), t.stride())
                )
            moved.append(made.requires_grad_(t.requires_grad))
        out = [t for t in leaves(call([t.view_as(t) for t in moved])) if isinstance(t, torch.Tensor)]
        try:
            runs.append((out, _gradients(out, [t for t in moved if t.requires_grad])))
        except RuntimeError:  # no derivative: `compare` says so
            runs.append((out, [None] * sum(t.requires_grad for t in moved)))
    plain, *rest = runs
    return [
        tuple([_apart(a, b) for a, b in zip(x, y, strict=True)] for x, y in zip(plain, one, strict=True))
        for one in rest
    ]


def _apart(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None or a.shape != b.shape or not a.numel():
        return 0.0
    return float((a.detach().double() - b.detach().double()).abs().nan_to_num(0.0, 0.0, 0.0).max())


def _close(found: torch.Tensor, expected: torch.Tensor, spread: Sequence[float]) -> None:
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE.get(expected.dtype, 0.0)
    scale = float(expected.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if tolerance and expected.numel() else 1.0
    atol = tolerance * max(scale, 0.1) + 4 * max(spread, default=0.0)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=atol, equal_nan=True, check_stride=False)
