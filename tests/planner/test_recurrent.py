"""Recurrent layers on a GPU: what their steps take, and how sure that is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from hocket import cluster
from hocket.planner import Constants, Network, Plan, Profile, assumptions, predict
from hocket.workload import Workload, capture

H100 = Network.of(cluster.load("h100-like"))
WIDE = (64, 50, 32)  # steps, samples, inputs


class Outputs(nn.Module):
    """A layer, and a product behind its outputs."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layer(x)[0])
        return found


def taken(layer: nn.RNNBase, steps: int, samples: int, inputs: int, **more: Any) -> Workload:
    x = torch.empty(steps, samples, inputs, device="meta")
    return capture(Outputs(layer).to("meta"), x, **{"degrees": (), **more})


# https://github.com/baidu-research/DeepBench, the tables of its README: a layer's recurrent part in float32, its inputs
# not multiplied; forward and backward without the gradients of weights where it is trained. FLOP/s and bytes/s by the
# data sheets of TITAN X (2015), TITAN X Pascal, TITAN Xp and GTX 1080 Ti.
MAXWELL, PASCAL, XP, TI = (6.69e12, 336.5e9), (10.97e12, 480e9), (12.15e12, 547.7e9), (11.34e12, 484e9)
PUBLISHED = [
    (nn.RNN, 1760, 16, 50, PASCAL, 7.75, True),
    (nn.RNN, 2560, 32, 50, MAXWELL, 21.99, True),
    (nn.LSTM, 1024, 128, 25, XP, 9.76, True),
    (nn.GRU, 2816, 32, 1500, PASCAL, 1790.75, True),
    (nn.LSTM, 1536, 4, 50, XP, 6.93, False),
    (nn.LSTM, 256, 4, 150, TI, 1.63, False),
    (nn.GRU, 2816, 1, 1500, XP, 350.62, False),
    (nn.GRU, 2560, 2, 375, XP, 75.02, False),
]


def test_steps_take_about_what_was_published_of_older_gpus() -> None:
    """`recurrent_share` was chosen on these rows; docs/predictions.md has them one by one."""
    errors = []
    for kind, hidden, samples, steps, (flops, memory_Bps), ms, trained in PUBLISHED:
        device = dataclasses.replace(H100, flops=flops, float32_flops=flops, tf32_flops=flops, memory_Bps=memory_Bps)
        layer = taken(kind(hidden, hidden), steps, samples, hidden)
        profile = Profile(layer, device, Constants())
        phases = ("forward", "backward") if trained else ("forward",)
        found = [one for part in layer.layers for one in part.operations if one.kind == "recurrent"]
        # Here all products of float32 are in float32.
        work = [dataclasses.replace(one, number_format="float32" if one.flops else "") for one in found]
        seconds = sum(profile.kernel_s(one) for one in work if one.phase in phases)
        errors.append(math.log(seconds * 1e3 / ms))
    assert math.sqrt(sum(one**2 for one in errors) / len(errors)) < 0.31
    assert abs(sum(errors) / len(errors)) < 0.05
    assert max(map(abs, errors)) < 1.2816 * 0.5  # all are inside of what an interval says of such steps


def test_a_host_launches_one_operator_for_all_steps() -> None:
    """A host ten thousand times as slow tells them: the device's steps hide nothing then."""
    short, long = (taken(nn.LSTM(32, 32), steps, 4, 32) for steps in (8, 64))
    slow = dataclasses.replace(Constants(), host_s=0.1)
    times = [predict(Plan(), one, H100, workers=1, batch=one.batch, constants=slow) for one in (short, long)]
    launched = 2 * 2 * (64 - 8) * slow.launch_s  # inside of the operator
    assert times[1].parts.compute - times[0].parts.compute == pytest.approx(launched, rel=0.3)
    few, many = (Profile(one, H100, Constants()).times(Plan(), one.batch) for one in (short, long))
    kernels = 2 * (64 - 8) * Constants().kernel_s  # a product and a kernel for the rest, each way
    assert float(many.recurrent.sum() - few.recurrent.sum()) > 2 * kernels


def test_a_model_of_recurrent_steps_has_a_wide_interval_and_says_so() -> None:
    recurrent = taken(nn.LSTM(32, 512, 2), *WIDE)
    one = predict(Plan(), recurrent, H100, workers=1, batch=recurrent.batch)
    assert 0.5 * one.step_s < one.recurrent_s < one.step_s
    low, high = one.interval_s
    known = dataclasses.replace(one, recurrent_s=0.0)
    assert high / low > 1.5 * known.interval_s[1] / known.interval_s[0]
    assert high / one.step_s > math.exp(1.2816 * 0.5 * one.recurrent_s / one.step_s)
    rows = {name: basis for name, _, basis in assumptions(one, H100, precision="float32", workload=recurrent)}
    assert rows["recurrent"] == "assumed"

    linear = capture(nn.Linear(64, 64).to("meta"), torch.empty(8, 64, device="meta"), degrees=())
    other = predict(Plan(), linear, H100, workers=1, batch=8)
    assert other.recurrent_s == 0
    assert "recurrent" not in {row[0] for row in assumptions(other, H100, precision="float32", workload=linear)}


def test_fusion_takes_nothing_of_a_library_s_steps() -> None:
    workload = taken(nn.GRU(32, 64), *WIDE)
    plain, fused = (
        Profile(workload, H100, dataclasses.replace(Constants(), fused_share=share, host_s=0.0, launch_s=0.0)).times(
            Plan(), workload.batch
        )
        for share in (0.0, 0.6)
    )
    assert plain.recurrent.sum() == fused.recurrent.sum() > 0
    assert 0 < fused.spared.sum() < fused.forward.sum()


def test_half_a_batch_reads_recurrent_weights_as_often() -> None:
    layer = taken(nn.RNN(2048, 2048), 16, 64, 2048)
    profile = Profile(layer, H100, dataclasses.replace(Constants(), kernel_s=0.0))
    whole, half = (profile.times(Plan(), layer.batch * share).recurrent.sum() for share in (1.0, 0.5))
    assert half > 0.9 * whole
