"""Losses that are no means over samples: equal to one process's, or refused."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import hocket
from hocket.parallel.batches import LossForm, LossTally
from hocket.planner import Plan
from hocket.testing import run_ranks

from .. import loss_programs
from ..loss_programs import LOSSES, PLANS, REFUSED, STATE_PLANS, STATEFUL

plain = functools.cache(loss_programs.plain)
EXACT = [name for name in LOSSES if name not in REFUSED]
CUTS = [name for name in PLANS if name not in ("tensor", "whole pipeline")]


def judge(found: list[list[Any]], cases: list[tuple[str, str]]) -> None:
    cuts = CUTS if len(found) <= 2 else list(PLANS)  # what is left of more ranks than two is data parallel
    for case, *each in zip(cases, *found, strict=True):
        name, plan = case
        assert all(one == each[0] for one in each), f"ranks differ: {case}: {each}"
        if name in REFUSED and plan in cuts:
            assert isinstance(each[0], str), (case, each[0])
            assert "does not keep the loss of one process" in each[0], (case, each[0])
            assert "tensor parallelism, a pipeline with micro_batches = 1, or one rank" in each[0]
            continue
        assert not isinstance(each[0], str), (case, each[0])
        losses, evaluated = plain(name)
        assert each[0][0] == pytest.approx(losses, rel=1e-12), case
        if name not in REFUSED:  # what does not decompose has no mean over batches
            assert each[0][1] == pytest.approx(evaluated, rel=1e-12), case


def test_losses_are_those_of_one_process_or_refused() -> None:
    """Every loss by one of the plans that cut batches, by turns; every refusal by data parallelism."""
    cases = [(name, CUTS[i % len(CUTS)]) for i, name in enumerate(EXACT)] + [(name, "data") for name in REFUSED]
    cases += [("tokens", plan) for plan in CUTS[1:]] + [("contrastive", "tensor"), ("contrastive", "whole pipeline")]
    cases += [("inside", "parameters"), ("inside", "pipeline"), ("masked", "pipeline"), ("root", "pipeline")]
    judge(run_ranks(loss_programs.train_all, 2, cases, timeout_s=110), cases)


@pytest.mark.long
def test_several_batches_are_evaluated_before_the_first_step() -> None:
    """Stages have to agree whether outputs carry a graph, and the last one alone sees what tells."""
    cases = [(name, plan) for plan in ("pipeline", "whole pipeline") for name in ("tokens", "told", "pair", "inside")]
    for case, *each in zip(cases, *run_ranks(loss_programs.train_all, 2, cases, 0), strict=True):
        assert each[0] == each[1]
        assert each[0][1] == pytest.approx(plain(case[0], 0)[1], rel=1e-12), case


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_losses_under_all_plans(ranks: int) -> None:
    """Each loss by each plan: on two ranks or on four, by turns."""
    all_of_them = [(i + k, name, plan) for i, name in enumerate(LOSSES) for k, plan in enumerate(PLANS)]
    cases = [(name, plan) for number, name, plan in all_of_them if number % 2 == (ranks == 4)]
    judge(run_ranks(loss_programs.train_all, ranks, cases, timeout_s=400), cases)


def test_one_process_that_accumulates_refuses_what_does_not_add_up() -> None:
    cases = [("tokens", "accumulate"), ("masked", "accumulate"), ("pair", "accumulate"), ("contrastive", "accumulate")]
    judge([loss_programs.train_all(cases)], cases)


def test_batches_that_are_not_cut_may_have_terms_that_divide_by_different_things() -> None:
    """As those of BERT's pretraining do, over tokens and over samples, where batches are padded unequally."""
    model, optimizer, (x, y) = loss_programs.made("mixed")
    batches = [(x[:7], y[:7].clamp(min=0)), (x[7:14], y[7:14])]  # all tokens count in the first batch
    alone, other, _ = loss_programs.made("mixed")
    expected = []
    for inputs, target in batches:
        other.zero_grad()
        loss = LOSSES["mixed"](alone(inputs), target)
        loss.backward()
        other.step()
        expected.append(loss.item())
    trainer = hocket.Trainer(model, LOSSES["mixed"], optimizer)
    assert [float(trainer.step(batch)) for batch in batches] == pytest.approx(expected, rel=1e-12)
    with pytest.raises(RuntimeError, match="means over different things"):  # by what would two batches be weighted?
        trainer.evaluate(batches)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_loops_of_their_own_weigh_what_the_loss_divides_by(ranks: int) -> None:
    names = [
        "mean",
        "samples",
        "tokens",
        "weighted",
        "divided",
        "told",
        "sum",
        "inside",
        "tasks",
        "mixed",
        "guarded",
        "skipped",
        "contrastive",
        "root",
        *loss_programs.GATHERED,
    ]
    found = run_ranks(loss_programs.own_loops, ranks, names, timeout_s=110)
    assert all(one == found[0] for one in found)
    for name, losses in zip(names, found[0], strict=True):
        if name == "mixed":
            assert "means over different things" in losses
        elif name == "uneven":
            assert "the loss gathers from all ranks, which then must have equally many samples" in losses
        elif name in REFUSED:
            assert "samples of the batch meet in the loss" in losses
        else:
            assert losses == pytest.approx(loss_programs.own_loop(name, distributed=False), rel=1e-12), name


