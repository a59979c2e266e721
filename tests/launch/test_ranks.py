"""What ranks are given, what becomes of what they print, and how a launch ends well."""

import io
import json
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hocket.comm.secret_store import SecretStore, StoreServer
from hocket.launch import ArgumentError, LaunchError, _elastic, launch, parse_arguments, run
from hocket.testing import deadline

from ..processes import free_port

DUMP = "import json, os, sys; print(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}), flush=True)"


def test_ranks_get_what_torchrun_gives_them(launched: Any, script: Any) -> None:
    ran = launched(script(DUMP), n=3)
    assert ran.result.outcome == "finished"
    assert ran.result.exit_code == 0
    assert ran.result.failures == ()
    for rank in range(3):
        environment = json.loads(ran.lines(rank)[0])["env"]
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert environment["MASTER_ADDR"] == "localhost"
        assert int(environment["MASTER_PORT"]) > 0
        assert "TORCHELASTIC_RUN_ID" in environment


@pytest.mark.parametrize(
    "arguments",
    [["a b", "$HOME", "$$", "${local_rank}", ""], ["--help", "-n", "7", "-m"], ["--", "x", "--"]],
)
def test_what_follows_the_script_is_the_script_s(launched: Any, script: Any, arguments: list[str]) -> None:
    ran = launched(script(DUMP), *arguments, n=1)
    assert json.loads(ran.out)["argv"] == arguments


def test_environment_is_set_for_the_ranks_only(launched: Any, script: Any) -> None:
    before = dict(os.environ)
    ran = launched(script(DUMP), n=2, env={"GREETING": "a=b c"})
    assert json.loads(ran.lines(1)[0])["env"]["GREETING"] == "a=b c"
    assert dict(os.environ) == before


