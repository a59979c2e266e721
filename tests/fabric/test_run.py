"""`hocket run --fabric` and `hocket fabric`, as a user starts them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.cluster import load
from hocket.fabric import fabrics, wire
from hocket.launch import ArgumentError, launch
from hocket.launch._fabric import Sites, sites, spread
from hocket.testing import deadline

from ..processes import processes_with, until

SPEC = "star:hosts=2,bandwidth=80Mbit/s"
NAMES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "HOCKET_HOST", "GLOO_SOCKET_IFNAME")


def hocket(*words: str, **settings: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "hocket", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline(100), check=False, **settings)


@pytest.mark.parametrize(
    ("spec", "ranks", "hosts"),
    [
        ("star:hosts=4", 4, "0123"),
        ("star:hosts=4", 2, "01"),
        ("star:hosts=4", 8, "00112233"),
        ("star:hosts=4", 6, "001223"),
        ("star:hosts=2,server.ranks=2", 4, "0011"),
        ("star:hosts=2,server.ranks=2", 2, "01"),
    ],
)
def test_ranks_are_spread_over_hosts_in_order(spec: str, ranks: int, hosts: str) -> None:
    assert spread(wire(load(spec)), ranks) == tuple(f"host{index}" for index in hosts)


@pytest.mark.long
def test_ranks_run_in_their_hosts_and_reduce_over_the_links(temporary: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import json, os, torch, torch.distributed as dist
def sent():
    return int(next(line for line in open("/proc/net/dev") if "eth0" in line).split()[9])
dist.init_process_group("hocket")
place = {{name: os.environ.get(name) for name in {NAMES!r}}}
numbers = torch.full((50_000,), float(dist.get_rank() + 1))
before = sent()
dist.barrier()  # a host's ranks share its link: nobody sends before all have read
dist.all_reduce(numbers)
dist.barrier()
told = "HOCKET_NETWORK_NAMESPACE" in os.environ
print(json.dumps(place | {{"sum": float(numbers[-1]), "sent": sent() - before, "hidden": told}}))
dist.destroy_process_group()
""")
    done = hocket("run", "--fabric", SPEC, "-n", "4", str(script))
    assert done.returncode == 0, done.stderr
    said = sorted(
        (json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()), key=lambda one: one["RANK"]
    )
    assert [one["sum"] for one in said] == [10.0] * 4
    assert [one["HOCKET_HOST"].partition(":")[2] for one in said] == ["host0", "host0", "host1", "host1"]
    assert [one["LOCAL_RANK"] for one in said] == ["0", "1", "0", "1"]
    assert {one["LOCAL_WORLD_SIZE"] for one in said} == {"2"}
    assert [one["GROUP_RANK"] for one in said] == ["0", "0", "1", "1"]
    assert {one["MASTER_ADDR"] for one in said} == {"10.64.0.0"}
    assert {one["GLOO_SOCKET_IFNAME"] for one in said} == {"eth0"}
    assert min(one["sent"] for one in said) > 100_000  # half of 200 kB, at least, has left each host
    assert not any(one["hidden"] for one in said)
    assert fabrics() == []


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_killed_launcher_takes_its_fabric_and_its_ranks_with_it(
    temporary: Path, tmp_path: Path, stubborn: bool
) -> None:
    # Ranks that end late, as on a busy machine: the launch's warden must have the time to clean up.
    script = tmp_path / "script.py"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if stubborn else "pass"
    script.write_text(f"import signal, time; {ignore}; print('here', flush=True); time.sleep(1000)")
    command = [sys.executable, "-m", "hocket", "run", "--fabric", SPEC, "-n", "2", str(script)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert launcher.stdout is not None
        assert "here" in launcher.stdout.readline()
        os.kill(launcher.pid, signal.SIGKILL)
    finally:
        launcher.kill()
        launcher.communicate()
    until(lambda: processes_with("TMPDIR", temporary) == [], limit_s=30.0)
    assert fabrics() == []


def test_the_verbs_from_up_to_down(temporary: Path) -> None:
    made = hocket("fabric", "up", SPEC, "--name", "mine", "--no-check", "--json")
    assert made.returncode == 0, made.stderr
    value = json.loads(made.stdout)
    assert value["name"] == "mine"
    assert [node["name"] for node in value["nodes"]] == ["host0", "host1", "switch0"]
    again = hocket("fabric", "up", SPEC, "--name", "mine", "--no-check")
    assert again.returncode == 2
    assert "is up; take it down first" in again.stderr
    inside = hocket("fabric", "exec", "host1", "cat", "/proc/net/dev")
    assert inside.stdout.count("eth0") == 1
    show = ("python3", "-c", "import sys; print(sys.argv[1:])", "-h", "--name", "other", "--help")
    for words in (("host1",), ("host1", "--name", "mine"), ("--name=mine", "host1"), ("host1", "--name=mine", "--")):
        assert hocket("fabric", "exec", *words, *show).stdout == "['-h', '--name', 'other', '--help']\n"
    for words, said in ((("host1", "--name", "mine"), "say which program"), (("host1", "--name", "x", "ls"), "'x'")):
        refused = hocket("fabric", "exec", *words)
        assert refused.returncode == 2
        assert said in refused.stderr
    (shown,) = json.loads(hocket("fabric", "status", "--seconds", "0", "--json").stdout)["fabrics"]
    assert {link["name"]: link["nbytes"] for link in shown["links"]} == {
        "host0->switch0": 0,
        "host1->switch0": 0,
        "switch0->host0": 0,
        "switch0->host1": 0,
    }
    assert "latency is not emulated" in shown["latency"]
    assert json.loads(hocket("fabric", "down", "--json").stdout) == {"down": ["mine"]}
    assert hocket("fabric", "status").stdout == "no fabric is up\n"


@pytest.mark.long
def test_what_the_kernel_refuses_is_no_bad_input_whoever_asks(temporary: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    verbs = (("fabric", "up", SPEC), ("run", "--fabric", SPEC, "-n", "2", str(script)))
    no_rights = "exec setpriv --bounding-set -all"  # and no user namespaces, in which a user would have them
    for limit, refusal in (
        (f"echo 0 > /proc/sys/user/max_user_namespaces; {no_rights}", "this user may not make namespaces"),
        ("echo 0 > /proc/sys/user/max_net_namespaces; exec", "makes no more network namespaces"),
    ):
        inside = ["unshare", "--user", "--map-root-user", "sh", "-c", f'{limit} "$@"', "sh"]
        if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
            pytest.skip("needs unshare and setpriv, and a kernel that makes user namespaces")
        for words in verbs:
            done = subprocess.run(
                [*inside, sys.executable, "-m", "hocket", *words],
                capture_output=True, text=True, timeout=deadline(100), check=False,
            )  # fmt: skip
            assert done.returncode == 1, done.stderr
            assert refusal in done.stderr
            assert "Traceback" not in done.stderr
            assert "--help" not in done.stderr
    for words in (("fabric", "up", "lasen"), ("run", "--fabric", "lasen", str(script)), ("fabric", "down", "lasen")):
        assert hocket(*words).returncode == 2


@pytest.mark.long
def test_bad_input_is_refused_and_makes_nothing(temporary: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    for words, said in (
        (("star:hosts",), "write NAME=VALUE"),
        (("star:hosts=5000",), "5001 hosts and switches are more than the 1024"),
        (("star:hosts=2", "--name", "a/b"), "'a/b' cannot be the name of a fabric"),
    ):
        refused = hocket("fabric", "up", *words)
        assert refused.returncode == 2
        assert said in refused.stderr
    refused = hocket("run", "--fabric", "lasen", str(script))
    assert refused.returncode == 2
    assert "did you mean lassen" in refused.stderr
    with pytest.raises(ArgumentError, match="is for the command"):
        launch([str(script)], 2, flags=["--fabric", SPEC])


def test_a_dry_run_says_which_host_each_rank_would_get(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    done = hocket("run", "--dry-run", "--json", "--fabric", SPEC, "-n", "4", str(script))
    assert json.loads(done.stdout)["emulated_hosts"] == ["host0", "host0", "host1", "host1"]
    assert fabrics() == []


@pytest.mark.long
def test_an_aggregator_runs_beside_the_switch_and_each_host_sends_its_numbers_once(
    temporary: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import os, torch, torch.distributed as dist
def sent():
    return int(next(line for line in open("/proc/net/dev") if "eth0" in line).split()[9])
dist.init_process_group("hocket")
numbers = torch.full((500_000,), float(dist.get_rank() + 1))
before = sent()
dist.barrier()  # a host's ranks share its link: nobody sends before all have read
dist.all_reduce(numbers)
dist.barrier()
print(f'{os.environ["HOCKET_AGGREGATOR"].partition(":")[0]} {float(numbers[-1])} {sent() - before}')
dist.destroy_process_group()
""")
    done = hocket("run", "--fabric", "star:hosts=4,bandwidth=200Mbit/s", "--aggregate", "-n", "4", str(script))
    assert done.returncode == 0, done.stderr
    said = [line.partition("] ")[2].split() for line in done.stdout.splitlines()]
    assert [one[:2] for one in said] == [["10.128.0.4", "10.0"]] * 4
    assert max(int(one[2]) for one in said) < 2_600_000  # of 2 MB; a ring would send 3 MB
    assert fabrics() == []


@pytest.mark.long
def test_each_leaf_of_a_tree_of_aggregators_sends_up_what_one_host_sends(temporary: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import os, time, torch, torch.distributed as dist
from hocket.fabric import Fabric
dist.init_process_group("hocket")
numbers = torch.full((500_000,), float(dist.get_rank() + 1))
fabric = Fabric.attach(os.environ["HOCKET_FABRIC"])
before = fabric.counters()
dist.barrier()
dist.all_reduce(numbers)
dist.barrier()
if dist.get_rank() == 0:
    time.sleep(0.1)
    after = fabric.counters()
    trunks = [after[f"leaf{i}->spine0"] - before[f"leaf{i}->spine0"] for i in range(2)]
    print(f"{float(numbers[-1])} {trunks[0]} {trunks[1]}")
dist.barrier()
dist.destroy_process_group()
""")
    spec = "leafspine:leaves=2,ports=2,spines=1,bandwidth=200Mbit/s"
    done = hocket("run", "--fabric", spec, "--aggregate", "-n", "4", str(script))
    assert done.returncode == 0, done.stderr
    total, *trunks = map(float, done.stdout.partition("] ")[2].split())
    assert total == 10.0
    assert all(2_000_000 < nbytes < 2_200_000 for nbytes in trunks)  # once each, of 2 MB; a ring would send 3 MB


def test_aggregators_stand_at_the_switches_of_the_hosts_or_on_hosts_to_spare() -> None:
    tree = wire(load("leafspine:leaves=3,ports=2,spines=1"))
    at = {f"host{index}": f"leaf{index // 2}" for index in range(6)}
    assert sites(tree, tree.hosts) == Sites(("spine0",), at)
    assert sites(tree, tree.hosts[:2]) == Sites(("leaf0",))  # one switch has them all
    assert sites(tree, tree.hosts[::2]) == Sites(("spine0",))  # leaves would pass on what one host sends
    star = wire(load("star:hosts=3"))
    assert sites(star, star.hosts) == Sites(("switch0",))
    ring = wire(load("torus:dims=4x2"))
    assert sites(ring, ring.hosts[:6]) == Sites(ring.hosts[6:])
    assert sites(ring, ring.hosts) == Sites(ring.hosts[:1])
