"""What fails in one rank's step ends the step of every rank, with its text; what all refuse leaves them as they are."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import hocket
from hocket.comm import CommError
from hocket.parallel.mesh import _failed_group, give_up
from hocket.planner import Plan, PlanError
from hocket.testing import run_ranks


def made(failing: int, plan: Plan) -> tuple[hocket.Trainer, torch.Tensor]:
    """A trainer whose loss fails on one rank once `failing` calls have been made of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    calls = [0]

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if dist.get_rank() == dist.get_world_size() - 1 and calls[0] > failing:
            raise ValueError("this sample is damaged")
        return ((output - target) ** 2).mean()

    x = torch.randn(8, 8)
    return hocket.Trainer(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), plan, sample=x), x


def one_fails(plan: Plan) -> tuple[str, str, float]:
    trainer, x = made(24, plan)
    for _ in range(30):
        begin_s = time.monotonic()
        try:
            trainer.step((x, x))
        except RuntimeError as error:
            return type(error).__name__, str(error), time.monotonic() - begin_s
        except ValueError as error:
            return "ValueError", str(error), time.monotonic() - begin_s
    raise AssertionError("no error")


STAGED = Plan(pipeline_parallel_degree=2, micro_batches=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "plan"),
    [(2, Plan()), (2, Plan(shard="parameters")), (2, STAGED), pytest.param(4, STAGED, marks=pytest.mark.long)],
)
def test_an_error_of_one_rank_is_an_error_of_all(ranks: int, plan: Plan) -> None:
    *others, failed = run_ranks(one_fails, ranks, plan, timeout_s=60)
    said = f"rank {ranks - 1} has failed in its step: ValueError: this sample is damaged"
    kind = "StageError" if plan is STAGED else "CommError"
    assert [one[:2] for one in others] == [(kind, said)] * (ranks - 1)
    assert failed[:2] == ((kind, said) if plan is STAGED else ("ValueError", "this sample is damaged"))
    assert all(one[2] < 20 for one in (*others, failed))  # and not the time-out of 300 s


def next_after_failure(plan: Plan) -> tuple[list[float], float]:
    """The losses of a trainer after one whose step has failed on one rank, and a mean over the ranks after it."""
    one_fails(plan)
    trainer, x = made(10**9, plan)
    return [float(trainer.step((x, x))) for _ in range(3)], float(hocket.average(torch.tensor(float(dist.get_rank()))))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", [STAGED, Plan()])
def test_after_a_step_that_failed_the_next_trainer_trains(plan: Plan) -> None:
    one, other = run_ranks(next_after_failure, 2, plan, backend=None, timeout_s=60)
    assert one == other
    assert one[0][0] > one[0][-1] > 0
    assert one[1] == 0.5


def in_own_group() -> tuple[str, float]:
    one_fails(STAGED)
    with pytest.raises(CommError) as refused:
        made(10**9, STAGED)
    dist.destroy_process_group()
    dist.init_process_group("hocket")
    trainer, x = made(10**9, STAGED)
    return str(refused.value), float(trainer.step((x, x)))


@pytest.mark.long
def test_after_a_step_that_failed_a_group_of_the_program_is_refused_with_the_remedy() -> None:
    one, other = run_ranks(in_own_group, 2, timeout_s=60)
    assert one == other
    assert "has failed in its step: ValueError: this sample is damaged; to go on, call torch.dis" in one[0]


def known_to_one() -> str:
    trainer, x = made(10**9, Plan())
    trainer.step((x, x))
    if dist.get_rank():
        time.sleep(2)
        return ""
    group = dist.group.WORLD
    give_up([group], "rank 0 has failed in its step: ValueError: alone", "0/0/1")
    _failed_group._TOGETHER_S = 0.5
    with pytest.raises(CommError) as refused:
        made(10**9, Plan())
    return str(refused.value)


def test_a_step_that_failed_on_one_rank_alone_is_no_reason_to_join_anew() -> None:
    said, _ = run_ranks(known_to_one, 2, backend=None, timeout_s=60)
    assert "not all of them have ended that step in an error" in said


