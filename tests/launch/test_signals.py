"""Ctrl-C, and launchers that are killed: in the end nothing of the job runs or lies about."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from hocket import _sweep
from hocket.launch._clean import sweep_abandoned
from hocket.launch._job import Job, is_abandoned, new_job_name
from hocket.launch._listener import Notices
from hocket.testing import deadline

# Each rank starts a child in its own session, one in a session apart, and one by fork alone, as data loaders do.
RANKS = """
import os, pathlib, signal, subprocess, sys, time
here = pathlib.Path(os.environ["HOCKET_TEST"])
if {stubborn}:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
sleeper = ["sleep", "60"]
subprocess.Popen(sleeper)
subprocess.Popen(sleeper, start_new_session=True)
if os.fork() == 0:
    here.joinpath("forked" + os.environ["RANK"]).touch()
    time.sleep(60)
    os._exit(0)
while not here.joinpath("forked" + os.environ["RANK"]).exists():
    time.sleep(0.01)
here.joinpath("ready" + os.environ["RANK"]).touch()
try:
    time.sleep(60)
finally:
    print("finally", flush=True)
"""


@pytest.fixture
def job(hocket: Any, script: Any, tmp_path: Path, wait_until: Any) -> Any:
    """Start a job of two ranks, with flags; it runs when this returns."""

    def start(*flags: str, stubborn: bool = False) -> "subprocess.Popen[str]":
        process: subprocess.Popen[str] = hocket("run", "-n", "2", *flags, script(RANKS.format(stubborn=stubborn)))
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
        return process

    return start


def test_one_interrupt_ends_all_in_order(job: Any, running: Any) -> None:
    process = job()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=deadline(60))
    assert process.returncode == 130
    assert sorted(out.splitlines()) == ["[0] finally", "[1] finally"]
    assert "SIGINT: the ranks have 10 s to end; once more ends them at once" in err
    assert "Traceback" not in err
    assert "interrupted after" in err
    assert running() == []


def test_a_second_interrupt_ends_those_that_will_not(job: Any, running: Any) -> None:
    process = job(stubborn=True)
    process.send_signal(signal.SIGINT)
    while "once more" not in process.stderr.readline():
        pass
    time.sleep(0.3)
    assert process.poll() is None
    begin_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=deadline(60))
    assert time.monotonic() - begin_s < deadline(5)
    assert process.returncode == 130
    assert running() == []


def test_stubborn_ranks_are_killed_after_the_grace(job: Any, running: Any) -> None:
    process = job("--shutdown-timeout=1", stubborn=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=deadline(60))
    assert process.returncode == 130
    assert running() == []


def test_a_request_to_terminate_is_passed_on(job: Any, running: Any) -> None:
    process = job()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=deadline(60))
    assert process.returncode == 143
    assert running() == []


SAVES = """
import os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["HOCKET_TEST"])
def save(number, frame):
    time.sleep(1.0)
    here.joinpath("saved" + os.environ["RANK"]).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
here.joinpath("ready" + os.environ["RANK"]).touch()
time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--max-restarts", "1")])
def test_a_request_to_terminate_that_is_sent_twice_leaves_ranks_their_time(
    hocket: Any, script: Any, tmp_path: Path, wait_until: Any, running: Any, flags: tuple[str, ...]
) -> None:
    """As timeout(1) sends it, to its child and to the group, and Slurm at a time limit, to the step and by srun."""
    process = hocket("run", "-n", "2", *flags, script(SAVES))
    wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
    process.send_signal(signal.SIGTERM)
    while "SIGTERM: the ranks have 10 s to end; once more after 5 s ends them at once" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=deadline(60))
    assert process.returncode == 143
    assert all((tmp_path / f"saved{rank}").exists() for rank in (0, 1))
    assert running() == []


