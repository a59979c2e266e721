"""What a model or a loss module computes from all samples of a batch is right on ranks, refused, or told by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.comm import torch_adapter
from hocket.parallel.data import look_apart
from hocket.parallel.data._apart import kept_in
from hocket.parallel.data._coupling import taken_beside
from hocket.testing import run_ranks

BATCH = 16


def data() -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(40, 6, generator=random).double()
    return TensorDataset(x, x[:, :3] * x[:, 3:])


class Network(nn.Module):
    """Three numbers for each sample; a way to compute them or their loss can be given."""

    def __init__(self, then: Callable[[Any, Tensor, Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        self.register_buffer("center", torch.zeros(3).double())
        self.register_buffer("largest", torch.zeros(()).double())
        self.register_buffer("queue", torch.ones(4, 3).double())
        self.then = then

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.layers(x)
        return out if self.then is None else self.then(self, out, y if y is not None else out)


def hardest(_: Any, out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean(1).topk(2).values.mean()


def contrastive(_: Any, out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out @ y.T, torch.arange(len(out)))


def masked(_: Any, out: Tensor, y: Tensor) -> Tensor:
    keep = (y[:, 0] > 0).double()
    return ((out - y).square().mean(1) * keep).sum() / keep.sum()


def whitened(_: Any, out: Tensor, __: Tensor) -> Tensor:
    return (out - out.mean(0)) / out.std(0)


def centred(model: Any, out: Tensor, _: Tensor) -> Tensor:
    found = out - model.center
    if model.training:
        model.center = model.center * 0.9 + out.detach().mean(0) * 0.1
    return found


def bounded(model: Any, out: Tensor, _: Tensor) -> Tensor:
    found = out / (1 + model.largest)
    model.largest.copy_(torch.maximum(model.largest, out.detach().abs().max()))
    return found


def queued(model: Any, out: Tensor, _: Tensor) -> Tensor:
    found = out + 0.1 * (out @ model.queue.T).softmax(1) @ model.queue
    model.queue = torch.cat([out.detach(), model.queue])[:4]
    return found


def watched(_: Any, out: Tensor, __: Tensor) -> Tensor:
    """A hook keeps something of it: hooks may keep more outside, so that such a model is not run besides."""
    return out


def gathered(_: Any, out: Tensor, __: Tensor) -> Tensor:
    """It communicates, so that its parts would wait for each other."""
    return out - hocket.average(out.detach().mean(0))


INSIDE = {
    "mean": lambda _, out, y: (out - y).square().mean(),
    "masked": masked,
    "hardest": hardest,
    "contrastive": contrastive,
    "sum": lambda _, out, y: (out - y).square().sum(),
    "metric besides": lambda _, out, y: {"loss": (out - y).square().mean(), "spread": out.std()},
}
OUTPUTS = {
    "whitened": whitened,
    "centred": centred,
    "bounded": bounded,
    "queued": queued,
    "gathered": gathered,
    "watched": watched,
}


def losses(then: Callable[..., Any], *, inside: bool) -> list[Any]:
    """The losses of an epoch and what it leaves, or the error that it ends in; then the warnings."""
    model = Network(then)
    if then is watched:
        plain = model
        model.layers.register_forward_hook(lambda _, __, out: bounded(plain, out, out))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(data(), batch_size=BATCH))
    found: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for x, y in loader:
                optimizer.zero_grad()
                out = model(x, y) if inside else model(x)
                loss = out["loss"] if isinstance(out, dict) else out if inside else F.mse_loss(out, y)
                loss.backward()
                optimizer.step()
                found.append(float(hocket.average(loss)))
            found += [float(one.detach().sum()) for one in (*model.parameters(), model.center)]
        except RuntimeError as error:
            found = [str(error)]
    return [found, [str(one.message) for one in caught]]


def all_losses() -> dict[str, list[Any]]:
    found = {name: losses(then, inside=True) for name, then in INSIDE.items()}
    return found | {name: losses(then, inside=False) for name, then in OUTPUTS.items()}


def everything() -> dict[str, Any]:
    return {"inside": all_losses(), "outside": outside(), "views": two_views()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Of one rank alone, and of two."""
    return [*run_ranks(everything, 1, timeout_s=60), *run_ranks(everything, 2, timeout_s=120)]


