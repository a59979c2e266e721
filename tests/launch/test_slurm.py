"""`hocket run` in a Slurm allocation starts on all nodes; one a host becomes one job, several are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.launch import ArgumentError, batch_script, parse_arguments, step_command
from hocket.testing import deadline

ALLOCATION = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "16,8",
    "SLURM_JOB_PARTITION": "all",
}


def test_an_allocation_of_several_nodes_is_used_whole(monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    words = ["train.py", "--epochs", "3"]
    command = step_command(words, 4, ALLOCATION)
    assert command is not None
    flags = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=1"]
    assert command == ["srun", *flags, sys.executable, "-m", "hocket", "run", "-n=4", *words]
    head, *lines = batch_script(command, ALLOCATION).splitlines()
    assert head == "#!/bin/sh"
    assert lines[:3] == ["#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", "#SBATCH --partition=all"]
    assert lines[3].startswith("exec srun --nodes=2 ")
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    for other in ({}, {**ALLOCATION, "SLURM_JOB_NUM_NODES": "1"}, {**ALLOCATION, **step}):
        assert step_command(words, 4, other) is None
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)
    path = script("")
    assert parse_arguments([path]).nproc == 4
    assert parse_arguments(["-n", "1", path]).nproc == 1


def test_a_launcher_on_each_host_is_one_job_and_two_on_one_host_are_refused(
    monkeypatch: pytest.MonkeyPatch, script: Any
) -> None:
    variables = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    path = script("")
    flags = parse_arguments(["-n", "3", path]).flags
    assert (flags.nnodes, flags.node_rank, flags.master_addr, flags.master_port) == ("2", 1, "127.0.0.1", 29999)
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    with pytest.raises(ArgumentError, match="each would start ranks"):
        parse_arguments(["-n", "3", path])


def test_on_every_node_of_skypilot_the_same_command_makes_one_job(hocket: Any, script: Any) -> None:
    path = script("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])")
    nodes = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_TASK_ID": f"sky-{os.getpid()}",
    }
    started = [
        hocket("run", "-n", "1", path, env={**os.environ, **nodes, "SKYPILOT_NODE_RANK": str(rank)}) for rank in (1, 0)
    ]
    said = [process.communicate(timeout=deadline(90))[0] for process in started]
    assert said == ["[1] 1 2 0\n", "[0] 0 2 0\n"]


@pytest.fixture
def slurm() -> None:
    """Skip where no Slurm of two nodes runs."""
    try:
        nodes = subprocess.run(["sinfo", "-h", "-N"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        pytest.skip("no Slurm runs here: docs/launchers.md says how to start one")
    if len(nodes) < 2:
        pytest.skip("needs a Slurm of two nodes")


@pytest.mark.usefixtures("slurm")
def test_hocket_run_in_a_batch_script_starts_on_every_node(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, torch, hocket\n"
        "from torch import distributed as dist\n"
        "dist.init_process_group('hocket')\n"
        "total = torch.ones(1); dist.all_reduce(total)\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'SLURMD_NODENAME')\n"
        "print(json.dumps([*(os.environ[name] for name in names), total.item()]))\n"
        "dist.destroy_process_group()\n"
    )
    batch = tmp_path / "job.sh"
    batch.write_text(f"#!/bin/sh\nexec {sys.executable} -m hocket run {script}\n")
    asked = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/out", str(batch)]
    ran = subprocess.run(asked, capture_output=True, text=True, timeout=deadline(180), cwd=tmp_path, check=False)
    out = (tmp_path / "out").read_text()
    print(out)
    assert ran.returncode == 0
    found = [json.loads(line.partition("] ")[2]) for line in sorted(out.splitlines()) if '["' in line]
    assert [line[:3] + line[4:] for line in found] == [[str(rank), "4", str(rank % 2), 4.0] for rank in range(4)]
    assert len({line[3] for line in found}) == 2
