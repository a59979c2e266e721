"""Programs of other libraries give the numbers of Gloo, bit for bit; `make test-third-party` runs them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.testing import deadline

pytestmark = pytest.mark.third_party

PROGRAMS = Path(__file__).with_name("programs.py")


def numbers(library, backend):
    command = [sys.executable, "-m", "hocket", "run", "-n", "2", str(PROGRAMS), library, backend]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=deadline(100),
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOCKET_TIMEOUT": "60"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("[0] numbers ")]
    return json.loads(line.removeprefix("[0] numbers "))


@pytest.mark.parametrize("library", ["accelerate", "transformers", "ignite", "fabric", "lightning", "torchmetrics"])
def test_the_numbers_are_those_of_gloo(library):
    if importlib.util.find_spec("lightning" if library == "fabric" else library) is None:
        pytest.skip(f"{library} is not installed; `make test-third-party` installs it")
    assert numbers(library, "hocket") == numbers(library, "gloo")