def test_notices_are_new_after_a_while_and_of_other_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("hocket.launch._listener.time.monotonic", lambda: now_s[0])
    notices, told = Notices(), []
    for at_s, number in (
        (0.0, signal.SIGTERM), (0.1, signal.SIGTERM), (0.2, signal.SIGINT), (0.3, signal.SIGINT), (0.7, signal.SIGINT),
        (4.9, signal.SIGTERM), (5.1, signal.SIGTERM),
    ):  # fmt: skip
        now_s[0] = at_s
        told.append(notices.are_new(number))
    assert told == [True, False, True, False, True, False, True]


def test_under_nohup_a_job_outlives_its_terminal(hocket: Any, script: Any, tmp_path: Path, wait_until: Any) -> None:
    source = f"import pathlib, time; pathlib.Path({str(tmp_path / 'ready')!r}).touch(); time.sleep(0.7); print('done')"
    ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    process = hocket("run", "-n", "1", script(source), preexec_fn=ignore)
    wait_until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=deadline(60))[0] == "done\n"
    assert process.returncode == 0


@pytest.mark.long
def test_an_interrupt_while_the_launcher_starts_leaves_nothing(
    hocket: Any, script: Any, running: Any, wait_until: Any
) -> None:
    process = hocket("run", "-n", "2", "--max-restarts", "0", script("import time; time.sleep(60)"))
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(lambda: "/torch/" in maps.read_text())  # its extension modules are being imported
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=deadline(60))
    assert process.returncode == 130, err
    assert running() == []


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_killed_launcher_takes_its_ranks_with_it(
    job: Any, running: Any, temporary: Path, wait_until: Any, stubborn: bool
) -> None:
    process = job(stubborn=stubborn)
    assert len(list(temporary.iterdir())) == 1
    process.kill()
    wait_until(lambda: not running(), limit_s=30.0)
    wait_until(lambda: not list(temporary.iterdir()), limit_s=20.0)


def test_ranks_end_with_a_launcher_whose_warden_was_killed_too(job: Any, running: Any, wait_until: Any) -> None:
    process = job()
    ranks = [pid for pid in children(process.pid) if pid != warden(process.pid)]
    assert len(ranks) == 2
    for pid in (warden(process.pid), process.pid):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not set(ranks) & set(running()), limit_s=20.0)
    clean()  # what they had started themselves


