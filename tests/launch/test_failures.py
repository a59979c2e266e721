"""A rank fails: what is shown, in which order, and what the launch ends with."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from hocket import _limits
from hocket._sweep import job_of, stat_of
from hocket.comm.shm import state_of
from hocket.launch import _failure, _listener, _worker
from hocket.launch._failure import MemoryKills, RankFailure, describe, of_processes, read_failure
from hocket.launch._listener import FailedRank
from hocket.launch._merge import Merger
from hocket.testing import deadline

from ..processes import free_port, until

WAIT = "import time; time.sleep(60)"


def failing(how: str) -> str:
    """A script whose rank 1 fails while the others wait."""
    return f"import os, sys, signal, ctypes\nif os.environ['RANK'] == '1':\n    {how}\n{WAIT}"


@pytest.mark.parametrize(
    ("how", "exit_code", "signal_name", "error"),
    [
        ("raise ValueError('batch 17')", 1, None, "ValueError: batch 17"),
        (
            "raise ExceptionGroup('several', [OSError('a'), OSError('b')])",
            1,
            None,
            "ExceptionGroup: several (2 sub-exceptions)",
        ),
        ("sys.exit(3)", 3, None, "SystemExit: 3"),
        ("sys.exit('no data')", 1, None, "SystemExit: no data"),
        ("os._exit(7)", 7, None, None),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL", None),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "SIGTERM", None),
        ("ctypes.string_at(0)", 139, "SIGSEGV", None),
    ],
)
def test_the_failing_rank_is_named_with_its_reason(
    launched: Any, script: Any, how: str, exit_code: int, signal_name: str | None, error: str | None
) -> None:
    ran = launched(script(failing(how)), n=3)
    assert ran.result.outcome == "failed"
    assert ran.result.exit_code == exit_code
    first, *others = ran.result.failures
    assert (first.rank, first.exit_code, first.signal, first.error) == (1, exit_code, signal_name, error)
    assert not first.ended_by_launcher
    assert {other.rank for other in others} == {0, 2}
    assert all(other.ended_by_launcher for other in others)
    report = [line for line in ran.err.splitlines() if "OMP_NUM_THREADS" not in line and not line.startswith("[")]
    assert report[0].startswith("hocket: rank 1 failed first: ")
    assert report[-2] == "ranks 0, 2 were ended because of that (SIGTERM)"
    assert report[-1] == f"hocket: failed, exit status {exit_code}"


JOINS = """
import os
if os.environ["RANK"] {}:
    import torch
    torch.distributed.init_process_group("hocket")
"""


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--max-restarts=1",)], ids=["alone", "elastic"])
def test_a_rank_that_ends_well_before_it_joins_is_told_at_once(
    hocket_forked: Any, script: Any, tmp_path: Path, flags: Any
) -> None:
    ran = hocket_forked("run", "-n", "3", *flags, script(JOINS.format("!= '1'")), cwd=tmp_path)
    assert ran.returncode == 1
    assert "rank 1 ended, exit status 0, and has not joined the group for which rank " in ran.stderr
    assert ran.stderr.splitlines()[-1] == "hocket: failed, exit status 1"


@pytest.mark.long
def test_a_host_whose_rank_ends_well_before_it_joins_is_told_at_once(hocket: Any, script: Any) -> None:
    source = JOINS.format("== '0'")
    port, path = free_port(), script(source)
    place = ["-n", "1", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    first, second = (hocket("run", *place, f"--node-rank={number}", path) for number in range(2))
    err = second.communicate(timeout=deadline(60))[1]
    first.terminate()  # what srun or ssh does then
    first.communicate(timeout=deadline(60))
    assert second.returncode == 1
    assert "rank 1 ended, exit status 0, and has not joined the group for which rank 0 waits" in err


def test_a_rank_may_end_before_others_that_have_joined_or_join_none(
    hocket_forked: Any, script: Any, tmp_path: Path
) -> None:
    source = """
