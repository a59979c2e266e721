"""One rule for every form of an operator, and no operator lost that had a rule before the table was one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hocket.sharding import Shard, as_local, cut, note, noted, operator_name, rule_for
from hocket.sharding._operators import canonical

from .memory_peers import MemoryPeers, in_ranks

SHARD = Shard.even(0, 4, 2)
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))

# What the two tables had that preceded this one; two of the names were there to be refused.
OLD = set((Path(__file__).parent / "old_operators.txt").read_text().split()) - {"unfold", "fold"}


def test_no_operator_is_lost_that_had_a_rule() -> None:
    assert len(OLD) == 315
    assert {name for name in OLD if rule_for(canonical(name)) is None} == set()


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (torch.add, "add"),
        (torch.Tensor.add_, "add"),
        (torch.Tensor.__radd__, "add"),
        (torch.Tensor.__iadd__, "add"),
        (torch.less, "lt"),
        (torch.Tensor.less_, "lt"),
        (torch.Tensor.__lt__, "lt"),
        (torch.Tensor.bfloat16, "to"),
        (torch.Tensor.to, "to"),
        (torch.absolute, "abs"),
        (torch.concat, "cat"),
        (torch.special.expit, "sigmoid"),
        (torch.special.xlogy, "xlogy"),
        (torch.Tensor.__and__, "bitwise_and"),
        (torch.Tensor.__invert__, "bitwise_not"),
        (torch.Tensor.__rtruediv__, "div"),
        (torch.Tensor.swapaxes, "transpose"),
        (F.upsample, "interpolate"),
        (torch.Tensor.shape.__get__, "get_shape"),
        (torch.Tensor.__getitem__, "getitem"),
    ],
)
def test_all_forms_of_an_operator_have_one_name(func: Any, name: str) -> None:
    assert operator_name(func) == name


# A form, and the plain form that it must be divided as.
SAME: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "less": (torch.less, torch.lt),
    "greater_equal": (torch.greater_equal, torch.ge),
    "bfloat16": (lambda x, y: x.bfloat16(), lambda x, y: x.to(torch.bfloat16)),
    "short": (lambda x, y: x.short(), lambda x, y: x.to(torch.int16)),
    "absolute": (lambda x, y: torch.absolute(x), lambda x, y: x.abs()),
    "concat": (lambda x, y: torch.concat([x, y], 1), lambda x, y: torch.cat([x, y], 1)),
    "swapaxes": (lambda x, y: x.swapaxes(0, 1), lambda x, y: x.transpose(0, 1)),
    "expit": (lambda x, y: torch.special.expit(x), lambda x, y: x.sigmoid()),
    "hypot": (torch.hypot, lambda x, y: (x * x + y * y).sqrt()),
    "logaddexp": (torch.logaddexp, lambda x, y: (x.exp() + y.exp()).log()),
    "xlogy": (lambda x, y: torch.xlogy(x, y.abs()), lambda x, y: x * y.abs().log()),
    "in_place": (lambda x, y: x.clone().mul_(y), lambda x, y: x * y),
    "operator": (lambda x, y: 2 - x, lambda x, y: torch.sub(2, x)),
    # Operators without a rule of their own, by those into which torch decomposes them.
    "addmm": (lambda x, y: torch.addmm(y[:1], x, y.t() @ y), lambda x, y: y[:1] + x @ (y.t() @ y)),
    "baddbmm": (
        lambda x, y: torch.baddbmm(torch.full((4, 6, 6), torch.inf), x[:, :, None], y[:, None], beta=0, alpha=2),
        lambda x, y: 2 * x[:, :, None] @ y[:, None],
    ),
    "pairwise": (F.pairwise_distance, lambda x, y: (x - y + 1e-6).square().sum(-1).sqrt()),
    "expand_as": (lambda x, y: x[:, :1].expand_as(x), lambda x, y: x[:, :1].expand(4, 6)),
    "dist": (lambda x, y: torch.special.log_softmax(x, 1), lambda x, y: x.log_softmax(1)),
    "aten": (lambda x, y: torch.ops.aten.silu(x), lambda x, y: F.silu(x)),
    "polygamma": (lambda x, y: torch.special.digamma(x.abs() + 1), lambda x, y: torch.digamma(x.abs() + 1)),
}


def on_shards(function: Callable[..., Any], both: bool, exchanges: bool) -> tuple[list[torch.Tensor], list[str]]:
    gathered: list[str] = []

    def run(peers: MemoryPeers) -> torch.Tensor:
        peers.heard = lambda name, args, form, why: gathered.append(name) if why else None
        x, y = note(cut(X, SHARD, peers.rank).clone(), SHARD, peers), Y
        if both:
            y = note(cut(Y, SHARD, peers.rank).clone(), SHARD, peers)
        found: torch.Tensor = function(x, y)
        return found

    return in_ranks(2, exchanges, run), gathered


@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("name", SAME)
def test_aliases_and_what_only_decomposes_are_divided_as_their_plain_form(
    name: str, both: bool, exchanges: bool
) -> None:
    if both and name == "addmm":  # its second factor is to be replicated
        return
    form, plain = SAME[name]
    (one, other), gathered = on_shards(form, both, exchanges)
    (expected, _), _ = on_shards(plain, both, exchanges)
    assert gathered == []
    assert noted(one) is not None
    assert noted(one) == noted(other) == noted(expected)
    with as_local():
        torch.testing.assert_close(one, expected, check_stride=False)


def test_what_has_no_rule_is_gathered_or_refused_by_name() -> None:
    from hocket.sharding import CannotShard

    _, gathered = on_shards(lambda x, y: torch.take(x, torch.arange(3)), False, True)
    assert set(gathered) == {"take"}
    with pytest.raises(CannotShard, match="take has no rule"):
        on_shards(lambda x, y: torch.take(x, torch.arange(3)), False, False)
