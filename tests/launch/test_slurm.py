"""`hocket run` in a Slurm allocation starts on all nodes; one a host becomes one job, several are refused."""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hocket.cli import main
from hocket.launch import ArgumentError, LaunchError, batch_script, parse_arguments, run_step, step_command
from hocket.testing import deadline

from ..processes import until

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
    head, *lines = batch_script(command, {**ALLOCATION, "SLURM_MEM_PER_NODE": "4096"}).splitlines()
    assert head == "#!/bin/sh"
    # What srun asks for is there: with the tasks alone Slurm may give a core for each, and srun fails.
    asked = [*flags[:1], *flags[2:4], "--partition=all", "--mem=4096"]
    asked += ["--requeue", "--signal=USR1@90", "--open-mode=append"]
    assert lines[:8] == [f"#SBATCH {flag}" for flag in asked]
    assert lines[8].startswith("export HOCKET_SAVED_MARK=")
    assert lines[9].startswith("srun --nodes=2 ")
    assert lines[11].startswith('if rm "$HOCKET_SAVED_MARK" 2>/dev/null; then scontrol requeue "$SLURM_JOB_ID"; fi')
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    for other in ({}, {**ALLOCATION, "SLURM_JOB_NUM_NODES": "1"}, {**ALLOCATION, **step}):
        assert step_command(words, 4, other) is None
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)
    path = script("")
    assert parse_arguments([path]).nproc == 4
    assert parse_arguments(["-n", "1", path]).nproc == 1
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2,1")
    assert parse_arguments(["-n", "1", path]).nproc == 1
    with pytest.raises(ArgumentError, match="8 tasks, 2,1 on its nodes"):
        parse_arguments([path])