@pytest.mark.long
def test_clean_removes_what_a_crash_has_left(job: Any, running: Any, temporary: Path) -> None:
    process = job(stubborn=True)
    (directory,) = temporary.iterdir()
    name = directory.name.removeprefix("hocket-job-")
    assert name not in clean("--dry-run")  # a job that runs is none of its business
    for pid in (warden(process.pid), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait(timeout=deadline(60))
    listed = json.loads(clean("--dry-run", "--json"))["leftovers"]
    (leftover,) = [leftover for leftover in listed if leftover["job"] == name]
    assert leftover["directory"] == str(directory)
    assert set(leftover["processes"]) == set(running())
    assert len(running()) == 8
    assert f"removed 8 processes and {directory}" in clean()
    assert running() == []
    assert not directory.exists()
    assert name not in clean()


@pytest.mark.long
def test_the_next_launch_removes_what_a_crash_has_left(
    job: Any, launched: Any, script: Any, running: Any, temporary: Path, wait_until: Any
) -> None:
    process = job(stubborn=True)
    (directory,) = temporary.iterdir()
    assert "had left" not in launched(script("")).err  # of a job that runs
    os.kill(warden(process.pid), signal.SIGKILL)
    process.kill()
    process.wait(timeout=deadline(60))
    name = directory.name.removeprefix("hocket-job-")
    # Its own fixture asserts that the directory has gone as well.
    assert f"hocket: removed what job {name} had left" in launched(script("")).err
    assert running() == []
    assert "had left" not in launched(script("")).err


def test_what_a_warden_is_at_is_left_to_it(job: Any, temporary: Path, wait_until: Any) -> None:
    process = job()
    (directory,) = temporary.iterdir()
    keeping = warden(process.pid)
    os.kill(keeping, signal.SIGSTOP)
    process.kill()
    process.wait(timeout=deadline(60))
    assert sweep_abandoned() == []
    assert directory.exists()
    os.kill(keeping, signal.SIGCONT)
    wait_until(lambda: not directory.exists() and _sweep.start_ticks(keeping) is None)


def test_a_job_whose_end_was_interrupted_can_be_ended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job().__enter__()
    assert job._warden is not None
    with monkeypatch.context() as patch:
        patch.setattr(job._warden, "wait", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            job.end()
    job.end()
    assert not os.path.exists(job.directory)


def test_nothing_that_ends_a_launcher_ends_a_warden_that_has_just_begun(wait_until: Any) -> None:
    with Job() as job:

        def wardens() -> list[int]:
            pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
            return [pid for pid in pids if _sweep.warden_of(pid) == job.name]

        wait_until(wardens)
        (keeping,) = wardens()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            os.kill(keeping, number)  # before Python has begun there
        time.sleep(0.5)
        assert _sweep.start_ticks(keeping) is not None
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_job_of_another_host_that_shares_the_temporary_directory_is_not_taken_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine = re.sub(r"^\d+", str(gone.pid), new_job_name())
    assert is_abandoned(mine)
    assert not is_abandoned(new_job_name())
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
    assert not is_abandoned(mine)


def test_a_rank_whose_launcher_has_gone_before_it_could_ask_ends(script: Any, tmp_path: Path) -> None:
    from hocket.launch import _worker

    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, _worker.__file__, str(gone.pid), str(tmp_path), "held", "script", script("print('ran')")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(60), check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"the launcher (process {gone.pid}) has gone" in done.stderr


def test_a_rank_that_is_interrupted_while_it_begins_ends_without_a_traceback(script: Any, tmp_path: Path) -> None:
    from hocket.launch import _worker

    def interrupt() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as the launcher does
        os.kill(os.getpid(), signal.SIGINT)

    command = [sys.executable, _worker.__file__, str(os.getpid()), str(tmp_path), "held"]
    for kind, target in ("script", script("print('ran')")), ("command", "echo"):
        done = subprocess.run(
            [*command, kind, target, "ran"], capture_output=True, text=True, timeout=deadline(60), check=False,
            preexec_fn=interrupt,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_an_interrupted_gloo_job_ends_too(hocket_forked: Any, script: Any, tmp_path: Path) -> None:
    # Rank 0 is inside a collective, where Python cannot act on the signal.
    source = """
    import os, signal, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(0.3)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
    """
    ended = hocket_forked("run", "-n", "2", script(textwrap.dedent(source)), cwd=tmp_path)
    assert ended.returncode == 130, ended.stderr


def children(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def warden(launcher: int) -> int:
    (pid,) = [pid for pid in children(launcher) if b"_sweep.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert _sweep.job_of(pid) is None
    return pid


def clean(*flags: str) -> str:
    command = [sys.executable, "-m", "hocket", "clean", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline(60), check=True).stdout


FORKS = """
import os

child = os.fork()  # as a data loader's worker, killed before it could unlink what it shares
if child == 0:
    open(f"/dev/shm/torch_{os.getpid()}_1_1", "w").close()
    os._exit(0)
os.waitpid(child, 0)
print(child, flush=True)
"""


def test_shared_memory_of_a_rank_s_process_that_has_ended_unseen_goes_with_the_job(launched: Any, script: Any) -> None:
    child = launched(script(FORKS), n=1).out.strip()
    assert child.isdigit()
    assert not os.path.exists(f"/dev/shm/torch_{child}_1_1")


TOLD_EARLY = """
import os, signal, time, torch, hocket
if os.environ["RANK"] == "0":
    os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(1)
model = torch.nn.Linear(2, 1)
trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
trainer.resume("checkpoint")
for _ in range(1000):
    trainer.step((torch.ones(4, 2), torch.ones(4, 1)))
"""


def test_who_is_told_to_end_before_resume_saves(hocket_forked: Any, script: Any, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # where torch leaves a directory
    ended = hocket_forked("run", "-n", "2", script(TOLD_EARLY), cwd=tmp_path, env=environment)
    assert ended.returncode == 75, ended.stderr
    assert (tmp_path / "checkpoint" / "manifest.json").exists()