class Damaged:
    """Batches of which the last rank cannot read the second."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield torch.ones(8, 8), torch.ones(8, 8)
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("this sample is damaged")
        yield torch.ones(8, 8), torch.ones(8, 8)


def one_fails_without_training(what: str, plan: Plan) -> tuple[str, str, float]:
    trainer, _ = made(10**9, plan)
    begin_s = time.monotonic()
    try:
        trainer.evaluate(Damaged()) if what == "evaluation" else trainer.predict(Damaged())
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin_s
    raise AssertionError("no error")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("what", "plan"), [("evaluation", Plan()), ("evaluation", STAGED), ("prediction", STAGED)])
def test_an_error_of_one_rank_ends_evaluation_and_prediction_of_all(what: str, plan: Plan) -> None:
    other, failed = run_ranks(one_fails_without_training, 2, what, plan, timeout_s=60)
    kind = "StageError" if plan is STAGED else "CommError"
    assert other[:2] == (kind, f"rank 1 has failed in its {what}: ValueError: this sample is damaged")
    assert "this sample is damaged" in failed[1]
    assert max(other[2], failed[2]) < 20


def test_a_batch_without_samples_is_refused_as_such() -> None:
    model, x = nn.Linear(3, 2), torch.zeros(0, 3)
    trainer = hocket.Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="the batch has no samples"):
        trainer.step((x, x[:, :2]))
    assert model.weight.isfinite().all()


def all_fail() -> float:
    trainer, x = made(10**9, Plan())
    trainer.step((x, x))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.step((x[:, :7], x))
    return float(trainer.step((x, x)))


def all_fail_apart(apart_s: float, slow_s: float) -> str:
    """What the second rank's error comes to, which is its own and `apart_s` after the first's; then the next step."""
    torch.manual_seed(0)
    now = [slow_s]

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(now[0])
        if target.isnan().any():
            raise ValueError("this sample is damaged")
        return ((output - target) ** 2).mean()

    model, x = nn.Linear(8, 8), torch.randn(8, 8)
    trainer = hocket.Trainer(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), Plan())
    trainer.step((x, x))
    now[0] = apart_s if dist.get_rank() else 0.0
    with pytest.raises(ValueError, match="this sample is damaged"):
        trainer.step((x, x * torch.nan))
    now[0] = 0.0
    try:
        return f"{float(trainer.step((x, x))):.6f}"
    except RuntimeError as error:
        return str(error)


@pytest.mark.long
def test_errors_of_all_ranks_that_come_apart_are_of_all_where_steps_are_long_and_of_one_where_not() -> None:
    one, other = run_ranks(all_fail_apart, 2, 3.0, 4.0, timeout_s=90)
    assert one == other
    assert float(one) > 0.0
    for found in run_ranks(all_fail_apart, 2, 6.0, 0.0, timeout_s=90):
        assert "rank 0 has failed in its step: ValueError: this sample is damaged" in found


def test_after_an_error_of_all_ranks_training_goes_on() -> None:
    one, other = run_ranks(all_fail, 2, timeout_s=60)
    assert one == other


def scripted() -> list[str]:
    """What a part that torch.jit has compiled comes to, by each plan."""
    found = []
    for plan in (Plan(), Plan(shard="parameters"), Plan(tensor_parallel_degree=2)):
        torch.manual_seed(0)
        inner = torch.jit.script(nn.Sequential(nn.ReLU(), nn.Linear(32, 32)))  # type: ignore[no-untyped-call]
        model = nn.Sequential(nn.Linear(16, 32), inner, nn.Linear(32, 10))
        x, y = torch.randn(8, 16), torch.randint(10, (8,))
        try:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            trainer = hocket.Trainer(model, nn.functional.cross_entropy, optimizer, plan, sample=x)
            found.append(f"{float(trainer.step((x, y))) - float(trainer.step((x, y))):.3f}")
        except PlanError as error:
            found.append(str(error))
    return found


def test_what_torch_jit_has_compiled_trains_or_is_refused() -> None:
    for plain, shards, tensor in run_ranks(scripted, 2, timeout_s=60):
        assert float(plain) > 0.0
        assert "shard: what torch.jit has compiled" in shards
        assert "as 1 is" in shards
        assert "tensor_parallel_degree: what torch.jit has compiled" in tensor


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10)).double()


def scripts() -> dict[str, nn.Module]:
    """One model, plain, compiled by torch.jit in both ways, and as a program of torch.export."""
    x = torch.ones(4, 16).double()
    rows = torch.export.Dim("rows", min=1)
    return {
        "plain": plain(),
        "scripted": torch.jit.script(plain()),  # type: ignore[no-untyped-call]
        "traced": torch.jit.trace(plain(), x),  # type: ignore[no-untyped-call]
        "exported": torch.export.export(plain(), (x,), dynamic_shapes=({0: rows},)).module(),
    }


def whole_scripts(folder: str) -> dict[str, list[float]]:
    """Losses of whole models that are compiled, in a Trainer that saves, loads and predicts, and by distribute."""
    found: dict[str, list[float]] = {}
    x, y = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(8)
    for name, model in scripts().items():
        trainer = hocket.Trainer(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), Plan())
        losses = [float(trainer.step((x, y)))]
        trainer.save(f"{folder}/{name}")
        losses.append(float(trainer.step((x, y))))
        trainer.load(f"{folder}/{name}")
        losses.append(float(trainer.step((x, y))))
        if name != "exported":  # torch gives those one mode, that of training
            assert float(trainer.predict(x).sum()) == pytest.approx(
                float(trainer.predict(x[:4]).sum() + trainer.predict(x[4:]).sum())
            )
        found[name] = losses
    for name, model in scripts().items():
        loader = DataLoader(list(zip(x, y, strict=True)), batch_size=8)
        model, optimizer, loader = hocket.distribute(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        for a, b in loader:
            loss = nn.functional.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            found[f"{name}, distributed"] = [float(hocket.average(loss))]
    return found


@pytest.mark.long
def test_a_model_that_is_compiled_as_a_whole_trains_as_the_plain_one(tmp_path: Path) -> None:
    for found in run_ranks(functools.partial(whole_scripts, str(tmp_path)), 2, timeout_s=120):
        for name, losses in found.items():
            plainly = found["plain, distributed" if "distributed" in name else "plain"]
            assert losses == pytest.approx(plainly, abs=1e-12), name  # float64: the order of additions alone differs


def divided_scripts() -> list[str]:
    """What the compiled models come to where layers are divided."""
    found = []
    for name, model in scripts().items():
        for plan in (Plan(tensor_parallel_degree=2), Plan(pipeline_parallel_degree=2)):
            if name != "plain":
                optimizer, sample = torch.optim.SGD(model.parameters(), 0.1), torch.ones(4, 16).double()
                with pytest.raises(PlanError) as caught:
                    hocket.Trainer(model, nn.functional.cross_entropy, optimizer, plan, sample=sample)
                found.append(str(caught.value))
    return found


def test_no_layers_of_a_compiled_model_are_divided() -> None:
    for found in run_ranks(divided_scripts, 2, timeout_s=60):
        assert ["torch.jit has compiled" in one for one in found] == [True] * 4 + [False] * 2
        assert all("a program of torch.export" in one for one in found[4:])
        assert ["pipeline_parallel_degree: " in one for one in found] == [False, True] * 3


def compiled() -> list[str]:
    """What compiled models come to in a pipeline: wrapped, in place, and one block of it."""
    found = []
    for how in ("whole", "in place", "block"):
        model: nn.Module = nn.Sequential(
            nn.Linear(16, 32), nn.Tanh(), nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 8)
        )
        if how == "whole":
            model = torch.compile(model)  # type: ignore[assignment]
        elif how == "in place":
            model.compile()
        else:
            model[2] = torch.compile(model[2])  # type: ignore[index, operator]
        try:
            plan = Plan(pipeline_parallel_degree=2, micro_batches=2)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=torch.randn(8, 16))
        except PlanError as error:
            found.append(str(error))
    return found


@pytest.mark.long
def test_what_is_compiled_is_not_cut_into_stages() -> None:
    for whole, in_place, block in run_ranks(compiled, 2, timeout_s=60):
        assert "the model is compiled" in in_place
        assert "2 is compiled" in block
        assert all("block.compile()" in one for one in (whole, in_place, block))
