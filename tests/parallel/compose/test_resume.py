"""A loop of the program's own that is told to end, and goes on with the losses of an uninterrupted run."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.parallel import CheckpointError
from hocket.parallel.batches import _workers
from hocket.parallel.compose import _preemption, _resume
from hocket.parallel.mesh.world import current
from hocket.parallel.state.objects import read_objects, write_objects
from hocket.testing import RankError, run_ranks

EPOCHS = 3
_BATCHES = 5  # of an epoch; the last is smaller than the others
_SAVED = 75


class Noisy(TensorDataset):
    """Samples with noise that their place in training decides."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.01 * torch.randn_like(x), y


def train(path: str, stop_after: int | None, accumulate: str = "", dropout: float = 0.0) -> tuple[list[float], int]:
    """Return the losses, and the exit status of the program; the last rank is told to end after batch `stop_after`."""
    torch.manual_seed(0)
    _preemption._EVERY_S = (
        0.0  # ask in each step: these are so quick that the program may be over before the next question
    )
    data = Noisy(torch.randn(34, 4, dtype=torch.float64), torch.randn(34, 1, dtype=torch.float64))
    norm = nn.BatchNorm1d(6) if accumulate else nn.LayerNorm(6)  # with which ranks find out that each draws its own
    model: Any = nn.Sequential(nn.Linear(4, 6), norm, nn.Dropout(dropout), nn.Linear(6, 1)).double()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, sync_batch_norm=True)
    state = hocket.resume(
        path, loader, model=model, optimizer=optimizer, schedule=schedule,
        extra=lambda: {"epoch": epoch, "batches": batches},
    )  # fmt: skip
    losses, batches = [], state["batches"] if state else 0
    try:
        for epoch in range(state["epoch"] if state else 0, EPOCHS):  # noqa: B007 - `extra` reads it
            for x, y in loader:
                steps = not accumulate or batches % 2 == 1
                with model.no_sync() if accumulate == "no_sync" and not steps else nullcontext():
                    loss = (model(x) - y).square().mean()
                    loss.backward()
                if steps:
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(hocket.average(loss.item()))
                batches += 1
                if batches == stop_after and dist.get_rank() == dist.get_world_size() - 1:
                    os.kill(os.getpid(), signal.SIGUSR1)
            schedule.step()
    except SystemExit as ended:
        return losses, int(ended.code or 0)
    return losses, 0


def joined(path: Path, stops: list[int | None], ranks: list[int], *settings: Any) -> tuple[list[float], list[int]]:
    """Return the losses of runs that follow each other, and how many batches each of them took."""
    losses, counts = [], []
    for stop, size in zip(stops, ranks, strict=True):
        mine, status = run_ranks(train, size, str(path / "checkpoint"), stop, *settings)[0]
        assert status == (_SAVED if stop else 0)
        losses += mine
        counts.append(len(mine))
    return losses, counts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accumulate", ["", "plain", "no_sync"])
def test_the_losses_are_those_of_a_run_that_nothing_has_interrupted(accumulate: str, tmp_path: Path) -> None:
    expected, _ = joined(tmp_path / "other", [None], [2], accumulate, 0.25)
    # In an epoch, in the middle of an accumulation; at an epoch's end, when its last batch has been taken.
    found, counts = joined(tmp_path, [3, 2 * _BATCHES, None], [2, 2, 2], accumulate, 0.25)
    assert found == expected
    assert sum(counts) == EPOCHS * _BATCHES
    assert (tmp_path / "checkpoint" / "manifest.json").exists()