import os, time
rank = int(os.environ["RANK"])
if rank < 2:
    import torch
    os.environ["WORLD_SIZE"] = "2"
    torch.distributed.init_process_group("hocket")
    time.sleep(1.0 - rank)
"""
    ended = hocket_forked("run", "-n", "3", script(source), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_an_error_that_several_ranks_raised_is_said_once() -> None:
    def failed(rank: int, error: str | None, by_launcher: bool = False) -> RankFailure:
        return RankFailure(
            rank, rank, 100, 1, "SIGTERM" if by_launcher else None, 5.0 + rank, 6.0, error,
            error and f"Traceback\n{error}", by_launcher,
        )  # fmt: skip

    ended = failed(3, None, by_launcher=True)
    lines = describe([failed(1, "ValueError: rank 1 has 3"), failed(0, "ValueError: rank 0 has 3"), ended], 2.0)
    assert lines[0] == "ranks 0, 1 failed with the same error: exit status 1, 4.0 s after the start"
    assert lines[1:] == ["Traceback", "ValueError: rank 1 has 3", "rank 3 was ended because of that (SIGTERM)"]
    for other in (failed(0, "ValueError: another"), failed(0, None), ended):
        assert describe([failed(1, "ValueError: rank 1 has 3"), other], 2.0)[0].startswith("rank 1 failed first: ")


@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_tracebacks_are_the_user_s_own(
    launched: Any, script: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    source = "def outer():\n    inner()\n\ndef inner():\n    raise KeyError('x')\n\nouter()\n"
    path = script(source)
    monkeypatch.chdir(tmp_path)
    ran = launched("script" if flags else path, n=1, flags=flags)
    # Printed once, by the launcher.
    assert ran.err.count("Traceback") == 1
    lines = [line for line in ran.err.splitlines() if line.startswith('  File "')]
    assert lines == [
        f'  File "{path}", line 7, in <module>',
        f'  File "{path}", line 2, in outer',
        f'  File "{path}", line 5, in inner',
    ]
    assert os.path.basename(_worker.__file__) not in ran.err


def test_syntax_errors_are_shown_as_python_shows_them(launched: Any, script: Any) -> None:
    ran = launched(script("def f(:\n"), n=1)
    assert ran.result.exit_code == 1
    assert "SyntaxError: invalid syntax" in ran.err
    assert "_worker" not in ran.err


def test_a_crash_in_compiled_code_shows_the_python_stack(launched: Any, script: Any) -> None:
    path = script("import ctypes\ndef dereference():\n    ctypes.string_at(0)\n\ndereference()\n")
    ran = launched(path, n=1)
    assert "Segmentation fault" in ran.err
    assert f'File "{path}", line 3 in dereference' in ran.err
    assert "_worker" not in ran.err


def test_the_first_exception_counts_and_not_the_first_end(launched: Any, script: Any) -> None:
    # Rank 1 fails, but does not end before rank 0, which fails because of it.
    source = """
    import atexit, os, pathlib, select, time
    cause, told = (pathlib.Path(os.environ["HOCKET_TEST"], name) for name in ("cause", "told"))
    def until(path):
        while not path.exists():
            time.sleep(0.01)
    if os.environ["RANK"] == "1":
        until(told)
        other = os.pidfd_open(int(told.read_text()))
        atexit.register(select.select, [other], [], [])
        atexit.register(cause.touch)
        raise ValueError("the cause")
    told.with_suffix(".part").write_text(str(os.getpid()))
    told.with_suffix(".part").rename(told)
    until(cause)
    raise ConnectionError("rank 1 has gone")
    """
    ran = launched(script(textwrap.dedent(source)), n=2)
    first, second = ran.result.failures
    assert (first.rank, first.error) == (1, "ValueError: the cause")
    assert (second.rank, second.error) == (0, "ConnectionError: rank 1 has gone")
    assert not second.ended_by_launcher
    report = ran.err[ran.err.index("rank 1 failed first") :]
    assert report.count("Traceback") == 1
    assert re.search(r"rank 0 failed \d+\.\d+ s", report)
    assert "exit status 1: ConnectionError: rank 1 has gone" in report


def test_a_killed_rank_comes_before_those_that_complain_of_it(
    launched: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tempfile.mkdtemp(dir="/tmp")  # sockets' paths are, too
    monkeypatch.setenv("TMPDIR", short)
    monkeypatch.setattr(tempfile, "tempdir", short)
    # The survivor notices the death at once, faster than the launcher may, or else says it all the same.
    source = """
    import multiprocessing.connection, os, pathlib, select, signal, time
    told, watched = (pathlib.Path(os.environ["HOCKET_TEST"], name) for name in ("pid", "watched"))
    def until(path):
        while not path.exists():
            time.sleep(0.01)
    if os.environ["RANK"] == "1":
        listener = multiprocessing.connection.Listener(family="AF_UNIX")  # what data loaders open, too
        told.with_suffix(".part").write_text(str(os.getpid()))
        told.with_suffix(".part").rename(told)
        until(watched)
        os.kill(os.getpid(), signal.SIGKILL)
    until(told)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    other = os.pidfd_open(int(told.read_text()))
    watched.touch()
    select.select([other], [], [])
    raise ConnectionError("rank 1 has gone")
    """
    ran = launched(script(textwrap.dedent(source)), n=2)
    os.rmdir(short)  # nothing is left in it
    first, second = ran.result.failures
    assert (first.rank, first.signal) == (1, "SIGKILL")
    assert (second.rank, second.error) == (0, "ConnectionError: rank 1 has gone")
    assert ran.result.exit_code == 137


@pytest.mark.parametrize(
    ("before", "after", "killed", "said"),
    [
        ((3, 5), (3, 5), True, "not from the kernel"),
        ((3, 5), (3, 6), True, "on this machine the kernel has killed"),
        ((3, 5), (3, 6), False, None),  # another's
        ((3, 5), (4, 6), True, "killed one process here for want of memory: the control group of this job may have"),
        ((3, 5), (5, 7), False, "killed 2 processes here"),  # a loader's workers
        ((None, 5), (None, 5), True, "not from the kernel"),
        ((None, None), (None, None), True, "is often the kernel"),
    ],
)
def test_a_kill_for_want_of_memory_is_told_from_others(
    monkeypatch: pytest.MonkeyPatch, before: Any, after: Any, killed: bool, said: str | None
) -> None:
    monkeypatch.setattr(_failure, "kernel_kills", lambda: after)
    found = MemoryKills(*before).since(killed)
    assert (found is None) if said is None else said in str(found)


@pytest.mark.parametrize(
    ("line", "name"), [("0::/mine", "memory.events"), ("4:memory:/mine", "memory.oom_control"), ("0::/mine", None)]
)
def test_the_kernel_s_count_is_that_of_the_control_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, name: str | None
) -> None:
    monkeypatch.setattr(_limits, "_GROUPS", tmp_path)
    monkeypatch.setattr(_limits, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(f"{line}\n")
    root = tmp_path if line.startswith("0") else tmp_path / "memory"
    (root / "mine").mkdir(parents=True)
    if name is not None:
        (root / name).write_text("oom_kill 9\n")
        (root / "mine" / name).write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    group, machine = _limits.kernel_kills()
    assert group == (None if name is None else 2)
    assert machine is None or machine >= 0


@pytest.fixture
def small_group() -> Any:
    """A control group of 1 GiB, where this user may make one."""
    root = Path("/sys/fs/cgroup/memory")  # version 1, which moves a process without further ado
    group = root / f"hocket-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(1 << 30))
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.long
def test_a_rank_that_the_kernel_kills_for_want_of_memory_is_said_to_be(
    hocket: Any, script: Any, small_group: Path
) -> None:
    path = script(failing("kept = [os.urandom(1) * (1 << 26) for _ in range(40)]"))

    def enter() -> None:
        (small_group / "tasks").write_text(str(os.getpid()))

    process = hocket("run", "-n", "2", path, preexec_fn=enter)
    _, err = process.communicate(timeout=deadline(60))
    assert process.returncode == 137, err
    assert "rank 1 failed first: killed by SIGKILL" in err
    assert "killed one process here for want of memory: the control group of this job may have 1.0 GiB" in err


def test_a_rank_that_will_not_end_is_killed_after_the_grace(launched: Any, script: Any) -> None:
    source = """
    import os, pathlib, signal, time
    ready = pathlib.Path(os.environ["HOCKET_TEST"], "ready")
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready.touch()
        time.sleep(60)
    while not ready.exists():
        time.sleep(0.01)
    raise SystemExit(5)
    """
    ran = launched(script(textwrap.dedent(source)), n=2, flags=["--shutdown-timeout=1"])
    assert ran.result.exit_code == 5
    first, second = ran.result.failures
    assert (first.rank, second.rank, second.signal, second.ended_by_launcher) == (1, 0, "SIGKILL", True)
    assert 1.0 < ran.result.wall_s < deadline(10)


def test_an_excepthook_of_the_user_s_is_called(launched: Any, script: Any) -> None:
    source = "import sys\nsys.excepthook = lambda kind, error, trace: print('hook', kind.__name__)\nraise ValueError"
    ran = launched(script(source), n=1)
    assert ran.out == "hook ValueError\n"
    assert ran.result.failures[0].error == "ValueError"


@pytest.mark.long
def test_a_traceback_is_shown_once_also_where_a_group_has_set_a_hook_over_python_s(launched: Any, script: Any) -> None:
    source = """
    import sys, torch.distributed as dist
    hooks = [sys.excepthook]
    dist.init_process_group("gloo")
    def hook(*what):  # as error reporters do
        print("reported", what[0].__name__)
        hooks[0](*what)
    hooks[0], sys.excepthook = sys.excepthook, hook
    def main():
        raise ValueError("once")
    try:
        1 / 0
    except ZeroDivisionError:
        sys.excepthook(*sys.exc_info())  # what the launcher does not show is printed
    main()
    """
    ran = launched(script(textwrap.dedent(source)), n=1)
    assert ran.out == "reported ZeroDivisionError\nreported ValueError\n"
    assert ran.err.count("in main") == 1
    assert ran.err.count("ZeroDivisionError: division by zero") == 1


@pytest.mark.long
def test_torch_is_set_aside_for_the_garbage_collector_at_the_end_and_its_record_decorator_works(
    launched: Any, script: Any
) -> None:
    source = """
    import atexit, gc
    atexit.register(lambda: print(gc.get_freeze_count() > 100_000))
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main():
        raise ValueError("recorded")
    assert gc.get_freeze_count() < 10_000
    main()
    """
    ran = launched(script(textwrap.dedent(source)), n=1)
    assert ran.out == "True\n"
    assert ran.result.failures[0].error == "ValueError: recorded"
    assert ran.err.count("in main") == 1


def test_exit_functions_run_when_a_rank_fails(launched: Any, script: Any) -> None:
    ran = launched(script("import atexit\natexit.register(print, 'saved')\nraise ValueError"), n=1)
    assert ran.out == "saved\n"


def test_ends_are_noticed_on_kernels_without_process_descriptors(
    launched: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    ran = launched(script(failing("os._exit(7)")), n=2)
    assert [failure.rank for failure in ran.result.failures] == [1, 0]
    assert ran.result.exit_code == 7


def test_a_launch_whose_output_cannot_be_read_any_more_does_not_hang(
    launched: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bool:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(Merger, "_read", broken)
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        launched(script(f"print('hello', flush=True)\n{WAIT}"), n=2)


def test_a_stopped_rank_is_the_headline_and_the_job_ends_soon(launched: Any, script: Any) -> None:
    source = """
        import os, pathlib, signal, sys, time
        told = pathlib.Path(os.environ["HOCKET_TEST"], "told")
        if os.environ["RANK"] == "1":
            told.with_suffix(".part").write_text(f"/proc/{os.getpid()}/stat")
            told.with_suffix(".part").rename(told)
            os.kill(os.getpid(), signal.SIGSTOP)
        if os.environ["RANK"] == "2":
            while not (told.exists() and ") T " in pathlib.Path(told.read_text()).read_text()):
                time.sleep(0.01)
            sys.exit("waited long enough")
        time.sleep(60)
    """
    ran = launched(script(textwrap.dedent(source)), n=3)
    assert ran.result.wall_s < deadline(15)  # the launcher did not wait for a process that cannot end
    assert ran.result.exit_code == 1
    stopped = next(failure for failure in ran.result.failures if failure.rank == 1)
    assert (stopped.stopped, stopped.signal, stopped.ended_by_launcher) == (True, "SIGTERM", True)
    assert (
        f"hocket: rank 1 (process {stopped.pid}) was stopped (SIGSTOP); rank 2 gave up first: exit status 1" in ran.err
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("watched", ["here", "by elastic"])
def test_a_rank_that_is_stopped_while_ranks_start_is_ended_and_named_soon_after_the_timeout(
    launched: Any, script: Any, monkeypatch: pytest.MonkeyPatch, watched: str
) -> None:
    monkeypatch.setenv("HOCKET_TIMEOUT", "1")
    monkeypatch.setattr(_listener, "_COMPLAIN_S", 0.5)
    source = """
        import os, signal, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(100)
    """
    flags = [] if watched == "here" else ["--max-restarts", "0", "--tee", "1"]
    ran = launched(script(textwrap.dedent(source)), n=2, flags=flags)
    assert ran.result.wall_s < deadline(20)
    first = ran.result.failures[0]
    assert (first.rank, first.stopped, first.signal) == (1, True, "SIGTERM")
    assert (
        f"hocket: rank 1 (process {first.pid}) was stopped (SIGSTOP) for longer than HOCKET_TIMEOUT allows" in ran.err
    )
    assert "`kill -CONT PROCESS` lets a stopped rank go on in time" in ran.err


def test_a_process_is_known_whose_name_or_job_is_no_text() -> None:
    source = "import ctypes; ctypes.CDLL(None).prctl(15, b'123456789012345\\xe8'[3:]); print(flush=True); input()"
    environment = {**os.environb, b"HOCKET_JOB": b"\xe8"}
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        until(lambda: stat_of(process.pid)[:1] == ["T"])
        assert "kill -CONT" in state_of(process.pid)
        assert job_of(process.pid) == "\ufffd"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("timeout_s", "seconds", "ended"), [(2.0, 20, True), (2.0, 6, False), (None, 1000, False)])
def test_only_the_time_counts_in_which_a_stopped_rank_was_watched(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, seconds: int, ended: bool
) -> None:
    # The launcher was itself stopped after a second.
    clock = iter([0.0, 1.0, *(1000.0 + second for second in range(seconds))])
    now = [next(clock)]
    monkeypatch.setattr(_listener.time, "monotonic", lambda: now[0])
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            ranks = _listener.StoppedRanks(timeout_s)
            for now[0] in clock:
                ranks.look([process])
            assert ranks.pids == ({process.pid} if ended else set())
        finally:
            process.kill()


def test_a_wrong_timeout_is_refused_before_any_rank_starts(hocket: Any, script: Any) -> None:
    job = hocket("run", "-n", "2", script("print('started')"), env={**os.environ, "HOCKET_TIMEOUT": "soon"})
    out, err = job.communicate(timeout=deadline(60))
    assert (job.returncode, out) == (2, "")
    assert "HOCKET_TIMEOUT=soon: give the seconds" in err


def test_who_never_came_is_the_headline_and_not_who_waited(launched: Any, script: Any) -> None:
    source = """
        import os, time
        class Late(Exception):
            culprits = (1,)
        if os.environ["RANK"] != "1":
            raise Late("rank 1 is late")
        time.sleep(60)
    """
    ran = launched(script(textwrap.dedent(source)), n=3)
    assert re.search(
        r"hocket: rank 1 did not come where others waited; rank [02] gave up first: exit status 1", ran.err
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "place"),
    [
        ("sys.exit(0)", r" \(\S+\.py:\d+\)"),
        ("os._exit(0)", ""),
        # Its process still ends when the other's failure ends all, as on a busy machine.
        ("atexit._clear(); atexit.register(time.sleep, 30); atexit.register(leave); sys.exit(0)", r" \(\S+\.py:\d+\)"),
        ("atexit._clear(); atexit.register(time.sleep, 30); atexit.register(leave); break", ""),
        # It heeds no signal, and ends well when it is done with something else.
        (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); atexit._clear(); atexit.register(time.sleep, 3); "
            "atexit.register(leave); sys.exit(0)",
            r" \(\S+\.py:\d+\)",
        ),
    ],
    ids=["exit", "at once", "slowly", "slowly at the end", "unheeding"],
)
@pytest.mark.parametrize("flags", [(), ("--max-restarts=1",)], ids=["alone", "elastic"])
def test_a_rank_that_ends_well_while_others_train_is_the_headline(
    hocket_forked: Any, script: Any, tmp_path: Path, way: str, place: str, flags: Any
) -> None:
    source = f"""
