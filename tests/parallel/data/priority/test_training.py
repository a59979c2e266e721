"""Training with gradients sent by priority loses what one process loses, and says no where it cannot."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import hocket
from hocket.planner import Plan, PlanError
from hocket.testing import run_ranks

from ... import programs, trainer_programs
from ...compose.test_trainer import check

CASES = [
    (model, optimizer, Plan(priority=True, bucket_bytes=nbytes, accumulate=accumulate))
    for number, (model, optimizer) in enumerate(itertools.product(("mlp", "conv", "words"), ("sgd", "adam")))
    for nbytes, accumulate in (((None, 1), (1000, 2)) if number % 2 else ((200, 1),))
]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("n", "cases"),
    [(2, CASES), (3, CASES[::2]), pytest.param(3, CASES[1::2], marks=pytest.mark.long)],
    ids=["2", "3", "3, the others"],
)
def test_losses_are_those_of_one_process(n: int, cases: list[tuple[str, str, Plan]]) -> None:
    check(run_ranks(trainer_programs.train_all, n, cases, timeout_s=110), cases)


class Odd(nn.Module):
    """Uses weights in ways that names do not show; a layer is used in the second half of the run only."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(6, 6)
        self.first = nn.Linear(6, 6)
        self.held = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(6))
        self.unused = nn.Linear(2, 2)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.held.weight.t(), self.held.bias)  # of a module that is never called
        x = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False).tanh()[:, None]
        x = self.attention(x, x, x)[0] * self.scale
        return self.late(self.recurrent(x)[0][:, 0])


def odd(plan: Plan) -> Any:
    torch.manual_seed(3)
    model = Odd().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    data = torch.randn(20, 6, dtype=torch.float64)
    trainer = hocket.Trainer(model, F.mse_loss, optimizer, plan)
    losses = []
    for _ in range(3):
        for x, y in trainer.batches(DataLoader(torch.utils.data.TensorDataset(data, data.flip(1)), batch_size=8)):
            losses.append(float(trainer.step((x, y))))
            schedule.step()
    state = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    steps = len(optimizer.state_dict()["state"])
    weights = [p.detach().numpy().copy() for p in model.parameters()]
    return losses, state, steps, weights


@pytest.mark.long
def test_modules_wait_for_what_they_use_however_they_come_by_it() -> None:
    losses, state, steps, weights = odd(Plan())
    for n, nbytes in ((2, None), (2, 100)):
        for rank in run_ranks(odd, n, Plan(priority=True, bucket_bytes=nbytes), timeout_s=60):
            assert rank[0] == pytest.approx(losses, rel=1e-12)
            assert rank[2] == steps
            for name, value in state.items():
                assert rank[1][name] == pytest.approx(value, rel=1e-10, abs=1e-12), name
            for mine, theirs in zip(rank[3], weights, strict=True):
                assert mine == pytest.approx(theirs, rel=1e-10, abs=1e-12)


def under_way() -> Any:
    """What is pending at each module's turn, in the fourth step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hocket.Trainer(model, F.mse_loss, optimizer, Plan(priority=True, bucket_bytes=64 * 64 * 4))
    batch = (torch.randn(8, 64), torch.randn(8, 64))
    for _ in range(4):
        trainer.step(batch)
    form: Any = trainer._composition.form
    before = [p.detach().clone() for p in model.parameters()]
    pending = [len(form._pending)]
    counting = [layer.register_forward_hook(lambda *_: pending.append(len(form._pending))) for layer in model]
    updated_inside = []
    handle = model[0].register_forward_hook(
        lambda *_: updated_inside.append(
            [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        )
    )
    trainer.step(batch)
    for hook in (*counting, handle):
        hook.remove()
    changed = len(form._pending)
    trainer.finish()
    order = list(form._sender._order)
    return pending, updated_inside[0], changed, len(form._pending), order, len(form._chunks)


def test_a_module_s_forward_waits_for_its_own_gradients_only() -> None:
    ranks = run_ranks(under_way, 2, timeout_s=60)
    for pending, updated, left, at_end, order, chunks in ranks:
        assert pending == [12, 10, 8, 6, 4, 2, 0]
        assert updated == [True, True] + [False] * 10
        assert (left, at_end) == (12, 0)
        assert sorted(order) == list(range(chunks))
        assert order == ranks[0][4]


def kept(priority: bool) -> list[list[float]]:
    """The losses of three epochs whose batches are used as they come, or kept first: the last of each is smaller."""
    found = []
    for keep in (False, True):
        model, data, loss_fn = programs.setting("conv", torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        trainer = hocket.Trainer(model, loss_fn, optimizer, Plan(priority=priority))
        batches = (b for _ in range(3) for b in trainer.batches(DataLoader(data, batch_size=programs.BATCH)))
        found.append([float(trainer.step(batch)) for batch in (list(batches) if keep else batches)])
    return found


@pytest.mark.long
def test_batches_that_are_kept_and_used_later_count_as_they_did() -> None:
    for priority in (False, True):
        for used, later in run_ranks(kept, 2, priority, timeout_s=60):
            assert used == later


def saves(path: str) -> Any:
    model, data, loss_fn = programs.setting("conv", torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=programs.BATCH)
    trainer = hocket.Trainer(model, loss_fn, optimizer, Plan(priority=True))
    for batch in [b for _ in range(2) for b in trainer.batches(loader)]:
        trainer.step(batch)
    trainer.save(path)
    expected = [float(trainer.step(batch)) for batch in trainer.batches(loader)]
    trainer.load(path)
    again = [float(trainer.step(batch)) for batch in trainer.batches(loader)]
    metric = trainer.evaluate(loader)
    del trainer  # what is under way is not lost
    with torch.no_grad():
        direct = float(loss_fn(model(data.tensors[0]), data.tensors[1]))
    return expected, again, metric, direct


def test_checkpoints_and_evaluation_see_the_updated_weights(tmp_path: Path) -> None:
    for expected, again, metric, direct in run_ranks(saves, 2, str(tmp_path / "one"), timeout_s=60):
        assert again == expected
        assert metric == pytest.approx(direct, rel=1e-12)


class Changing(nn.Module):
    """After some steps it uses a layer's bias without the layer, which it had not done before."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 4:
            return self.one(x) + self.two.bias
        return self.two(self.one(x))


