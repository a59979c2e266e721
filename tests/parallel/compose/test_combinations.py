"""Data, tensor and pipeline parallelism together, sharded or not, lose what one process loses."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import rnn

import hocket
from hocket.planner import Plan, PlanError
from hocket.testing import run_ranks

from .. import programs, trainer_programs
from .test_trainer import check

T: dict[str, Any] = {"tensor_parallel_degree": 2}
P: dict[str, Any] = {"pipeline_parallel_degree": 2, "micro_batches": 2}


@pytest.mark.long
def test_two_axes_on_four_ranks() -> None:
    wanted = [
        ("words", "adam", Plan(**T, shard="parameters", clip_norm=0.5)),
        ("conv", "sgd", Plan(**T, shard="gradients", clip_norm=0.5)),
        ("mlp", "sgd", Plan(**P, shard="parameters", clip_norm=0.5)),
        ("words", "sgd", Plan(**P, shard="optimizer", clip_norm=0.5)),
        ("words", "adam", Plan(**P, **T, clip_norm=0.5)),
        ("mlp", "adam", Plan(**P, pipeline_schedule="zero_bubble", shard="gradients")),
        ("mlp", "adam", Plan(**P, pipeline_schedule="interleaved", stages_per_rank=2, shard="gradients")),
    ]
    check(run_ranks(trainer_programs.train_all, 4, wanted, timeout_s=115), wanted)


# Backwards in halves where no named order has them; messages are implied.
BY_HAND = """
order by-hand ranks=2 stages=2 micro_batches=2
rank 0
  0F0 0F1 0I0 0B1 0W0
rank 1
  1F0 1F1 1I0 1B1 1W0
"""


@pytest.mark.long
def test_an_order_by_hand_loses_what_one_process_loses(tmp_path: Path) -> None:
    path = tmp_path / "by-hand.txt"
    path.write_text(BY_HAND)
    wanted = [
        ("mlp", "sgd", Plan(**P, pipeline_schedule=str(path), clip_norm=0.5)),
        ("words", "adam", Plan(**P, pipeline_schedule=BY_HAND)),
    ]
    check(run_ranks(trainer_programs.train_all, 2, wanted, timeout_s=115), wanted)


@pytest.mark.long
def test_three_axes_on_eight_ranks() -> None:
    wanted = [("words", "adam", Plan(**T, **P, shard="gradients", clip_norm=0.5))]
    check(run_ranks(trainer_programs.train_all, 8, wanted, timeout_s=115), wanted)


def refused(plan: Plan, sample: bool = True) -> str:
    model, data, loss_fn = programs.setting("words", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        hocket.Trainer(model, loss_fn, optimizer, plan, sample=data.tensors[0][:2] if sample else None)
    except PlanError as error:
        return str(error)
    return ""


def all_refusals() -> list[str]:
    return [
        refused(Plan(**T), sample=False),
        refused(Plan(**P, **T)),
        refused(Plan(**P, accumulate=2)),
        refused(Plan(shard="parameters", pipeline_parallel_degree=2, data_parallel_degree=2)),
    ]


def test_what_cannot_be_combined_is_refused_on_every_rank_with_rule_and_remedy() -> None:
    for said in run_ranks(all_refusals, 2):
        for message, part in zip(
            said,
            [
                "pass Trainer(..., sample=inputs)",
                "use 4 workers, or degrees whose product divides them",
                "say accumulate = 1 and micro_batches = 4",
                "say 1, or -1 for the rest of the world",
            ],
            strict=True,
        ):
            assert part in message


def tied_and_sharded() -> list[str]:
    on_one_rank: dict[str, Any] = {**P, "stages_per_rank": 2, "pipeline_schedule": "zero_bubble_v"}
    return [refused(Plan(shard="parameters", **way)) for way in (P, on_one_rank)]


def test_tied_weights_of_several_stages_cannot_be_sharded_themselves() -> None:
    for message in itertools.chain(*run_ranks(tied_and_sharded, 4)):
        assert 'say shard = "gradients", or untie them' in message


def magnified(plan: Plan) -> list[float]:
    """Losses of a model whose blocks hand divided channels to each other, as a convolution to what shuffles pixels."""
    torch.manual_seed(0)
    conv = partial(torch.nn.Conv2d, kernel_size=3, padding=1)
    up = torch.nn.Sequential(conv(8, 32), torch.nn.PixelShuffle(2))
    model = torch.nn.Sequential(conv(2, 8), torch.nn.ReLU(), up, conv(8, 2)).double()
    x = torch.linspace(-1, 1, 8 * 2 * 36, dtype=torch.float64).view(8, 2, 6, 6).sin()
    y = torch.linspace(0, 3, 8 * 2 * 144, dtype=torch.float64).view(8, 2, 12, 12).cos()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, optimizer, plan, sample=x)
    return [float(trainer.step((x, y))) for _ in range(4)]


@pytest.mark.long
def test_sharded_blocks_hand_each_other_tensors_that_are_divided() -> None:
    expected = magnified(Plan())
    for found in run_ranks(magnified, 4, Plan(shard="parameters", tensor_parallel_degree=2), timeout_s=110):
        assert found == pytest.approx(expected, rel=1e-12)


class Packed(torch.nn.Module):
    """Runs over packed sequences, for which the weights of a divided layer are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = torch.nn.GRU(16, 16, batch_first=True), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x, 3 + 2 * (x[:, 0, 0] > 0), batch_first=True, enforce_sorted=False)
        out, _ = rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=5)
        return self.head(out)  # type: ignore[no-any-return]


def packed(plan: Plan) -> list[float]:
    """Losses of a recurrent layer over sequences of several lengths."""
    torch.manual_seed(0)
    model, x, y = Packed().double(), torch.randn(8, 5, 16).double(), torch.randn(8, 5, 4).double()
    trainer = hocket.Trainer(
        model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), plan, sample=x
    )
    return [float(trainer.step((x, y))) for _ in range(3)]


@pytest.mark.long
def test_packed_sequences_run_through_layers_divided_twice() -> None:
    """torch's forward took weights of FSDP2 for new ones, and read them anew in place of the gathered ones."""
    expected = packed(Plan())
    for found in run_ranks(packed, 4, Plan(shard="parameters", tensor_parallel_degree=2), timeout_s=110):
        assert found == pytest.approx(expected, rel=1e-12)
