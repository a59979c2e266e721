import json
import runpy
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hocket.testing import run_ranks


@pytest.fixture
def forked_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of a measurement fork from the server of `run_ranks`, so that none imports torch for seconds.

    How `hocket bench` and its like start processes is tested where this is not asked for.
    """
    monkeypatch.setattr("hocket.cli._bench.world.run_world", _run_world)
    monkeypatch.setattr("hocket.cli.bench.run_world", _run_world)


def _run_world(
    module: str, spec: Mapping[str, Any], n: int, *, what: str, mpi: bool, timeout_s: float
) -> dict[str, Any]:
    assert not mpi
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as directory:
        spec_path, result_path = Path(directory) / "spec.json", Path(directory) / "result.json"
        spec_path.write_text(json.dumps({**spec, "n": n, "store": f"{directory}/store", "result": str(result_path)}))
        env = {"OMP_NUM_THREADS": "1", "TMPDIR": directory}
        run_ranks(_as_main, n, module, str(spec_path), backend=None, timeout_s=timeout_s, env=env)
        result: dict[str, Any] = json.loads(result_path.read_text())
        return result


def _as_main(module: str, spec_path: str) -> None:
    sys.argv = [module, spec_path]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
