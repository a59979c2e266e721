"""Models that no check of their loss may run, or whose passes of a part leave something else, are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.planner import Plan, PlanError
from hocket.testing import RankError, run_ranks


class Student(nn.Module):
    """BYOL in small: a teacher follows its student in each forward pass in training."""

    def __init__(self, *, alike: bool = False, data: bool = False) -> None:
        super().__init__()
        self.student, self.data = nn.Linear(4, 4), data
        self.teacher = (copy.deepcopy(self.student) if alike else nn.Linear(4, 4)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    if self.data:
                        teacher.data = teacher.data * 0.9 + student.data * 0.1
                    else:
                        teacher.lerp_(student, 0.1)
        return self.student(x) - self.teacher(x)


class Clamped(nn.Linear):
    """Writes to its weight, the same whatever the samples are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


def table(**fields: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(12, 4, **fields), nn.Flatten())


def said(model: nn.Module, plan: Plan, *, words: bool = False) -> str | list[float]:
    """The losses, or the error."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(12, (3, 8, 1), generator=generator) if words else torch.randn(3, 8, 4, generator=generator)
    trained = [p for p in model.parameters() if p.requires_grad]
    trainer = hocket.Trainer(model, F.mse_loss, torch.optim.SGD(trained, 0.1), plan, sample=x[0])
    try:
        return [float(trainer.step((one, torch.ones(8, 4)))) for one in x]
    except PlanError as error:
        return str(error)


def all_said() -> dict[str, str | list[float]]:
    torch.manual_seed(0)
    divided, twice = Plan(tensor_parallel_degree=2), Plan(accumulate=2)
    return {
        "data": said(Student(), Plan()),
        "set": said(Student(data=True), Plan()),
        "tensor": said(Student(), divided),
        "sharded": said(Student(), Plan(shard="parameters")),
        "alike": said(Student(alike=True), Plan()),
        "alike, twice": said(Student(alike=True), twice),
        "clamped": said(Clamped(4, 4), twice),
        "norm": said(table(max_norm=1.0), Plan(), words=True),
        "norm, whole": said(table(max_norm=1.0), divided, words=True),
        "often": said(table(scale_grad_by_freq=True), Plan(), words=True),
        "sparse": said(table(sparse=True), Plan(shard="parameters"), words=True),
    }


def test_models_that_change_parameters_in_each_pass_and_tables_of_whole_batches_are_refused() -> None:
    alone = all_said_alone()
    for found in run_ranks(all_said, 2):
        for name in ("data", "set", "tensor", "sharded", "alike, twice"):
            assert "each forward pass changes teacher.bias" in found[name], name
        assert "0 has max_norm, which goes by all rows" in found["norm"]
        assert "0 has scale_grad_by_freq" in found["often"]
        assert "say sparse=False" in found["sparse"]
        for name in ("alike", "clamped", "norm, whole"):
            assert torch.allclose(torch.tensor(found[name]), torch.tensor(alone[name]), rtol=1e-5), name


def all_said_alone() -> dict[str, Any]:
    """What one process loses by a loop of its own."""
    torch.manual_seed(0)
    losses: dict[str, Any] = {}
    makers = {
        "data": Student, "set": Student, "tensor": Student, "sharded": Student, "alike": lambda: Student(alike=True),
        "alike, twice": lambda: Student(alike=True), "clamped": lambda: Clamped(4, 4), "norm": table,
        "norm, whole": lambda: table(max_norm=1.0),
    }  # fmt: skip
    for name, make in makers.items():
        model, generator = make(), torch.Generator().manual_seed(1)
        words = name.startswith("norm")
        x = torch.randint(12, (3, 8, 1), generator=generator) if words else torch.randn(3, 8, 4, generator=generator)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        losses[name] = []
        for one in x:
            optimizer.zero_grad()
            loss = F.mse_loss(model(one), torch.ones(8, 4))
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    return losses


def above_the_median(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half of the samples count, of any part of a batch: no count tells that they are others."""
    each = (output - target).square().mean(1)
    return each[each > each.detach().median()].mean()


