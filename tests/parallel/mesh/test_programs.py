"""Hosts whose copies of a program differ, or their versions, are told of once; nothing is said of what is alike."""

from pathlib import Path
from typing import Any

import pytest

SOURCE = """
import os, sys
kind, rank = sys.argv[1], os.environ["RANK"]
os.environ["HOCKET_HOST"] = f"host{rank}"  # as on two hosts
sys.path.insert(0, f"{os.path.dirname(__file__)}/{rank}")
import helper
import torch
if rank == "0":
    import plots  # which rank 0 alone needs
if kind == "other" and rank == "1":
    torch.__version__ = "2.0.1"
import hocket
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    hocket.Trainer(model, torch.nn.functional.mse_loss, optimizer).step((torch.ones(4, 2), torch.ones(4, 1)))
hocket.distribute(torch.nn.Linear(2, 1), None, None)
"""


@pytest.mark.parametrize("kind", ["other", "alike"])
def test_hosts_with_other_copies_of_a_program_are_told_of_once(kind: str, hocket_forked: Any, tmp_path: Path) -> None:
    """An edited `forward` or loss function on one host was trained together with the former one, in silence."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "helper.py").write_text(f"FACTOR = {rank if kind == 'other' else 0}\n")
    (tmp_path / "0" / "plots.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    ran = hocket_forked("run", "-n", "2", "--no-run-dir", str(script), kind, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    files, versions = "helper.py: rank 1 has loaded other contents than rank 0", "rank 1 has torch 2.0.1, and rank 0"
    said = 1 if kind == "other" else 0
    assert [ran.stderr.count(text) for text in (files, versions)] == [said, said], ran.stderr
    assert ran.stderr.count("Warning") == 2 * said, ran.stderr