def test_what_a_model_computes_from_all_samples_is_right_or_refused_or_told(found: list[dict[str, Any]]) -> None:
    """Hard examples, negatives and sums inside a model's own loss trained another model, without a word."""
    alone, first, other = (one["inside"] for one in found)
    for name in ("hardest", "contrastive", "sum", "whitened"):
        assert len(first[name][0]) == 1, name
        assert first[name][0] == other[name][0]
    assert "its loss of the batch is" in first["hardest"][0][0]
    assert "its loss of the batch is" in first["contrastive"][0][0]
    assert 'loss_reduction="sum"' in first["sum"][0][0]
    assert "what it gives for the samples is" in first["whitened"][0][0]
    for name in ("mean", "masked", "metric besides", "centred", "gathered"):
        torch.testing.assert_close(first[name][0], alone[name][0], rtol=1e-10, atol=1e-12, msg=name)
        torch.testing.assert_close(other[name][0], alone[name][0], rtol=1e-10, atol=1e-12, msg=name)
        assert first[name][1] == [], name
    for name, buffer in (("bounded", "largest"), ("queued", "queue"), ("watched", "largest")):
        assert "Network) keeps a state that depends on the whole batch" in first[name][1][0]
        assert buffer in first[name][1][0]


class CentredLoss(nn.Module):
    """A loss module with a statistic of its own, as that of DINO."""

    def __init__(self, *, averaged: bool) -> None:
        super().__init__()
        self.averaged = averaged
        self.register_buffer("center", torch.zeros(3).double())

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss = (out - y + self.center).square().mean()
        mean = out.detach().mean(0)
        self.center = self.center * 0.9 + 0.1 * (hocket.average(mean) if self.averaged else mean)
        return loss


class Kept(nn.Module):
    """A metric: what it keeps is no matter of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(())

    def forward(self, out: Tensor) -> None:
        self.seen = self.seen + out.detach().sum()


def outside() -> list[Any]:
    found: list[Any] = []
    for averaged, seeded in ((False, True), (True, True), (True, False)):
        model, metric, loss_of = Network(), Kept(), CentredLoss(averaged=averaged)
        teacher = nn.Linear(6, 3).double()
        with torch.no_grad():
            teacher.weight.fill_(0.1 if seeded else torch.initial_seed() % 7 + torch.distributed.get_rank())
            teacher.bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(data(), batch_size=BATCH))
        losses: list[Any] = []
        try:
            for x, y in loader:
                optimizer.zero_grad()
                out = model(x)
                metric(out)
                with torch.no_grad():
                    y = y + teacher(x)
                loss = loss_of(out, y)
                loss.backward()
                optimizer.step()
                losses.append(float(hocket.average(loss)))
        except RuntimeError as error:
            losses = [str(error)]
        found.append(losses)
    return found


def test_loss_modules_and_teachers_that_differ_from_rank_to_rank_are_refused(found: list[dict[str, Any]]) -> None:
    alone, *ranks = (one["outside"] for one in found)
    for own, averaged, unseeded in ranks:
        assert "'center' of the CentredLoss that the loop calls besides its model is not the same" in own[0]
        torch.testing.assert_close(averaged, alone[1], rtol=1e-10, atol=0)
        assert "'weight' of the Linear that the loop calls besides its model is not the same" in unseeded[0]


def simclr(model: Any, x: Tensor) -> Tensor:
    """Views of a batch go through the model together, and its samples are each other's negatives."""
    z = F.normalize(model(torch.cat([x, x + 0.1])), dim=1)
    return (z @ z.T).logsumexp(1).mean()


