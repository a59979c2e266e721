"""The trainer's plans give the losses of one process."""

from __future__ import annotations

import functools
import json
import math
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.algorithms import Choices, to_toml
from hocket.planner import Plan, PlanError
from hocket.testing import deadline, run_ranks

from .. import programs, trainer_programs

SHARDS = ("none", "optimizer", "gradients", "parameters")


@functools.cache
def one_process(model: str, optimizer: str, plan: Plan) -> Any:
    return trainer_programs.train(model, optimizer, plan)


def cases(clip_norm: float | None = None) -> list[tuple[str, str, Plan]]:
    """Every model, optimizer and form at least once with each other, in a third of the runs."""
    grid = [(m, o, s) for m in programs.MODELS for o in programs.OPTIMIZERS for s in SHARDS]
    return [(m, o, Plan(shard=s, clip_norm=clip_norm)) for m, o, s in grid[::3] + grid[1::6]]


def check(found: list[list[Any]], wanted: list[tuple[str, str, Plan]], tolerance: float = 1e-12) -> None:
    for i, (model, optimizer, plan) in enumerate(wanted):
        losses, metric, norm = one_process(model, optimizer, Plan(clip_norm=plan.clip_norm))
        assert len(losses) == 6
        for rank in found:
            assert rank[i][0] == pytest.approx(losses, rel=tolerance), (model, optimizer, plan)
            assert rank[i][1] == pytest.approx(metric, rel=tolerance)
            assert rank[i][2] == (None if norm is None else pytest.approx(norm, rel=1e-9))


def test_one_process_trains_as_a_program_without_hocket() -> None:
    for model, optimizer in [("mlp", "sgd"), ("words", "adam")]:
        losses, _ = programs.plain(model, optimizer, torch.float64)
        assert one_process(model, optimizer, Plan())[0] == pytest.approx(losses, rel=1e-14)


@pytest.mark.long
@pytest.mark.parametrize("n", [2, 3])
def test_sharded_forms_lose_what_one_process_loses_with_gradients_clipped(n: int) -> None:
    wanted = cases(clip_norm=0.5)
    check(run_ranks(trainer_programs.train_all, n, wanted, timeout_s=110), wanted)


@pytest.mark.long
def test_accumulation_and_recomputation_change_nothing_but_memory() -> None:
    wanted = [("mlp", "adam", Plan(shard=s, accumulate=3, recompute=True, bucket_bytes=300)) for s in SHARDS]
    check(run_ranks(trainer_programs.train_all, 4, wanted, timeout_s=110), wanted)


def in_bfloat16(plans: list[Plan]) -> list[Any]:
    return [trainer_programs.train("mlp", "adam", plan, torch.float32) for plan in plans]


@pytest.mark.long
def test_bfloat16_loses_what_one_process_loses_in_bfloat16() -> None:
    plain, exact = (in_bfloat16([Plan(precision=p)])[0][0] for p in ("bfloat16", "float32"))  # type: ignore[arg-type]
    assert plain != exact
    assert plain == pytest.approx(exact, rel=2e-2)
    plans = [
        Plan(precision="bfloat16", shard="gradients"),
        Plan(precision="bfloat16", shard="parameters", recompute=True),
        Plan(precision="bfloat16", pipeline_parallel_degree=2, micro_batches=2),
        Plan(precision="bfloat16", tensor_parallel_degree=2),
    ]
    for rank in run_ranks(in_bfloat16, 2, plans, timeout_s=110):
        for plan, (losses, _, _) in zip(plans, rank, strict=True):
            assert losses == pytest.approx(plain, rel=1e-2), plan


def test_a_plan_that_does_not_fit_is_refused_with_the_remedy() -> None:
    model, _, loss_fn = programs.setting("mlp", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="say 1, or -1 for the rest of the world"):
        hocket.Trainer(model, loss_fn, optimizer, Plan(data_parallel_degree=2))
    assert hocket.Trainer(model, loss_fn, optimizer, "auto").plan == Plan(data_parallel_degree=1)


@pytest.mark.long
def test_a_plan_found_by_measurement_trains_as_one_process_and_says_why(tmp_path: Path) -> None:
    kept = {"XDG_CACHE_HOME": str(tmp_path), "HOCKET_CALIBRATION": "keep"}  # although the machine may be busy
    found = run_ranks(trainer_programs.train_by_measurement, 2, timeout_s=110, env=kept)
    losses, _, _ = one_process("mlp", "adam", Plan())
    assert "what was measured before is taken" in found[0][3][1]
    for each, plan, refused, (same, _) in found:
        assert same
        assert each == pytest.approx(losses, rel=1e-12)
        assert plan == found[0][1]
        # Which plan is the fastest is for this machine to say, as busy as it is now.
        assert math.prod(value for name, value in plan.items() if name.endswith("_parallel_degree")) == 2
        assert plan["predicted"]["step_s"] > 0
        assert plan["reasons"]
        assert "pass Trainer(..., sample=inputs)" in refused[0]
        assert "the sample has 1 of the global batch's samples, and there are 2 workers" in refused[1]
        assert "sample: the model cannot be run on it: TypeError" in refused[2]