class Signals(torch.utils.data.Dataset[Any]):
    """Who loads a sample gets a signal meanwhile, as srun sends it to all processes."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), (signal.SIGTERM, signal.SIGUSR1)[index])
        return torch.tensor([float(index)])


class SignalStream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(Signals().__getitem__, range(2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dataset", [Signals, SignalStream])
@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.long) for method in ("spawn", "forkserver"))]
)
def test_workers_of_loaders_outlive_signals_that_the_rank_handles(dataset: type, method: str) -> None:
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGUSR1)}
    given: Any = DataLoader(dataset(), batch_size=1, num_workers=1, multiprocessing_context=method)
    loader = hocket.distribute(nn.Linear(1, 1), None, given)[2]
    try:
        assert [float(value) for value in loader] == [0.0, 1.0]
        _workers._ending().value = 1  # as at the program's end, when workers are ended by SIGTERM and waited for
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            list(loader)
        _workers._ending().value = 0
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(RuntimeError, match="(exited unexpectedly|killed by signal)"):
            list(loader)
        assert (given.worker_init_fn, given.multiprocessing_context.get_start_method()) == (None, method)
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        _workers._ending().value = 0
        for number, handler in before.items():
            signal.signal(number, handler)


def test_other_numbers_of_ranks_go_on(tmp_path: Path) -> None:
    expected, _ = joined(tmp_path / "other", [None], [1])
    found, _ = joined(tmp_path, [4, 9, None], [2, 3, 1])
    assert found == pytest.approx(expected, rel=1e-12)  # float64: sums in another order


def refused(path: str, name: str) -> None:
    """Resume with objects of other names or shapes than were saved."""
    model: Any = nn.Linear(4, 2).double()
    loader: Any = DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=8)
    model, _, loader = hocket.distribute(model, None, loader)
    hocket.resume(path, loader, **{name: model})


def test_a_checkpoint_of_other_objects_or_a_damaged_one_is_refused_on_all_ranks(tmp_path: Path) -> None:
    joined(tmp_path, [1], [2])
    path = str(tmp_path / "checkpoint")
    with pytest.raises(RankError, match="has the states of model, optimizer, schedule, and resume was given weights"):
        run_ranks(refused, 2, path, "weights")
    (tmp_path / "checkpoint" / "objects.pt").write_bytes(b"x")
    with pytest.raises(RankError, match=r"is damaged: objects\.pt has 1 bytes of"):
        run_ranks(refused, 2, path, "model")


def test_objects_that_a_preempted_run_has_kept_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    net = nn.Linear(4, 1)
    model, _, loader = hocket.distribute(net, None, DataLoader(TensorDataset(torch.zeros(8, 4))))
    kept = {"best": tmp_path, "seen": np.arange(3, dtype=np.uint8)}
    # What SIGTERM would have written between two batches.
    state = {"objects": {"model": net.state_dict()}, "gradients": {"model": {}}, "loader": loader.position()}
    write_objects(tmp_path / "loop", {**state, "extra": kept}, loader.world)
    other = nn.Linear(4, 1)
    trainer = hocket.Trainer(other, nn.functional.mse_loss, torch.optim.SGD(other.parameters(), lr=0.1))
    trainer.save(tmp_path / "trainer", kept)
    resumed: list[Callable[..., Any]] = [
        lambda **options: hocket.resume(tmp_path / "loop", loader, model=model, **options),
        lambda **options: trainer.resume(tmp_path / "trainer", **options),
    ]
    for resume in resumed:
        with pytest.raises(CheckpointError, match=r"can run code \(pathlib\.\w+\); .* weights_only=False to .*resume"):
            resume()
        assert resume(weights_only=False)["best"] == tmp_path
        _preemption._listening.clear()  # the next is another program


class Saver:
    """Stands for Preemption: saves when it is told to."""

    def __init__(self, world: Any, path: Path, save: Callable[[], None]) -> None:
        self.save = save

    def check(self) -> None:
        self.save()


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("optimizer", lambda p: torch.optim.AdamW(p, lr=0.1), "its kind was Adam, and is AdamW"),
        ("optimizer", lambda p: torch.optim.Adam(p[::-1]), r"its parameter 0 was model\.weight, and is model\.bias"),
        ("model", lambda p: torch.optim.Adam(p), r"its weight was torch\.float32, and is torch\.float64"),
    ],
)
def test_what_load_state_dict_would_take_without_a_word_is_refused(
    name: str, other: Callable[[Any], Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_resume, "Preemption", Saver)
    for optimizer in (torch.optim.Adam, other):
        net: Any = nn.Linear(1, 1).to(torch.float64 if (name, optimizer) == ("model", other) else torch.float32)
        model, adam, loader = hocket.distribute(
            net, optimizer(list(net.parameters())), DataLoader(TensorDataset(torch.zeros(8, 1)))
        )
        refused = pytest.raises(CheckpointError, match=f"of another '{name}': {said}; pass what was saved")
        with refused if optimizer is other else nullcontext():
            hocket.resume(tmp_path / "checkpoint", loader, model=model, optimizer=adam)
            loader.between()


def test_a_link_that_leads_nowhere_is_no_new_beginning(tmp_path: Path) -> None:
    model, _, loader = hocket.distribute(nn.Linear(4, 1), None, DataLoader(TensorDataset(torch.zeros(8, 4))))
    trainer = hocket.Trainer(model.module, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    (tmp_path / "latest").symlink_to("unmounted")
    for resume in (trainer.resume, lambda path: hocket.resume(path, loader, model=model)):
        with pytest.raises(CheckpointError, match="is a link to 'unmounted', where there is nothing: mount or make"):
            resume(tmp_path / "latest")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("latest")
    with pytest.raises(CheckpointError, match="Symlink loop"):
        trainer.resume(tmp_path / "latest")
    assert [one.name for one in tmp_path.iterdir()] == ["latest"]


def test_what_cannot_be_resumed_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, loader = hocket.distribute(nn.Linear(4, 1), None, DataLoader(TensorDataset(torch.zeros(8, 4))))
    with pytest.raises(TypeError, match="best=float has no state_dict; keep plain values by extra="):
        hocket.resume(tmp_path / "checkpoint", loader, model=model, best=1.0)
    with pytest.raises(TypeError, match=r"pass the loader that hocket\.distribute has returned"):
        hocket.resume(tmp_path / "checkpoint", [1], model=model)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    other = nn.Linear(4, 1)
    trainer = hocket.Trainer(other, nn.functional.mse_loss, torch.optim.SGD(other.parameters(), lr=0.1))
    for _ in range(2):  # the second takes the place of the first
        hocket.resume(tmp_path / "checkpoint", loader, model=model)
    with pytest.raises(CheckpointError, match="which has not trained yet, and a signal would save one of the two"):
        trainer.resume(tmp_path / "other")
    next(iter(loader))
    trainer.resume(tmp_path / "other")


def test_the_trainers_checkpoint_is_named_as_such(tmp_path: Path) -> None:
    net = nn.Linear(4, 1)
    trainer = hocket.Trainer(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
    trainer.step((torch.randn(8, 4), torch.randn(8, 1)))
    trainer.save(tmp_path / "checkpoint")
    model, _, loader = hocket.distribute(nn.Linear(4, 1), None, DataLoader(TensorDataset(torch.zeros(8, 4))))
    with pytest.raises(CheckpointError, match=r"written by Trainer\.save, and is for Trainer\.load"):
        hocket.resume(tmp_path / "checkpoint", loader, model=model)


class OwnNoise(nn.Module):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.random = torch.Generator().manual_seed(3), np.random.default_rng(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.generator) + float(self.random.random())


def _noisy(path: Path, kind: str, steps: int, *, resumed: bool) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Sequential(OwnNoise()), nn.Linear(3, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), batch_size=4)
    losses = []
    if kind == "trainer":
        trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer)
        if resumed:
            trainer.load(path)
        for batch, _ in zip(trainer.batches(loader), range(steps), strict=False):
            losses.append(float(trainer.step(batch)))
            if len(losses) == steps:
                trainer.save(path)
                break
        return losses
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    hocket.resume(path, loader, model=model, optimizer=optimizer)
    with contextlib.suppress(SystemExit):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == steps:
                os.kill(os.getpid(), signal.SIGUSR1)
    return losses


@pytest.mark.parametrize("kind", ["trainer", "loop"])
def test_generators_that_a_model_has_of_its_own_go_on_where_they_stopped(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_preemption, "_EVERY_S", 0.0)
    handlers = {number: signal.getsignal(number) for number in _preemption.SIGNALS}
    try:
        whole = _noisy(tmp_path / "other", kind, 20, resumed=False)
        begun = _noisy(tmp_path / "checkpoint", kind, 4, resumed=False)
        assert begun + _noisy(tmp_path / "checkpoint", kind, 20, resumed=True) == whole
        assert len(whole) == 10
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("kind", ["trainer", "loop"])
def test_a_program_that_changes_its_directory_saves_where_it_looks_for_what_it_has_saved(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_preemption, "_EVERY_S", 0.0)
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in _preemption.SIGNALS}
    model: Any = nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), batch_size=4)
    try:
        if kind == "trainer":
            trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer)
            trainer.resume("checkpoint")
            batches = trainer.batches(loader)
        else:
            model, optimizer, batches = hocket.distribute(model, optimizer, loader)
            hocket.resume("checkpoint", batches, model=model, optimizer=optimizer)
        (tmp_path / "outputs").mkdir()
        os.chdir("outputs")
        with contextlib.suppress(SystemExit):
            for batch in batches:
                if kind == "trainer":
                    trainer.step(batch)
                os.kill(os.getpid(), signal.SIGUSR1)
        assert (tmp_path / "checkpoint").is_dir()
        assert not (tmp_path / "outputs" / "checkpoint").exists()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Told(TensorDataset):
    """Has the program told to end while a sample is loaded."""

    left = 0  # samples until then

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().__getitem__(index)


def _in_turn(path: Path, turns: str, told: int, *, resume: bool = True) -> list[float]:
    """Return losses of steps on the batches of two loaders, as `zip` gives them, or two of the second to one."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    trainer = hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.05))
    sets = [Told(torch.randn(n, 4, dtype=torch.float64), torch.randn(n, 1, dtype=torch.float64)) for n in (24, 48)]
    sets[0].left = told
    one, other = (DataLoader(data, batch_size=4, shuffle=True) for data in sets)
    losses: list[float] = []
    if resume:
        trainer.resume(path)
    with contextlib.suppress(SystemExit):
        if turns == "zip":
            for pair in zip(trainer.batches(one), trainer.batches(other), strict=False):
                losses += [float(trainer.step(batch)) for batch in pair]
        else:
            inner = iter(trainer.batches(other))
            for batch in trainer.batches(one):
                losses.append(float(trainer.step(batch)))
                losses += [float(trainer.step(next(inner))) for _ in range(2)]
    return losses