def guarded(output: torch.Tensor, target: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return ((output - target).square() * (target > 0)).sum() / count


def of_samples_that_count(target: torch.Tensor, loss: Any) -> None:
    """Take a step in two parts."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()
    trainer = hocket.Trainer(model, loss, torch.optim.SGD(model.parameters(), 0.1), Plan(accumulate=2))
    trainer.step((torch.randn(len(target), 4, dtype=torch.float64), target))


def test_losses_that_the_first_samples_explain_by_chance_are_refused() -> None:
    many = torch.ones(8, 4, dtype=torch.float64)
    few = many * torch.tensor([1, 0, 0, 1, 0, 0, 1, 0]).unsqueeze(1)
    with pytest.raises(PlanError, match="samples exchanged"):
        # The first two and the other four are cut at their medians as the six are: other parts would not be.
        of_samples_that_count(many[:6] * torch.tensor([10, 80, 20, 30, 90, 100]).unsqueeze(1), above_the_median)
    with pytest.raises(PlanError, match="bends a mean over samples"):
        of_samples_that_count(many, lambda o, t: (F.mse_loss(o, t) - 0.1).abs() + 0.1)
    with pytest.raises(PlanError, match="divides by more than it counts"):
        of_samples_that_count(few, lambda o, t: guarded(o, t, (t > 0).sum() + 1))
    with pytest.warns(UserWarning, match="divides by more than it counts where that is little"):
        of_samples_that_count(many, lambda o, t: guarded(o, t, (t > 0).sum().clamp(min=8)))
    of_samples_that_count(many, lambda o, t: guarded(o, t, (t > 0).sum().clamp(min=1)))


def test_a_look_that_fails_by_itself_is_told_and_the_loss_is_judged_by_its_parts(monkeypatch: Any) -> None:
    """Its error was taken for the program's own, which the step would meet, and nothing was judged."""

    def broken(*_: Any) -> bool:
        raise TypeError("of the look")

    monkeypatch.setattr("hocket.parallel.compose._loss_judge.samples_paired", broken)
    ones = torch.ones(8, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="could not be compared .*: TypeError: of the look"):
        of_samples_that_count(ones, F.mse_loss)
    with pytest.raises(PlanError, match="is not a mean over samples"):
        of_samples_that_count(ones, lambda output, target: F.mse_loss(output, target).sqrt())


def test_a_loss_that_is_no_number_yet_is_judged_by_a_later_batch() -> None:
    target = torch.ones(8, 4, dtype=torch.float64)
    model = nn.Linear(4, 4).double()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.square().mean().sqrt() + 0 * target.mean()

    trainer = hocket.Trainer(model, loss, torch.optim.SGD(model.parameters(), 0.0), Plan(accumulate=2))
    inputs = torch.randn_like(target)
    trainer.step((inputs, target * torch.inf))
    with pytest.raises(PlanError, match="is not a mean over samples"):
        trainer.step((inputs, target))


def noisy(output: torch.Tensor) -> torch.Tensor:
    return output + torch.randn_like(output) * torch.randint(1, 5, (len(output), 1))


def test_a_loss_with_noise_is_judged_and_one_that_chooses_samples_is_told_not_to_be() -> None:
    """That of a VAE is random as it evaluates, too; it was judged not at all."""
    ones = torch.ones(8, 4, dtype=torch.float64)
    of_samples_that_count(ones, lambda output, target: F.mse_loss(noisy(output), target))
    with pytest.raises(PlanError, match="is not a mean over samples"):
        of_samples_that_count(ones, lambda output, target: F.mse_loss(noisy(output), target) + output.sum())
    with pytest.warns(UserWarning, match="draws random choices in each pass"):
        of_samples_that_count(
            ones, lambda output, target: F.mse_loss(output[torch.randperm(len(output))[:1]], target[:1])
        )


class Balanced(nn.Module):
    """Computes its loss: means over labels that count, and a thousandth of the balance of experts, as Mixtral's."""

    def __init__(self, *, flat: bool, constant: bool) -> None:
        super().__init__()
        self.experts, self.flat, self.constant = nn.Linear(4, 3), flat, constant

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.experts(inputs)
        share = logits.softmax(-1).mean((0, 1))
        used = torch.full_like(share, 1 / 3) if self.constant else share.detach()
        balance = (used * share).sum() if self.flat else (used.expand(2, 3) * share).sum()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-3 * balance


def balanced(micro_batches: int, *, flat: bool = False, constant: bool = False) -> None:
    torch.manual_seed(0)
    layers = [Balanced(flat=flat, constant=constant)]
    plan = Plan(accumulate=2)
    if micro_batches:
        plan = Plan(pipeline_parallel_degree=2, micro_batches=micro_batches)
    model = layers[0] if not micro_batches else Piped(layers[0])
    inputs = torch.randn(8, 5, 4)
    batch = {"inputs": inputs, "labels": torch.arange(40).view(8, 5) % 3}
    trainer = hocket.Trainer(model, None, torch.optim.SGD(model.parameters(), 0.1), plan, sample=batch)
    trainer.step(batch)


class Piped(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), last

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.last(3 * self.first(inputs), labels)


def test_a_term_that_is_small_is_judged_by_itself() -> None:
    """No comparison of losses shows it, but Adam trains by it what has no other gradient."""
    balanced(0, flat=True, constant=True)
    with pytest.raises(PlanError, match=r"a term of it is 0\.000\d+ for 8 samples"):
        balanced(0, flat=True)
    with pytest.raises(PlanError, match=r"a term of it is 0\.000\d+ for 8 samples"):
        balanced(0)
    with pytest.raises(RankError, match=r"a term of it is 0\.000\d+ for 8 samples"):
        run_ranks(balanced, 2, 2)


def later(plan: Plan, term: str) -> str | list[float]:
    """The losses, or the error, of a loss that has a term from the second epoch on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    x = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, epoch = torch.arange(8) % 4, 0

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(output, target)
        if term == "grows":  # in-batch negatives, after a warm-up
            return loss + 0.1 * epoch * F.cross_entropy(output @ output.T, torch.arange(len(output)))
        if epoch and term == "root":
            return loss + output.square().mean().sqrt()
        if epoch and term == "means":
            return loss + output.square().mean() + F.cross_entropy(output, target, reduction="none").exp().mean()
        return output.abs().mean() if epoch % 2 and term == "turns" else loss

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan, sample=x[0])
    found = []
    try:
        for epoch in range(4):  # noqa: B007 (the loss reads it)
            found += [float(trainer.step((one, y))) for one in x]
    except PlanError as error:
        return f"{trainer.steps} steps: {error}"
    return found


def all_later() -> dict[str, str | list[float]]:
    plans = {
        "data": Plan(),
        "gradients": Plan(shard="gradients"),
        "parameters": Plan(shard="parameters"),
        "priority": Plan(priority=True),
        "twice": Plan(tensor_parallel_degree=2, accumulate=2),
        "pipeline": Plan(pipeline_parallel_degree=2, micro_batches=2),
        "tensor": Plan(tensor_parallel_degree=2),
    }
    return {f"{name} {term}": later(plan, term) for name, plan in plans.items() for term in TERMS}


TERMS = ("grows", "root", "means", "turns")


@pytest.mark.long
def test_a_term_that_comes_later_is_compared_when_it_comes() -> None:
    alone = {term: later(Plan(), term) for term in TERMS}
    for found in run_ranks(all_later, 2):
        for name, given in found.items():
            plan, term = name.split()
            if term in ("grows", "root") and plan != "tensor":
                assert "3 steps: " in str(given), name
                assert "it is computed otherwise in this step" in str(given), name
            else:
                assert given == pytest.approx(alone[term], rel=1e-12), name


def losses_after_an_empty_one() -> list[float]:
    """In the first batch there is nothing that counts."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()
    x = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.stack([torch.zeros(8, dtype=torch.long), torch.arange(8) % 4, torch.arange(8) % 3])

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        labelled = target > 0
        return F.cross_entropy(output[labelled], target[labelled], reduction="sum") / labelled.sum().clamp(min=1)

    trainer = hocket.Trainer(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1), Plan())
    return [float(trainer.step(batch)) for batch in zip(x, y, strict=True)]


def test_a_check_that_waits_for_samples_does_not_take_the_steps_before_for_changes_by_passes() -> None:
    (alone,) = run_ranks(losses_after_an_empty_one, 1)
    for losses in run_ranks(losses_after_an_empty_one, 2):
        assert losses == pytest.approx(alone, rel=1e-12)


def test_a_batch_norm_without_running_statistics_is_refused_by_its_name() -> None:
    """Its statistics are those of a part of the batch where it evaluates; the refusal spoke of the loss alone."""
    norms = [nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4)]
    untracked, tracked = (nn.Sequential(nn.Linear(4, 4), norm) for norm in norms)
    plan = Plan(sync_batch_norm=True)
    for refused, trained in zip(run_ranks(said, 2, untracked, plan), run_ranks(said, 2, tracked, plan), strict=True):
        assert "layer '1': this batch norm keeps no running statistics" in refused
        assert "say track_running_stats=True" in refused
        assert len(trained) == 3
