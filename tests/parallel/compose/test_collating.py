"""Each rank calls a loader's collate_fn with its own samples: what that changes is told or refused."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import hocket
from hocket.parallel.batches._collated import Alone, alone_like, look_at_collating
from hocket.planner import Plan
from hocket.testing import run_ranks

Sample = tuple[Tensor, Tensor]


def samples(*, ragged: bool) -> list[Sample]:
    """Samples of 4 numbers in 5 or up to 9 rows, and their classes."""
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 10, (14,), generator=random).tolist() if ragged else [5] * 14
    rows = (torch.randn(n, 4, generator=random, dtype=torch.float64) for n in lengths)
    return [(x, torch.tensor(i % 3)) for i, x in enumerate(rows)]


def padded(rows: list[Sample]) -> Sample:
    return nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True), torch.stack([y for _, y in rows])


def listed(rows: list[Sample]) -> tuple[list[Tensor], Tensor]:
    return [x for x, _ in rows], torch.stack([y for _, y in rows])


def put_together(x: Any, length: int = 0) -> Any:
    """What a loop makes of a list of samples: padded to the longest, or to a length."""
    if isinstance(x, list):
        x = nn.utils.rnn.pad_sequence(x, batch_first=True)
        return F.pad(x, (0, 0, 0, max(0, length - x.shape[1])))
    return x


def mixed(rows: list[Sample]) -> Sample:
    x, y = default_collate(rows)
    return 0.7 * x + 0.3 * x.roll(1, 0), y


def mixed_by_chance(rows: list[Sample]) -> Sample:
    x, y = default_collate(rows)
    part = torch.rand(()).double()
    return part * x + (1 - part) * x[torch.randperm(len(x)).roll(1)], y


def normalised(rows: list[Sample]) -> Sample:
    x, y = default_collate(rows)
    return (x - x.mean(0)) / x.std(0), y


def noisy(rows: list[Sample]) -> Sample:
    x, y = default_collate(rows)
    return x + torch.rand_like(x), y


def by_size(rows: list[Sample]) -> Sample:
    return default_collate(sorted(rows, key=lambda row: float(row[0].sum())))  # type: ignore[no-any-return]


class Network(nn.Module):
    """Classes of a mean over rows: of all, or of those that are not padding."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.masks, self.inner, self.scores = masks, nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        is_row = (x != 0).any(-1, keepdim=True) if self.masks else torch.ones_like(x[..., :1])
        return self.scores((torch.tanh(self.inner(x)) * is_row).sum(1) / is_row.sum(1))


class Whole:
    """Batches of a loader, of which every rank loads all."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def loader(collate: Callable[[list[Sample]], Any], workers: int = 0) -> Any:
    context = "fork" if workers else None
    rows = samples(ragged=collate in (padded, listed))
    return DataLoader(rows, 8, collate_fn=collate, num_workers=workers, multiprocessing_context=context)


def made(masks: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Network(masks).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def plain(batches: Any, masks: bool = False, length: int = 0) -> list[float]:
    model, optimizer = made(masks)
    return list(steps(model, optimizer, batches, lambda loss: loss, length))


def steps(
    model: nn.Module, optimizer: Any, batches: Any, report: Callable[[Tensor], Any], length: int
) -> Iterator[float]:
    for x, y in batches:
        loss = F.cross_entropy(model(put_together(x, length)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(report(loss.detach()))


def trained(batches: Any, plan: Plan | None, masks: bool = False, length: int = 0) -> tuple[list[float], str]:
    """Losses by `plan` or in a loop of the program's own, and what was told or refused."""
    model, optimizer = made(masks)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses: list[float] = []
        said = ""
        try:
            if plan is None:
                model, optimizer, batches = hocket.distribute(model, optimizer, batches)
                losses += steps(model, optimizer, batches, hocket.average, length)
            else:
                trainer = hocket.Trainer(
                    model, F.cross_entropy, optimizer, plan, sample=(torch.ones(8, 9, 4).double(),)
                )
                given = ((put_together(x, length), y) for x, y in trainer.batches(batches))
                losses += [float(trainer.step(batch)) for batch in given]
        except (RuntimeError, ValueError) as error:
            said = str(error)
    return losses, said + "".join(str(one.message) for one in told if "collate_fn" in str(one.message))


def run_all() -> dict[str, tuple[list[float], str]]:
    whole = Plan(tensor_parallel_degree=2)
    found = {f"{one.__name__}, tensor": trained(loader(one), whole) for one in (mixed, padded)}
    for name, plan in (("Trainer", Plan()), ("loop", None)):
        for one in (mixed, mixed_by_chance, normalised, noisy, by_size):
            found[f"{one.__name__}, {name}"] = trained(loader(one), plan)
        found[f"mixed by workers, {name}"] = trained(loader(mixed, 1), plan)
        found[f"padded and masked, {name}"] = trained(loader(padded), plan, masks=True)
        found[f"whole mixed, {name}"] = trained(Whole(loader(mixed)), plan)
        found[f"whole padded, {name}"] = trained(Whole(loader(padded)), plan)
        found[f"padded by workers, {name}"] = trained(loader(padded, 1), plan)
        found[f"padded outside, {name}"] = trained(loader(listed), plan)
        found[f"padded outside to one length, {name}"] = trained(loader(listed), plan, length=9)
        found[f"padded outside and masked, {name}"] = trained(loader(listed), plan, masks=True)
    found["padded, parameters"] = trained(loader(padded), Plan(shard="parameters"))
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[list[float], str]]:
    ranks = run_ranks(run_all, 2, timeout_s=110)
    assert all(one == other for one, other in zip(ranks[0].items(), ranks[1].items(), strict=True) if "," not in one[0])
    return ranks[0]


