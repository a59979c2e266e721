"""Calibrations that are kept: what they depend on, and that files of others run nothing."""

from __future__ import annotations

import dataclasses
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from hocket.calibrate import Calibration
from hocket.calibrate import _kept as kept
from hocket.parallel.mesh import World, join
from hocket.planner import Constants, MeasuredPlan, Network, Plan
from hocket.workload import Layer, Operation, Workload

LAYER = Layer("0", "Linear", 16, 64, 64, 128, 32.0, (Operation("forward", 1e6, 64.0, 32.0),), 1e-4, 2.0000000001e-4)
CALIBRATION = Calibration(
    Workload("net", 8, (LAYER,), "float32", "measured", optimizer_s=1e-5),
    Network("these ranks", 2, 1, 1e9, 1.1e-5, 1e9, 1e9, 1e-5, 0.0, 0.0, 2**33, 0.0, at_once=1.7),
    Constants(step_s=1e-4, prefetch=False, basis="measured", fitted_workers=2, seen=(((0.0, 1.5), 0.1),)),
    (MeasuredPlan(Plan(shard="optimizer", data_parallel_degree=2), 0.012345678901234567),),
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HOCKET_CALIBRATION", raising=False)
    return join()


class Net(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def key(world: World, *, width: int = 4, rows: int = 8, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> str:
    model = Net(width)
    return kept.key_of(model, kind(model.parameters(), lr=0.1), (torch.rand(rows, 4),), world)


def test_a_calibration_comes_back_as_it_was_and_for_this_user_alone(world: World, tmp_path: Path) -> None:
    kept.keep("a" * 64, CALIBRATION)
    assert kept.taken("a" * 64) == CALIBRATION
    assert kept.taken("a" * 32 + "b" * 32) is None  # a file of the same name
    (file,) = tmp_path.rglob("*.json")
    assert file.stat().st_mode & 0o077 == 0


def test_values_do_not_count_and_forms_do(world: World) -> None:
    same = key(world)
    assert key(world) == same
    others = {key(world, width=5), key(world, rows=9), key(world, kind=torch.optim.SGD)}
    assert len(others | {same}) == 4


def test_state_of_the_optimizer_plain_attributes_and_chosen_algorithms_count(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, inputs = Net(), (torch.rand(8, 4),)

    def key_of(momentum: float = 0.0) -> str:
        return kept.key_of(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), inputs, world)

    found = [key_of(), key_of(0.9)]
    for turns in (2, 3):
        model.turns = turns
        found.append(key_of())
    table = tmp_path / "choices.toml"
    monkeypatch.setenv("HOCKET_CHOICES", str(table))
    for text in ("# one", "# other"):
        table.write_text(text)
        found.append(key_of())
    assert len(set(found)) == len(found)


def test_a_loss_counts_by_its_source_and_its_settings() -> None:
    losses = [
        torch.nn.functional.mse_loss,
        torch.nn.functional.l1_loss,
        partial(torch.nn.functional.huber_loss, delta=0.5),
        partial(torch.nn.functional.huber_loss, delta=1.0),
        torch.nn.CrossEntropyLoss(),
        torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda output, target: (output - target).sum(),
        lambda output, target: (output - target).mean(),
    ]
    found = [kept.key_with_loss("c" * 64, one) for one in losses]
    assert found == [kept.key_with_loss("c" * 64, one) for one in losses]
    assert len({*found, "c" * 64}) == 1 + len(losses)


def test_what_a_control_group_leaves_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Slurm job on the same host may have other cores and less memory, which is the limit of plans."""
    found = [key(world)]
    monkeypatch.setattr(kept, "memory", lambda: (2**30, 2**29))
    found.append(key(world))
    monkeypatch.setattr(kept, "usable_cores", lambda: 1000)
    assert len({*found, key(world)}) == 3


def test_threads_count(world: World) -> None:
    before, threads = key(world), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert key(world) != before
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"form": 1}', "\x80\x04\x95", '{"form": 0, "key": "%s"}' % ("c" * 64)]
)
def test_what_is_no_calibration_counts_as_none(world: World, tmp_path: Path, text: str) -> None:
    kept.keep("c" * 64, CALIBRATION)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(text)
    assert kept.taken("c" * 64) is None


@pytest.mark.parametrize(("name", "value"), [("workload", None), ("constants", None), ("runs", [[None, 1.0]])])
def test_what_was_changed_since_it_was_kept_counts_as_none(
    world: World, tmp_path: Path, name: str, value: object
) -> None:
    kept.keep("c" * 64, CALIBRATION)
    (file,) = tmp_path.rglob("*.json")
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, name: value}))
    assert kept.taken("c" * 64) is None
    file.write_text(json.dumps(document).replace('"step_s": ', '"step_s": 1'))
    assert kept.taken("c" * 64) is None
    file.write_text(json.dumps(document))
    assert kept.taken("c" * 64) == CALIBRATION


def test_the_user_may_measure_again_or_keep_none(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.keep("d" * 64, CALIBRATION)
    monkeypatch.setenv("HOCKET_CALIBRATION", "again")
    assert kept.taken("d" * 64) is None
    kept.keep("d" * 64, dataclasses.replace(CALIBRATION, runs=()))
    monkeypatch.setenv("HOCKET_CALIBRATION", "off")
    assert kept.taken("d" * 64) is None
    kept.keep("e" * 64, CALIBRATION)
    monkeypatch.delenv("HOCKET_CALIBRATION")
    assert kept.taken("d" * 64) == dataclasses.replace(CALIBRATION, runs=())
    assert kept.taken("e" * 64) is None


def test_a_busy_machine_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (9.5, 1.0, 1.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert kept.busy() == "a load of 9.5 on 4 cores"
    monkeypatch.setattr(os, "getloadavg", lambda: (0.4, 9.0, 9.0))
    assert kept.busy() == ""


def test_a_folder_that_cannot_be_written_to_keeps_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    kept.keep("f" * 64, CALIBRATION)
    assert kept.taken("f" * 64) is None


def test_what_could_not_be_written_is_left_out(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk; drafts had been left behind."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    kept.keep("f" * 64, CALIBRATION)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
