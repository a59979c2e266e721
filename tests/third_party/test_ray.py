"""Ray Train on a local cluster with two workers: RayConfig gives the numbers of Gloo, and of one process."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.testing import deadline

pytestmark = pytest.mark.third_party


@pytest.mark.timeout(600)
def test_losses_under_ray_are_those_of_gloo_and_of_one_process(tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed; `make test-third-party` installs it")
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ray_programs.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=deadline(250),
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOCKET_TIMEOUT": "60"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    one = found.pop("one")["losses"]
    gloo = found.pop("prepare-gloo")
    assert found["prepare-hocket"]["losses"] == gloo["losses"]
    assert all(each["backend"] == "hocket" and each["secret"] for each in found.values())
    assert found["distribute-hocket"]["losses"] == pytest.approx(one, rel=1e-5)
    assert found["trainer-hocket"]["losses"] == pytest.approx(one, rel=1e-5)
