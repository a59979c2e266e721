import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import hocket
from hocket.testing import run_ranks
from hocket.workloads import RunDirectory, _scaling, build, settings_from_options
from hocket.workloads._training import Diverged, Trainee, train

EDSR = {"patch": 16, "batch_size": 6}
RESNET = {"synthetic": True, "image_size": 32, "batch_size": 4}


def trainee(name: str, **options: Any) -> Trainee:
    """A worker's trainee; all of them together if there is a process group."""
    settings = settings_from_options(name, {"workers": 1, **options})
    torch.manual_seed(settings.seed)
    workload = build(settings)
    module, dataset = workload.model(), workload.dataset()
    loader: Any = DataLoader(dataset, batch_size=settings.batch_size)
    model, optimizer, loader = hocket.distribute(module, workload.optimizer(module), loader)
    return Trainee(workload, model, optimizer, loader, dataset, device=torch.device("cpu"), autocast=settings.autocast)


def one_batch_again_and_again(name: str, steps: int, **options: Any) -> list[float]:
    """Losses of steps that all see the same images."""
    settings = settings_from_options(name, {"workers": 1, **options})
    torch.manual_seed(0)
    workload = build(settings)
    model = workload.model()
    batch = next(iter(DataLoader(workload.dataset(), batch_size=settings.batch_size)))
    plain = Trainee(
        workload,
        model,
        workload.optimizer(model),
        [batch],
        workload.dataset(),
        device=torch.device("cpu"),
        autocast=False,
    )
    return [plain.step()[1].item() for _ in range(steps)]


@pytest.mark.parametrize(
    ("name", "steps", "options"),
    [("edsr", 40, {"patch": 16, "lr": 5e-3}), ("resnet50", 2, {**RESNET, "lr": 0.01})],
)
def test_a_short_training_lowers_the_loss(name: str, steps: int, options: dict[str, Any]) -> None:
    losses = one_batch_again_and_again(name, steps + 1, **options)
    assert losses[-1] < 0.9 * losses[0]


def test_the_metrics_tell_the_whole_run(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {})
    summary = train(trainee("edsr", **EDSR), 5, run)
    lines = run.metrics()
    assert lines[0]["step"] == 1
    assert lines[-1]["step"] == 5
    assert lines[-1]["samples"] == summary["samples"] == 30
    assert lines[-1]["loss"] == summary["loss"]
    assert lines[-1]["left_s"] == 0.0
    assert all(0.0 < line["loss"] < 0.2 for line in lines)


@pytest.mark.long
def test_a_loss_without_bounds_ends_the_run_with_a_remedy(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {})
    with pytest.raises(Diverged, match=r"by step \d+, at learning rate .*; use a lower --lr"):
        train(trainee("resnet50", **RESNET, lr=1e30), 4, run)
    assert run.metrics()[-1]["loss"] is None


def test_the_learning_rate_rises_and_falls() -> None:
    workload = build(settings_from_options("edsr", {"workers": 1, "steps": 1000, "lr": 0.01}))
    rates = [workload.learning_rate(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.0001)
    assert max(rates) == pytest.approx(0.01, rel=0.05)
    assert rates[-1] == pytest.approx(0.0001, rel=0.01)
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_one_size_fits_a_bfloat16_forward_pass() -> None:
    images, loss = trainee("edsr", **EDSR, autocast=True).step()
    assert images == 6
    assert loss.dtype == torch.float32
    assert math.isfinite(loss.item())


def _losses(steps: int) -> list[float]:
    """The loss of each step over all ranks."""
    model = trainee("edsr", **EDSR)
    losses = []
    for _ in range(steps):
        images, loss = model.step()
        both = torch.tensor([loss.item() * images, images], dtype=torch.float64)
        loss_sum, count = hocket.total(both).tolist()
        losses.append(loss_sum / count)
    return losses


def test_two_workers_train_as_one() -> None:
    alone = _losses(4)
    for losses in run_ranks(_losses, 2, 4):
        assert losses == pytest.approx(alone, rel=1e-4)


def _evaluate(path: str) -> dict[str, Any]:
    settings = settings_from_options("edsr", {"workers": 1})
    torch.manual_seed(0)
    workload = build(settings)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return workload.evaluate(workload.model(), Path(path) if rank == 0 else None)


@pytest.mark.long
def test_workers_judge_every_photograph_once(tmp_path: Path) -> None:
    alone = _evaluate(str(tmp_path / "one.png"))
    together = run_ranks(_evaluate, 2, str(tmp_path / "two.png"))
    assert together[0] == together[1]
    for row, expected in zip(together[0]["rows"], alone["rows"], strict=True):
        assert row["photograph"] == expected["photograph"]
        assert row["bicubic_dB"] == expected["bicubic_dB"]
        assert row["edsr_dB"] == pytest.approx(expected["edsr_dB"], abs=0.01)
    assert (tmp_path / "one.png").is_file()
    assert (tmp_path / "two.png").is_file()


def _measure() -> tuple[dict[str, Any], int]:
    settings = settings_from_options("edsr", {"workers": 2, **EDSR})
    workload = build(settings)
    together = trainee("edsr", **EDSR)
    dataset = workload.dataset()
    alone = None
    if dist.get_rank() == 0:
        module = workload.model()
        alone = Trainee(
            workload,
            module,
            workload.optimizer(module),
            DataLoader(dataset, batch_size=3),
            dataset,
            device=torch.device("cpu"),
            autocast=False,
        )
    found = _scaling.measure(together, alone, step_s=1.0, budget_s=60.0)
    return found, 0 if alone is None else alone.steps


@pytest.mark.long
def test_scaling_is_measured_alike_on_every_worker() -> None:
    (first, steps_alone), (second, none_alone) = run_ranks(_measure, 2)
    assert first == second
    assert first["efficiency"] == pytest.approx(first["samples_per_s"] / (2 * first["one_samples_per_s"]))
    assert first["efficiency_lowest"] <= first["efficiency_highest"]
    assert first["steps_per_block"] == 2
    assert steps_alone == 1 + first["rounds"] * first["steps_per_block"]
    assert none_alone == 0
    assert first["idle_core_share"] < 0.5