@pytest.mark.long
def test_calibration_measures_what_dividing_tensors_costs_and_leaves_a_model_that_can_be_divided() -> None:
    for found in run_ranks(trainer_programs.divide_what_was_measured, 2, timeout_s=110):
        assert found["degrees"] == (2,)
        assert found["considered"] == [1, 2]
        assert 0 <= found["exchange_s"] < deadline(1)
        assert 0.05 <= found["exchange_share"] <= 1
        assert not found["refused"]
        assert found["said"] == found["held"] < 0.7 * found["whole"]
        assert found["untouched"]
        # What else it runs in the time that it has is for this machine to say, as busy as it is now.
        assert {"2 data", "1 data x 2 tensor"} <= {name for name, _ in found["ran"]}
        assert all(0 < step_s < deadline(10) for _, step_s in found["ran"])
        assert 1 <= found["at_once"] <= 2


def test_an_optimizer_that_needs_whole_parameters_is_refused_where_they_are_divided() -> None:
    model, _, loss_fn = programs.setting("mlp", torch.float32)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="LBFGS is not known to work so. Use one of ASGD, Adadelta"):
        hocket.Trainer(model, loss_fn, optimizer, Plan(shard="optimizer"))
    with pytest.raises(ValueError, match=r"LBFGS computes the loss several times .*: keep your loop"):
        hocket.Trainer(model, torch.nn.functional.mse_loss, optimizer)