import atexit, os, signal, sys, time, torch
torch.distributed.init_process_group("hocket")
leave = torch.distributed.destroy_process_group
for step in range(3):
    if step == 2 and os.environ["RANK"] == "1":
        {way}
    torch.distributed.all_reduce(torch.ones(4))
"""
    ran = hocket_forked("run", "-n", "2", *flags, script(source), cwd=tmp_path)
    assert ran.returncode == 1
    assert re.search(
        rf"rank 1{place} ended with status 0 while others still trained; rank 0 waited in vain", ran.stderr
    )
    assert "All ranks take the same steps" in ran.stderr
    assert "(early stopping) is to go by hocket.average of it" in ran.stderr


def test_a_rank_that_ends_well_when_the_job_is_ended_has_not_left(launched: Any, script: Any) -> None:
    source = """
        import os, signal, sys, time
        class Late(Exception):
            culprits = (1,)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        time.sleep(1)
        if os.environ["RANK"] != "1":
            raise Late("rank 1 is late")
        time.sleep(60)
    """
    ran = launched(script(textwrap.dedent(source)), n=2)
    assert "rank 1 did not come where others waited" in ran.err


def test_a_rank_that_its_exception_was_ending_has_failed_by_itself(tmp_path: Path) -> None:
    """The other rank's process is gone first, and the launcher's SIGTERM comes while this one still ends."""
    told = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback ...", "timestamp": "7"}
    told.write_text(json.dumps({"message": {"message": "ValueError: no luck", "extraInfo": extra}}))
    failure = read_failure(FailedRank(0, 0, 11, -15, str(told)), 9.0, "")
    assert (failure.exit_code, failure.signal, failure.error) == (1, None, "ValueError: no luck")
    assert read_failure(FailedRank(0, 0, 11, -15, ""), 9.0, "").exit_code == 143


@pytest.mark.parametrize(
    "attributes",
    ["def __str__(self): raise RuntimeError('no text')", "culprits = [object()]", "culprits = 5"],
)
def test_an_error_that_cannot_be_recorded_is_shown(launched: Any, script: Any, attributes: str) -> None:
    ran = launched(script(f"class Odd(Exception):\n    {attributes}\nraise Odd"), n=1)
    assert ran.result.exit_code == 1
    assert "raise Odd" in ran.err
    assert "_worker.py" not in ran.err


def test_a_full_disk_does_not_take_a_traceback_away(launched: Any, script: Any) -> None:
    source = """
    import os, resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    raise ValueError("of the program")
    """
    ran = launched(script(textwrap.dedent(source)), n=1)
    assert "ValueError: of the program" in ran.err


@pytest.mark.sampled(1)
@pytest.mark.parametrize("flags", [[], ["--max-restarts", "1"]])
def test_a_rank_that_has_failed_and_does_not_end_is_ended(launched: Any, script: Any, flags: list[str]) -> None:
    source = """
    import os, signal, threading, time
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
    threading.Thread(target=time.sleep, args=(1000,)).start()
    if os.environ["RANK"] == "1":
        raise ValueError("of rank 1")
    """
    ran = launched(script(textwrap.dedent(source)), flags=["--shutdown-timeout", "1", *flags])
    assert ran.result.exit_code == 137
    assert ran.result.failures[0].error == "ValueError: of rank 1"
    assert "rank 1 has failed and does not end by itself" in ran.err
    assert "asked" in ran.lines(1)


@pytest.mark.parametrize("variable", ["TMPDIR", "PYTHON_EXEC"])
def test_a_job_that_cannot_begin_says_why(script: Any, tmp_path: Path, variable: str) -> None:
    nowhere = str(tmp_path / "none")
    source = (  # where all other places for temporary files are closed, too
        f"import os, sys, tempfile; tempfile._candidate_tempdir_list = lambda: [{nowhere!r}]\n"
        "from hocket.cli import main; main(sys.argv[1:])"
    )
    setting = {"env": os.environ | {variable: nowhere}, "capture_output": True, "text": True, "cwd": tmp_path}
    command = ["-c", source] if variable == "TMPDIR" else ["-m", "hocket"]
    ran = subprocess.run([sys.executable, *command, "run", "-n", "2", script("")], timeout=deadline(60), **setting)
    assert ran.returncode == 1
    assert nowhere in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_limit_of_processes_is_named() -> None:
    said = of_processes(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
    assert said is not None
    assert "ulimit -u" in said
    assert of_processes(PermissionError(errno.EACCES, "Permission denied")) is None


def test_a_breakpoint_of_a_rank_that_reads_no_input_is_explained(launched: Any, script: Any) -> None:
    program = 'import os\nif os.environ["RANK"] == "1": breakpoint()\nprint("on")\n'
    ran = launched(script(program))
    assert "rank 1 reads no input, so that the debugger ends here: rank 0 alone reads what is typed" in ran.err
    own = 'import bdb, os\nif os.environ["RANK"] == "0": raise bdb.BdbQuit\n'
    assert "reads no input" not in launched(script(own)).err


WHOLE = """
import sys, torch, hocket
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(3, 3)
model, optimizer, loader = hocket.distribute(
    model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(torch.ones(16, 3)), 8)
)
for (x,) in loader:
    out = model(x).reshape(*eval(sys.argv[1]), 3)
    assert out.sum() < 1e9
    if sys.argv[2:] == ["exit"]:
        raise SystemExit("not this")
    if sys.argv[2:]:
        raise ValueError("this the program knows")
    out.sum(1).mean().backward()
    optimizer.step()