def pairs(model: Any, x: Tensor) -> Tensor:
    z = F.normalize(model(torch.cat([x, x + 0.1])), dim=1)
    return (z[: len(x)] * z[len(x) :]).sum(1).square().mean()


def vicreg(model: Any, x: Tensor) -> Tensor:
    """The first of two forward passes has a statistic of its own."""
    first, second = model(x), model(x + 0.1)
    return F.mse_loss(first, second) + F.relu(1 - first.std(0)).mean()


def triplet(model: Any, x: Tensor) -> Tensor:
    """Distances of all pairs, which torch cannot derive twice."""
    z, same = model(x), x[:, :1] * x[:, 0] > 0
    distances = torch.cdist(z, z)
    return F.relu((distances * same).amax(1) - (distances + 1e3 * same).amin(1) + 1).mean()


def two_views() -> list[str]:
    found = []
    for loss_of in (simclr, vicreg, triplet, pairs):
        model, _, loader = hocket.distribute(Network(), None, DataLoader(data(), batch_size=BATCH))
        x, _ = next(iter(loader))
        try:
            loss_of(model, x).backward()
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_samples_that_meet_in_views_are_refused(found: list[dict[str, Any]]) -> None:
    for one in found[1:]:
        *meet, apart = one["views"]
        assert all("samples of the batch meet in the loss" in said for said in meet), meet
        assert apart == ""


def test_a_batch_that_the_model_changes_in_place_is_as_it_was_after_the_look() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return x

    x = torch.zeros(6, 2)
    look = look_apart(Shifted(), ((x,), {}), 6, summed=None)
    assert look is not None
    assert not look.wrong
    assert not x.any()


def test_a_model_that_draws_noise_as_it_evaluates_is_looked_at_too() -> None:
    """As a VAE does: it was left alone."""

    def noisy(_: Any, out: Tensor, __: Tensor) -> Tensor:
        return out + torch.randn_like(out)

    x = torch.randn(8, 6).double()
    for then, wrong in ((noisy, False), (lambda *given: whitened(None, noisy(*given), given[2]), True)):
        found = look_apart(Network(then), ((x,), {}), 8, summed=False)
        assert found is not None
        assert bool(found.wrong) is wrong


def test_a_look_seeds_no_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch notes a seed for each kind of them with the stack, a millisecond each time."""
    noted: list[int] = []
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.manual_seed_all", noted.append)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.RReLU())
    found = look_apart(model.double(), ((torch.randn(8, 4).double(),), {}), 8, summed=None)
    assert found is not None
    assert found.rows == {0}
    assert not found.wrong
    assert noted == []


@pytest.mark.filterwarnings("ignore")  # torch says that all of this will move
def test_ranges_of_fake_quantization_are_found_while_they_follow_the_batch() -> None:
    """Torch's observers are hooks of layers; training that knows of quantization was 0.3% off, without a word."""
    quantization = torch.ao.quantization
    torch.manual_seed(0)
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(4, 3))
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    quantization.prepare_qat(model, inplace=True)
    inputs = ((torch.randn(8, 4),), {})
    found = look_apart(model, inputs, 8, summed=None)
    assert found is not None
    assert 0 in found.wrong
    model(*inputs[0])
    model.apply(quantization.disable_observer)
    found = look_apart(model, inputs, 8, summed=None)
    assert found is not None
    assert not found.wrong


class Steps(nn.Module):
    """Gives what a layer makes of sequences, in one row for each step of each."""

    def __init__(self, layer: nn.Module, order: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.order = layer, order

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return self.order(out[0] if isinstance(out, tuple) else out)


FLAT: dict[str, Callable[[Tensor], Tensor]] = {
    "by samples": lambda one: one.reshape(-1, one.shape[-1]),
    "by steps": lambda one: one.transpose(0, 1).reshape(-1, one.shape[-1]),
    "twice": lambda one: torch.cat([one.mean(1), one.amax(1)]),
    "by value": lambda one: (rows := one.reshape(-1, one.shape[-1]))[rows[:, 0].argsort()],
}


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("samples", [1, 2, 7, 8])
def test_rows_for_each_step_of_each_sample_are_those_of_parts_in_any_order(name: str, samples: int) -> None:
    x = torch.randn(samples, 5, 4).double()
    for layer, wrong in (
        (nn.LSTM(4, 3, batch_first=True), False),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), False),
        (nn.LSTM(4, 3), True),
        (nn.TransformerEncoderLayer(4, 2, 8), True),
    ):
        found = look_apart(Steps(layer, FLAT[name]).double(), ((x,), {}), samples, summed=None)
        assert found is not None
        assert not found.rows
        assert bool(found.wrong) is wrong