def changes() -> str:
    model = Changing()
    trainer = hocket.Trainer(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), Plan(priority=True))
    batch = (torch.ones(4, 4), torch.ones(4, 4))
    messages = []
    for _ in range(6):
        try:
            trainer.step(batch)
        except RuntimeError as error:
            messages.append(str(error))
    return "\n".join(messages)


def test_a_stale_use_is_an_error_and_not_a_wrong_curve() -> None:
    for told in run_ranks(changes, 2, timeout_s=60):
        assert "parameter 'two.bias' was used by a module that had not used it in the first step" in told
        assert "make a new Trainer" in told


def test_what_cannot_be_combined_is_refused_with_the_remedy() -> None:
    for plan, word in [
        (Plan(priority=True, shard="gradients"), 'shard = "none"'),
        (Plan(priority=True, tensor_parallel_degree=2), "leave the model whole"),
        (Plan(priority=True, pipeline_parallel_degree=2), "leave the model whole"),
        (Plan(priority=True, embeddings="row"), 'embeddings = "replicated"'),
        (Plan(priority=True, clip_norm=1.0), "leave clip_norm out"),
    ]:
        with pytest.raises(PlanError, match=word):
            plan.resolve(4)
    model = nn.Linear(3, 3)
    for optimizer, word in [
        (hocket.optim.LAMB(model.parameters()), "LAMB needs norms over whole parameters"),
        (torch.optim.LBFGS(model.parameters()), "LBFGS is not known to work so"),
    ]:
        with pytest.raises((PlanError, ValueError), match=word):
            hocket.Trainer(model, F.mse_loss, optimizer, Plan(priority=True))
    other = nn.Linear(3, 3, device="meta")
    with pytest.raises(PlanError, match="from the CPU's memory only"):
        hocket.Trainer(other, F.mse_loss, torch.optim.SGD(other.parameters(), lr=0.1), Plan(priority=True))


def written(how: str) -> str:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = hocket.Trainer(model, F.mse_loss, optimizer, Plan(priority=True))
    batch = (torch.ones(4, 4).double(), torch.ones(4, 4).double())
    for _ in range(4):
        trainer.step(batch)
    last = list(model.parameters())[-1]
    if how == "after finish":
        trainer.finish()
    if how in ("in place", "after finish"):
        with torch.no_grad():
            last.clamp_(-0.1, 0.1)
    elif how == "by data":
        last.data.mul_(0.9)
    elif how == "other data":
        last.data = last.data * 0.9
    elif how == "state":
        optimizer.state[last]["exp_avg"].zero_()
    elif how == "no state":
        optimizer.state.clear()
    try:
        trainer.step(batch)
    except RuntimeError as error:
        return str(error)
    return ""


WRITTEN = {
    "in place": "to parameter '2.bias'",
    "by data": "to parameter '2.bias'",
    "other data": "to parameter '2.bias'",
    "state": "to the optimizer's state of parameter '2.bias'",
    "no state": "to the optimizer's state of parameter '",
    "after finish": "",
    "nothing": "",
}


def written_all() -> dict[str, str]:
    return {how: written(how) for how in WRITTEN}


@pytest.mark.long
def test_what_is_written_before_an_update_that_is_due_is_refused() -> None:
    for told in run_ranks(written_all, 2, timeout_s=60):
        for how, what in WRITTEN.items():
            assert (what in told[how] and "call trainer.finish()" in told[how]) if what else told[how] == ""


def loaded(priority: bool) -> list[float]:
    """Weights and the optimizer's state of before are loaded into what was given to the Trainer."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trainer = hocket.Trainer(model, F.mse_loss, optimizer, Plan(priority=priority))
    losses, batches = [], torch.randn(12, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    for number, x in enumerate(batches):
        if number == 4:
            kept = copy.deepcopy((model[2].state_dict(), optimizer.state_dict()))
        if number == 7:
            model[2].load_state_dict(kept[0])
        if number == 9:
            optimizer.load_state_dict(kept[1])
        losses.append(float(trainer.step((x, x.flip(0)))))
    return losses


def test_states_of_a_layer_and_of_the_optimizer_are_those_after_the_updates_that_are_due() -> None:
    (alone,) = run_ranks(loaded, 1, False, timeout_s=60)
    for losses in run_ranks(loaded, 2, True, timeout_s=60):
        assert losses == pytest.approx(alone, rel=1e-9)
