"""However a fabric ends, nothing of it is left: real kills."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hocket.cluster import load
from hocket.fabric import Fabric, FabricError, fabrics
from hocket.fabric._namespace import in_network
from hocket.testing import deadline

from ..processes import processes_with, until
from .conftest import Up

STUBBORN = ["bash", "-c", "trap '' TERM INT HUP; setsid sleep 1000 & while :; do sleep 1; done"]
SPEC = "star:hosts=2,bandwidth=80Mbit/s"


def gone(fabric: Fabric, directory: Path) -> bool:
    """Whether the fabric's namespaces hold no process, and no file names it."""
    return not in_network(set(fabric._state.numbers)) and not list(directory.iterdir())


def test_taking_it_down_ends_what_runs_in_it(up: Up, temporary: Path) -> None:
    fabric = up(SPEC)
    inside = fabric.run_in_host("host1", STUBBORN)
    until(lambda: len(in_network(set(fabric._state.numbers))) >= 3)
    fabric.close()
    assert gone(fabric, temporary)
    assert inside.wait(timeout=deadline(5)) == -signal.SIGKILL
    fabric.close()  # a second time does nothing


@pytest.mark.long
def test_killing_the_keeper_leaves_nothing(up: Up, temporary: Path) -> None:
    fabric = up(SPEC)
    inside = fabric.run_in_host("host1", STUBBORN)
    until(lambda: len(in_network(set(fabric._state.numbers))) >= 3)
    os.kill(fabric.keeper, signal.SIGKILL)
    until(lambda: gone(fabric, temporary))
    inside.wait(timeout=deadline(5))
    with pytest.raises(FabricError, match="does not answer"):
        fabric.counters()


def test_killing_the_owner_leaves_nothing(temporary: Path) -> None:
    code = f"""
import time
from hocket.cluster import load
from hocket.fabric import Fabric
fabric = Fabric(load("{SPEC}"))
fabric.run_in_host("host1", {STUBBORN!r})
print(fabric.name, flush=True)
time.sleep(1000)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    fabric = Fabric.attach(owner.stdout.readline().strip())
    until(lambda: in_network(set(fabric._state.numbers)))
    owner.kill()
    owner.communicate()
    until(lambda: gone(fabric, temporary))
    until(lambda: processes_with("TMPDIR", temporary) == [])


@pytest.mark.long
def test_what_keeper_and_warden_could_not_end_goes_with_the_next_fabric(up: Up, temporary: Path) -> None:
    fabric = up(SPEC, name="lost")
    # Not through run_in_host, whose processes would go with this one.
    inside = subprocess.Popen(
        fabric.command_in("host1", STUBBORN), env={**os.environ, **fabric.environment("host1")}, start_new_session=True
    )
    until(lambda: len(in_network(set(fabric._state.numbers))) >= 3)
    warden = int(Path(f"/proc/{fabric.keeper}/task/{fabric.keeper}/children").read_text())
    os.kill(warden, signal.SIGKILL)
    os.kill(fabric.keeper, signal.SIGKILL)
    until(lambda: not fabric._state.alive)
    left = in_network(set(fabric._state.numbers))
    assert left
    other = up(SPEC, name="lost")
    # The kernel may give the numbers of namespaces that have gone to those of another fabric.
    assert not set(left) & set(in_network(set(fabric._state.numbers)))
    assert inside.wait(timeout=deadline(5)) == -signal.SIGKILL
    assert [state.name for state in fabrics()] == [other.name]


def test_of_two_that_come_up_at_once_one_has_the_name(temporary: Path) -> None:
    def make(_: int) -> Fabric | str:
        try:
            return Fabric(load(SPEC), name="same")
        except FabricError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(make, range(2)))
    ((fabric,), (refusal,)) = ([one for one in made if isinstance(one, kind)] for kind in (Fabric, str))
    assert isinstance(fabric, Fabric)
    assert "'same'" in str(refusal)
    assert [state.keeper for state in fabrics()] == [fabric.keeper]
    assert fabric.counters()
    fabric.close()


def test_the_kernel_removes_the_namespaces_themselves(up: Up) -> None:
    fabric = up(SPEC)
    # A descriptor of ours on one side of a cable: the cable goes with the namespace of its other side.
    host = os.open(fabric.namespace("host0"), os.O_RDONLY)
    try:
        fabric.close()
        look = (
            "import ctypes, os, sys; ctypes.CDLL(None).setns(int(sys.argv[1]), 0); print(open('/proc/net/dev').read())"
        )

        def cables() -> str:
            command = [sys.executable, "-I", "-S", "-c", look, str(host)]
            return subprocess.run(command, pass_fds=[host], capture_output=True, text=True, check=True).stdout

        until(lambda: "eth0" not in cables())
    finally:
        os.close(host)


def test_a_fabric_that_nobody_owns_stays_until_it_is_taken_down(temporary: Path) -> None:
    code = f"""
from hocket.cluster import load
from hocket.fabric import Fabric
print(Fabric(load("{SPEC}"), owner=None).name)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=deadline(60), check=True
    )
    time.sleep(0.2)
    fabric = Fabric.attach(done.stdout.strip())
    assert set(fabric.counters()) == {"host0->switch0", "host1->switch0", "switch0->host0", "switch0->host1"}
    fabric.close()
    with pytest.raises(FabricError, match="none is"):
        Fabric.attach(fabric.name)


def test_a_user_without_rights_makes_fabrics_in_a_user_namespace(temporary: Path) -> None:
    # Root that has given up its rights is a user like any other, who can still read where Python is installed.
    if not Path("/proc/self/ns/user").exists() or Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0":
        pytest.skip("this kernel makes no user namespaces")
    code = f"""
import ctypes, os, subprocess, sys
if os.getuid() == 0 and sys.argv[1:] != ["dropped"]:
    libc = ctypes.CDLL(None)
    for capability in set(range(64)) - {{31}}:  # without CAP_SETFCAP Linux lets nobody map user 0
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    os.execv(sys.executable, [sys.executable, "-c", open("/proc/self/cmdline").read().split(chr(0))[2], "dropped"])
rights = next(int(line.split()[1], 16) for line in open("/proc/self/status") if line.startswith("CapEff"))
from hocket.cluster import load
from hocket.fabric import Fabric, FabricError
try:
    fabric = Fabric(load("{SPEC}"))
except FabricError as error:
    print("refused", error)
    sys.exit()
with fabric:
    cat = fabric.run_in_host("host1", ["cat", "/proc/net/dev"], stdout=subprocess.PIPE, text=True)
    own = fabric._state.user_namespace is not None
    print(rights & ~(1 << 31), cat.communicate()[0].count("eth0"), len(fabric.counters()), own)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=deadline(60))
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("refused this user may not make namespaces"):
        pytest.skip(done.stdout)
    assert done.stdout == "0 1 4 True\n"
