"""Ranks together see the batches of one device, in order, each sample with the same random augmentation."""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset

import hocket
from hocket.parallel import DistributedLoader, ShardedLoader
from hocket.parallel.batches import _rng
from hocket.parallel.batches import batch as _batch
from hocket.parallel.batches._batch_shard import BatchShard, fingerprint
from hocket.parallel.batches._cut import Cutter, cut_fields, samples_in
from hocket.parallel.batches._samples import SeededDataset
from hocket.parallel.mesh.world import World
from hocket.testing import RankError, run_ranks

from .. import loader_programs as programs

# --- arithmetic -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 500), st.integers(1, 40))
def test_shares_are_contiguous_complete_and_as_equal_as_can_be(total: int, world: int) -> None:
    shares = [BatchShard.of(total, world, rank) for rank in range(world)]
    assert [shares[0].begin, *(s.end for s in shares)] == [s.begin for s in shares] + [total]
    sizes = [s.samples for s in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    if total:
        assert sum(s.weight for s in shares) == pytest.approx(world)
        for share in shares:
            assert share.weight == pytest.approx(share.samples * world / total)
    if total and total % world == 0:
        assert {s.weight for s in shares} == {1.0}


class Alike(World):
    """A world whose other ranks do and draw as this one does."""

    def from_root(self, value: Any) -> Any:
        return value

    def from_all(self, value: Any) -> list[Any]:
        return [value] * self.size


def as_rank(kind: type[Any], loader: Any, rank: int, world: int) -> Any:
    made = kind(loader)
    made.world = made._among = Alike(rank, world, None)
    return made


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 60),
    batch=st.integers(1, 20),
    world=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    by_index=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_parts_of_all_ranks_are_the_batches_of_torch(
    size: int, batch: int, world: int, shuffle: bool, drop_last: bool, by_index: bool, seed: int
) -> None:
    def user_loader() -> Any:
        torch.manual_seed(seed)
        loader = DataLoader(TensorDataset(torch.arange(size)), batch_size=batch, shuffle=shuffle, drop_last=drop_last)
        return loader if by_index else Wrapped(loader)

    serial = user_loader()
    expected = [[x.tolist() for (x,) in serial] for _ in range(2)]
    training, evaluation = [], []
    for rank in range(world):
        loader = as_rank(DistributedLoader, user_loader(), rank, world)
        epochs = [[(x.tolist(), share_in_use()) for (x,) in loader] for _ in range(2)]
        assert {len(epoch) for epoch in epochs} == {len(serial)} == {len(loader)}
        training.append([[x[: share.samples] for x, share in epoch] for epoch in epochs])
        shard = as_rank(ShardedLoader, user_loader(), rank, world)
        evaluation.append([[x.tolist() for (x,) in shard] for _ in range(2)])
        if by_index:
            assert len(evaluation[-1][0]) == len(shard)
    for epoch in range(2):
        batches = zip(*(rank[epoch] for rank in training), strict=True)
        assert [list(itertools.chain(*parts)) for parts in batches] == expected[epoch]
        seen = sorted(x for rank in evaluation for part in rank[epoch] for x in part)
        assert seen == sorted(x for part in expected[epoch] for x in part)