def test_the_launcher_s_plan_is_taken_up_or_refused_by_a_loop_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, loss_fn = programs.setting("mlp", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setenv("HOCKET_PLAN", json.dumps(Plan(shard="gradients", clip_norm=2.0).to_json()))
    assert hocket.Trainer(model, loss_fn, optimizer).plan.clip_norm == 2.0
    with pytest.raises(PlanError, match="shard: a loop of the program's own is for plain data parallelism"):
        hocket.distribute(model, optimizer)


@pytest.mark.parametrize(
    ("plan", "remedy"),
    [
        (Plan(clip_norm=2.0), "call torch.nn.utils.clip_grad_norm_ before optimizer.step()"),
        (Plan(recompute=True), "use torch.utils.checkpoint in the model"),
        (Plan(precision="bfloat16"), "compute under torch.autocast"),
        (Plan(synchronisation="local:8"), "use hocket.Trainer"),
    ],
)
def test_what_a_loop_of_one_s_own_has_to_do_itself_is_refused_in_a_plan(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, remedy: str
) -> None:
    model, _, _ = programs.setting("mlp", torch.float32)
    monkeypatch.setenv("HOCKET_PLAN", json.dumps(plan.to_json()))
    with pytest.raises(PlanError, match=re.escape(remedy)):
        hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_plan_with_float8_is_refused_by_all_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, loss_fn = programs.setting("mlp", torch.float32)
    optimizer, plan = torch.optim.SGD(model.parameters(), lr=0.1), Plan(precision="float8")
    said = "precision: products in float8 are planned and predicted, not carried out"
    with pytest.raises(PlanError, match=said):
        hocket.Trainer(model, loss_fn, optimizer, plan)
    monkeypatch.setenv("HOCKET_PLAN", json.dumps(plan.to_json()))
    with pytest.raises(PlanError, match=said):
        hocket.distribute(model, optimizer)


def test_batches_and_losses_of_a_wrong_kind_are_named() -> None:
    model, data, _ = programs.setting("mlp", torch.float32)
    trainer = hocket.Trainer(model, lambda output, _: output, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="a scalar tensor, or a pair .sum, count., not one of shape .4, 3."):
        trainer.step(tuple(t[:4] for t in data.tensors))
    with pytest.raises(
        TypeError, match="a batch is a tuple or list of the model's inputs and then the target, or a map"
    ):
        trainer.step(data.tensors[0])


def test_the_table_of_algorithms_that_a_plan_names_is_used_or_refused(tmp_path: Path) -> None:
    table = tmp_path / "choices.toml"
    table.write_text(to_toml(Choices.parse("all_reduce >=0B ring rings=2")))
    for chosen, refused in run_ranks(trainer_programs.with_choices, 2, str(table), str(tmp_path / "none.toml")):
        assert chosen == "ring"
        assert "choices: the table of choices" in refused
        assert "none.toml' cannot be read" in refused


def test_what_the_loss_was_computed_of_is_freed_before_gradients_come() -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    model = torch.nn.Linear(4, 1000)
    model.bias.register_hook(lambda _: alive.append(held[-1]() is not None))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        held.append(weakref.ref(output))
        return torch.nn.functional.cross_entropy(output, target)

    trainer = hocket.Trainer(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        trainer.step((torch.ones(8, 4), torch.arange(8)))
    assert alive
    assert not any(alive[-2:])


_SEEN: set[int] = set()  # the Trainer puts back what a model's attributes were


class _Counting(torch.nn.Module):
    """Two layers that tell how many samples they were given; some models take one number of them alone."""

    def __init__(self, only: int | None) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        self.only = only

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _SEEN.add(len(x))
        return self.layers(x if self.only is None else x.view(self.only, 8))


def samples_seen_while_built(accumulate: int, rows: int, only: int | None) -> tuple[set[int], list[int]]:
    torch.manual_seed(0)
    model = _Counting(only)
    plan = Plan(tensor_parallel_degree=2, accumulate=accumulate)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    hocket.Trainer(model, torch.nn.functional.mse_loss, sgd, plan, sample=torch.ones(rows, 8))
    return _SEEN, [len(one) for one in model.parameters()]


@pytest.mark.parametrize(
    ("accumulate", "rows", "only", "seen"),
    [
        (4, 64, None, {4}),
        (1, 3, None, {3}),
        (1, 64, 64, {4, 64}),  # a model that takes no part of its sample is given the whole
    ],
)
def test_a_divided_model_is_examined_on_a_few_samples(
    accumulate: int, rows: int, only: int | None, seen: set[int]
) -> None:
    for found, lengths in run_ranks(samples_seen_while_built, 2, accumulate, rows, only, timeout_s=110):
        assert found == seen
        assert lengths == [8, 8, 4, 4]  # divided


def _epochs(path: Path, kind: str, stop: int | None, *, resumed: bool) -> list[float]:
    """Return the losses of four epochs that end with a checkpoint after `stop` steps, or after minus `stop` epochs.

    Each has a loader of its own; or the last two have another one; or two are taken in turn, of which one is longer; or
    the loop leaves each epoch early.
    """
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(44, 4), torch.randn(44, 1))
    model = torch.nn.Linear(4, 1)
    trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.01))
    held = [DataLoader(data, batch_size=size, shuffle=True) for size in (8, 4)]
    losses = []
    torch.manual_seed(7 if resumed else 0)
    first = trainer.load(path)["epoch"] if resumed else 0
    for epoch in range(first, 4):
        taken = {"two": held, "other": [held[epoch // 2]]}.get(kind, held[:1])
        if kind == "seeded":
            torch.manual_seed(epoch + 1)
        if kind in ("own", "seeded"):
            taken = [DataLoader(data, batch_size=8, shuffle=True)]
        for batches in zip(*map(trainer.batches, taken), strict=False):
            losses += [float(trainer.step(batch)) for batch in batches]
            if trainer.steps == stop:
                trainer.save(path, {"epoch": epoch})
                return losses
            if kind == "short" and trainer.steps % 4 == 0:
                break
        if epoch + 1 == -(stop or 0):
            trainer.save(path, {"epoch": epoch + 1})
            return losses
    return losses


@pytest.mark.parametrize(
    ("kind", "stop"),
    [("own", 9), ("own", 14), ("own", -3), ("other", 14), ("other", -3), ("two", -3), ("short", 10), ("short", -3)],
)
def test_a_run_goes_on_in_the_loader_in_which_it_was_saved(kind: str, stop: int, tmp_path: Path) -> None:
    whole = _epochs(tmp_path / "checkpoint", kind, None, resumed=False)
    begun = _epochs(tmp_path / "checkpoint", kind, stop, resumed=False)
    assert begun + _epochs(tmp_path / "checkpoint", kind, None, resumed=True) == whole


def test_loaders_that_are_made_for_each_epoch_shuffle_as_one_does_unless_they_are_seeded(tmp_path: Path) -> None:
    assert _epochs(tmp_path, "own", None, resumed=False) == _epochs(tmp_path, "one", None, resumed=False)
    whole = _epochs(tmp_path / "checkpoint", "seeded", None, resumed=False)
    begun = _epochs(tmp_path / "checkpoint", "seeded", 8, resumed=False)
    assert begun + _epochs(tmp_path / "checkpoint", "seeded", None, resumed=True) == whole


def test_a_run_that_was_left_in_its_first_epoch_goes_on_in_it_and_says_so(tmp_path: Path) -> None:
    begun = _epochs(tmp_path / "checkpoint", "short", -1, resumed=False)
    with pytest.warns(UserWarning, match="left its loop after batch 3 of epoch 0, and then saved: the rest of that"):
        rest = _epochs(tmp_path / "checkpoint", "one", None, resumed=True)
    whole = _epochs(tmp_path / "checkpoint", "one", None, resumed=False)
    assert begun + rest[:2] == whole[:6]
