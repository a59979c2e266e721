"""Programs written for torch give the same numbers on hocket as on gloo: one word changes, and no import."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.testing import deadline

from ..processes import script_output

pytestmark = pytest.mark.long

PROGRAMS = Path(__file__).parents[2] / "examples" / "torch"
# Gloo adds the ranks' parts in another order than hocket (that of ranks) only where there are more than two.
RANKS = {"ddp": 2, "fsdp2": 2, "tensor_parallel": 2, "pipeline": 2, "dcp_checkpoint": 2, "device_mesh": 4}
BY_TORCHRUN = "dcp_checkpoint"  # the others on ranks that fork, which saves importing torch some thirty times


def _by_torchrun(program, backend, directory):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[program]}"]
    result = subprocess.run(
        [*command, str(PROGRAMS / f"{program}.py"), "--backend", backend],
        capture_output=True,
        text=True,
        timeout=deadline(100),
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)},  # torchrun leaves its logs there
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def _numbers(said):
    return json.loads(said.strip().splitlines()[-1])


def test_every_program_is_tested():
    assert {path.stem for path in PROGRAMS.glob("*.py")} == set(RANKS)


@pytest.mark.parametrize("program", RANKS)
def test_the_same_numbers_to_the_last_bit(program, tmp_path):
    path = PROGRAMS / f"{program}.py"
    if program == BY_TORCHRUN:
        said = _by_torchrun(program, "hocket", tmp_path)
    else:
        said = script_output(path, "--backend", "hocket", n=RANKS[program])
    assert _numbers(said) == _numbers(script_output(path, "--backend", "gloo", n=RANKS[program]))
    left = [one.name for one in tmp_path.iterdir() if not one.name.startswith(("torchelastic_", "torchinductor_"))]
    assert left == []
    assert "hocket" not in path.read_text().split("import", 1)[1].replace('default="hocket"', "")