class Ranked(nn.Module):
    """Takes a list of a mapping for each text of a pair, and computes a loss with in-batch negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, texts: list[dict[str, torch.Tensor]], labels: torch.Tensor) -> torch.Tensor:
        one, other = (self.inner(text["x"]) for text in texts)
        return F.cross_entropy(one @ other.T, torch.arange(len(labels)))


@pytest.mark.parametrize("samples", [2, 4])
def test_a_list_of_mappings_as_long_as_the_arguments_or_the_batch_has_one_for_each_field(samples: int) -> None:
    torch.manual_seed(0)
    texts = [{"x": torch.randn(samples, 4).double()} for _ in range(2)]
    found = look_apart(Ranked().double(), ((texts, torch.zeros(samples)), {}), samples, summed=False)
    assert found is not None
    assert "its loss of the batch" in found.wrong[0]


class Experts(nn.Module):
    """Computes a thousandth of the balance of its experts: a term of its own loss, or one that it keeps for the loop's.

    Entropies are a mean over samples, so that they do not meet in a term of these.
    """

    def __init__(self, *, meet: bool, kept: bool) -> None:
        super().__init__()
        self.choose, self.out, self.meet, self.kept = nn.Linear(6, 4), nn.Linear(6, 3), meet, kept
        self.term: Any = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share, loss = self.choose(x).softmax(1), F.mse_loss(self.out(x), y)
        term = 1e-3 * (share.mean(0).square().sum() if self.meet else -(share * share.log()).sum(1).mean())
        self.term = term if self.kept else None
        return loss if self.kept else loss + term


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("meet", [False, True])
def test_samples_that_meet_in_a_thousandth_of_the_loss_are_found(*, meet: bool, kept: bool) -> None:
    """No comparison of whole losses showed it in float32, and nothing was known of what a model keeps in attributes."""
    torch.manual_seed(0)
    model, (x, y) = Experts(meet=meet, kept=kept), (one.float() for one in data()[:8])
    found = look_apart(model, ((x, y), {}), 8, summed=False)
    assert found is not None
    assert list(found.wrong) == ([1 if kept else 0] if meet else [])
    out = model(x, y)
    loss = out + model.term if kept else out
    taken = taken_beside(loss, kept_in(model), torch_adapter.graph_marks([out]))
    assert bool(found.relevant([out], taken, loss)[0]) == meet
    assert found.relevant([out], [None] * kept, out)[0] == "" or not kept


@pytest.mark.parametrize(
    ("then", "right"),
    [
        (lambda _, out, y: out - out.mean(0), False),
        (lambda _, out, y: F.mse_loss(out, y) + 1e-3 * out.softmax(1).mean(0).square().sum(), False),
        (lambda _, out, y: F.layer_norm(out, [3]), True),
        (lambda _, out, y: F.mse_loss(out, y) + out.softmax(1).square().mean(0).sum(), True),
    ],
)
def test_a_single_sample_gets_another_beside_it(then: Callable[[Any, Tensor, Tensor], Any], *, right: bool) -> None:
    """Where each rank has one, nothing showed that a model computes something of all of its batch."""
    inputs = tuple(one[None] for one in data()[0])
    found = look_apart(Network(then), (inputs, {}), 1, summed=False)
    assert found is not None
    assert bool(found.wrong) is not right
