"""What stands between hosts is named before anything starts: links, ports, versions, memory, /dev/shm, interfaces."""

import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket import _limits
from hocket.cluster import load
from hocket.fabric import Fabric, FabricError
from hocket.launch import _doctor, _facts, _probe, _running_job, parse_arguments, threads_of_rank
from hocket.launch._preflight import judge, rounds
from hocket.testing import deadline

CLUSTER = "".join(f'[[nodes]]\nname = "{host}"\n' for host in "abc") + '[[nodes]]\nname = "s"\nkind = "switch"\n'
LINK = '[[links]]\nends = ["{}", "s"]\nbandwidth = "{} Mbit/s"\n'
SSH = """#!/bin/sh
while [ "$1" != -- ]; do host="$1"; shift; done
shift
case "$host" in
{cases}
esac
"""
SETUP = {
    "memory": "sed 's/^MemTotal:.*/MemTotal: {half} kB/' /proc/meminfo > {place}/meminfo; "
    "mount --bind {place}/meminfo /proc/meminfo",
    "shm": "mount -t tmpfs -o size=1m none /dev/shm; head -c 1000000 /dev/zero > /dev/shm/full",
    "torch": "cd {place}",
    "interface": "export GLOO_SOCKET_IFNAME=eth9",
    "none": "true",
}
FOUND = {
    "none": (0, "network: "),
    "memory": (0, "memory: b has "),
    "shm": (0, "/dev/shm: on b /dev/shm has 0 MiB free"),
    "torch": (1, "and 0.9.9 on b"),
    "interface": (1, "b has no interface eth9, which GLOO_SOCKET_IFNAME names"),
    "link": (0, "link: b sends and receives at "),
    "port": (1, "cannot connect to"),
}


@pytest.fixture(params=[200, 20])
def fabric(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fabric]:
    """Three hosts at a switch; the link of the second has so many Mbit/s, the others 200."""
    pytest.importorskip("pyroute2", reason="fabrics need the extra `fabric`")
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a host with a memory of its own needs root, and util-linux")
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER + LINK.format("a", 200) + LINK.format("b", request.param) + LINK.format("c", 200))
    try:
        with Fabric(load(str(path))) as fabric:
            yield fabric
    except FabricError as error:
        pytest.skip(f"no fabrics here: {error}")


def doctor(fabric: Fabric, place: Path, what: str) -> "subprocess.CompletedProcess[str]":
    """Run `hocket doctor --hosts` over three emulated hosts, the second of which has something wrong with it."""
    half = int(Path("/proc/meminfo").read_text().split()[1]) // 2
    (place / "torch-0.9.9.dist-info").mkdir(exist_ok=True)
    (place / "torch-0.9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.9.9\n")
    cases = []
    for name, host in zip("abc", fabric.hosts, strict=True):
        setup = SETUP.get(what if name == "b" else "none", "true").format(half=half, place=place)
        address = fabric.address(host)
        # The rest of the command follows as the words of a shell.
        inside = f"{setup}; export SSH_CONNECTION='- - {address} 22'; exec sh -c \"$0\""
        cases.append(
            f'{name}) exec {shlex.join(fabric.command_in(host, ["unshare", "-m", "sh", "-c", inside]))} "$*";;'
        )
    ssh = place / "ssh"
    ssh.write_text(SSH.format(cases="\n".join(cases)))
    ssh.chmod(stat.S_IRWXU)
    command = [sys.executable, "-m", "hocket", "doctor", "--hosts", "a,b,c", "--ssh", str(ssh)]
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline(120), check=False)


@pytest.mark.long
@pytest.mark.parametrize("fabric", [200], indirect=True)
def test_what_stands_between_hosts_is_named(fabric: Fabric, tmp_path: Path) -> None:
    for what in ("none", "interface", "port"):
        if what == "port":
            for link in fabric.counters():
                if "b" in link.split("->"):
                    fabric.cut(link)
        ran = doctor(fabric, tmp_path, what)
        print(what, ran.stdout, ran.stderr)
        status, text = FOUND[what]
        assert text in ran.stdout + ran.stderr
        assert ran.returncode == status
        if what == "none":
            assert "warning" not in ran.stdout


@pytest.mark.long
@pytest.mark.parametrize("fabric", [200], indirect=True)
@pytest.mark.parametrize("what", ["memory", "shm", "torch"])
def test_what_is_wrong_on_one_host_is_named(fabric: Fabric, tmp_path: Path, what: str) -> None:
    ran = doctor(fabric, tmp_path, what)
    print(ran.stdout, ran.stderr)
    status, text = FOUND[what]
    assert text in ran.stdout + ran.stderr
    assert ran.returncode == status


@pytest.mark.long
@pytest.mark.parametrize("fabric", [20], indirect=True)
def test_a_link_at_a_tenth_of_its_rate_is_named(fabric: Fabric, tmp_path: Path) -> None:
    ran = doctor(fabric, tmp_path, "link")
    print(ran.stdout, ran.stderr)
    assert ran.stdout.count("link: ") == 1
    assert FOUND["link"][1] in ran.stdout