def test_ranks_get_huge_pages_and_one_hash_seed_unless_the_user_has_chosen(
    launched: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(**environment: str) -> dict[str, str]:
        ran = launched(script(DUMP), n=1, env=environment)
        return {name: json.loads(ran.out)["env"][name] for name in ("PYTHONHASHSEED", "GLIBC_TUNABLES")}

    for name in ("PYTHONHASHSEED", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert given() == {"PYTHONHASHSEED": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert given(GLIBC_TUNABLES="")["GLIBC_TUNABLES"] == ""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    assert given() == {"PYTHONHASHSEED": "3", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}


def test_cores_are_shared_out_unless_the_user_has_chosen(
    launched: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(DUMP)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    ran = launched(path, n=2)
    assert json.loads(ran.lines(0)[0])["env"]["OMP_NUM_THREADS"] == str(share)
    assert ran.err.count(f"OMP_NUM_THREADS={share}") == 1
    assert "OMP_NUM_THREADS" not in json.loads(launched(path, n=1).out)["env"]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    ran = launched(path, n=2)
    assert json.loads(ran.lines(0)[0])["env"]["OMP_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in ran.err


def test_lines_of_ranks_are_never_torn(launched: Any, script: Any) -> None:
    source = """
    import os, sys
    rank = os.environ["RANK"]
    for i in range(300):
        for part in ("line", str(i), "of", rank):
            sys.stdout.write(part + " ")
            sys.stdout.flush()
        sys.stdout.write("\\n")
    sys.stderr.write("no new line at the end")
    """
    ran = launched(script(textwrap.dedent(source)), n=3)
    assert len(ran.out.splitlines()) == 900
    for rank in range(3):
        assert ran.lines(rank) == [f"line {i} of {rank} " for i in range(300)]
        assert f"[{rank}] no new line at the end\n" in ran.err


def test_of_a_progress_bar_the_last_state_remains_where_there_is_no_terminal(launched: Any, script: Any) -> None:
    source = "import sys\nfor i in range(101): sys.stderr.write(f'\\r{i}%')\nsys.stderr.write('\\ndone\\n')"
    ran = launched(script(source), n=1)
    assert ran.err == "100%\ndone\n"


def test_rank_0_alone_reads_what_the_user_types(hocket: Any, script: Any) -> None:
    path = script("import os, sys; print(repr(sys.stdin.read()))")
    process = hocket("run", "-n", "2", path, stdin=subprocess.PIPE)
    out, _ = process.communicate("typed", timeout=deadline(60))
    assert sorted(out.splitlines()) == ["[0] 'typed'", "[1] ''"]


def test_arguments_arrive_as_given_and_streams_may_be_closed(script: Any, tmp_path: Path) -> None:
    path = script("import os, sys; open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}', 'w').write(repr(sys.argv[2:]))")
    words = ["a b", '"', "$HOME", "", "--", "-n", "--"]
    command = [sys.executable, "-m", "hocket", "run", "-n", "2", path, str(tmp_path), *words]
    closed = f"{shlex.join(command)} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", closed], cwd=tmp_path, timeout=deadline(60), check=False).returncode == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == [repr(words)] * 2


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--max-restarts=1",)])
def test_a_host_of_ipv6_alone_whose_name_does_not_resolve_has_ranks(
    script: Any, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    inside = ["unshare", "--map-root-user", "--net", "--uts", "sh", "-c"]
    prepare = "hostname nosuchhost.invalid; ip link set lo up; ip address del 127.0.0.1/8 dev lo"
    if shutil.which("ip") is None or subprocess.run([*inside, prepare], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare and ip, and a kernel that makes user namespaces")
    path = script("import os, sys; sys.stdout.write(os.environ['MASTER_PORT'].isdigit() * 'ok' + '\\n')")
    command = shlex.join([sys.executable, "-m", "hocket", "run", "-n", "2", *flags, path])
    done = subprocess.run(
        [*inside, f"{prepare}; {command}"], capture_output=True, text=True, timeout=deadline(60), check=False
    )
    assert sorted(done.stdout.splitlines()) == ["[0] ok", "[1] ok"], done.stderr


@pytest.mark.long
def test_without_a_stdin_ranks_find_an_empty_one(script: Any, tmp_path: Path) -> None:
    path = script("import os, sys; sys.stdout.write(f'{sys.stdin.read()!r} {os.fstat(0).st_rdev}\\n')")
    run = [sys.executable, "-m", "hocket", "run"]
    for launcher in (run, [*run, "--max-restarts=0"]):
        closed = f"{shlex.join([*launcher, '-n', '2', path])} <&-"
        done = subprocess.run(
            ["sh", "-c", closed], cwd=tmp_path, capture_output=True, text=True, timeout=deadline(60), check=False
        )
        null = os.stat(os.devnull).st_rdev
        assert sorted(done.stdout.splitlines()) == [f"[0] '' {null}", f"[1] '' {null}"], done.stderr


def test_modules_run_as_with_python_m(launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("from . import part; print(part.__name__, __spec__.name, __package__)")
    (package / "part.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert launched("package", n=1, flags=["-m"]).out == "package.part package.__main__ package\n"
    missing = launched("package.nothing", n=1, flags=["-m"])
    assert missing.result.exit_code == 1
    assert "No module named package.nothing" in missing.err


def test_programs_that_are_not_python_run(launched: Any) -> None:
    # Rank 0 is ended when rank 1 fails, which waits until it has spoken.
    program = 'cd "$HOCKET_TEST"; echo "$RANK of $WORLD_SIZE"; touch said$RANK; until [ -e said0 ]; do sleep 0.01; done'
    ran = launched("sh", "-c", program + "; exit $RANK", n=2, flags=["--no-python"])
    assert ran.lines(0) == ["0 of 2"]
    assert ran.result.exit_code == 1
    missing = launched("no-such-program", n=1, flags=["--no-python"])
    assert missing.result.exit_code == 127
    assert "cannot run 'no-such-program': No such file or directory" in missing.err


def test_failed_ranks_are_started_again_if_the_user_wants_it(launched: Any, script: Any) -> None:
    source = """
    import os
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("attempt", attempt)
    if attempt == "0" and os.environ["RANK"] == "1":
        raise OSError("a passing fault")
    """
    ran = launched(script(textwrap.dedent(source)), n=2, flags=["--max-restarts=2"])
    assert ran.result.outcome == "finished"
    assert ran.result.exit_code == 0
    assert ran.result.restarts == 1
    assert ran.result.failures == ()
    assert "attempt 1" in ran.lines(0)
    assert "OSError: a passing fault" in ran.err
    assert ran.err.count("starting all ranks again: restart 1 of 2") == 1


def test_a_launch_ends_at_its_time_limit(launched: Any, script: Any) -> None:
    ran = launched(script("import time; time.sleep(60)"), n=2, timeout_s=0.5)
    assert ran.result.outcome == "timed-out"
    assert ran.result.exit_code == 124
    assert ran.result.wall_s < deadline(10)
    assert "timed-out" in ran.err


def test_launches_at_the_same_time_do_not_meet(hocket: Any, script: Any) -> None:
    source = """
    import os, pathlib, time
    here, world = pathlib.Path(os.environ["HOCKET_TEST"]), os.environ["WORLD_SIZE"]
    print(os.environ["MASTER_PORT"], world, flush=True)
    here.joinpath(f"rank {os.environ['RANK']} of {world}").touch()
    while len(list(here.glob("rank * of *"))) < 5:  # all run at once
        time.sleep(0.01)
    """
    path = script(textwrap.dedent(source))
    processes = [hocket("run", "-n", str(n), path) for n in (2, 3)]
    ports = set()
    for n, process in zip((2, 3), processes, strict=True):
        out, err = process.communicate(timeout=deadline(60))
        assert process.returncode == 0, err
        words = [line.split()[-2:] for line in out.splitlines()]
        assert [world for _, world in words] == [str(n)] * n
        assert len({port for port, _ in words}) == 1
        ports.add(words[0][0])
    assert len(ports) == 2


def test_a_launch_whose_output_nobody_reads_ends(hocket: Any, script: Any) -> None:
    path = script("import time\nfor i in range(6000): print('x' * 1000, flush=True); time.sleep(0.01)")
    process = hocket("run", "-n", "2", path)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=deadline(30)) == 141


def test_a_launch_whose_output_finds_no_space_says_so(script: Any, tmp_path: Path) -> None:
    path = script("import time\nprint('x', flush=True)\ntime.sleep(600)")
    command = [sys.executable, "-m", "hocket", "run", "-n", "1", str(path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=deadline(60), check=False
        )
    assert done.returncode == 1
    assert "what the ranks print cannot be written: No space left on device" in done.stderr
    assert "output-lost" in done.stderr


def test_logs_and_tees_go_where_torchrun_puts_them(launched: Any, script: Any, tmp_path: Path) -> None:
    path = script(
        f"""import os, sys, time
print('out', flush=True); print('err', file=sys.stderr)
if os.environ['RANK'] == '0': open({str(tmp_path / "said")!r}, 'w')
while not os.path.exists({str(tmp_path / "said")!r}): time.sleep(0.01)  # rank 0 is ended when rank 1 fails
assert os.environ['RANK'] == '0'"""
    )
    flags = ["--log-dir", str(tmp_path / "logs"), "-r", "0:1", "-t", "1:3", "--duplicate-stderr-filters", "Assert"]
    ran = launched(path, n=2, flags=flags)
    (attempt,) = (tmp_path / "logs").glob("*/attempt_0")
    assert (attempt / "0" / "stdout.log").read_text() == "out\n"
    assert (attempt / "1" / "stdout.log").read_text() == "out\n"
    # Where a rank has a log of its own its traceback is in there, not only in our report.
    assert (attempt / "1" / "stderr.log").read_text().endswith("AssertionError\n")
    assert (attempt / "filtered_stderr.log").read_text() == "[1] AssertionError\n"
    assert ran.lines(0) == []
    assert ran.lines(1) == ["out"]
    assert "[0] err\n" in ran.err
    assert "[1] err\n" in ran.err


def test_console_can_be_limited_to_some_ranks(launched: Any, script: Any) -> None:
    ran = launched(script("import os; print('rank', os.environ['RANK'])"), n=3, flags=["--local-ranks-filter=0,2"])
    assert sorted(ran.out.splitlines()) == ["[0] rank 0", "[2] rank 2"]


def test_two_launchers_make_one_world_with_torchrun_s_flags(hocket_forked: Any, script: Any, tmp_path: Path) -> None:
    flags = ["-n", "2", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    path = script("import os; print(os.environ['GROUP_RANK'], os.environ['WORLD_SIZE'])")
    with ThreadPoolExecutor(2) as pool:
        hosts = [pool.submit(hocket_forked, "run", *flags, f"--node-rank={n}", path, cwd=tmp_path) for n in (0, 1)]
    first, second = (host.result() for host in hosts)
    assert sorted(first.stdout.splitlines()) == ["[0] 0 4", "[1] 0 4"], first.stderr
    assert sorted(second.stdout.splitlines()) == ["[2] 1 4", "[3] 1 4"], second.stderr


TRAINS = """
import torch, hocket
model = torch.nn.Linear(2, 1)
trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1))
for _ in range(3):
    trainer.step((torch.ones(4, 2), torch.ones(4, 1)))
"""


@pytest.mark.long
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_one_of_several_hosts_says_how_long_steps_took_where_the_run_has_no_directory(
    hocket_forked: Any, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # where torch would leave it
    port, path = free_port(), script(TRAINS)
    flags = ["-n", "1", "--nnodes=2", "--no-run-dir", f"--rdzv-backend={backend}"]
    places = [["--master-addr=127.0.0.1", f"--master-port={port}", f"--node-rank={n}"] for n in (0, 1)]
    if backend == "c10d":
        places = [[f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=one"]] * 2
    with ThreadPoolExecutor(2) as pool:
        hosts = [pool.submit(hocket_forked, "run", *flags, *place, path, cwd=tmp_path) for place in places]
    ended = [host.result() for host in hosts]
    assert [host.returncode for host in ended] == [0, 0], ended
    assert sum(host.stderr.count("no step is predicted: 3 were made") for host in ended) == 1, ended


@pytest.mark.long
def test_a_full_disk_ends_a_log_and_not_the_job(hocket: Any, script: Any, tmp_path: Path) -> None:
    path = script("import time\nfor i in range(5): print('x' * 49999, flush=True); time.sleep(0.1)")
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))
    process = hocket("run", "-n", "1", "-t", "1", "--log-dir", str(tmp_path / "logs"), path, preexec_fn=limit)
    out, err = process.communicate(timeout=deadline(60))
    assert process.returncode == 0
    assert len(out) == 5 * 50_000
    (log,) = (tmp_path / "logs").glob("*/attempt_0/0/stdout.log")
    assert log.stat().st_size == 100_000
    assert err.count("a log file ends here: [Errno 27] File too large") == 1


@pytest.mark.parametrize("start", ["subprocess.Popen(command)", "subprocess.Popen(command, start_new_session=True)"])
def test_what_ranks_start_ends_with_them(launched: Any, script: Any, start: str) -> None:
    # That nothing runs any more is held by the fixture that all tests of this folder use.
    source = f"import subprocess, sys; command = [sys.executable, '-c', 'import time; time.sleep(60)']; {start}"
    assert launched(script(source), n=2).result.exit_code == 0


def test_bad_arguments_are_refused_before_anything_starts(script: Any, tmp_path: Path) -> None:
    path = script("")
    with pytest.raises(ArgumentError, match="there is no script 'missing.py'"):
        launch(["missing.py"], 2)
    with pytest.raises(ArgumentError, match="-n 0: give 1 rank or more"):
        launch([path], 0)
    with pytest.raises(ArgumentError, match="unknown flag --wolrd"):
        launch([path], 2, flags=["--wolrd"])
    with pytest.raises(ArgumentError, match="--max-restarts -1: give 0 or more"):
        launch([path], 2, flags=["--max-restarts=-1"])
    with pytest.raises(ArgumentError, match="rendezvous backend 'foo' is not registered"):
        launch([path], 2, flags=["--rdzv-backend=foo"])
    with pytest.raises(ArgumentError, match="-x NOT_SET_ANYWHERE: give KEY=VALUE"):
        launch([path], 2, flags=["-x", "NOT_SET_ANYWHERE"])
    with pytest.raises(ArgumentError, match="the rendezvous host 'no.such.host.invalid' does not resolve"):
        launch([path], 2, flags=["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=no.such.host.invalid:29400"])


@pytest.mark.long
def test_hosts_that_do_not_meet_are_an_error(script: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hocket", "run", "-n", "1", "--nnodes=2", "--rdzv-backend=c10d"]
        + ["--rdzv-endpoint=localhost:1", "--rdzv-conf=timeout=1,read_timeout=1,is_host=0", script("")],
        capture_output=True,
        text=True,
        timeout=deadline(90),
        check=False,
    )
    assert done.returncode == 1
    assert "the hosts did not meet at 'localhost:1'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_launcher_says_for_whom_it_waits(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_elastic, "_SILENT_S", 0.2)
    monkeypatch.setenv("HOCKET_SECRET", "0" * 64)
    command = ["--no-run-dir", "--nnodes=2", "-n1", "--timeout=5", "--rdzv-backend=c10d"]
    for is_host, said in (0, "no launcher answers at"), (1, "not all hosts have come to"):
        place, err = f"localhost:{free_port()}", io.BytesIO()
        more = [f"--rdzv-endpoint={place}", f"--rdzv-conf=timeout=2,read_timeout=2,join_timeout=2,is_host={is_host}"]
        with pytest.raises(LaunchError, match="did not meet"):
            run(parse_arguments([*command, *more, script("")]), io.BytesIO(), err)
        assert f"hocket: {said} '{place}' yet; start the same command on all hosts" in err.getvalue().decode()


@pytest.mark.long
def test_hosts_whose_localhost_does_not_resolve_are_told_so(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def without_a_hosts_file(host: str, *rest: Any, **more: Any) -> Any:
        if host == "localhost":
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return known(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", without_a_hosts_file)
    monkeypatch.setenv("HOCKET_SECRET", "0" * 64)
    place = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-conf=is_host=1,last_call_timeout=1"]
    with pytest.raises(LaunchError, match="^'localhost' does not resolve on this host .Temporary.*add.* to /etc/hosts"):
        launch([script("")], 1, flags=["--nnodes=1:2", "--rdzv-backend=c10d", *place])


def said_when_its_store_goes(server: StoreServer, flags: list[str], ready: Callable[[], object]) -> str:
    """What a launcher says whose store, on this host, goes when `ready()` is true."""
    command = [sys.executable, "-m", "hocket", "run", "--no-run-dir", "-n", "1", *flags]
    environment = {**os.environ, "HOCKET_SECRET": "0" * 64}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as launcher:
        until_s = time.monotonic() + deadline(60)
        while not ready() and time.monotonic() < until_s:
            time.sleep(0.05)
        server.close()
        _, said = launcher.communicate(timeout=deadline(90))
    assert launcher.returncode == 1
    assert "has gone; the launcher there, or rank 0, has ended, and says why" in said
    assert "Traceback" not in said
    return said


@pytest.mark.long
@pytest.mark.parametrize("numbered", [False, True])
def test_a_launcher_whose_store_goes_before_all_have_met_says_so(script: Any, numbered: bool) -> None:
    secret = b"0" * 64
    server = StoreServer(("127.0.0.1", 0), secret)
    place = [f"--rdzv-endpoint=127.0.0.1:{server.port}", "--rdzv-backend=c10d"]
    if numbered:
        place = ["--master-addr=127.0.0.1", f"--master-port={server.port}", "--node-rank=1"]
    store = SecretStore("127.0.0.1", server.port, secret, deadline(10))
    said = said_when_its_store_goes(server, ["--nnodes=3", *place, script("")], store.num_keys)
    assert f"the hosts did not meet at '127.0.0.1:{server.port}'" in said


@pytest.mark.long
def test_a_launcher_whose_store_goes_while_its_ranks_run_does_not_say_that_hosts_never_met(
    script: Any, tmp_path: Path
) -> None:
    begun, server = tmp_path / "begun", StoreServer(("127.0.0.1", 0), b"0" * 64)
    place = [f"--rdzv-endpoint=127.0.0.1:{server.port}", "--rdzv-backend=c10d", "--rdzv-conf=last_call_timeout=1"]
    path = script(f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(300)")
    said = said_when_its_store_goes(server, ["--nnodes=1:2", *place, path], begun.exists)
    assert f"the hosts no longer meet at '127.0.0.1:{server.port}'" in said


@pytest.mark.long
def test_a_script_that_trains_once_in_each_rank_is_told_so(launched: Any, script: Any) -> None:
    source = """
    import os, sys
    if "join" in sys.argv and os.environ["RANK"] == "1":
        sys.exit()  # rank 0 speaks, and a group of its own will do
    import torch
    import torch.distributed as dist
    import hocket
    if "join" in sys.argv:
        os.environ["WORLD_SIZE"] = "1"
        dist.init_process_group("hocket")
    for _ in range(2):
        torch.ones(2, requires_grad=True).sum().backward()
    """
    path = script(textwrap.dedent(source))
    ran = launched(path, n=2)
    assert ran.result.outcome == "finished"
    said = [line for line in ran.err.splitlines() if "this script trains 2 times, once in each rank" in line]
    assert len(said) == 1
    assert "hocket.distribute(model, optimizer, loader)" in said[0]
    joined = launched(path, "join", n=2)
    assert joined.result.outcome == "finished"
    assert "trains 2 times" not in joined.err


def test_the_switches_of_the_launcher_s_python_are_the_ranks(script: Any, tmp_path: Path) -> None:
    path = script("import sys\nassert False\nprint(sys.flags.optimize, sys.flags.dev_mode, sys.warnoptions)")
    command = [
        sys.executable,
        "-O",
        "-X",
        "dev",
        "-W",
        "error::ResourceWarning",
        "-m",
        "hocket",
        "run",
        "-n",
        "1",
        path,
    ]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=deadline(60), check=False)
    print(ran.stderr)
    assert ran.stdout.startswith("1 True ")
    assert "error::ResourceWarning" in ran.stdout


def test_a_process_that_goes_on_where_its_rank_has_ended_well_is_named_and_ended(launched: Any, script: Any) -> None:
    program = """
        import multiprocessing, os, subprocess, time
        def sleep(): time.sleep(300)
        if os.environ["RANK"] == "0":
            if os.fork():
                os._exit(0)
            os.setsid()
            sleep()
        else:  # none of these is the program's training
            multiprocessing.get_context("fork").Process(target=sleep).start()
            subprocess.Popen(["sleep", "300"], preexec_fn=os.setsid)
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
    """
    ran = launched(script(textwrap.dedent(program)))
    assert ran.result.exit_code == 0
    assert re.search(r"hocket: rank 0 ended, exit status 0, and process \d+, which it had forked, still ran", ran.err)
    assert ran.err.count("still ran") == 1