@pytest.mark.long
@pytest.mark.parametrize("how", ["Trainer", "loop"])
def test_a_collate_fn_that_gives_a_sample_something_of_others_is_told(found: Any, how: str) -> None:
    for name in ("mixed", "mixed_by_chance", "normalised", "mixed by workers"):
        assert "gives a sample something else beside other samples" in found[f"{name}, {how}"][1], name
    for name in ("noisy", "by_size", "padded and masked", "whole mixed", "whole padded"):
        assert not found[f"{name}, {how}"][1], name


@pytest.mark.parametrize(
    "how",
    [
        *("padded by workers, Trainer", "padded by workers, loop", "padded, parameters"),
        *("padded outside, Trainer", "padded outside, loop"),
    ],
)
def test_padding_that_is_not_masked_is_refused(found: Any, how: str) -> None:
    assert "something else for a sample that is padded further" in found[how][1]
    assert "or it is on the left" in found[how][1]
    assert "pad on the right" in found[how][1]


@pytest.mark.parametrize("how", ["Trainer", "loop"])
def test_batches_that_every_rank_loads_whole_are_exact(found: Any, how: str) -> None:
    assert found[f"whole mixed, {how}"][0] == pytest.approx(plain(loader(mixed)), abs=1e-9)
    assert found[f"whole padded, {how}"][0] == pytest.approx(plain(loader(padded)), abs=1e-9)
    assert found[f"padded outside and masked, {how}"][0] == pytest.approx(plain(loader(padded), masks=True), abs=1e-9)
    to_one_length = plain(loader(listed), length=9)
    assert found[f"padded outside to one length, {how}"][0] == pytest.approx(to_one_length, abs=1e-9)
    assert found[f"padded and masked, {how}"][0] == pytest.approx(plain(loader(padded), masks=True), abs=1e-9)


def test_a_plan_that_does_not_cut_batches_takes_any_collate_fn(found: Any) -> None:
    for one in (mixed, padded):
        losses, said = found[f"{one.__name__}, tensor"]
        assert not said
        assert losses == pytest.approx(plain(loader(one)), abs=1e-9)


def test_samples_that_a_collate_fn_changes_in_place_are_its_own() -> None:
    rows = [{"x": [1.0] * n} for n in (2, 3, 1, 3)]

    def fill(given: list[dict[str, list[float]]]) -> Any:
        for one in given:
            one["x"] += [0.0] * (max(len(row["x"]) for row in given) - len(one["x"]))
        return {"x": torch.tensor([one["x"] for one in given])}, False

    shown = look_at_collating(fill, rows)
    assert shown.batch["x"].shape == (4, 3)
    assert not shown.mixed
    assert shown.alone is not None
    assert shown.alone.batch["x"].tolist() == [[1.0, 1.0]]  # the first that is shorter


def test_labels_that_are_the_inputs_where_nothing_is_padded_stay_labels_beside_a_longer_sample() -> None:
    ids = torch.tensor([[3, 4, 5], [7, 8, 9]])
    batch = {"ids": ids, "labels": ids.clone()}
    longer = {"ids": torch.tensor([[3, 4, 5, 0, 0]]), "labels": torch.tensor([[3, 4, 5, -100, -100]])}
    held, alone = list(batch.values()), Alone(longer, 0, 1)
    found = alone_like(batch, held, alone)
    assert found is not None
    assert all(torch.equal(found.batch[name], longer[name]) for name in longer)
    assert alone_like({name: one.clone() for name, one in batch.items()}, held, alone) is None  # either may be either


@pytest.mark.parametrize("count", [1, 2, 3])
def test_random_numbers_that_mix_a_few_samples_are_seen(count: int) -> None:
    def drawing(collate: Callable[[list[Sample]], Sample]) -> Callable[[Any], tuple[Any, bool]]:
        def collated(rows: list[Sample]) -> tuple[Sample, bool]:
            torch.manual_seed(1)
            return collate(rows), True

        return collated

    few = samples(ragged=False)[:count]
    assert look_at_collating(drawing(mixed), few).mixed
    assert not look_at_collating(drawing(noisy), few).mixed


@pytest.mark.parametrize("count", [1, 2])
def test_random_numbers_that_mix_images_of_whole_numbers_are_seen(count: int) -> None:
    def collated(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Any, bool]:
        images, labels = torch.stack([one for one, _ in rows]), torch.stack([label for _, label in rows])
        left = images.clone()
        left[:, :, 1:] = images.roll(1, 0)[:, :, 1:]
        return (left, labels), True

    def by_itself(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Any, bool]:
        return (torch.stack([255 - one for one, _ in rows]), torch.stack([label for _, label in rows])), True

    few = [(torch.full((3, 3), 90 + 20 * i, dtype=torch.uint8), torch.tensor(i)) for i in range(count)]
    assert look_at_collating(collated, few).mixed
    assert not look_at_collating(by_itself, few).mixed
