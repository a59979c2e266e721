"""LARS and LAMB lose under every plan what they lose on one device: their norms are of whole parameters."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

from ... import programs, trainer_programs

Case = tuple[str, str, Plan]
P: dict[str, Any] = {"pipeline_parallel_degree": 2, "micro_batches": 2}
T: dict[str, Any] = {"tensor_parallel_degree": 2}
BOTH = ("lars", "lamb")


def losses_and_ratios(model_name: str, optimizer_name: str, plan: Plan, epochs: int = 2) -> Any:
    """Losses of three steps an epoch, the trust ratios of the last, and how many all_reduces its update made."""
    model, data, loss_fn = programs.setting(model_name, torch.float64)
    optimizer = programs.optimizer_of(optimizer_name, model.parameters())
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan, sample=data.tensors[0][:4])
    counts: list[int] = []
    whole = optimizer.step

    def counted(*args: Any) -> Any:
        made, plain = [0], dist.all_reduce

        def one(*inner: Any, **named: Any) -> Any:
            made[0] += 1
            return plain(*inner, **named)

        dist.all_reduce = one
        try:
            return whole(*args)
        finally:
            dist.all_reduce = plain
            counts.append(made[0])

    optimizer.step = counted  # type: ignore[method-assign]
    loader = DataLoader(data, batch_size=programs.BATCH, shuffle=True)
    losses = [float(trainer.step(batch)) for _ in range(epochs) for batch in trainer.batches(loader)]
    assert trainer.trust_ratios is not None
    return losses, trainer.trust_ratios.values, sorted(set(counts))


def all_of(cases: list[Case]) -> list[Any]:
    return [losses_and_ratios(*case) for case in cases]


@functools.cache
def alone(model: str, optimizer: str) -> Any:
    return losses_and_ratios(model, optimizer, Plan())


def check(cases: list[Case], n: int) -> None:
    for rank in run_ranks(all_of, n, cases, timeout_s=110):
        for case, (losses, ratios, operations) in zip(cases, rank, strict=True):
            wanted, wanted_ratios, _ = alone(*case[:2])
            assert losses == pytest.approx(wanted, rel=1e-9), case
            assert ratios == pytest.approx(wanted_ratios, rel=1e-9), case
            everywhere = case[2] == Plan()
            assert operations == [0 if everywhere else 1], case


def test_one_device_trains_as_a_program_without_hocket() -> None:
    for name in BOTH:
        losses, _ = programs.plain("conv", name, torch.float64, epochs=4)
        assert losses_and_ratios("conv", name, Plan(), epochs=4)[0] == pytest.approx(losses, rel=1e-12)
        assert min(losses) < 0.9 * losses[0]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [2, 3])
def test_sharded_forms(n: int) -> None:
    shards = ("none", "optimizer", "gradients", "parameters")
    models = ("mlp", "conv", "words")
    grid = [(m, o, Plan(shard=s)) for m in models for o in BOTH for s in shards]  # type: ignore[arg-type]
    check(grid if n == 2 else grid[1::3], n)


@pytest.mark.long
def test_tensor_pipeline_and_embedding_parallelism_on_two_ranks() -> None:
    plans = [("mlp", Plan(**T)), ("mlp", Plan(**P)), ("words", Plan(**P)), ("words", Plan(**T))]
    plans += [("tables", Plan(embeddings=how)) for how in ("row", "table")]  # type: ignore[arg-type]
    check([(m, o, plan) for m, plan in plans for o in BOTH], 2)


@pytest.mark.long
def test_their_combinations_on_four_ranks() -> None:
    cases: list[Case] = [
        ("mlp", "lars", Plan(**T, shard="gradients")),
        ("words", "lamb", Plan(**T, shard="parameters")),
        ("conv", "lamb", Plan(**P, shard="optimizer")),
        ("words", "lars", Plan(**P, shard="gradients")),
        ("mlp", "lamb", Plan(**P, shard="parameters")),
        ("words", "lamb", Plan(**P, **T)),
        ("mlp", "lars", Plan(**P, **T)),
        ("mlp", "lars", Plan(pipeline_parallel_degree=4, micro_batches=2, pipeline_schedule="gpipe")),
        ("tables", "lars", Plan(embeddings="row", shard="gradients")),
        ("tables", "lamb", Plan(embeddings="table", shard="parameters")),
        ("mlp", "lamb", Plan(shard="gradients", accumulate=2, clip_norm=1e6)),
    ]
    check(cases, 4)


def part(optimizer_name: str, plan: Plan, load: str, save: str, until: int) -> list[float]:
    model, data, loss_fn = programs.setting("conv", torch.float64)
    optimizer = programs.optimizer_of(optimizer_name, model.parameters())
    schedule = hocket.optim.warmup(optimizer, 3, total=20)
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan, sample=data.tensors[0][:4])
    loader = DataLoader(data, batch_size=programs.BATCH, shuffle=True)
    if load:
        schedule.load_state_dict(trainer.load(load))
    return trainer_programs.train_until(until, trainer, loader, schedule, save)


def parts(cases: list[tuple[Any, ...]]) -> list[list[float]]:
    return [part(*case) for case in cases]


@pytest.mark.long
def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    chain = [Plan(shard="gradients"), Plan(**T), Plan(**P), Plan(shard="parameters")]
    paths = {(name, i): str(tmp_path / f"{name}{i}") for name in BOTH for i in range(4)}
    found: dict[str, list[float]] = {name: [] for name in BOTH}
    for i, (plan, n) in enumerate(zip(chain, (3, 2, 4, 2), strict=True)):
        cases = [(name, plan, paths.get((name, i - 1), ""), paths[name, i], 3 * i + 4) for name in BOTH]
        for name, losses in zip(BOTH, run_ranks(parts, n, cases, timeout_s=110)[0], strict=True):
            found[name] += losses
    for name in BOTH:
        assert found[name] == pytest.approx(part(name, Plan(), "", "", 13), rel=1e-9)


@pytest.mark.long
def test_clipping_counts_what_other_ranks_hold_of_divided_tables() -> None:
    plans = [Plan(embeddings=how, clip_norm=0.3) for how in ("row", "table")]  # type: ignore[arg-type]
    losses, _, norm = trainer_programs.train("tables", "sgd", Plan(clip_norm=0.3))
    for rank in run_ranks(trainer_programs.train_all, 2, [("tables", "sgd", plan) for plan in plans], timeout_s=110):
        for found in rank:
            assert found[0] == pytest.approx(losses, rel=1e-9)
            assert found[2] == pytest.approx(norm, rel=1e-9)