def test_a_job_of_several_components_is_not_taken_for_its_first(
    monkeypatch: pytest.MonkeyPatch, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    heterogeneous = {**ALLOCATION, "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "4", "SLURM_HET_SIZE": "2"}
    for name in ("RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in heterogeneous.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["run", "-n", "2", script("")])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "this Slurm job has 2 components, and `hocket run` would start on the nodes of the first alone" in said
    assert "srun --het-group=0-1 python train.py" in said
    assert step_command(["train.py"], 2, {**heterogeneous, "SLURM_STEP_ID": "0"}) is None


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


@pytest.mark.parametrize(
    ("more", "nodes"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "2"),  # as enroot's hook sets them, with or without pyxis
        ({"RANK": "0", "WORLD_SIZE": "1"}, "1:1"),  # independent trainings, on purpose
        ({"RANK": "1", "WORLD_SIZE": "2", "HOCKET_JOB": "job"}, "1:1"),  # a rank of a job starts one of its own
    ],
)
def test_launchers_in_containers_of_enroot_are_one_job(
    monkeypatch: pytest.MonkeyPatch, script: Any, more: dict[str, str], nodes: str
) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    place = {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]"}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "50007"}
    for name, value in {**ALLOCATION, **step, **place, **master, **more}.items():
        monkeypatch.setenv(name, value)
    assert parse_arguments(["-n", "1", script("")]).flags.nnodes == nodes


def test_on_every_node_of_skypilot_the_same_command_makes_one_job(
    hocket_forked: Any, script: Any, tmp_path: Path
) -> None:
    path = script("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])")
    nodes = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_TASK_ID": f"sky-{os.getpid()}",
    }
    base = {name: value for name, value in os.environ.items() if name != "HOCKET_RUN_DIR"}
    with ThreadPoolExecutor(2) as pool:
        environments = [{**base, **nodes, "SKYPILOT_NODE_RANK": str(rank)} for rank in (1, 0)]
        started = [pool.submit(hocket_forked, "run", "-n", "1", path, cwd=tmp_path, env=env) for env in environments]
    said = [one.result() for one in started]
    assert [one.stdout for one in said] == ["[1] 1 2 0\n", "[0] 0 2 0\n"], said
    # On a disk that the nodes share the directory is one, and said once.
    assert ["this run is kept in runs/" in one.stderr for one in said] == [False, True]
    (kept,) = (tmp_path / "runs").glob("script-sky-*")
    assert {"run.json", "run-node1.json"} <= {file.name for file in kept.iterdir()}


@pytest.fixture(scope="session")
def slurm() -> None:
    """Skip where no Slurm of two nodes runs; asked once, since one that is installed and does not run takes 9 s."""
    try:
        nodes = subprocess.run(["sinfo", "-h", "-N"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        pytest.skip("no Slurm runs here: docs/launchers.md says how to start one")
    if len(nodes) < 2:
        pytest.skip("needs a Slurm of two nodes")


RESUMES = """
import os, sys, time, torch, hocket
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 3).double(), torch.randn(64, 1).double())
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, torch.optim.Adam(model.parameters(), lr=0.01))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
state = trainer.resume("checkpoint", extra=lambda: {"epoch": epoch})
for epoch in range(state["epoch"] if state else 0, 3):
    for batch in trainer.batches(loader):
        loss = float(trainer.step(batch))
        if os.environ.get("RANK", "0") == "0":
            print(f"step {trainer.steps} {loss:.12f}", flush=True)
        time.sleep(float(os.environ.get("STEP_S", "0")))
"""


def losses(text: str) -> list[str]:
    """Return what was printed of each step."""
    return re.findall(r"^(?:\[0\] )?(step \d+ .*)$", text, flags=re.MULTILINE)


@pytest.mark.long
def test_a_job_that_is_told_to_end_saves_and_goes_on_with_the_same_losses(
    hocket: Any, script: Any, tmp_path: Path
) -> None:
    """Signals to the launcher, in the first epoch and later, too; exit status 75, no step lost, none twice."""
    path = script(RESUMES)
    alone = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=deadline(120),
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    together: list[str] = []
    for number, after in ((signal.SIGTERM, "step 3"), (signal.SIGUSR1, "step 11"), (None, None)):
        pause = {} if number is None else {"STEP_S": "0.3"}
        process = hocket("run", "-n", "2", path, cwd=tmp_path, env={**os.environ, **pause, "TMPDIR": str(tmp_path)})
        out = ""
        if number is not None:
            for line in process.stdout:
                out += line
                if f"{after} " in line:
                    process.send_signal(number)
                    break
        rest, err = process.communicate(timeout=deadline(120))
        assert process.returncode == (75 if number else 0), err
        if number is not None:
            assert f"hocket: {number.name}: a checkpoint is in checkpoint" in err
        together += losses(out + rest)
    assert together == losses(alone.stdout)
    assert len(together) == 24


@pytest.mark.long
@pytest.mark.timeout(500)  # Slurm waits for two minutes before it starts what is queued again
@pytest.mark.usefixtures("slurm")
def test_a_job_near_its_time_limit_is_queued_again_and_goes_on(script: Any, tmp_path: Path) -> None:
    path = script(RESUMES)
    alone = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=deadline(120),
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    command = step_command([path], 1, {**ALLOCATION, "SLURM_JOB_CPUS_PER_NODE": "1(x2)"})
    assert command is not None
    text = batch_script(command, {"SLURM_JOB_NUM_NODES": "2"})
    # Slurm sends the signal up to a minute early: of a limit of two minutes, with 65 s or more left.
    text = text.replace("--signal=USR1@90", "--signal=USR1@65\n#SBATCH --time=2")
    text = text.replace("srun ", "export STEP_S=$((SLURM_RESTART_COUNT > 0 ? 0 : 6))\nsrun ")
    (tmp_path / "job.sh").write_text(text)
    asked = ["sbatch", "--wait", f"--output={tmp_path}/out", str(tmp_path / "job.sh")]
    subprocess.run(asked, check=True, timeout=deadline(400), cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)})
    out = (tmp_path / "out").read_text()
    print(out)
    assert "hocket: SIGUSR1: a checkpoint is in checkpoint" in out
    assert losses(out) == losses(alone.stdout)


@pytest.mark.long
@pytest.mark.usefixtures("slurm")
def test_a_job_of_two_nodes_that_has_saved_ends_by_its_status(script: Any, tmp_path: Path) -> None:
    """The launcher that ends first has srun end the step, hence the other launcher."""
    batch, out = tmp_path / "job.sh", tmp_path / "out"
    batch.write_text(f"#!/bin/sh\n{sys.executable} -m hocket run -n 1 {script(RESUMES)}\necho status $?\n")
    asked = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={out}", str(batch)]
    settings: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": deadline(30)}
    job = subprocess.run(
        asked, cwd=tmp_path, env={**os.environ, "STEP_S": "1", "TMPDIR": str(tmp_path)}, **settings
    ).stdout.strip()
    try:
        assert until(lambda: out.exists() and "step 2 " in out.read_text(), deadline(120))
        subprocess.run(["scancel", "--signal=USR1", job], **settings)
        assert until(lambda: "\nstatus " in out.read_text(), deadline(60))
    finally:
        subprocess.run(["scancel", job], timeout=deadline(30), check=False)
    assert "\nstatus 75\n" in out.read_text(), out.read_text()


SIGNALLED = """
import os, pathlib, signal, sys, threading, time
from hocket.launch import run_step
os.setpgid(0, 0)
def end():
    while len(list(pathlib.Path(sys.argv[1]).glob("began-*"))) < 2: time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)  # as timeout(1) does: this process, then its group
    os.killpg(0, signal.SIGTERM)
threading.Thread(target=end, daemon=True).start()
sys.exit(run_step(sys.argv[2:]))
"""


def test_an_allocation_without_srun_is_told() -> None:
    with pytest.raises(LaunchError, match="none-such, which starts on all, cannot be run here: No such file"):
        run_step(["none-such"])


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("missing", [False, True])
def test_the_tasks_of_a_step_may_save_when_who_started_it_is_told_to_end(
    missing: bool, script: Any, tmp_path: Path
) -> None:
    """Where srun itself gets SIGTERM it kills all of them at once; it still does where Slurm does not answer."""
    task = tmp_path / "task.sh"
    trap = "trap 'sleep 1; echo saved; exit 75' TERM"
    loop = "for i in $(seq 600); do sleep 0.1; done"
    task.write_text(f"{trap}\n: > {tmp_path}/began-$SLURM_PROCID\n{loop}\n")
    batch, path = tmp_path / "job.sh", os.environ["PATH"]
    if missing:
        (tmp_path / "scontrol").write_text("#!/bin/sh\necho it does not answer >&2\nexit 1\n")
        (tmp_path / "scontrol").chmod(0o755)
        path = f"{tmp_path}:{path}"
    start = f"{sys.executable} {script(SIGNALLED)} {tmp_path} srun --kill-on-bad-exit=1 -N2 -n2 bash {task}"
    batch.write_text(f"#!/bin/sh\nexport PATH={path}\n{start}\necho status $?\n")
    asked = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/out", str(batch)]
    subprocess.run(asked, capture_output=True, timeout=deadline(120), cwd=tmp_path, check=True)
    out = (tmp_path / "out").read_text()
    print(out)
    assert out.count("saved") == (0 if missing else 2)
    assert ("hocket: srun is to end the step at once: scontrol: it does not answer" in out) == missing
    assert ("status 75" in out) != missing


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
