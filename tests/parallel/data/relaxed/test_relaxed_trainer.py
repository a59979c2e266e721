"""The Trainer by plans with relaxed synchronisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hocket.testing import run_ranks

from ... import programs
from . import trainer_programs

WORDS = ("local:1", "local:3", "stale:2", "ssp:1", "hogwild")
ALL_SAMPLES = programs.SAMPLES * trainer_programs.EPOCHS


def one_process(name: str) -> list[float]:
    losses: list[float] = trainer_programs.train(name, "every_step")[0]
    return losses


def check(case: tuple[str, str], ranks: list[Any], losses: list[float]) -> None:
    name, word = case
    for found, report, _, weights, plan in ranks:
        assert found == ranks[0][0]  # evaluation is of one model
        assert weights == ranks[0][3]
        assert found[-1] == pytest.approx(losses[-1], rel=1e-12 if word == "local:1" else 0.02)
        assert "not serially equivalent" in plan["reasons"]["synchronisation"]
        assert report["relaxed"]["rule"] == word
        assert report["relaxed"]["serially_equivalent"] is False
        workers = report["relaxed"]["workers"]
        # Every sample once an epoch, whoever trained it.
        assert sum(worker["samples"] for worker in workers) == ALL_SAMPLES
        assert [worker["updates"] for worker in workers] == [len(rank[2]) for rank in ranks], name


@pytest.mark.long
@pytest.mark.parametrize(("backend", "env"), [("hocket", {}), ("gloo", {"HOCKET_SHARED_MEMORY": "0"})])
def test_workers_share_every_epoch_and_end_it_alike(backend: str, env: dict[str, str], tmp_path: Path) -> None:
    words = WORDS if not env else ("local:3", "stale:2", "ssp:1")
    cases = [(name, word) for name in ("mlp", "words") for word in words]
    found = run_ranks(trainer_programs.train_all, 3, cases, str(tmp_path), backend=backend, env=env, timeout_s=100)
    for i, case in enumerate(cases):
        check(case, [rank[i] for rank in found], one_process(case[0]))
        if case[1] in ("stale:2", "hogwild") and backend == "hocket":
            slow, *fast = (len(rank[i][2]) for rank in found)
            assert slow < min(fast)  # it took fewer parts


@pytest.mark.long
def test_other_fields_of_a_plan_go_with_it() -> None:
    fields = {"accumulate": 2, "clip_norm": 0.5, "recompute": True}
    for rank in run_ranks(trainer_programs.with_fields, 2, fields, timeout_s=60):
        for losses in rank:
            assert losses[-1] < losses[0]


@pytest.mark.parametrize("word", ["local:3", "stale:1"])
def test_training_goes_on_from_a_checkpoint(word: str, tmp_path: Path) -> None:
    for first, again in run_ranks(trainer_programs.go_on, 2, word, str(tmp_path / "saved"), timeout_s=60):
        # Averages are the same numbers again; asynchronous updates come in another order.
        assert again[0] == pytest.approx(first[1], rel=1e-12 if word == "local:3" else 1e-2)


def test_what_cannot_be_combined_is_refused_with_the_remedy() -> None:
    shard, batch_norm = run_ranks(trainer_programs.refused, 2)[0]
    assert "shard: cannot be combined with synchronisation = 'stale:2'" in shard
    assert "leave sync_batch_norm out" in batch_norm


@pytest.mark.long
def test_one_process_trains_as_if_nothing_were_relaxed() -> None:
    losses = one_process("mlp")
    for word in WORDS:
        assert trainer_programs.train("mlp", word)[0] == pytest.approx(losses, rel=1e-13)
