"""What can be cut together does not depend on the form in which a program calls an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hocket.workload import DividedShare
from hocket.workload.division import _region_search, choose, record


class Between(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, 16), nn.Linear(16, 8), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.function(self.first(x)))


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "lt": lambda h: h * torch.lt(h, 0.5),
    "less": lambda h: h * torch.less(h, 0.5),
    "logaddexp": lambda h: torch.logaddexp(h, -h),
    "xlogy": lambda h: torch.xlogy(h, h.abs() + 1),
    "hypot": lambda h: torch.hypot(h, h + 1),
    "expit": torch.special.expit,
    "float": lambda h: h.bfloat16().float(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_layers_with_any_element_wise_operator_between_them_pair_up(name: str) -> None:
    model = Between(FUNCTIONS[name])
    recording = record(model, lambda: model(torch.randn(4, 8)), lambda out: [out])
    (region,) = choose(model, recording, 2).regions
    assert [role.kind for role in region.roles.values()] == ["column", "row"]


def test_what_is_divided_is_told_by_what_a_rank_has() -> None:
    share = DividedShare.of(4, (100.0, 10.0, 0.0), (25.0, 10.0, 0.0))
    assert share == DividedShare(1.0, 0.0, 0.0)
    assert str(DividedShare(0.521, 0.97, 0.6)) == "divides 52% of parameters, 97% of FLOPs, 60% of activations"
    assert DividedShare.of(1, (100.0, 10.0, 1.0), (100.0, 10.0, 1.0)) == DividedShare(0.0, 0.0, 0.0)


class Residual(nn.Module):
    """Two linear layers beside which the input goes on: whoever cuts the second must cut the whole chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.second(self.first(x).relu())).relu()


def test_rules_are_asked_once_for_each_operator_of_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of n blocks tries the whole chain, so that without a memory n * n operators would be ruled."""
    asked: list[int] = []
    plain = _region_search.apply_rule
    monkeypatch.setattr(_region_search, "apply_rule", lambda site: (asked.append(1), plain(site))[1])
    counts = []
    for blocks in (10, 20):
        model = nn.Sequential(*(Residual() for _ in range(blocks)), nn.Linear(8, 8))
        recording = record(model, lambda model=model: model(torch.randn(4, 8)), lambda out: [out])
        asked.clear()
        assert choose(model, recording, 2).regions
        counts.append(len(asked))
    assert counts[1] < 2.5 * counts[0]
