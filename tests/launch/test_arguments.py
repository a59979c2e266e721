"""The command line of `hocket run`."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from hocket._limits import usable_cores
from hocket.launch._arguments import ArgumentError, parse_arguments
from hocket.launch._elastic import launch_config
from hocket.planner import Plan


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.py").touch()
    (tmp_path / "2").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "flag", [["-n", "3"], ["-n3"], ["--np", "3"], ["--workers", "3"], ["--nproc-per-node=3"], ["--nproc_per_node", "3"]]
)
def test_the_number_of_ranks_has_several_names(flag: list[str]) -> None:
    parsed = parse_arguments([*flag, "s.py"])
    assert parsed.nproc == 3
    assert parsed.target == "s.py"


def test_auto_and_cpu_count_what_is_there() -> None:
    assert parse_arguments(["-n", "cpu", "s.py"]).nproc == usable_cores()
    assert parse_arguments(["-n", "auto", "s.py"]).nproc >= 1


@pytest.mark.parametrize(
    ("line", "target", "arguments"),
    [
        ("s.py", "s.py", []),
        ("-n 2 s.py -n 3 --json", "s.py", ["-n", "3", "--json"]),
        ("-n 2 -- s.py -- x --", "s.py", ["--", "x", "--"]),
        ("-n 2 s.py -- x", "s.py", ["--", "x"]),
        ("-n 2 -x A=1 -x B=2 -t 3 2 s.py", "2", ["s.py"]),
        ("-m -n 2 package.module -m", "package.module", ["-m"]),
        ("--no-python -n 2 echo -h", "echo", ["-h"]),
        ("--max-restarts 3 --rdzv-conf timeout=5,x=1 --log-dir d -r 0:1 s.py a", "s.py", ["a"]),
    ],
)
def test_flags_end_at_the_script(line: str, target: str, arguments: list[str]) -> None:
    parsed = parse_arguments(line.split())
    assert parsed.target == target
    assert list(parsed.arguments) == arguments


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "say which script to run, after the flags"),
        ("-n 2", "say which script to run, after the flags"),
        ("-n 2 --", 'say which script to run, after the "--"'),
        ("-n", "expected one argument"),
        ("-n 2 --no-such-flag s.py", "unknown flag --no-such-flag"),
        ("-n x s.py", "-n x: Unsupported nproc_per_node value: x; give a number of ranks"),
        ("-n 0 s.py", "-n 0: give 1 rank or more"),
        ("no.py", "there is no script 'no.py' in "),
        ("python3 no.py", "; leave it out: scripts run under this Python"),
        ("-n 2 -", "a script from a pipe can be read by one rank only"),
        ("/dev/null", "a script from a pipe can be read by one rank only"),
        ("--timeout 0 s.py", "--timeout 0.0: give a number of seconds above 0"),
        ("--timeout soon s.py", "--timeout: invalid float value: 'soon'"),
        ("-m --no-python s.py", "exclude each other"),
        ("-x =1 s.py", "-x =1: give KEY=VALUE"),
        ("--shutdown-timeout -5 s.py", "--shutdown-timeout -5: give 0 seconds or more"),
        (".", "is a directory without a __main__.py"),
        ("--run-dir= s.py", "--run-dir '': give a directory"),
        ("--run-dir s.py s.py", "--run-dir 's.py': give a directory"),
        ("--hosts a --ssh= s.py", "--ssh '' is no command; write 'ssh -p 2222'"),
        ("--hosts a --ssh ' s.py", "is no command; write 'ssh -p 2222'"),
    ],
)
def test_mistakes_are_named(line: str, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_arguments(line.split())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--master-port=99999", "must be an integer between 0 and 65536"),
        ("--master-port=0", "name the port at which the hosts meet"),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:99999", "must be an integer between 0 and 65536"),
        ("--node-rank=2", "--node-rank 2: the numbers of 2 hosts are 0 to 1"),
        ("--monitor-interval=0", "--monitor-interval 0.0: give a number of seconds above 0"),
        ("--log-dir=/proc/none", "No such file or directory"),
        ("--nnodes=x", "--nnodes x: give a number of hosts, or the fewest and the most as 2:4"),
        ("--nnodes=2:1", "--nnodes 2:1: give a number of hosts"),
        ("--max-restarts=-1", "--max-restarts -1: give 0 or more"),
        ("--redirects=x", "--redirects x: give 0"),
        ("--tee=0:1,3", "--tee 0:1,3: give 0"),
        ("-n 2 --local-ranks-filter=0,2", "--local-ranks-filter 0,2: give local ranks, 0 to 1"),
        ("--signals-to-handle=SIGTERM,FOO", "there is no signal 'FOO'"),
        ("--event-log-handler=foo", "--event-log-handler foo: torch has no such handler"),
    ],
)
def test_what_torch_would_end_on_is_named(line: str, message: str, tmp_path: Path) -> None:
    arguments = parse_arguments(["--nnodes=2", *line.split(), __file__])
    with pytest.raises(ArgumentError, match=message):
        launch_config(arguments, str(tmp_path))


def test_binding_to_memory_needs_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ArgumentError, match="--numa-binding node: torch binds by GPUs"):
        launch_config(parse_arguments(["--numa-binding=node", __file__]), str(tmp_path))


def test_variables_may_be_named_without_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_HERE", "v")
    assert parse_arguments(["-x", "SET_HERE", "-x", "A=b=c", "s.py"]).environment == {"SET_HERE": "v", "A": "b=c"}


def test_torchrun_s_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    assert parse_arguments(["s.py"]).nproc == 3
    assert parse_arguments(["-n", "2", "s.py"]).nproc == 2


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30s")
    with pytest.raises(ArgumentError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT=30s: give a whole number"):
        parse_arguments(["s.py"])
    assert parse_arguments(["--shutdown-timeout=3", "s.py"]).grace_s == 3


def test_one_host_gets_a_rendezvous_of_its_own_and_several_what_they_ask_for() -> None:
    alone = parse_arguments(["-n", "2", "s.py"]).flags
    assert (alone.rdzv_backend, alone.rdzv_endpoint, alone.local_addr) == ("c10d", "localhost:0", "localhost")
    assert alone.rdzv_id != parse_arguments(["-n", "2", "s.py"]).flags.rdzv_id
    several = parse_arguments(
        ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--master-port=1234", "s.py"]
    ).flags
    assert (several.rdzv_backend, several.node_rank, several.master_port) == ("static", 1, 1234)


def test_a_plan_goes_to_the_ranks_whole(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('shard = "gradients"')
    parsed = parse_arguments(["-n", "2", "--plan", "plan.toml", "s.py"])
    assert Plan.from_json(json.loads(parsed.environment["HOCKET_PLAN"])) == Plan(shard="gradients")


def test_a_plan_that_does_not_fit_the_ranks_is_refused_before_they_start(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("tensor_parallel_degree = 3")
    with pytest.raises(ArgumentError, match="does not divide 2 workers; use 3 workers"):
        parse_arguments(["-n", "2", "--plan", "plan.toml", "s.py"])
    with pytest.raises(ArgumentError, match="cannot read plan 'none.toml'"):
        parse_arguments(["-n", "2", "--plan", "none.toml", "s.py"])
    assert parse_arguments(["-n", "2", "--plan", "auto", "s.py"]).environment["HOCKET_PLAN"] == "auto"


def test_one_host_needs_no_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def without_a_hosts_file(host: str, *rest: Any) -> Any:
        if host == "localhost":
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return known(host, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", without_a_hosts_file)
    flags = parse_arguments(["-n", "2", __file__]).flags
    assert (flags.rdzv_endpoint, flags.local_addr) == ("127.0.0.1:0", "127.0.0.1")
