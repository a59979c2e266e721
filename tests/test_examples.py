"""The examples do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?:loss |^)([\d.]+)(?: of 397 right)?$", text, re.MULTILINE)]


@pytest.mark.long
def test_distribute_gives_the_same_numbers_on_one_worker_and_on_two() -> None:
    script = str(EXAMPLES / "distribute.py")
    alone = output(sys.executable, script)
    together = output(sys.executable, "-c", "from hocket.cli import main; main()", "run", "-n", "2", script)
    *losses, right = numbers(alone)
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]
    assert right > 340
    *losses_together, right_together = numbers(together.replace("[0] ", ""))
    assert losses_together == pytest.approx(losses, abs=0.002)
    assert right_together == pytest.approx(right, abs=1)
