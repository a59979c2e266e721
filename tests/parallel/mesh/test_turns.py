"""Programs with threads: what one thread at a time calls is right, and what two may call at once is refused."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import deadline, run_ranks

PLANS = [hocket.Plan(), hocket.Plan(shard="parameters")]


def _made(plan: hocket.Plan, rate: float = 0.05) -> hocket.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), rate), plan=plan)


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(4, 8, 5, generator=generator, dtype=torch.float64)
    return [(one[:, :3], one[:, 3:]) for one in made]


class _Ahead:
    """Batches that a thread has loaded ahead."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        loaded: queue.Queue[Any] = queue.Queue(1)

        def load() -> None:
            try:
                for batch in self._loader:
                    loaded.put(batch)
                loaded.put(None)
            except RuntimeError as error:
                loaded.put(error)

        thread = threading.Thread(target=load, name="ahead")
        thread.start()
        while (batch := loaded.get(timeout=deadline(20))) is not None:
            if isinstance(batch, RuntimeError):
                raise batch
            yield batch
        thread.join()


def _in_thread(work: Callable[[], Any]) -> Any:
    """What work gives in a thread that is waited for; or its error, as text."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(work())
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=call, name="other")
    thread.start()
    thread.join(deadline(20))
    return found[0]


def _epoch(trainer: hocket.Trainer, loader: Any, opened: bool = False) -> list[float]:
    return [float(trainer.step(batch)) for batch in (loader if opened else trainer.batches(loader))]


def _one_at_a_time(plan: hocket.Plan) -> list[float]:
    """It is built here, trained in a thread, evaluated here, trained in another, and the loader has one of its own."""
    trainer = _made(plan)
    losses = _in_thread(lambda: _epoch(trainer, _batches()))
    losses.append(trainer.evaluate(_batches()))
    losses += _in_thread(lambda: _epoch(trainer, _batches()))
    return [*losses, *_epoch(trainer, _Ahead(_batches()))]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_threads_that_wait_for_each_other_give_the_losses_of_one_process(plan: hocket.Plan) -> None:
    (alone,) = run_ranks(_one_at_a_time, 1, hocket.Plan())
    for losses in run_ranks(_one_at_a_time, 2, plan):
        assert losses == pytest.approx(alone, rel=1e-12)  # rounding alone differs


def _by_pool(plan: hocket.Plan, pool: str = "executor") -> list[float]:
    """Its epochs are tasks of a pool, whose thread lives on, and it is evaluated here between them."""
    trainer, losses = _made(plan), []
    for _ in range(3):
        if pool == "executor":
            losses += EXECUTOR.submit(_epoch, trainer, _batches()).result(deadline(20))
        elif pool == "map":
            losses += next(iter(EXECUTOR.map(_epoch, [trainer], [_batches()])))
        elif pool == "pool":
            losses += POOL.apply(_epoch, (trainer, _batches()))
        else:
            losses += asyncio.run(_awaited(trainer))
        losses.append(trainer.evaluate(_batches()))
    return losses


async def _awaited(trainer: hocket.Trainer) -> list[float]:
    return await asyncio.get_running_loop().run_in_executor(EXECUTOR, _epoch, trainer, _batches())


EXECUTOR, POOL = ThreadPoolExecutor(1), ThreadPool(1)


@pytest.mark.parametrize("pool", ["executor", "map", "pool", "asyncio"])
def test_tasks_of_a_pool_that_are_waited_for_give_the_losses_of_one_process(pool: str) -> None:
    (alone,) = run_ranks(_by_pool, 1, hocket.Plan(), pool)
    for losses in run_ranks(_by_pool, 2, hocket.Plan(), pool):
        assert losses == pytest.approx(alone, rel=1e-12)


def _task_beside(plan: hocket.Plan) -> Any:
    """A task that runs while the main thread does something else, and is over when that goes on."""
    trainer = _made(plan)
    task = EXECUTOR.submit(trainer.step, _batches()[0])
    until_s = time.monotonic() + deadline(20)
    while not task.done() and time.monotonic() < until_s:
        sum(range(1000))
    return trainer.step(_batches()[1])


def _batches_ahead(plan: hocket.Plan) -> Any:
    trainer = _made(plan)
    return _epoch(trainer, _Ahead(trainer.batches(_batches())), opened=True)


def _distributed_ahead(plan: hocket.Plan) -> Any:
    model = nn.Linear(3, 2).double()
    model, optimizer, loader = hocket.distribute(model, torch.optim.SGD(model.parameters(), 0.1), _batches())
    for inputs, targets in _Ahead(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def _two_at_once(plan: hocket.Plan) -> Any:
    """A thread that has made a step, and waits for more to do; and one here."""
    trainer, made, over = _made(plan), threading.Event(), threading.Event()

    def work() -> None:
        trainer.step(_batches()[0])
        made.set()
        over.wait(deadline(20))

    threading.Thread(target=work, name="other").start()
    assert made.wait(deadline(20))
    try:
        return trainer.step(_batches()[1])
    finally:
        over.set()


def _within_a_call(plan: hocket.Plan) -> Any:
    """A thread that the main thread waits for while it is in a call itself."""
    trainer = _made(plan)

    def metric(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if isinstance(found := _in_thread(trainer.state_dict), str):
            raise RuntimeError(found)
        return nn.functional.mse_loss(output, target)

    return trainer.evaluate(_batches(), metric)


def _refused(program: Callable[[hocket.Plan], Any], plan: hocket.Plan) -> str:
    with pytest.raises(RuntimeError) as refused:
        program(plan)
    return str(refused.value)


@pytest.mark.parametrize("program", [_batches_ahead, _distributed_ahead, _two_at_once, _within_a_call, _task_beside])
def test_threads_that_run_at_once_are_refused_on_every_rank(program: Callable[[hocket.Plan], Any]) -> None:
    for said in run_ranks(_refused, 2, program, hocket.Plan()):
        assert "is still running: on another rank they may come in another order" in said
        assert "put the thread around the loader" in said


_TWO = r"""
import os, threading, torch, hocket
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
at_once, over = threading.Barrier(2), threading.Barrier(2)

