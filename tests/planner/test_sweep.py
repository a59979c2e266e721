"""Constants of a cluster, fitted to a sweep."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hocket import cluster
from hocket.cli import main
from hocket.planner import Constants, Network, PlanError, fit_sweep, read_sweep

SIZES = [2**power for power in range(16, 34, 3)]


@pytest.mark.parametrize(("ranks", "name"), [(8, "inside_share"), (64, "network_share")])
def test_a_sweep_that_the_formulas_made_gives_their_constants(ranks: int, name: str) -> None:
    where = Network.of(cluster.load("h100-like"))
    truth = dataclasses.replace(Constants.of(where.reached), collective_s=35e-6, **{name: 0.55})
    sweep = {n: where.collective("all_reduce", float(n), ranks, 1, truth).seconds for n in SIZES}
    found, error = fit_sweep(sweep, where, kind="all_reduce", ranks=ranks)
    assert getattr(found, name) == pytest.approx(0.55, rel=0.01)
    assert found.collective_s == pytest.approx(35e-6, rel=0.05)
    assert (found.basis, found.fitted_workers) == ("fitted", ranks)
    assert error < 0.01


NCCL = """\
# out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    101.9   10.29   18.01      0
    16777216       4194304     float     sum      -1    276.6   60.66  106.15      0
  1073741824     268435456     float     sum      -1   8203.9  130.88  229.04      0
 17179869184    4294967296     float     sum      -1 127997.0  134.22  234.89      0
"""


def test_nccl_tests_output_becomes_a_cluster_that_predicts_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight A100: 235 of 300 GB/s, 78%."""
    assert read_sweep(NCCL)[16777216] == pytest.approx(276.6e-6)
    assert read_sweep("bytes,us\n8,1.5\n16,2\n32,3\n")[8] == pytest.approx(1.5e-6)
    (tmp_path / "sweep.txt").write_text(NCCL)
    words = ["cluster", "fit", "selene-like", str(tmp_path / "sweep.txt"), "-n", "8", "-o", str(tmp_path / "mine.toml")]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["fitted"]["inside_share"] == pytest.approx(0.78, abs=0.05)
    mine = cluster.load(str(tmp_path / "mine.toml"))
    assert Constants.of(mine.reached).inside_share == found["fitted"]["inside_share"]
    assert Constants.of(mine.reached).fetch_share == 0.081  # what the sweep says nothing of stays
    with pytest.raises(PlanError, match="2 sizes were read"):
        read_sweep("1,2\n3,4\n")
