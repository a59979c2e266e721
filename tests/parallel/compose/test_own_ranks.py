"""Ranks that a program starts itself lose what one process does, however they are told who they are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.testing import deadline

SOURCE = """
import os, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
import hocket

def losses():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    x = torch.randn(13, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True)
    model, optimizer, loader = hocket.distribute(model, torch.optim.Adam(model.parameters(), 0.1), loader)
    found = []
    for _ in range(2):
        for inputs, wanted in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(hocket.average(loss)))
    return found

def train(rank, ranks, folder, how):
    if how == "spawn":  # as torch's tutorials do it
        dist.init_process_group("hocket", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    else:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    found = losses()
    if rank == 0:
        print(found, flush=True)

if __name__ == "__main__":
    print(losses(), flush=True)  # in this process, before there are ranks, as an earlier cell of a notebook
    folder, how = sys.argv[1:]
    os.environ["MASTER_PORT"] = str(dist.TCPStore("127.0.0.1", 0, is_master=True).port)  # a free one, once it is closed
    torch.multiprocessing.start_processes(train, (2, folder, how), nprocs=2, start_method=how)
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_ranks_of_a_program_s_own_lose_what_one_process_does(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    command = [sys.executable, str(script), str(tmp_path), how]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=deadline(110), check=False)
    assert ran.returncode == 0, ran.stderr
    alone, together = map(ast.literal_eval, ran.stdout.splitlines())
    assert together == pytest.approx(alone, rel=1e-12)
    assert len(alone) == 8
    assert "Traceback" not in ran.stderr
