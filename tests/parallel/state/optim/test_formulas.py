"""LARS and LAMB are what their papers say, and so are the rules for rates."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hocket
from hocket.parallel.state.optim import (
    LAMB,
    LARS,
    polynomial,
    scaled,
    warmup,
)

Array = np.ndarray[Any, np.dtype[np.float64]]


def lars(
    w: Array, gradients: list[Array], *, lr: float, momentum: float, decay: float, eta: float, adapt: bool
) -> tuple[Array, float]:
    """You, Gitman, Ginsburg 2017, Algorithm 1, for one layer; the last local rate besides."""
    v, ratio = np.zeros_like(w), 1.0
    for g in gradients:
        ratio = eta * math.sqrt((w**2).sum()) / (math.sqrt((g**2).sum()) + decay * math.sqrt((w**2).sum()))
        ratio, decayed = (ratio, g + decay * w) if adapt else (1.0, g)
        v = momentum * v + lr * ratio * decayed
        w = w - v
    return w, ratio


def lamb(
    w: Array, gradients: list[Array], *, lr: float, betas: tuple[float, float], decay: float, adapt: bool, high: float
) -> tuple[Array, float]:
    """You et al. 2020, Algorithm 2, for one layer, with eps = 1e-6."""
    m, v, ratio = np.zeros_like(w), np.zeros_like(w), 1.0
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + 1e-6)
        if adapt:
            u = u + decay * w
            ratio = min(math.sqrt((w**2).sum()), high) / math.sqrt((u**2).sum())
        w = w - lr * ratio * u
    return w, ratio


shapes = st.lists(st.sampled_from([(3,), (4, 2), (2, 3, 2, 2), (1, 1), (5,), ()]), min_size=1, max_size=5)


@given(shapes, st.integers(0, 2**31), st.sampled_from([0.0, 0.9]), st.sampled_from([0.0, 0.05]))
@settings(deadline=None, max_examples=40)
def test_lars_is_the_papers(shapes: list[tuple[int, ...]], seed: int, momentum: float, decay: float) -> None:
    parameters, gradients = problem(shapes, seed)
    before = [p.detach().numpy().copy() for p in parameters]
    optimizer = LARS(parameters, lr=0.7, momentum=momentum, weight_decay=decay, trust_coefficient=0.02)
    run(optimizer, parameters, gradients)
    for i, parameter in enumerate(parameters):
        adapt = parameter.ndim > 1
        series = [g[i].numpy() for g in gradients]
        wanted, _ = lars(before[i], series, lr=0.7, momentum=momentum, decay=decay, eta=0.02, adapt=adapt)
        np.testing.assert_allclose(parameter.detach().numpy(), wanted, rtol=1e-12, atol=1e-14)


@given(shapes, st.integers(0, 2**31), st.sampled_from([0.0, 0.05]), st.sampled_from([1.5, math.inf]))
@settings(deadline=None, max_examples=40)
def test_lamb_is_the_papers(shapes: list[tuple[int, ...]], seed: int, decay: float, high: float) -> None:
    parameters, gradients = problem(shapes, seed)
    before = [p.detach().numpy().copy() for p in parameters]
    optimizer = LAMB(parameters, lr=0.03, betas=(0.8, 0.95), weight_decay=decay, norm_limits=(0.0, high))
    run(optimizer, parameters, gradients)
    ratios = []
    for i, parameter in enumerate(parameters):
        adapt = parameter.ndim > 1
        series = [g[i].numpy() for g in gradients]
        wanted, ratio = lamb(before[i], series, lr=0.03, betas=(0.8, 0.95), decay=decay, adapt=adapt, high=high)
        np.testing.assert_allclose(parameter.detach().numpy(), wanted, rtol=1e-12, atol=1e-14)
        ratios += [ratio] * adapt
    trust = optimizer.trust_ratios
    if not ratios:
        assert trust is None
        return
    assert trust is not None
    assert list(trust.values.values()) == pytest.approx(ratios, rel=1e-12)
    assert (trust.least, trust.median, trust.most) == pytest.approx((min(ratios), np.median(ratios), max(ratios)))


def problem(shapes: list[tuple[int, ...]], seed: int) -> tuple[list[nn.Parameter], list[list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) + 0.1

    return [nn.Parameter(draw(s)) for s in shapes], [[draw(s) for s in shapes] for _ in range(3)]


def run(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[list[torch.Tensor]]) -> None:
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def test_groups_fall_in_two_unless_they_say_adapt() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    groups = LARS([weight, bias], lr=1.0, weight_decay=0.1).param_groups
    assert [(len(g["params"]), g["adapt"], g["weight_decay"]) for g in groups] == [(1, True, 0.1), (1, False, 0.0)]
    explicit = LAMB([{"params": [weight, bias], "adapt": True, "lr": 0.5}], weight_decay=0.1).param_groups
    assert [(len(g["params"]), g["adapt"], g["weight_decay"], g["lr"]) for g in explicit] == [(2, True, 0.1, 0.5)]
    plain = LAMB([{"params": weight, "adapt": False}])
    weight.grad = torch.ones_like(weight)
    plain.step()
    assert plain.trust_ratios is None
    named = LAMB(nn.Linear(2, 3).named_parameters())
    assert [g["param_names"] for g in named.param_groups] == [["weight"], ["bias"]]


def test_weights_or_gradients_of_zeros_move_at_the_plain_rate_and_stay_finite() -> None:
    for kind in (LARS, LAMB):
        zero, still = (nn.Parameter(value) for value in (torch.zeros(2, 2), torch.ones(2, 2)))
        optimizer = kind([zero, still], lr=0.5, weight_decay=0.0)
        zero.grad, still.grad = torch.full((2, 2), 2.0), torch.zeros(2, 2)
        optimizer.step()
        moved = -0.5 * (2.0 if kind is LARS else 1.0)
        torch.testing.assert_close(zero.detach(), torch.full((2, 2), moved), rtol=1e-5, atol=0)
        assert torch.equal(still.detach(), torch.ones(2, 2))
        assert optimizer.trust_ratios is not None
        assert optimizer.trust_ratios.values == {"0": 1.0, "1": 1.0}


def test_norms_of_bfloat16_weights_are_not_made_in_bfloat16() -> None:
    weight = nn.Parameter(torch.full((64, 64), 1.0, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 2**-4)
    optimizer = LARS([weight], lr=1.0, trust_coefficient=1.0)
    optimizer.step()
    assert optimizer.trust_ratios is not None
    assert optimizer.trust_ratios.most == pytest.approx(16.0, rel=1e-6)


def test_state_goes_on_in_a_copy_and_through_a_state_dict() -> None:
    for kind in (LARS, LAMB):
        parameters, gradients = problem([(3, 2), (3,)], 1)
        optimizer = kind(parameters, lr=0.1)
        run(optimizer, parameters, gradients)
        twins = [nn.Parameter(p.detach().clone()) for p in parameters]
        other = kind(twins, lr=9.0)
        other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
        copied_parameters, copied = copy.deepcopy((parameters, optimizer))
        for each, which in ((parameters, optimizer), (twins, other), (copied_parameters, copied)):
            run(which, each, gradients)
        for a, b, c in zip(parameters, twins, copied_parameters, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)


def test_what_makes_no_sense_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    for kind, wrong in [
        (LARS, {"lr": -1.0}),
        (LARS, {"lr": 1.0, "momentum": 1.0}),
        (LARS, {"lr": 1.0, "trust_coefficient": 0.0}),
        (LARS, {"lr": 1.0, "eps": -1e-3}),
        (LAMB, {"betas": (0.9, 1.0)}),
        (LAMB, {"weight_decay": -0.1}),
        (LAMB, {"norm_limits": (2.0, 1.0)}),
    ]:
        name = list(wrong)[-1]
        with pytest.raises(ValueError, match=f"{name} must be"):
            kind([weight], **wrong)  # type: ignore[operator]
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="say sparse=False"):
        LAMB(table.parameters()).step()


def test_rates_grow_with_the_batch_rise_and_fall() -> None:
    assert scaled(0.1, 4096, 256) == pytest.approx(1.6)
    assert scaled(0.1, 4096, 256, "sqrt") == pytest.approx(0.4)
    with pytest.raises(ValueError, match="1 sample or more"):
        scaled(0.1, 0, 256)
    with pytest.raises(ValueError, match="there is no such rule|rule must be"):
        scaled(0.1, 8, 4, "cubic")  # type: ignore[arg-type]

    def rates(make: Any, steps: int) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
        schedule = pickle.loads(pickle.dumps(make)) if not callable(make) else make(optimizer)
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    assert rates(lambda o: warmup(o, 4), 6) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    falling = rates(lambda o: warmup(o, 2, total=6, power=2.0), 8)
    assert falling == pytest.approx([1.0, 2.0, 2.0, 2 * 0.75**2, 2 * 0.5**2, 2 * 0.25**2, 0.0, 0.0])
    assert rates(lambda o: polynomial(o, 4, power=1.0, end=0.5), 5) == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0])
    assert rates(lambda o: warmup(o, 2, start=0.5), 3) == pytest.approx([1.5, 2.0, 2.0])
    with pytest.raises(ValueError, match="fewer than all"):
        warmup(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 5, total=5)


def test_the_trainer_tells_trust_ratios_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    trainer = hocket.Trainer(model, nn.functional.mse_loss, LAMB(model.parameters()))
    assert trainer.trust_ratios is None
    assert trainer.report()["trust_ratios"] is None
    trainer.step((torch.randn(4, 3), torch.randn(4, 2)))
    trust = trainer.trust_ratios
    assert trust is not None
    assert list(trust.values) == ["0.weight", "2.weight"]
    told = trainer.report()["trust_ratios"]
    assert told["parameters"] == trust.values
    assert told["least"] <= told["median"] <= told["most"]
    assert "2 parameters" in str(trust)