def train(rate):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    at_once.wait()
    try:
        trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer)
        for _ in range(10_000):
            trainer.step((torch.ones(4, 3), torch.ones(4, 2)))
        print("trained", flush=True)
    except RuntimeError as error:
        said = "refused" if "is still running" in str(error) else type(error).__name__
        os.write(1, f"{said}\n".encode())  # as one line, whatever the other thread writes
    over.wait()

threads = [threading.Thread(target=train, args=(rate,)) for rate in (0.1, 0.2)]
for one in threads:
    one.start()
for one in threads:
    one.join()
"""


@pytest.mark.long
def test_of_two_threads_that_join_and_train_at_once_both_are_refused(tmp_path: Path) -> None:
    """Else each rank may go on in another one, and they would train one model by two programs."""
    program = tmp_path / "program.py"
    program.write_text(_TWO)
    command = [sys.executable, "-m", "hocket", "run", "-n", "2", "--no-run-dir", str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=deadline(60), check=False)
    said = [line for line in ran.stdout.splitlines() if line.strip("[01] ")]
    assert len(said) == 4, ran.stderr
    for rank in range(2):
        assert f"[{rank}] refused" in said
    assert {line[4:] for line in said} <= {"refused", "PeerDiedError"}  # if the other rank has ended first


@pytest.mark.parametrize("program", [_batches_ahead, _distributed_ahead, _two_at_once, _within_a_call])
def test_one_rank_may_have_threads_as_it_likes(program: Callable[[hocket.Plan], Any]) -> None:
    run_ranks(program, 1, hocket.Plan())


def losses_of_a_pool(way: str) -> list[float] | str:
    """Train with batches that a pool's thread takes from the loader: while this one waits, or meanwhile."""
    torch.manual_seed(0)
    made = nn.Linear(3, 1)
    rows = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = hocket.distribute(
        made, torch.optim.SGD(made.parameters(), 0.1), DataLoader(TensorDataset(rows), batch_size=4)
    )
    found = []
    with ThreadPoolExecutor(1) as pool:
        batches = iter(loader)

        def take() -> Any:
            return next(batches, None) if way == "plain" else pool.submit(next, batches, None)

        try:
            one = take()
            while (batch := one if way == "plain" else one.result()) is not None:
                one = take() if way == "meanwhile" else None
                loss = model(batch[0]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(float(hocket.average(loss)))
                one = one or take()
        except RuntimeError as error:
            return str(error)
    return found


def test_batches_that_a_pool_takes_while_the_loop_waits_train_as_others() -> None:
    waits, plain = (run_ranks(losses_of_a_pool, 2, way) for way in ("waits", "plain"))
    assert waits == plain


def test_batches_that_a_pool_takes_meanwhile_are_refused() -> None:
    for said in run_ranks(losses_of_a_pool, 2, "meanwhile"):
        assert "is still running" in said
        assert "To load batches ahead, put the thread around the loader that you give to Hocket" in said
