"""Comparing what two runs of a script wrote down."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hocket.cli._check.equivalence import (
    NothingRecorded,
    RecordedRun,
    compare,
    read,
)

FACTS: dict[str, Any] = {
    "reduction": "mean",
    "distributed": True,
    "shared_batches": True,
    "draws": False,
    "keras": False,
    "seeded": True,
    "dropout": [],
    "batch_norm": [],
    "types": ["float32"],
    "compression": [],
    "parameters": [["weight", 1], ["bias", 2]],
}


def run(losses: list[float], n: int = 1, **facts: Any) -> RecordedRun:
    return RecordedRun(losses, [{**FACTS, **facts} for _ in range(n)])


def write(directory: Path, ranks: list[list[tuple[float, float | None]]], **facts: Any) -> None:
    for rank, entries in enumerate(ranks):
        lines = [json.dumps({"loss": loss, "share": share}) for loss, share in entries]
        (directory / f"losses-{rank}.jsonl").write_text("\n".join(lines))
        (directory / f"facts-{rank}.json").write_text(json.dumps({**FACTS, **facts}))


def test_losses_of_parts_make_that_of_the_batch(tmp_path: Path) -> None:
    write(tmp_path, [[(2.0, 0.75), (1.0, None), (3.0, 1.0)], [(4.0, 0.25), (5.0, None), (math.inf, 0.0)]])
    assert read(tmp_path, 2).losses == [2.5, 3.0, 3.0]


def test_sums_are_added(tmp_path: Path) -> None:
    write(tmp_path, [[(2.0, 0.75), (3.0, 1.0)], [(4.0, 0.25), (9.0, 0.0)]], reduction="sum")
    assert read(tmp_path, 2).losses == [6.0, 3.0]


def test_a_rank_without_a_backward_pass_is_named(tmp_path: Path) -> None:
    write(tmp_path, [[(1.0, None)]])
    with pytest.raises(NothingRecorded, match="rank 1 of 2 made no backward pass"):
        read(tmp_path, 2)


def test_equal_up_to_the_tolerance() -> None:
    found = compare(run([1.0, 2.0, math.nan, 0.0]), run([1.0, 2.0001, math.nan, 0.0], 2), 1e-4)
    assert found.equivalent
    assert found.worst == pytest.approx(5e-5, rel=1e-3)
    assert found.hints == []
    assert not compare(run([1.0, 2.0]), run([1.0, 2.0001], 2), 1e-6).equivalent


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_not_a_number_does_not_pass_for_equal(value: float) -> None:
    found = compare(run([1.0, 1.0]), run([1.0, value], 2), 1e-4)
    assert not found.equivalent
    assert found.first_divergent == 2
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (run([1.5, 2.5], 2, distributed=False), "no call to hocket.distribute"),
        (run([1.5, 2.5], 2, shared_batches=False), "do not come from a loader that hocket.distribute returned"),
        (run([1.0], 2), "One rank made 2 backward passes and 2 ranks made 1 each"),
        (run([1.5, 2.5], 2), "from the first step on"),
        (run([1.5, 2.5], 2, seeded=False), "does not seed"),
        (run([1.0, 2.5], 2, dropout=["a", "b", "c", "d"]), "drops values at random ('a', 'b', 'c' and 1 more)"),
        (run([1.0, 2.5], 2, batch_norm=["bn"]), "Batch norm ('bn')"),
        (run([1.0, 2.5], 2, draws=True), "Random numbers are drawn between backward passes"),
        (run([1.0, 2.1], 2, types=["bfloat16"]), "Parameters are bfloat16"),
        (run([1.0 + 1e-8, 2.1], 2), "agree up to rounding (1.0e-08)"),
    ],
)
def test_hints_name_the_cause(parallel: RecordedRun, words: str) -> None:
    found = compare(run([1.0, 2.0]), parallel, 1e-4)
    assert not found.equivalent
    assert any(words in hint for hint in found.hints), found.hints


def test_losses_that_a_trainer_tells_are_those_of_the_batch(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"losses-{rank}.jsonl").write_text(json.dumps({"loss": 2.0, "whole": True}))
        (tmp_path / f"facts-{rank}.json").write_text(json.dumps({**FACTS, "reduction": "sum"}))
    assert compare(run([2.0]), read(tmp_path, 2), 1e-4).equivalent


def test_keras_is_not_taken_for_a_loop(tmp_path: Path) -> None:
    write(tmp_path, [[(2.0, None)]] * 2, keras=True)
    with pytest.raises(NothingRecorded, match="compare what fit returns"):
        read(tmp_path, 2)


def test_ranks_that_all_do_the_same_do_not_pass(tmp_path: Path) -> None:
    write(tmp_path, [[(2.0, None), (1.0, None)]] * 2, distributed=False)
    found = compare(run([2.0, 1.0]), read(tmp_path, 2), 1e-4)
    assert not found.equivalent
    assert found.hints[0] == "Each of the 2 ranks computed the same losses, so each did all of the work."
    write(tmp_path, [[(2.5, None)], [(1.5, None)]])
    assert compare(run([2.0]), read(tmp_path, 2), 1e-4).equivalent


def test_ranks_that_end_with_other_parameters_do_not_pass() -> None:
    apart = RecordedRun([1.0], [FACTS, {**FACTS, "parameters": [["weight", 1], ["bias", 3]]}])
    found = compare(run([1.0]), apart, 1e-4)
    assert not found.equivalent
    assert "parameter 'bias' differs between ranks" in found.hints[0]


@pytest.mark.parametrize("losses", [[1.0, 0.5], [1.0, 0.7]])
def test_compression_is_named_whether_the_losses_agree_or_not(losses: list[float]) -> None:
    found = compare(run([1.0, 0.5]), run(losses, 2, compression=["int8:256"]), 1e-4)
    (said,) = found.relaxed
    assert "Gradients are sent as int8:256, which is not serially equivalent" in said
    assert found.to_json()["relaxed"] == [said]
    assert compare(run([1.0]), run([1.0], 2), 1e-4).relaxed == []
