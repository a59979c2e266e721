"""The examples do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.testing import deadline

from .processes import script_output

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAINER = EXAMPLES / "trainer.py"
HOCKET = (sys.executable, "-m", "hocket")
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(110), check=False, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?:loss |^)([\d.]+)(?: of 397 right)?$", text, re.MULTILINE)]


@pytest.mark.long
def test_distribute_gives_the_same_numbers_on_one_worker_and_on_two() -> None:
    script = EXAMPLES / "distribute.py"
    *losses, right = numbers(script_output(script))
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]
    assert right > 340
    *losses_together, right_together = numbers(script_output(script, n=2))
    assert losses_together == pytest.approx(losses, abs=0.002)
    assert right_together == pytest.approx(right, abs=1)


def epochs(text: str) -> dict[int, tuple[float, float]]:
    """By epoch the loss, and the percentage of test rows that are right."""
    found = re.findall(r"epoch (\d+): loss ([\d.]+), ([\d.]+)% of the test rows right", text)
    return {int(epoch): (float(loss), float(right)) for epoch, loss, right in found}


@pytest.mark.timeout(300)
@pytest.mark.long
def test_trainer_learns_to_sort_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    checkpoint, plan = str(tmp_path / "checkpoint"), tmp_path / "plan.toml"
    plan.write_text("tensor_parallel_degree = 2\n")
    alone = epochs(script_output(TRAINER, "--epochs", "2"))
    assert list(alone) == [0, 1]
    assert alone[1][1] > 90
    first = script_output(TRAINER, "--epochs", "1", "--checkpoint", checkpoint, n=2)
    second = output(
        *(*HOCKET, "run", "-n", "2", "--plan", str(plan), str(TRAINER)),
        *("--epochs", "2", "--checkpoint", checkpoint),
    )
    assert "plan: 2 data\n" in first
    assert "plan: 1 data x 2 tensor\n" in second
    for text, epoch in ((first, 0), (second, 1)):
        assert list(epochs(text)) == [epoch]
        assert epochs(text)[epoch][0] == pytest.approx(alone[epoch][0], abs=0.001)
        assert epochs(text)[epoch][1] == pytest.approx(alone[epoch][1], abs=1)
