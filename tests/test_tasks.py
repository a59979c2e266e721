"""Tasks of srun and mpirun are found by their variables and join; half a description is refused, never passed over."""

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hocket import _meeting_place
from hocket._tasks import LaunchedTask, TasksError, described, expand_hosts, launched, tasks_per_node
from hocket.testing import deadline

from .processes import script_output

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[08-10]",
}
# A task of `srun --het-group=0,1` in the job of `sbatch -n2 -w n2 : -n1 -w n1`, as Slurm 22.05 describes it.
HETEROGENEOUS = {
    "SLURM_JOB_ID": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "n2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-a-1@1",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that no launcher has made."""
    for name in os.environ:
        if name.startswith(("SLURM_", "SKYPILOT_", "OMPI_", "PMI", "MPI_", "MASTER_")) or name in (
            "RANK",
            "WORLD_SIZE",
        ):
            monkeypatch.delenv(name)


def test_each_launcher_s_variables_say_which_task_this_is() -> None:
    assert described({}) is None
    assert described(SLURM) == LaunchedTask("srun", 4, 5, 0, 1, "slurm-7.0", "node08")
    assert described(OPEN_MPI) == LaunchedTask("mpirun", 1, 2, 1, 2, "prterun-a-1@1", "127.0.0.1")
    # Open MPI starts its daemons by srun: the task is the inner launcher's
    assert described({**SLURM, **OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}) == LaunchedTask(
        "mpirun", 1, 2, 1, 1, "prterun-a-1@1", None
    )
    hydra = described({**SLURM, **HYDRA})
    assert hydra is not None
    assert (hydra.rank, hydra.size, hydra.local_rank, hydra.local_size, hydra.host) == (3, 4, 1, 2, None)
    sky = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    assert described(sky) == LaunchedTask("SkyPilot", 1, 2, 0, 1, "skypilot", "10.0.0.1")


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is missing"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, "PMIX_RANK=1"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK=1"),
        (
            {**SLURM, "SLURM_PROCID": "5"},
            "SLURM_PROCID=5, SLURM_LOCALID=0 and SLURM_NODEID=2 do not fit SLURM_STEP_NUM_TASKS=5",
        ),
        ({**SLURM, "SLURM_LOCALID": "1"}, "SLURM_LOCALID=1 and SLURM_NODEID=2 do not fit"),
        ({**HETEROGENEOUS, "SLURMD_NODENAME": "n1"}, r"SLURM_NODEID=0 \(n1\) do not fit"),
        ({**HETEROGENEOUS, "SLURM_STEP_NUM_TASKS": "2"}, "do not fit SLURM_STEP_NUM_TASKS=2 .*PER_NODE=2,1"),
        ({**HETEROGENEOUS, "SLURM_JOB_NODELIST_HET_GROUP_0": "n7"}, "several components of a heterogeneous job"),
        ({**SLURM, "SLURM_NODEID": "3"}, "several components of a heterogeneous job"),
    ],
)
def test_tasks_that_are_half_described_are_refused(variables: dict[str, str], missing: str) -> None:
    with pytest.raises(TasksError, match=missing):
        described(variables)


def test_components_of_a_heterogeneous_job_are_one_job_whatever_their_nodes_are_called() -> None:
    """Slurm numbers nodes by components, and lists them by name: rank 0 is on n2, where two tasks are."""
    assert described(HETEROGENEOUS) == LaunchedTask("srun", 1, 3, 1, 2, "slurm-4.0", "n2")
    other = {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURMD_NODENAME": "n1"}
    assert described({**HETEROGENEOUS, **other}) == LaunchedTask("srun", 2, 3, 0, 1, "slurm-4.0", "n2")
    # Without an allocation, `srun -n2 -w n2 ... : -n1 -w n1 ...` uses the older names.
    older = {key.replace("HET_GROUP", "PACK_GROUP"): value for key, value in HETEROGENEOUS.items()}
    assert described(older) == described(HETEROGENEOUS)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("tasks", [1, 2])
def test_a_step_on_one_component_of_several_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tasks: int
) -> None:
    """As srun starts them that is not told of components: what it starts looks like a whole job."""
    step = {"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NODELIST": "n2", "SLURM_STEP_TASKS_PER_NODE": str(tasks)}
    for name, value in {**HETEROGENEOUS, **step, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29999")
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launched() is (tasks > 1)
    if tasks > 1:
        _meeting_place.meeting_place(described())  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert said.count("this Slurm job has 2 components, and this step has no tasks on 1 (counted from 0)") == 1
    assert "srun --het-group=0-1" in said


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_rank_without_a_size_or_a_size_without_a_rank_does_not_train_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not launched()
    monkeypatch.setenv(name, "2")
    with pytest.raises(TasksError, match=f"{name}=2 is set and"):
        launched()


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2: ranks count from 0"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': give a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1': give a whole number"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE='': give a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT='http': give a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, "MASTER_PORT=70000: give the port"),
    ],
)
def test_variables_of_ranks_started_by_hand_are_refused_before_anybody_waits(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TasksError, match=re.escape(said)):
        launched()
    with pytest.raises(TasksError, match=re.escape(said)):
        dist.init_process_group("hocket")
    assert not dist.is_initialized()


def test_a_batch_script_of_many_tasks_that_starts_one_process_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert not launched()
    assert "this Slurm job has 4 tasks, and this process trains alone" in capsys.readouterr().err


@given(st.lists(st.tuples(st.from_regex(r"[a-z]{1,3}", fullmatch=True), st.integers(0, 120)), min_size=1, max_size=6))
def test_lists_of_hosts_are_expanded_in_their_order(hosts: list[tuple[str, int]]) -> None:
    names = [f"{name}{number:03}" for name, number in hosts]
    assert list(expand_hosts(",".join(names))) == names
    assert list(expand_hosts(",".join(f"{name}[{number:03}]" for name, number in hosts))) == names
    spans = ",".join(f"{name}[{number:03}-{number + 2:03},999]-x" for name, number in hosts)
    expected = [f"{name}{n:03}-x" for name, number in hosts for n in (number, number + 1, number + 2, 999)]
    assert list(expand_hosts(spans)) == expected


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1, max_size=5))
def test_tasks_of_nodes_are_counted(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert tasks_per_node(text) == [count for count, times in runs for _ in range(times)]


def test_jobs_beside_each_other_agree_on_ports_of_their_own() -> None:
    """Jobs whose names lead to the same candidate ports: each task gets the answer of its own job's rank 0."""
    jobs = [LaunchedTask("srun", 0, 3, 0, 3, f"job-{index}", "127.0.0.1") for index in range(4)]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(16) as pool:
        patch.setattr(_meeting_place, "_PORTS", 8)  # all jobs have the same candidates
        patch.setattr(_meeting_place, "_FIRST_PORT", 15_500)
        patch.setattr(_meeting_place, "_PATIENCE_S", deadline(30))
        waiting = [
            [
                pool.submit(_meeting_place._agree, LaunchedTask("srun", rank, 3, rank, 3, job.job, job.host))
                for rank in (2, 1, 0)
            ]
            for job in jobs
        ]
        found = [{one.result(timeout=deadline(60)) for one in job} for job in waiting]
    assert all(len(ports) == 1 for ports in found)
    assert len(set.union(*found)) == len(jobs)


def test_with_a_secret_a_stranger_at_the_ports_of_a_job_is_passed_over() -> None:
    told: list[bytes] = []

    def stranger(server: socket.socket) -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            with peer:
                told.append(peer.recv(96, socket.MSG_WAITALL))
                peer.sendall(b"hocket 1 " + b"0" * 64 + b"\n")

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(_meeting_place, "_PORTS", 8)
        patch.setattr(_meeting_place, "_FIRST_PORT", 15_600)
        patch.setattr(_meeting_place, "_PATIENCE_S", deadline(30))
        patch.setenv("HOCKET_SECRET", "a secret of this test's job")
        begin = int(_meeting_place._proof(b"a secret of this test's job", "job-7")[:12], 16)
        tried = [15_600 + (begin + index * 997) % 8 for index in range(8)]
        seats = [socket.create_server(("127.0.0.1", port)) for port in tried[:-1]]  # he has guessed all but one
        threads = [threading.Thread(target=stranger, args=(seat,), daemon=True) for seat in seats]
        for thread in threads:
            thread.start()
        tasks = [LaunchedTask("srun", rank, 3, rank, 3, "job-7", "127.0.0.1") for rank in (2, 1, 0)]
        found = [pool.submit(_meeting_place._agree, one) for one in tasks]
        (port,) = {one.result(timeout=deadline(60)) for one in found}
        assert port != 1
        assert told
        without = _meeting_place._proof(b"", "job-7")  # what somebody would say who knows the job's name alone
        assert not any(without in said for said in told)
        for seat in seats:
            seat.shutdown(socket.SHUT_RDWR)
            seat.close()


SCRIPT = """
import os, sys, torch, hocket
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(8, 3).double(), torch.randn(8, 1).double())
model = torch.nn.Linear(3, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
values = (f"{value:.12f}" for value in model.state_dict()["weight"][0].tolist())
sys.stdout.write(" ".join((rank, size, *values)) + "\\n")  # in one write: mpirun may join the pieces of two ranks
"""


def _launchers() -> list[object]:
    beside = Path(sys.executable).parent / "mpirun"
    commands: dict[str, tuple[str | None, list[str]]] = {
        "openmpi": (
            str(beside) if beside.exists() else shutil.which("mpirun.openmpi"),
            ["--allow-run-as-root", "--oversubscribe", "-n", "2"],
        ),
        "mpich": (shutil.which("mpirun.mpich"), ["-n", "2"]),
        "slurm": (shutil.which("srun"), ["-N2", "-n2", "--overcommit"]),
    }
    return [
        pytest.param(
            [found or "", *flags],
            id=name,
            # What MPICH's variables mean is tried above, and in no more does its launcher differ from Open MPI's.
            marks=[
                pytest.mark.skipif(found is None, reason=f"{name} is not installed"),
                *([pytest.mark.long] if name == "mpich" else []),
            ],
        )
        for name, (found, flags) in commands.items()
    ]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_tasks_agree_where_rank_0_has_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_meeting_place, "_PATIENCE_S", deadline(10))
    with ThreadPoolExecutor(2) as pool:
        tasks = [LaunchedTask("srun", rank, 2, rank, 2, "job-6", "::1") for rank in (1, 0)]
        found = [pool.submit(_meeting_place._agree, one) for one in tasks]
        assert len({one.result(timeout=deadline(30)) for one in found}) == 1


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("launcher", _launchers())
def test_a_script_started_by_mpirun_or_srun_trains_once(launcher: list[str], tmp_path: Path) -> None:
    if launcher[0].endswith("srun") and subprocess.run(["sinfo", "-h"], capture_output=True, check=False).returncode:
        pytest.skip("no Slurm controller runs here")
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [*launcher, sys.executable, str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=deadline(120), check=False)
    assert ran.returncode == 0, ran.stderr
    number = script_output(script).split()[2:]
    assert sorted(line.split()[:2] for line in ran.stdout.splitlines()) == [["0", "2"], ["1", "2"]]
    # In float64 the mean over 4 rows may be summed in another order: 12 digits hold.
    for line in ran.stdout.splitlines():
        assert line.split()[2:] == number


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("true", "have its loopback interface brought up"),
        ("ip link set lo up", "127.0.0.1"),
        ("ip link set lo up; ip address del 127.0.0.1/8 dev lo", "::1"),
    ],
)
def test_tasks_of_one_host_meet_at_an_address_that_answers(before: str, found: str) -> None:
    """As in a sandbox without a network: torch tries 127.0.0.1 for minutes, whether it is there or not."""
    inside = ["unshare", "--map-root-user", "--net", "sh", "-c"]
    tools = all(map(shutil.which, ("unshare", "ip")))
    if not tools or subprocess.run([*inside, "ip link set lo up"], check=False, capture_output=True).returncode:
        pytest.skip("needs unshare and ip, and a kernel that makes user namespaces")
    source = """
from hocket import _meeting_place, _tasks
try:
    print(_meeting_place.meeting_place(_tasks.LaunchedTask("mpirun", 0, 2, 0, 2, "job", "127.0.0.1"))[0])
except _tasks.TasksError as error:
    print(error)
"""
    command = f"{before}; exec {shlex.join([sys.executable, '-c', source])}"
    ran = subprocess.run([*inside, command], capture_output=True, text=True, check=True, timeout=deadline(60))
    assert found in ran.stdout