class Wrapped:
    """Batches of which hocket knows nothing but that they can be iterated over."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def share_in_use() -> BatchShard:
    note = _batch.current()
    assert note is not None
    if note.share is None or note.share == BatchShard(0, 1, 1, 1):
        return BatchShard(0, 10**6, 10**6, 1)  # alone and not cut: all of the batch counts
    return note.share


# --- worlds of real processes ---------------------------------------------------------------------------------------


@functools.cache
def trained(n: int) -> list[dict[str, list[list[programs.Part]]]]:
    if n == 1:
        return run_ranks(programs.training_parts, 1, list(programs.LOADERS), timeout_s=60)
    return run_ranks(programs.training_parts, n, list(programs.LOADERS), timeout_s=90)


@pytest.mark.parametrize("name", programs.LOADERS)
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.long)])
def test_same_samples_and_noise_for_any_number_of_ranks(n: int, name: str) -> None:
    (alone,), ranks = trained(1), trained(n)
    assert len({str(epoch) for epoch in alone[name]}) > 1 or "order" in name or name == "list of batches"
    for epoch in range(programs.EPOCHS):
        parts = [rank[name][epoch] for rank in ranks]
        assert len({len(p) for p in parts}) == 1, "ranks must make the same number of steps"
        whole = [glued(batch) for batch in zip(*parts, strict=True)]
        assert whole == [contents for _, _, contents in alone[name][epoch]]


@pytest.mark.parametrize("sampler", [programs.Growing(), programs.Buckets(), None])
def test_the_order_is_that_of_torchs_own_loader(sampler: Any) -> None:
    how: dict[str, Any] = {"batch_size": 4, "shuffle": True} if sampler is None else {"batch_sampler": sampler}
    orders = []
    for divided in (False, True):
        torch.manual_seed(3)
        loader: Any = DataLoader(TensorDataset(torch.arange(21)), **how)
        loader = DistributedLoader(loader) if divided else loader
        orders.append([[batch[0].tolist() for batch in loader] for _ in range(3)])
    assert orders[0] == orders[1]


def glued(parts: tuple[programs.Part, ...]) -> Any:
    """The batch that the parts make."""
    total = parts[0][1]
    assert {part[1] for part in parts} == {total}
    assert sum(samples for samples, _, _ in parts) == total
    return _glue([contents for _, _, contents in parts], [samples for samples, _, _ in parts], total)


def _glue(values: list[Any], samples: list[int], total: int) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _glue([v[key] for v in values], samples, total) for key in first}
    if isinstance(first, list) and first and isinstance(first[0], list):
        return [_glue(list(column), samples, total) for column in zip(*values, strict=True)]
    if isinstance(first, list) and all(len(v) == max(s, 1) for v, s in zip(values, samples, strict=True)):
        return list(itertools.chain.from_iterable(v[:s] for v, s in zip(values, samples, strict=True)))
    assert all(v == first for v in values), "what belongs to the whole batch is the same for all"
    return first


def test_evaluation_sees_every_sample_once() -> None:
    names = ["in order", "shuffled", "smaller than the world", "own batch sampler", "worker processes", "stream"]
    ranks = run_ranks(programs.evaluation_parts, 3, names, timeout_s=60)
    (alone,) = run_ranks(programs.evaluation_parts, 1, names, timeout_s=60)
    for name in names:
        seen = sorted(x for rank in ranks for batch in rank[name] for x in batch[0])
        assert seen == sorted(x for batch in alone[name] for x in batch[0])
    assert [len(rank["smaller than the world"]) for rank in ranks] == [3, 2, 0]


def test_an_epoch_can_be_resumed_by_number() -> None:
    names = ["shuffled", "own generator", "own sampler", "workers that stay", "with replacement", "tensors"]
    for rank in run_ranks(programs.all_resumed, 2, names, timeout_s=60):
        assert rank == dict.fromkeys(names, True)


def test_a_sampler_that_differs_between_ranks_is_found() -> None:
    with pytest.raises(RankError, match=r"first batch on rank 1 is not that of rank 0 .*Seed the sampler"):
        run_ranks(programs.unseeded_sampler, 2)


def test_data_that_the_user_has_divided_is_found() -> None:
    with pytest.raises(RankError, match="do not divide the data among ranks yourself"):
        run_ranks(programs.divided_stream, 2)


# --- one process ----------------------------------------------------------------------------------------------------


def test_a_distributed_sampler_is_refused() -> None:
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with pytest.raises(ValueError, match="DistributedSampler already divides the data set"):
        DistributedLoader(loader)


def test_a_batch_that_cannot_be_cut_is_refused_by_its_type() -> None:
    loader = as_rank(DistributedLoader, [object()], 0, 2)
    with pytest.raises(TypeError, match="cannot share out a batch of type object"):
        list(loader)


def test_a_batch_with_flattened_targets_is_refused_by_its_shapes() -> None:
    """As a language model's targets are; they stayed whole, and the loss failed by their number alone."""
    batch = (torch.zeros(5, 8), torch.zeros(40, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shapes \[5, 8\] and \[40\].*the shape \[5, 8\],"):
        list(as_rank(DistributedLoader, [batch], 0, 2))
    assert [len(one) for one in next(iter(as_rank(DistributedLoader, [batch], 0, 1)))] == [5, 40]
    table = (torch.zeros(5, 8), torch.zeros(10))  # weights of classes, say
    assert [len(one) for one in next(iter(as_rank(DistributedLoader, [table], 0, 2)))] == [3, 10]


def test_loader_looks_like_the_user_s() -> None:
    data = TensorDataset(torch.arange(10))
    loader = DistributedLoader(DataLoader(data, batch_size=4, drop_last=True))
    assert (len(loader), loader.batch_size, loader.dataset, loader.drop_last) == (2, 4, data, True)
    with pytest.raises(AttributeError, match="bach_size"):
        _ = loader.bach_size


def test_global_generators_are_left_as_they_were() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = (torch.rand(3).tolist(), random.random(), np.random.random())
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loader = DistributedLoader(DataLoader(programs.Numbers(9), batch_size=4, shuffle=True))
    noise = [programs.plain(b)[1] for b in loader]
    assert len(set(itertools.chain(*noise))) == 9, "each sample its own noise"
    assert (torch.rand(3).tolist(), random.random(), np.random.random()) == expected
    assert noise != [programs.plain(b)[1] for b in loader], "another epoch, other noise"


def test_seeding_samples_can_be_switched_off() -> None:
    torch.manual_seed(1)
    loader = DistributedLoader(DataLoader(programs.Numbers(4), batch_size=4), seed_samples=False)
    noise = programs.plain(next(iter(loader)))[1]
    torch.manual_seed(1)
    assert noise == pytest.approx([torch.rand(()).item() for _ in range(4)])


def test_seeded_data_set_passes_on_attributes_and_pickles() -> None:
    inner = programs.Numbers(5)
    dataset = pickle.loads(pickle.dumps(SeededDataset(inner, 3)))
    assert (dataset.size, len(dataset)) == (5, 5)
    dataset.size = 7
    assert len(dataset) == 7
    keys = [(0, 1, 0), (0, 1, 1), (1, 1, 0)]
    first, second, third = dataset.__getitems__(keys)
    assert first[0] == second[0] == 1
    assert len({first, second, third}) == 3
    assert dataset.__getitems__(keys) == [first, second, third]


def test_stream_of_random_numbers_continues_where_it_ended() -> None:
    torch.manual_seed(0)
    stream = _rng.RandomStream(_rng.RngStates.now())
    expected = torch.rand(4).tolist()
    with stream:
        first = torch.rand(2).tolist()
        with stream:
            first += torch.rand(1).tolist()
    torch.rand(10)
    with stream:
        first += torch.rand(1).tolist()
    assert first == expected


def test_seeds_of_neighbours_differ() -> None:
    seeds = {_rng.mix(0, epoch, place) for epoch in range(20) for place in range(500)}
    assert len(seeds) == 10_000
    assert _rng.mix(1, 2, 3) != _rng.mix(3, 2, 1)


@dataclass(frozen=True)
class _Labels:
    classes: torch.Tensor
    of: str


def test_dataclasses_are_cut_as_mappings_are() -> None:
    x, labels = torch.arange(6).view(3, 2), _Labels(torch.arange(3), "a table")
    cutter = Cutter(None)
    assert cutter.size((x, labels)) == cutter.size(labels) == 3
    inputs, part = cutter.cut((x, labels), 1, 3)
    assert (inputs.tolist(), part.classes.tolist(), part.of) == ([[2, 3], [4, 5]], [1, 2], "a table")
    assert len(labels.classes) == 3


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_cut_keeps_structure(total: int, begin: int, end: int) -> None:
    begin, end = sorted((min(begin, total), min(end, total)))
    names = [f"n{i}" for i in range(total)]
    batch = {"x": torch.arange(total), "pair": (np.arange(total), [torch.arange(total)]), "scale": 2.0, "names": names}
    cutter = Cutter(None)
    assert cutter.size(batch) == total
    part = cutter.cut(batch, begin, end)
    numbers = list(range(begin, end))
    assert programs.plain(part) == {"x": numbers, "pair": [numbers, [numbers]], "scale": 2.0, "names": names[begin:end]}
    assert isinstance(part["pair"], tuple)


def samples(total: int, channels: int = 3) -> list[torch.Tensor]:
    return [torch.full((channels, 5, 5 + i), float(i)) for i in range(total)]


def firsts(part: Any) -> list[float]:
    return [float(tensor.flatten()[0]) for tensor in part]


def test_a_list_with_an_entry_for_each_sample_is_cut_as_a_list() -> None:
    cutter = Cutter(8)
    assert cutter.size(samples(8)) == 8
    assert firsts(cutter.cut(samples(8), 2, 5)) == [2.0, 3.0, 4.0]
    assert cutter.size(samples(3)) == 3, "the last batch, whose length is that of its samples' first axis"
    assert firsts(cutter.cut(samples(3), 2, 3)) == [2.0]


def test_fields_that_are_lists_of_samples_are_cut_each() -> None:
    batch = (tuple(samples(4)), tuple({"boxes": torch.zeros(i + 1, 4), "id": i} for i in range(4)), torch.arange(4))
    cutter = Cutter(4)
    assert cutter.size(batch) == 4
    images, targets, numbers = cutter.cut(batch, 1, 3)
    assert firsts(images) == [1.0, 2.0]
    assert [target["id"] for target in targets] == [1, 2]
    assert numbers.tolist() == [1, 2]


def objects(total: int) -> list[dict[str, torch.Tensor]]:
    """What is in each of some pictures; in the first, as many things as there are pictures."""
    return [{"boxes": torch.full((i or total, 4), float(i)), "id": torch.tensor(i)} for i in range(total)]


@pytest.mark.parametrize(
    "batch",
    [
        {"labels": objects(4), "pixel_values": torch.zeros(4, 3, 5, 5)},
        {"pixel_values": torch.zeros(4, 3, 5, 5), "labels": [one["boxes"] for one in objects(4)]},
        (samples(4), objects(4)),
        ({"pixel_values": torch.zeros(4, 3, 5, 5)}, tuple(objects(4))),
        ([torch.zeros(4, 3)], torch.zeros(4, 2), objects(4)),
    ],
)
def test_lists_with_an_entry_for_each_sample_are_told_by_what_is_as_long(batch: Any) -> None:
    cutter = Cutter(None)
    assert (cutter.size(batch), samples_in(batch)) == (4, 4)
    part = cutter.cut(batch, 1, 3)
    labels = part["labels"] if isinstance(part, dict) else part[-1]
    boxes = [one["boxes"] if isinstance(one, dict) else one for one in labels]
    assert [(len(one), float(one[0, 0])) for one in boxes] == [(1, 1.0), (2, 2.0)]
    if not isinstance(batch, dict):
        *inputs, target = cut_fields(tuple(batch[:-1]), batch[-1], 1, 3, 4)
        assert programs.plain((*inputs[0], target)) == programs.plain(part)


def test_fields_of_other_lengths_are_whole_where_samples_are_known() -> None:
    inputs, target = cut_fields((torch.zeros(2, 4), torch.zeros(5, 4)), None, 0, 1, 2)
    assert ([len(one) for one in inputs], target) == ([1, 5], None)


def test_a_list_of_fields_as_long_as_a_batch_is_still_one_of_fields() -> None:
    cutter = Cutter(2)
    assert cutter.size([torch.zeros(2, 3), torch.ones(2)]) == 2
    assert [part.shape[0] for part in cutter.cut([torch.zeros(2, 3), torch.ones(2)], 0, 1)] == [1, 1]
    assert cutter.size([torch.zeros(1, 3), torch.ones(1)]) == 1, "the last batch has fewer samples"


@pytest.mark.parametrize(
    ("expected", "batches", "words"),
    [
        (None, [[torch.zeros(5), torch.zeros(7), torch.zeros(6)]], "a list of 3 tensors alike but for .* 5, 6, 7"),
        (None, [{"x": samples(4)}, {"x": samples(3)}], r"the batch\['x'\]: a list of 4 tensors in the first .* 3 now"),
        (2, [[(samples(1)[0], torch.ones(1)), (samples(1)[0], torch.ones(1))]], "2 lists of 2 entries"),
    ],
)
def test_where_samples_are_not_clear_is_an_error(expected: int | None, batches: list[Any], words: str) -> None:
    cutter = Cutter(expected)
    for batch in batches[:-1]:
        cutter.size(batch)
    with pytest.raises(ValueError, match=words):
        cutter.size(batches[-1])


class Counting(IterableDataset[Any]):
    """A stream of the numbers 0 to 9, each in a tensor of three entries."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.full((3,), float(i)) for i in range(10)])


def test_a_loader_whose_batches_are_lists_of_samples_shares_them_out() -> None:
    ranks = []
    for rank in range(2):
        loader = DataLoader(Counting(), batch_size=4, collate_fn=list)
        ranks.append([firsts(part) for part in as_rank(DistributedLoader, loader, rank, 2)])
    assert ranks == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]


# --- which batch is meant -------------------------------------------------------------------------------------------


@pytest.fixture
def _no_open_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_batch, "_now", _batch._InUse())


@pytest.mark.usefixtures("_no_open_loader")
def test_the_batch_in_use_is_found_among_open_loaders() -> None:
    uneven = as_rank(DistributedLoader, [torch.arange(3)], 0, 2)
    even = as_rank(DistributedLoader, [torch.arange(4), torch.arange(4)], 0, 2)
    assert _batch.current() is None
    pairs = zip(uneven, even, strict=False)
    x, y = next(pairs)
    assert _batch.current((x,)).weight == pytest.approx(4 / 3)
    assert _batch.current({"a": [y[1:]]}).weight == 1.0
    assert _batch.current(torch.zeros(1)).weight == 1.0, "of the loader that yielded last if tensors do not tell"


@pytest.mark.usefixtures("_no_open_loader")
def test_an_inner_loop_gives_the_batch_back() -> None:
    outer = as_rank(DistributedLoader, [torch.arange(3), torch.arange(4)], 0, 2)
    inner = as_rank(ShardedLoader, [torch.arange(5)], 0, 2)
    weights = []
    for _ in outer:
        for _ in inner:
            with pytest.raises(RuntimeError, match=r"hocket\.average inside a loop over hocket\.shard"):
                hocket.average(1.0)
        weights.append(_batch.current().weight)
    assert weights == [pytest.approx(4 / 3), 1.0]


@pytest.mark.usefixtures("_no_open_loader")
def test_after_an_evaluation_a_loss_with_a_graph_counts_as_in_training() -> None:
    for _ in as_rank(DistributedLoader, [torch.arange(3)], 0, 2):
        pass
    for _ in as_rank(ShardedLoader, [torch.arange(5)], 0, 2):
        pass
    loss = torch.tensor(3.0, requires_grad=True)
    assert hocket.average(loss) == pytest.approx(4.0)  # 2 of 3 samples, on 2 ranks
    assert hocket.average(loss, 2 * loss) == pytest.approx((4.0, 8.0))
    with pytest.raises(RuntimeError, match=r"of the training: call it before that loop"):
        hocket.average(3.0)


@pytest.mark.usefixtures("_no_open_loader")
def test_one_batch_may_be_trained_on_many_times() -> None:
    x = next(iter(as_rank(DistributedLoader, [torch.arange(3)], 0, 2)))
    assert _batch.current((x,)).weight == pytest.approx(4 / 3)


class _Read(torch.utils.data.Dataset):
    """A data set of the user's own: `offset` as a rank's own data has, `draw` as one that draws by itself."""

    def __init__(self, offset: float, draw: bool = False, length: int = 12) -> None:
        self.offset, self.draw, self.length = offset, draw, length
        self.random = random.Random()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.offset + (self.random.random() if self.draw else 0.0), random.random()])


def _first_error(loader: Any) -> str:
    try:
        next(iter(loader))
    except ValueError as error:
        return str(error)
    return "none"


def _own_data() -> list[str]:
    rank = dist.get_rank()
    found = []
    for data, workers in (
        (TensorDataset(torch.arange(12.0) + rank), 0),
        (TensorDataset(torch.arange(12.0) + rank), 1),
        (TensorDataset(torch.arange(12.0 + rank)), 0),
        (_Read(rank), 0),
        (_Read(0, length=12 + rank), 1),
        (_Read(0), 0),
        (_Read(0, draw=True), 0),
    ):
        found.append(_first_error(DistributedLoader(DataLoader(data, batch_size=4, num_workers=workers))))
    return found


@pytest.mark.long
def test_data_of_a_rank_s_own_is_refused() -> None:
    """Also where the ranks' samplers give the same indices; but not what draws random numbers by itself."""
    for found in run_ranks(_own_data, 2):
        assert all("rank 1 and rank 0 hold different data: first samples" in found[i] for i in (0, 1, 3)), found
        assert all("hold different data: 13 samples and 12" in found[i] for i in (2, 4)), found
        assert found[5:] == ["none", "none"]


def test_a_position_that_was_taken_up_is_told_again_before_the_first_batch() -> None:
    data = TensorDataset(torch.arange(12.0))
    first = DistributedLoader(DataLoader(data, batch_size=3, shuffle=True))
    for _ in zip(range(2), first, strict=False):
        pass
    there = first.position()
    second = DistributedLoader(DataLoader(data, batch_size=3, shuffle=True))
    second.resume(there)
    again = second.position()
    assert (again["epoch"], again["batch"]) == (there["epoch"], there["batch"]) == (0, 2)
    third = DistributedLoader(DataLoader(data, batch_size=3, shuffle=True))
    third.resume(again)
    assert [part[0].tolist() for part in third] == [part[0].tolist() for part in second]


def test_steps_in_time_are_of_all_samples() -> None:
    x = torch.rand(4, 6)
    note = _batch.Note(BatchShard.of(8, 2, 0), (weakref.ref(x.untyped_storage()),), (x.nbytes,))
    assert note.part(x[:, 2:4]) == 1.0
    assert note.part(x[:1]) == 0.25


class Streams(IterableDataset[Any]):
    """Shuffles with the global generator, and with one of its own."""

    def __init__(self, *, counts: bool = False) -> None:
        self.counts = counts
        self.begun = 0
        self.random = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(11).tolist()
        self.random.shuffle(order)
        self.begun += self.counts
        for i in order:
            yield 100 * self.begun + i


class Told(Sampler[int]):
    """Shuffles by the number of the epoch, where the program tells it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(11, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def _drawn(items: list[int]) -> torch.Tensor:
    return torch.rand(len(items)) + torch.tensor(items)


def _interrupted(make: Callable[[], Any], batch: int) -> tuple[list[Any], list[Any]]:
    """What is left of three epochs after a batch of the second: of one run, and of another that goes on."""
    torch.manual_seed(3)
    loader = DistributedLoader(make())
    epochs = [[(part, loader.position()) for part in loader] for _ in range(3)]
    left = [part.tolist() for part, _ in [*epochs[1][batch:], *epochs[2]]]
    torch.manual_seed(4)
    again = DistributedLoader(make())
    position = epochs[1][batch - 1][1]
    again.resume(position)
    return left, [part.tolist() for _ in range(position["epoch"], 3) for part in again]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Streams(), batch_size=4),
        lambda: DataLoader([torch.arange(4), torch.arange(3), torch.arange(2)], batch_size=None, shuffle=True),
        lambda: DataLoader(range(11), batch_size=4, sampler=Told()),
        lambda: DataLoader(range(11), batch_size=4, shuffle=True, collate_fn=_drawn),
        lambda: DataLoader(range(11), batch_size=4, collate_fn=_drawn, num_workers=1, multiprocessing_context="fork"),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_left_of_a_run_is_that_of_one_that_nothing_has_interrupted(make: Any, batch: int) -> None:
    left, found = _interrupted(make, batch)
    assert found == left


def test_a_loader_that_does_not_give_again_what_it_gave_is_told() -> None:
    with pytest.warns(UserWarning, match=r"batch 0 of epoch 1 is not the one that the checkpoint's run has used"):
        left, found = _interrupted(lambda: DataLoader(Streams(counts=True), batch_size=4), 1)
    assert found != left


def test_random_numbers_of_persistent_workers_are_told_with_what_to_say() -> None:
    more: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
    with pytest.warns(UserWarning, match=r"of the epochs before: say persistent_workers=False"):
        left, found = _interrupted(lambda: DataLoader(Streams(), batch_size=4, **more), 1)
    assert found != left


RNG = np.random.default_rng(0)


class OwnNoise(Dataset[Any]):
    """Noise from generators of its own, of a transform's and of its module's."""

    def __init__(self) -> None:
        inner = torch.Generator().manual_seed(7)
        self.random = random.Random(5)
        self.transforms = [lambda x: x + torch.rand((), generator=inner).item()]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> list[float]:
        return [index, self.random.random(), self.transforms[0](0.0), float(RNG.random())]


def _own_noise() -> list[Any]:
    torch.manual_seed(1)
    loader = DistributedLoader(DataLoader(OwnNoise(), batch_size=6, shuffle=True))
    return [part[0].tolist() + torch.stack(part[1:]).T.flatten().tolist() for _ in range(2) for part in loader]


def test_generators_that_a_data_set_has_of_its_own_are_seeded_by_the_samples_place() -> None:
    (whole,) = run_ranks(_own_noise, 1)
    halves = zip(*run_ranks(_own_noise, 2), strict=True)
    assert [one[:3] + other[:3] + one[3:] + other[3:] for one, other in halves] == whole
    noise = [value for batch in whole for value in batch[6:]]
    assert len(set(noise)) == len(noise) == 72


def test_arrays_that_torch_does_not_take_are_compared() -> None:
    x = np.arange(12.0).reshape(6, 2)
    assert fingerprint(x[::-1].astype(">f8")) == fingerprint(x[::-1]) == fingerprint(torch.from_numpy(x))
    assert fingerprint(x[::-1]) != fingerprint(x[::-1] + 1)