@pytest.mark.long
def test_hugging_face_models_with_padded_batches_lose_what_one_process_loses() -> None:
    pytest.importorskip("transformers")
    names = [*(plan for plan in PLANS if "pipeline" not in plan), "distribute"]
    cases = [(kind, plan) for kind in ("gpt2", "llama") for plan in names]
    found = run_ranks(loss_programs.tune_all, 2, cases, timeout_s=200)
    for i, (kind, plan) in enumerate(cases):
        assert found[0][i] == found[1][i]
        assert found[0][i] == pytest.approx(loss_programs.tune(kind, "plain"), rel=1e-6), (kind, plan)


# --- state that a forward changes -------------------------------------------------------------------------------------


@pytest.mark.long
def test_state_is_left_as_one_pass_leaves_it_or_told() -> None:
    cases = [(name, plan) for name in STATEFUL for plan in STATE_PLANS]
    found = run_ranks(loss_programs.train_all_stateful, 2, cases, timeout_s=110)
    for i, (name, plan) in enumerate(cases):
        losses, buffers, _ = loss_programs.train_stateful(name, None)
        mine, said = found[0][i][0], [line for rank in found for line in rank[i][2]]
        if name in ("largest", "batch norm"):
            assert any("2" in line and ("part" in line or "each of them" in line) for line in said), (name, plan, said)
            assert mine != pytest.approx(losses, rel=1e-12)
            continue
        assert [line for line in said if "part" in line or "micro" in line] == [], (name, plan)
        assert mine == pytest.approx(losses, rel=1e-11), (name, plan)
        for rank in found:
            for key, value in rank[i][1].items():
                if key in buffers:
                    torch.testing.assert_close(value, buffers[key], rtol=1e-11, atol=0)


# --- what a loss divides by -------------------------------------------------------------------------------------------

KINDS = {
    "mse": lambda o, t: F.mse_loss(o, torch.zeros_like(o)) / 3,
    "tokens": lambda o, t: F.cross_entropy(o, t),
    "weighted": lambda o, t: 2 * F.cross_entropy(o, t, weight=torch.linspace(0.1, 1, 5, dtype=o.dtype)),
    "smoothed": lambda o, t: F.cross_entropy(o, t, label_smoothing=0.2).to(torch.float64),
    "divided": lambda o, t: (o.square().sum(-1) * (t >= 0)).sum() / (t >= 0).sum(),
    "chosen": lambda o, t: o[t >= 0].square().mean(),
    "two": lambda o, t: F.cross_entropy(o, t) - 0.5 * o[t >= 0].abs().mean(),
}