def test_who_connects_and_says_nothing_or_little_keeps_no_task_out() -> None:
    first = LaunchedTask("srun", 0, 3, 0, 3, f"loris-{os.getpid()}", "127.0.0.1")
    with ThreadPoolExecutor(3) as pool:
        port = _meeting_place._agree(first)
        silent = []
        for _ in range(300):  # served one by one, each would have two seconds
            for place in _candidates(first.job):
                with contextlib.suppress(OSError):
                    silent.append(socket.create_connection(("127.0.0.1", place), timeout=1.0))
                    silent[-1].sendall(b"0")
                    break
        began_s = time.monotonic()
        others = [pool.submit(_meeting_place._agree, replace(first, rank=rank, local_rank=rank)) for rank in (1, 2)]
        assert [one.result(deadline(20)) for one in others] == [port, port]
        assert time.monotonic() - began_s < deadline(10)
    for one in silent:
        one.close()


def _candidates(job: str) -> list[int]:
    begin = int(_meeting_place._proof(_meeting_place._secret(), job)[:12], 16)
    first, ports = _meeting_place._FIRST_PORT, _meeting_place._PORTS
    return [first + (begin + index * 997) % ports for index in range(_meeting_place._CANDIDATES)]


@pytest.mark.usefixtures("bare")
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed (extra: bench)")
@pytest.mark.parametrize("launcher", ["mpich", "open_mpi"])
def test_an_mpi_of_another_launcher_is_named_and_leaves_nothing(launcher: str, tmp_path: Path) -> None:
    """Open MPI in a rank of MPICH's mpirun said "Sorry!" of PMIx, and left 16 MiB in /dev/shm."""
    source = """
import mpi4py
from hocket import _meeting_place, _tasks
try:
    print(_meeting_place.meeting_place(_tasks.described()))
except _tasks.TasksError as error:
    print(error)
assert mpi4py.rc.initialize, "a program that asks MPI itself has what it had"
"""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "MPI_"))}
    mpich = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-c", source]
    if launcher == "open_mpi":  # one that tells what it has started: two ranks of one host, as if of two
        found = Path(sys.executable).parent / "mpirun"
        if not found.exists():
            pytest.skip("mpirun of Open MPI is not installed (extra: bench)")
        split = 'OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 exec "$0" "$@"'
        command = [str(found), "--allow-run-as-root", "--oversubscribe", "-n", "2", "sh", "-c", split, *command]
    environment = bare | (mpich if launcher == "mpich" else {})
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=deadline(60), check=False, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert "Sorry" not in ran.stderr
    if launcher == "mpich":
        assert "here it loads " in ran.stdout
        assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("sm_segment")]
    else:
        first, second = ran.stdout.splitlines()
        assert first == second
