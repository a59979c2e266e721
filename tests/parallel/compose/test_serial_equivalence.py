"""The contract: n ranks give the losses and the parameters of one device."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from hocket.testing import run_ranks

from .. import programs

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@functools.cache
def reference(dtype: torch.dtype) -> dict[tuple[str, str], Any]:
    return {(m, o): programs.plain(m, o, dtype) for m in programs.MODELS for o in programs.OPTIMIZERS}


def by_type() -> dict[torch.dtype, dict[tuple[str, str], Any]]:
    return {dtype: programs.all_cases(dtype) for dtype in TOLERANCE}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("backend", "n"), [("hocket", 1), ("hocket", 2), ("hocket", 3), ("hocket", 4), ("gloo", 2), ("gloo", 3)]
)
def test_losses_parameters_and_evaluation_are_those_of_one_device(backend: str, n: int) -> None:
    found = run_ranks(by_type, n, backend=backend, timeout_s=100)
    for dtype in TOLERANCE:
        ranks = [rank[dtype] for rank in found]
        for case, (losses, parameters) in reference(dtype).items():
            assert len(losses) == 6
            for rank in ranks:
                assert rank[case][0] == pytest.approx(losses, rel=TOLERANCE[dtype]), case
                for mine, theirs in zip(rank[case][1], parameters, strict=True):
                    np.testing.assert_allclose(mine, theirs, rtol=TOLERANCE[dtype] * 100, atol=TOLERANCE[dtype])
                assert all(map(np.array_equal, rank[case][1], ranks[0][case][1])), "ranks have come apart"
            seen, total = ranks[0][case][2]
            assert seen == programs.SAMPLES
            serial = sum_of_squares(case[0], dtype, ranks[0][case][1])
            assert total == pytest.approx(serial, rel=TOLERANCE[dtype])


def sum_of_squares(name: str, dtype: torch.dtype, parameters: list[np.ndarray]) -> float:
    model, data, _ = programs.setting(name, dtype)
    with torch.no_grad():
        for mine, trained in zip(model.parameters(), parameters, strict=True):
            mine.copy_(torch.from_numpy(trained))
        return model(data.tensors[0]).double().square().sum().item()
