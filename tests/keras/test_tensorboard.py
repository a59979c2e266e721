"""Keras' TensorBoard callback, written by TensorFlow itself and read by TensorBoard's own package."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.testing import deadline

from .compare import TOLERANCE

pytest.importorskip("tensorflow", reason="Keras' TensorBoard callback writes by tensorflow, which is not installed")
pytest.importorskip(
    "tensorboard", reason="what the callback has written is read by tensorboard, which is not installed"
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parent / "tensorboard_program.py"
WAYS = ["data", "pipeline"]


def written_by(directory: Path, *launcher: str) -> Path:
    command = [sys.executable, *launcher, str(PROGRAM), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(140), check=False)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(tmp_path_factory.mktemp("together"), "-m", "hocket", "run", "-n", "2")


def read(directory: Path) -> dict[tuple[str, int], np.ndarray]:
    """What TensorBoard finds: numbers, or edges and counts of histograms, by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events: Any = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag != "keras"]  # a text: the model's layers
    return {(tag, e.step): tensor_util.make_ndarray(e.tensor_proto) for tag in tags for e in events.Tensors(tag)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["train", "validation"])
def test_tensorboard_reads_of_two_workers_what_it_reads_of_plain_keras(
    alone: Path, together: Path, way: str, kind: str
) -> None:
    wanted, got = read(alone / way / kind), read(together / way / kind)
    assert got.keys() == wanted.keys()
    assert len(wanted) >= 6
    for key, value in wanted.items():
        np.testing.assert_allclose(got[key], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=str(key))


def test_scalars_are_those_of_the_history_that_every_rank_has(together: Path) -> None:
    histories = [json.loads((together / f"pipeline.{rank}.json").read_text())["history"] for rank in range(2)]
    assert histories[0] == histories[1]
    found = read(together / "pipeline" / "train")
    for name in ("loss", "accuracy"):
        assert [float(found[f"epoch_{name}", epoch]) for epoch in range(3)] == pytest.approx(histories[0][name])


@pytest.mark.parametrize("way", WAYS)
def test_rank_0_writes_and_no_other(together: Path, way: str) -> None:
    processes = [json.loads((together / f"{way}.{rank}.json").read_text())["process"] for rank in range(2)]
    files = list((together / way).rglob("events.out.tfevents.*"))
    assert len(files) == 2  # of training, and of validation
    assert processes[0] != processes[1]
    assert {int(re.findall(r"\.(\d+)\.\d+\.v2$", file.name)[0]) for file in files} == {processes[0]}
