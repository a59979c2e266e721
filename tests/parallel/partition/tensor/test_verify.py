"""The comparison with the plain model tells what is wrong from what only rounding moves."""

from __future__ import annotations

import torch
from torch import nn

from hocket.parallel.mesh import join
from hocket.parallel.partition.tensor import parallelize
from hocket.sharding import RULES
from hocket.testing import run_ranks

from .odd_models import Deceptive


class Steep(nn.Module):
    """A layer, batch norm and a kink: in a deep chain of them a value that rounding moves across zero is felt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width, bias=False), nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.layer(x)))


def cut(kind: str) -> tuple[dict[str, str], list[str], bool]:
    """How a model of single precision is cut, why so, and whether its weights are still of single precision."""
    torch.manual_seed(0)
    right = RULES["cumsum"]
    if kind == "deceptive":
        RULES["cumsum"] = RULES["pointwise"]
        model, sample = Deceptive(), torch.randn(5, 8)
    else:
        model, sample = nn.Sequential(*(Steep(16) for _ in range(30))), torch.randn(8, 16)
    model(sample).sum().backward()  # gradients that a program has made before
    found = parallelize(model, join(), (sample,))
    RULES["cumsum"] = right
    single = all(one.dtype in (torch.float32, torch.int64) for one in (*model.parameters(), *model.buffers()))
    return {one.name: one.form for one in found.decisions}, [one.reason for one in found.decisions], single


def test_what_rounding_moves_across_kinks_stays_cut_in_pairs() -> None:
    forms, reasons, single = run_ranks(cut, 2, "steep")[0]
    assert not any("differs" in reason for reason in reasons)
    assert (forms["0.layer"], forms["0.norm"], forms["1.layer"]) == ("column", "channels", "row")
    assert single


def test_a_wrong_guess_is_found_in_single_precision_too() -> None:
    forms, reasons, single = run_ranks(cut, 2, "deceptive")[0]
    assert forms == {"a": "column", "b": "row", "c": "column", "d": "column"}
    assert sum("outputs are gathered: output 0 differs" in reason for reason in reasons) == 2
    assert single