@given(st.integers(2, 40))
def test_each_host_is_in_one_measurement_at_a_time_and_sends_and_receives(count: int) -> None:
    found = list(rounds(count))
    for pairs in found:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))
    pairs = [pair for one in found for pair in one]
    assert len(pairs) == len(set(pairs))
    assert {a for a, _ in pairs} == {b for _, b in pairs} == set(range(count))
    if count <= 8:
        assert len(pairs) == count * (count - 1)


@given(st.integers(3, 8), st.integers(0, 7), st.sampled_from(["sends", "receives", "sends and receives"]), st.randoms())
def test_the_slow_host_is_named_and_no_other(count: int, slow: int, way: str, random: Any) -> None:
    hosts = [f"h{index}" for index in range(count)]
    bad = hosts[slow % count]
    links = {}
    for pairs in rounds(count):
        for a, b in pairs:
            hit = ("sends" in way and hosts[a] == bad) or ("receives" in way and hosts[b] == bad)
            rate_Bps = random.uniform(0.7e8, 1.3e8) * (0.1 if hit else 1)
            links[hosts[a], hosts[b]] = {"problem": None, "rate_Bps": rate_Bps, "latency_s": 1e-4, "to": ""}
    (found,) = [one for one in judge(hosts, links) if one.status != "ok"]
    assert found.found.startswith(f"{bad} {way} at ")


def test_a_host_that_is_named_by_its_address_is_named_once() -> None:
    refused = {"problem": "Connection refused", "to": ("10.0.0.2", 5000)}
    for host, place in (("10.0.0.2", "10.0.0.2, port 5000"), ("b", "b, 10.0.0.2, port 5000")):
        (found,) = judge(["a", host], {("a", host): refused})
        assert found.found == f"a cannot connect to {place}: Connection refused"


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_s_limits_count_wherever_they_stand(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a Slurm job or a systemd unit, whose process is in a group below the one with the limit."""
    own = {1: "4:memory:/job/step\n3:cpu,cpuacct:/job/step\n", 2: "0::/job/step\n"}[version]
    memory, cores = ((tmp_path / name if version == 1 else tmp_path) / "job" for name in ("memory", "cpu"))
    gib, inactive = 1 << 30, "total_inactive_file" if version == 1 else "inactive_file"
    limits: list[dict[str, int | str]] = [
        {"memory.limit_in_bytes": gib, "memory.usage_in_bytes": gib // 2, "cpu.cfs_quota_us": 150_000},
        {"memory.max": gib, "memory.current": gib // 2, "cpu.max": "150000 100000"},
    ]
    files = {
        **limits[version - 1],
        "memory.stat": f"anon 1\n{inactive} {gib // 4}\nactive_file 0",
        "cpu.cfs_period_us": 100_000,
    }
    for name, said in files.items():
        folder = memory if name.startswith("memory") else cores
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{said}\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(_limits, "_GROUPS", tmp_path)
    monkeypatch.setattr(_limits, "_OWN_GROUPS", tmp_path / "own")
    assert _limits.memory() == (gib, 3 * gib // 4)
    assert _limits.quota_cores() == 1.5
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (_limits.usable_cores(), threads_of_rank(1), threads_of_rank(4)) == (1, 1, 1)
    assert parse_arguments(["-n", "cpu", __file__]).nproc == 1
    said: list[str] = []
    job: Any = SimpleNamespace(_arguments=parse_arguments(["-n", "2", __file__]), say=said.append)
    _running_job.RunningJob.say_threads(job)
    assert said == ["OMP_NUM_THREADS=1 in each of 2 ranks (a quota of 1.5 of 8 cores); set it to choose"]
    assert _facts.resources()["memory"] == gib
    found = _doctor._memory()
    assert (found.status, found.found) == ("warning", "0.8 GiB free of 1.0 GiB")
    (tmp_path / "own").write_text("")
    assert _limits.memory()[0] != gib
    assert _limits.quota_cores() is None
    assert (_limits.usable_cores(), threads_of_rank(1), threads_of_rank(4)) == (8, None, 2)


def test_a_link_that_loses_long_messages_is_told_from_a_host_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_probe, "_MOST_S", 0.5)
    for answers, problem in ((15, "short messages arrive and long ones do not"), (0, "it does not answer")):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer(listener: socket.socket = listener, count: int = answers) -> None:
                with listener.accept()[0] as connection:
                    connection.recv(32, socket.MSG_WAITALL)
                    for _ in range(count):
                        connection.sendall(connection.recv(8, socket.MSG_WAITALL))
                    time.sleep(2)  # and takes no more

            threading.Thread(target=answer, daemon=True).start()
            assert _probe.probe(*listener.getsockname(), "secret")["problem"].startswith(problem)
