"""PyTorch's own distributed tests: what passes on Gloo passes on hocket, or stands in refused.txt with the reason."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from torch.torch_version import TorchVersion

from hocket.testing import deadline

pytestmark = pytest.mark.long
HERE = Path(__file__).parent
PASSES_ON_GLOO = [name for name in (HERE / "passes_on_gloo.txt").read_text().split("\n") if name.startswith("test_")]
_LINE = re.compile(r"(test_\w+), before torch ([\d.]+): (.*)")
REFUSED = {
    found[1]: found[3]
    for found in map(_LINE.fullmatch, (HERE / "refused.txt").read_text().splitlines())
    if found and TorchVersion(version("torch")) < found[2]
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_suite(tmp_path_factory.mktemp("suite"), PASSES_ON_GLOO)


def run_suite(directory, names):
    result = directory / "result.json"
    command = [sys.executable, str(HERE / "run.py"), "hocket", str(result), *names]
    env = {**os.environ, "TMPDIR": str(directory)}
    said = subprocess.run(command, capture_output=True, text=True, timeout=deadline(600), check=False, env=env)
    assert said.returncode == 0, said.stderr[-3000:]
    return json.loads(result.read_text())


def test_the_runner_leaves_no_directory_behind(tmp_path):
    assert list(run_suite(tmp_path, ["test_get_rank"])) == ["test_get_rank"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("hocket-suite-")] == []


@pytest.mark.timeout(620)
@pytest.mark.parametrize("name", PASSES_ON_GLOO)
def test_what_passes_on_gloo_passes_on_hocket(outcomes, name):
    outcome = outcomes[name]
    if name in REFUSED:
        assert outcome["outcome"] == "failed", f"{name} passes now: take it out of refused.txt"
    else:
        assert outcome["outcome"] == "passed", outcome["why"]