assert not sys.argv[1].startswith("(len(x)"), "after the loop"
"""


def test_an_error_of_shapes_says_how_many_samples_the_rank_had(
    hocket_forked: Any, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    told = "this rank had 4 of the 8 samples of its batch, as hocket divides the first axis"
    program = script(WHOLE)

    def said(*arguments: str) -> str:
        return str(hocket_forked("run", "-n", "2", "--no-run-dir", program, *arguments, cwd=tmp_path).stderr)

    wrong = said("(8,)")
    assert "shape '[8, 3]' is invalid for input of size 12" in wrong
    assert told in wrong
    for more, ends in ([], "after the loop"), (["exit"], "not this"), (["own"], "this the program knows"):
        assert ends in (other := said("(len(x),)", *more))
        assert told not in other


def test_a_clock_that_is_set_in_mid_run_does_not_change_how_long_a_rank_ran(
    launched: Any, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, now = tmp_path / "begun", time.time
    monkeypatch.setattr(time, "time", lambda: now() + (86400 if begun.exists() else 0))
    source = f"import os, pathlib; pathlib.Path({str(begun)!r}).touch(); os.kill(os.getpid(), 9)"
    said = re.search(r"killed by SIGKILL, ([0-9.]+) s after the start", launched(script(source), n=1).err)
    assert said is not None
    assert 0 <= float(said[1]) < deadline(60)  # a rank that a warm server starts may end within 0.05 s