@given(st.sampled_from(sorted(KINDS)), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_parts_of_a_batch_add_up_to_its_loss(kind: str, sizes: list[int], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    output = torch.randn(total, 5, generator=random, dtype=torch.float64, requires_grad=True)
    target = torch.randint(5, (total,), generator=random)
    target[torch.rand(total, generator=random) < 0.3] = -100
    whole = KINDS[kind](output, target)
    form = LossForm()
    form.ratios = (1.0, 5.0) if kind == "two" else (1.0, 1.0) if kind == "smoothed" else (1.0,)
    tally, measured = LossTally(form), []
    for o, t in zip(output.split(sizes), target.split(sizes), strict=True):
        measured.append(form.measure(KINDS[kind](o, t), (o,), t, len(t)))
        tally.add(measured[-1])
    loss, count = tally.mean()
    assert float(loss) == pytest.approx(float(whole.detach()), rel=1e-10, nan_ok=True)
    if count:
        (expected,) = torch.autograd.grad(whole, output)
        weighed = [one.loss * (one.weight / count) for one in measured if one.weight]
        parts = [torch.autograd.grad(one, output, retain_graph=True)[0] for one in weighed]
        torch.testing.assert_close(sum(parts[1:], parts[0]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("ratios", "loss", "same"),
    [
        ((1.0,), "smoothed", True),  # one count for each term, as one before
        ((1.0, 1.0), "tokens", True),
        ((1.0,), "two", False),  # tokens, and what was chosen
        ((1.0,), "padded", True),  # samples alone, also where terms have more elements
        ((1.0, 1.0, 5.0), "padded", True),
    ],
)
def test_a_branch_that_a_later_batch_takes_is_weighed_by_what_it_divides_by_or_refused(
    ratios: tuple[float, ...], loss: str, same: bool
) -> None:
    random = torch.Generator().manual_seed(3)
    output = torch.randn(8, 5, generator=random, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, -100, -100, 2, 3, 4, 0, 1])
    kinds = {**KINDS, "padded": lambda o, t: F.mse_loss(o.sum(1), t.double()) + o.abs().mean()}
    form = LossForm()
    form.ratios = ratios
    tally = LossTally(form)
    for o, t in zip(output.split(4), target.split(4), strict=True):
        tally.add(form.measure(kinds[loss](o, t), (o,), t, len(t)))
    if same:
        assert float(tally.mean()[0]) == pytest.approx(float(kinds[loss](output, target).detach()), rel=1e-12)
        return
    with pytest.raises(RuntimeError, match="takes another branch"):
        tally.mean()


class _Masked(torch.nn.Module):
    """A model that computes its loss over what is not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scores = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.scores(self.first(x)).squeeze(1).square() * mask).sum() / mask.sum()


def _masked_in_parts(**fields: Any) -> tuple[list[float], list[float]]:
    """Return losses and a sum of weights of two steps of one process, and of a plan in whose parts nothing counts."""
    torch.manual_seed(0)
    model, x = _Masked().double(), torch.rand(4, 2, dtype=torch.float64)
    plain = copy.deepcopy(model)
    masks = [torch.tensor(one).double() for one in ([1.0, 0, 1, 1], [1.0, 1, 0, 0], [0.0, 1, 1, 0])]
    optimizer, expected = torch.optim.SGD(plain.parameters(), 0.1), []
    for mask in masks:
        optimizer.zero_grad()
        loss = plain(x, mask)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    made = torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(model, lambda o, _: o, made, Plan(**fields), sample=(x, masks[0]))
    found = [float(trainer.step((x, mask, mask))) for mask in masks]
    state = trainer.state_dict()
    weights = [float(one["scores.weight"].sum()) for one in (plain.state_dict(), state)]
    return [*expected, weights[0]], [*found, weights[1]]


def test_a_part_in_which_nothing_counts_leaves_weights_as_they_are() -> None:
    expected, found = _masked_in_parts(accumulate=2)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "fields",
    [{}, {"shard": "optimizer"}, {"shard": "parameters"}, {"pipeline_parallel_degree": 2, "micro_batches": 2}],
    ids=lambda fields: next(iter(fields.values()), "data"),
)
def test_ranks_on_which_nothing_counts_leave_weights_as_they_are(fields: dict[str, Any]) -> None:
    for expected, found in run_ranks(functools.partial(_masked_in_parts, **fields), 2):
        assert found == pytest.approx(expected, rel=1e-12)


def _objects() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and objects of which parts of the second to fourth batch of eight have none."""
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 4, generator=random).double(), (torch.rand(32, 6, generator=random) < 0.3).double()
    y[8:12] = y[16:24] = y[28] = 0
    return x, y


def _of_objects(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, target, reduction="sum") / target.sum().clamp(min=1)


def _of_unknown(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.square().sum() / target.sum().clamp(min=1)


def _of_nearly_none(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.square().sum() / target.sum().clamp(min=0.25)


def _objects_detected(kind: str, loss_fn: Any = _of_objects) -> list[float] | str:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 6).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*_objects()), batch_size=8)
    try:
        if kind in ("data", "accumulate", "weight"):
            plan = Plan(accumulate=2) if kind == "accumulate" else Plan(data_parallel_degree=2)
            counter = _number if kind == "weight" else None
            trainer = hocket.Trainer(model, loss_fn, optimizer, plan=plan, loss_weight=counter)
            return [float(trainer.step(batch)) for batch in trainer.batches(loader)]
        own: Any = model
        if kind.startswith("distribute"):
            counter = _number if kind == "distribute by weight" else None
            own, optimizer, loader = hocket.distribute(model, optimizer, loader, loss_weight=counter)
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(own(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item() if kind == "plain" else hocket.average(loss.item()))
        return losses
    except RuntimeError as error:
        return str(error)


def _objects_by_ranks() -> list[list[float] | str]:
    """What two ranks say by each kind, then where the graph does not tell."""
    found = [_objects_detected(kind) for kind in ("distribute", "data", "weight", "distribute by weight")]
    found += [_objects_detected(kind, _of_nearly_none) for kind in ("distribute by weight", "weight")]
    return [*found, _objects_detected("distribute", _of_unknown), _objects_detected("data", _of_unknown)]


def _number(batch: Any) -> torch.Tensor:
    return batch[1].sum()


@pytest.mark.long
def test_parts_without_objects_weigh_what_they_do_in_one_process() -> None:
    """Their sum is not 0, and divided by 1 (RetinaNet, FCOS); or refused where nothing shows that there are none."""
    losses = _objects_detected("plain")
    assert _objects_detected("accumulate") == pytest.approx(losses, rel=1e-12)
    for rank in run_ranks(_objects_by_ranks, 2, timeout_s=60):
        for one in rank[:4]:
            assert one == pytest.approx(losses, rel=1e-12)
        assert rank[4] == pytest.approx(_objects_detected("plain", _of_nearly_none), rel=1e-12)
        assert "loss_weight counts nothing in this batch" in rank[5]
        for one in rank[6:]:
            assert "hocket.total(count).clamp(min=1)" in one