@pytest.mark.parametrize("turns", ["zip", "next"])
def test_no_batch_of_two_loaders_is_lost(turns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_preemption, "_EVERY_S", 0.0)
    handlers = {number: signal.getsignal(number) for number in _preemption.SIGNALS}
    try:
        whole = _in_turn(tmp_path, turns, 0, resume=False)
        begun = _in_turn(tmp_path / "checkpoint", turns, 11)
        assert 0 < len(begun) < len(whole)
        assert begun + _in_turn(tmp_path / "checkpoint", turns, 0) == whole
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_checkpoint_of_a_loop_is_named_as_such(tmp_path: Path) -> None:
    write_objects(tmp_path / "checkpoint", {"n": 1}, current(None))
    model = nn.Linear(4, 1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"was written by hocket\.resume"):
        trainer.load(tmp_path / "checkpoint")


def test_a_disk_that_is_full_is_said_to_be_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    write_objects(tmp_path / "checkpoint", {"n": 1}, current(None))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            write_objects(tmp_path / "checkpoint", {"n": torch.ones(100_000)}, current(None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_objects(tmp_path / "checkpoint", current(None))["n"] == 1
    assert {one.name for one in tmp_path.iterdir()} == {"checkpoint", "checkpoint.lock"}  # it saves there again


def _unshared(path: str, kind: str) -> str:
    """Resume where rank 1, as a host with a disk of its own would, has another folder at the same path."""
    model: Any = nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_rank():
        is_dir = Path.is_dir
        Path.is_dir = lambda self, **given: ".new-" not in self.name and is_dir(self, **given)  # type: ignore[method-assign]
    try:
        if kind == "trainer":
            hocket.Trainer(model, nn.functional.mse_loss, optimizer).resume(path)
        else:
            loader: Any = DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=8)
            model, optimizer, loader = hocket.distribute(model, optimizer, loader)
            hocket.resume(path, loader, model=model)
    except CheckpointError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize("kind", ["trainer", "loop"])
def test_a_folder_that_hosts_do_not_share_is_refused_before_anything_can_be_lost(kind: str, tmp_path: Path) -> None:
    for said in run_ranks(_unshared, 2, str(tmp_path / "checkpoint"), kind):
        assert "no checkpoint could be written to" in said
        assert "all hosts must share one" in said
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_way_is_said_before_anything_can_be_lost(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    model = nn.Linear(4, 1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="no checkpoint could be written"):
        trainer.resume(tmp_path / "notes" / "checkpoint")
    assert (tmp_path / "notes").read_text() == "mine"


def _own_batches(path: str, count: str, stop_before: int | None, saves: bool = True) -> tuple[list[float], list[str]]:
    """The losses of a Trainer's loop over its own batches, which saves after each step, and what it was warned of."""
    torch.manual_seed(0)
    _preemption._EVERY_S = 0.0
    batches = list(torch.randn(6, 8, 5, dtype=torch.float64))
    model = nn.Linear(4, 1).double()
    trainer = hocket.Trainer(model, nn.functional.mse_loss, torch.optim.Adam(model.parameters(), lr=0.05))
    done = 0

    def extra() -> dict[str, int]:
        return {"steps": {"of the loop": step, "of the Trainer": trainer.steps, "made": done}[count]}

    step, losses = 0, []
    with warnings.catch_warnings(record=True) as told, contextlib.suppress(SystemExit):
        warnings.simplefilter("always")
        state = trainer.resume(path, extra)
        done = begin = state["steps"] if state else 0
        for step in range(begin, len(batches)):
            if step == stop_before and dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            losses.append(float(trainer.step((batches[step][:, :4], batches[step][:, 4:]))))
            done += 1
            if saves:
                trainer.save(path, extra=extra())
    return losses, [str(one.message) for one in told if "resume: extra" in str(one.message)]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("count", "saves"), [("of the Trainer", True), ("made", True), ("of the loop", False)])
def test_a_loop_over_its_own_batches_goes_on_with_the_step_before_which_it_was_told(
    tmp_path: Path, count: str, saves: bool
) -> None:
    whole, warned = run_ranks(_own_batches, 2, str(tmp_path / "whole"), count, None, saves)[0]
    begun, warned_then = run_ranks(_own_batches, 2, str(tmp_path / "stopped"), count, 3, saves)[0]
    ended, _ = run_ranks(_own_batches, 2, str(tmp_path / "stopped"), count, None, saves)[0]
    assert len(begun) == 3
    assert begun + ended == whole
    assert warned == warned_then == []


def test_a_counter_that_is_another_after_a_step_than_before_the_next_is_warned_of(tmp_path: Path) -> None:
    first, other = run_ranks(_own_batches, 2, str(tmp_path), "of the loop", None)
    assert other[1] == []
    (told,) = first[1]
    assert "extra gave {'steps': 0} as this program saved, and gives {'steps': 1} before the step that follows" in told
