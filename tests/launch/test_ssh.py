"""Jobs of several hosts over ssh: emulated hosts, each with a real sshd, started and ended by one command."""

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hocket.cluster import load
from hocket.fabric import Fabric, FabricError
from hocket.launch import ArgumentError, LaunchError, LaunchResult, _ssh, parse_arguments
from hocket.launch._hosts import MARK, read_hosts
from hocket.launch._node import _address, _status
from hocket.launch._ssh import _Host, _keep
from hocket.testing import deadline

from ..processes import processes_with, until

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
GONE_S = 10.0  # what is promised: after that long nothing is left on any host


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a slots=4\nb slots=2  # two\n\n# none\n", {"a": 4, "b": 2}),
        ("a:4\nb:2", {"a": 4, "b": 2}),
        ("user@a\nb\nuser@a", {"user@a": 6, "b": 3}),
        ("10.0.0.1 slots=1 max_slots=8\n[fe80::1]:2", {"10.0.0.1": 1, "fe80::1": 2}),
        ("\ufeffa slots=2 max-slots=4\r\nuser@[fe80::1%eth0]:2\r\n", {"a": 2, "user@fe80::1%eth0": 2}),
    ],
)
def test_files_of_hosts_are_read_in_the_forms_of_open_mpi_horovod_and_mpich(
    text: str, found: dict[str, int], tmp_path: Path
) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    assert read_hosts(None, str(path), 3) == found


NO_HOSTS = ["", "a:0", "a:b", "-oProxyCommand=x", "user@-x", "a slots=2 cores=3", "a:2 slots=2", "a,,b", "a b:2"] + [
    "ssh://a:2222",
    "a:22:4",
    "a slots=-1",
    "a slots=2 slots=3",
    "a slots = 2",
    "a slots=",
    "$(x):2",
]


@pytest.mark.parametrize("hosts", NO_HOSTS)
def test_what_names_no_host_is_refused(hosts: str, script: Any) -> None:
    with pytest.raises(ArgumentError, match="names no host"):
        parse_arguments([f"--hosts={hosts}", script("")])


@pytest.mark.parametrize("text", ["a,b", "a slots=4,b slots=4", "# none"])
def test_a_file_that_names_no_host_a_line_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}.*names no host"):
        read_hosts(None, str(path), 3)


def test_flags_of_the_job_reach_the_hosts_and_those_about_hosts_do_not(script: Any) -> None:
    flags = ["--hosts", "a:2,b", "-n", "3", "--max-restarts=2", "--timeout", "9", "-x", "A=b", "--no-preflight", "-m"]
    arguments = parse_arguments([*flags, "package", "--hosts", "c"])
    assert arguments.hosts == {"a": 2, "b": 3}
    assert arguments.host_flags == ("--max-restarts=2", "-m")
    assert arguments.arguments == ("--hosts", "c")
    with pytest.raises(ArgumentError, match="leave out --nnodes"):
        parse_arguments(["--hosts", "a,b", "--nnodes", "2", script("")])


def test_what_a_host_says_is_found_behind_a_greeting_without_a_line_end() -> None:
    noise: list[bytes] = []
    host = _Host("a", 1, ["echo", f'news\n\nWelcome, user{MARK}{{"a": 1}}'], os.devnull)
    assert host.hear(noise.append) == {"a": 1}
    assert noise == [b"news", b"", b"Welcome, user"]
    host.process.communicate(timeout=deadline(20))


@pytest.mark.parametrize(
    ("reached_at", "beyond", "told"),
    [
        ("127.0.1.1", "127.0.0.9", "127.0.0.1"),
        ("127.0.1.1", None, "127.0.1.1"),
        ("192.0.2.1", "127.0.0.9", "192.0.2.1"),
    ],
)
def test_a_host_whose_name_is_loopback_tells_the_address_by_which_it_reaches_others(
    reached_at: str, beyond: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", f"127.0.0.1 1 {reached_at} 22")
    assert _address(beyond) == told


@pytest.mark.parametrize("where", [".", "script.py"])
def test_a_host_says_what_its_user_may_not_enter_or_read(where: str, script: Any) -> None:
    path = Path(script(""))
    source = "import sys; from hocket.launch._node import _facts; print(_facts(eval(sys.argv[1]))['problem'])"
    order = {"directory": str(path.parent), "script": path.name, "shared": None, "beyond": None}
    words = [sys.executable, "-c", source, str(order)]
    if not os.getuid():  # to whom no mode applies
        words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *words]
    (at := path.parent / where).chmod(0)
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=deadline(60), check=True).stdout
    finally:
        at.chmod(0o700)
    named = path.parent if where == "." else path.name
    assert re.fullmatch(f"user .* may not enter or read {named} there; open it to this user\n", said)


def test_what_a_host_s_login_starts_may_be_why_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ssh, "_READY_S", 0.1)
    host = _Host("a", 1, ["cat", "-T"], os.devnull)
    with pytest.raises(LaunchError, match=r"a said nothing in 0 s .* `cat a true` does not end .*\.bashrc"):
        host.hear(lambda line: None)
    host.process.communicate(timeout=deadline(20))


def test_a_rank_s_status_does_not_pass_for_a_lost_connection_or_a_saved_job() -> None:
    statuses = [("failed", 255), ("failed", 75), ("failed", 3), ("saved", 75), ("saved", 0), ("interrupted", 130)]
    found = [_status(LaunchResult(outcome, code, 1, 0.0, 0)) for outcome, code in statuses]
    assert found == [1, 1, 3, 75, 0, 130]


class Site:
    """Two emulated hosts with an sshd each, and how to start a launcher on the first."""

    def __init__(self, fabric: Fabric, directory: Path) -> None:
        self.fabric = fabric
        self.directory = directory
        self.hosts = {host: fabric.address(host) for host in fabric.wiring.hosts}
        self.daemons: dict[str, subprocess.Popen[Any]] = {}
        (directory / "config").write_text(
            f"Host *\n IdentityFile {directory}/key\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n"
            f" LogLevel ERROR\n User {getpass.getuser()}\n IdentitiesOnly yes\n"
        )
        for name in ("key", "host"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True)
        for host in self.hosts:
            self.serve(host)

    def serve(self, host: str) -> None:
        """Start a host's sshd."""
        assert SSHD is not None
        os.makedirs("/run/sshd", exist_ok=True)
        address = self.hosts[host]
        variables = {**self.fabric.environment(host), "HOCKET_TEST": str(self.directory)}
        told = " ".join(f"{name}={value}" for name, value in variables.items())
        config = self.directory / f"sshd-{host}"
        config.write_text(
            f"HostKey {self.directory}/host\nAuthorizedKeysFile {self.directory}/key.pub\nStrictModes no\nUsePAM no\n"
            f"PidFile none\nListenAddress {address}\nPermitRootLogin yes\nSetEnv {told}\n"
        )
        command = [SSHD, "-D", "-e", "-f", str(config)]
        with open(self.directory / "sshd.log", "ab") as log:
            self.daemons[host] = self.fabric.run_in_host(host, command, stderr=log, stdin=subprocess.DEVNULL)

        def answers() -> bool:
            probe = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=1).close()"
            command = self.fabric.command_in(host, [sys.executable, "-c", probe, address])
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        until(answers)

    def start(self, *arguments: str, slots: Sequence[int] = ()) -> "subprocess.Popen[str]":
        """Start `hocket run` on the first host, with so many ranks on each: one, if it is not said."""
        hosts = ["--hosts", ",".join(self.hosts.values())]
        if slots:
            file = self.directory / "hosts"
            file.write_text("".join(f"{a} slots={n}\n" for a, n in zip(self.hosts.values(), slots, strict=True)))
            hosts = ["--hostfile", str(file)]
        command = [sys.executable, "-m", "hocket", "run", *hosts, "--ssh", f"ssh -F {self.directory}/config"]
        first = next(iter(self.hosts))
        return self.fabric.run_in_host(
            first, [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def left(self, tmp_path: Path) -> list[int]:
        """Return what of a test's job still runs on any host, launcher and connections too; not the daemons."""
        found = {pid for place in (self.directory, tmp_path) for pid in processes_with("HOCKET_TEST", place)}
        return [pid for pid in found if pid not in _below({daemon.pid for daemon in self.daemons.values()}, sshd=True)]


def _below(daemons: set[int], *, sshd: bool = False) -> set[int]:
    """Return the processes that these have started, directly; with `sshd` these themselves, too."""
    found = set(daemons) if sshd else set()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(OSError, IndexError):
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) in daemons:
                found.add(pid)
    return found


@contextlib.contextmanager
def _hosts(count: int, directory: Path) -> Iterator[Site]:
    """Hosts with an sshd each."""
    if SSHD is None:
        pytest.skip("needs OpenSSH's server: apt-get install openssh-server")
    pytest.importorskip("pyroute2", reason="fabrics need the extra `fabric`")
    if os.getuid() != 0:
        pytest.skip("an sshd for an emulated host needs root")
    try:
        fabric = Fabric(load(f"star:hosts={count}"))
    except FabricError as error:
        pytest.skip(f"no fabrics here: {error}")
    with fabric:
        site = Site(fabric, directory)
        try:
            yield site
        finally:
            for daemon in site.daemons.values():
                daemon.kill()
                daemon.wait()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two hosts with an sshd each."""
    with _hosts(2, tmp_path_factory.mktemp("ssh")) as site:
        yield site


@pytest.fixture(scope="module")
def eight_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Eight hosts with an sshd each."""
    with _hosts(8, tmp_path_factory.mktemp("ssh")) as site:
        yield site


TRAIN = """
import os, torch, hocket
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(16, 3).double(), torch.randn(16, 1).double())
model = torch.nn.Linear(3, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
host = os.environ.get("HOCKET_HOST", "").partition(":")[2]
print(host, size, os.environ.get("MARKER"), *(f"{value:.12f}" for value in model.state_dict()["weight"][0].tolist()))
"""
SLEEP = """
import os, sys, time
print("rank", os.environ["RANK"], os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_one_command_trains_on_two_hosts_as_one_process_does(site: Site, script: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 3).double(), torch.randn(16, 1).double()
    model = torch.nn.Linear(3, 1).double()
    for batch in (slice(8), slice(8, 16)):  # as `optimizer` does: a process less, and nothing of Hocket's
        loss = torch.nn.functional.mse_loss(model(x[batch]), y[batch])
        for one, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            one.data -= 0.1 * gradient
    alone = [f"{value:.12f}" for value in model.weight[0].tolist()]
    process = site.start("-x", "MARKER=m", script(TRAIN), slots=(2, 1))
    out, err = process.communicate(timeout=deadline(240))
    print(out, err)
    assert process.returncode == 0
    assert "3 ranks on 2 hosts, which meet at" in err
    lines = sorted(out.splitlines())
    (one, one_at), (two, two_at) = site.hosts.items()
    ranks = ((one_at, 0, one), (one_at, 1, one), (two_at, 2, two))
    assert lines == sorted(f"[{address} {rank}] {host} 3 m {' '.join(alone)}" for address, rank, host in ranks)
    assert site.left(tmp_path) == []


def test_a_missing_ssh_is_named(hocket: Any, script: Any, tmp_path: Path) -> None:
    process = hocket("run", "--hosts", "a", "--ssh", "/no/ssh", "--no-run-dir", script(""), cwd=tmp_path)
    assert process.communicate(timeout=deadline(60))[1].startswith(
        "hocket run: '/no/ssh' cannot be started: No such file"
    )
    assert process.returncode == 1


def test_nothing_secret_is_told_before_a_host_has_said_that_it_is_there(
    hocket: Any, script: Any, tmp_path: Path
) -> None:
    ssh = tmp_path / "ssh"  # whose login shell asks something
    ssh.write_text(
        f"#!/bin/sh\necho 'Your name?'; read name; read town; echo \"$name$town\" > {tmp_path}/heard; exit 3\n"
    )
    ssh.chmod(0o700)
    process = hocket("run", "--hosts", "a", "--ssh", str(ssh), "--no-run-dir", script(""), cwd=tmp_path)
    _, err = process.communicate(timeout=deadline(60))
    assert (tmp_path / "heard").read_text() == "\n"
    assert "on a Hocket did not start (exit status 3)" in err
    assert f"Try `{ssh} a {sys.executable} -c 'import hocket'`" in err


def stand_in_for_ssh(directory: Path, address: str) -> Path:
    """A program that reaches this host under every name, at an address."""
    ssh = directory / "ssh"
    ssh.write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do host="$1"; shift; done\nshift\n'
        f'export SSH_CONNECTION="{address} 1 {address} 22" HOCKET_HOST="$host"\nexec sh -c "$*"\n'
    )
    ssh.chmod(0o700)
    return ssh


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ((), 1, "a is not reached by ssh"),
        (("--run-dir", "mine"), 1, "a is not reached by ssh"),
        (("--timeout", "1"), 124, "timed-out before all hosts were reached"),
    ],
)
def test_a_job_that_never_began_leaves_no_run_and_a_directory_that_was_named_says_why(
    hocket: Any, script: Any, tmp_path: Path, flags: tuple[str, ...], code: int, said: str
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\n{'exec sleep 60' if '--timeout' in flags else 'exit 255'}\n")
    ssh.chmod(0o700)
    env = {name: value for name, value in os.environ.items() if name != "HOCKET_RUN_DIR"}
    process = hocket("run", "--hosts", "a,b", "--ssh", str(ssh), *flags, script(""), cwd=tmp_path, env=env)
    _, err = process.communicate(timeout=deadline(30))
    assert process.returncode == code
    assert said in err
    kept = [json.loads(path.read_text()) for path in tmp_path.rglob("run.json")]
    if code == 1:
        assert not (tmp_path / "runs").exists()
        assert [one["error"].partition(";")[0] for one in kept] == (["a is not reached by ssh"] if flags else [])
    assert all((one["outcome"], one["exit_code"]) in (("failed", 1), ("timed-out", 124)) for one in kept)


@pytest.mark.long
def test_an_interrupt_while_a_host_is_not_reached_ends_the_launch(
    hocket: Any, script: Any, tmp_path: Path, wait_until: Any
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nexec sleep 50\n")
    ssh.chmod(0o700)
    process = hocket("run", "--hosts", "a", "--ssh", str(ssh), script(""))
    wait_until((tmp_path / "called").exists)
    begin_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=deadline(30))
    assert process.returncode == 130
    assert "interrupted before all hosts were reached" in err
    assert time.monotonic() - begin_s < deadline(10)


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), pytest.param(("--run-dir", "mine"), marks=pytest.mark.long)])
def test_where_a_run_is_kept_is_said_once_unless_it_was_asked_for(
    hocket: Any, script: Any, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    ssh = stand_in_for_ssh(tmp_path, "127.0.0.1")
    env = {name: value for name, value in os.environ.items() if name != "HOCKET_RUN_DIR"}
    words = ("--hosts", "a,b", "--ssh", str(ssh), "--no-preflight", *flags)
    process = hocket("run", *words, script("print(1)"), cwd=tmp_path, env=env)
    out, err = process.communicate(timeout=deadline(100))
    assert sorted(out.splitlines()) == ["[a 0] 1", "[b 1] 1"], err
    assert err.count("hocket: this run is kept in runs/script-") == (0 if flags else 1), err
    assert (tmp_path / "mine" / "run.json").exists() is bool(flags)


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), pytest.param(("--run-dir", "mine"), marks=pytest.mark.long)])
def test_a_host_that_cannot_make_the_directory_of_a_run_does_without_it_unless_it_was_asked_for(
    hocket: Any, script: Any, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    read_only = "mount --bind . . && mount -o remount,ro,bind ."
    if subprocess.run(["unshare", "-m", "sh", "-c", read_only], cwd=tmp_path, check=False).returncode:
        pytest.skip("no mount can be made here")
    ssh = stand_in_for_ssh(tmp_path, "127.0.0.1")
    text = ssh.read_text().replace("exec", f'[ $host = a ] || exec unshare -m sh -c "{read_only} && $*"\nexec')
    ssh.write_text(text)
    env = {name: value for name, value in os.environ.items() if name != "HOCKET_RUN_DIR"}
    words = ("--hosts", "a,b", "--ssh", str(ssh), "--no-preflight", *flags)
    process = hocket("run", *words, script("print(1)"), cwd=tmp_path, env=env)
    out, err = process.communicate(timeout=deadline(100))
    assert process.returncode == (1 if flags else 0), err
    assert "no directory for this run can be made on b at " in err
    if not flags:
        assert sorted(out.splitlines()) == ["[a 0] 1", "[b 1] 1"], err
        assert err.count("hocket: this run is kept in runs/script-") == 1


@pytest.mark.parametrize(
    ("ssh", "said"),
    [
        ("exec setpriv --bounding-set=-dac_override,-dac_read_search", []),  # to which modes apply, as to other users
        ("exit 3 ||", ["logs and records of b stay there, in {}: tar, or ssh, has ended there with exit status 3"]),
    ],
)
def test_of_a_host_that_may_not_read_the_run_s_directory_nothing_is_brought(
    ssh: str, said: list[str], script: Any, tmp_path: Path
) -> None:
    if os.getuid():
        pytest.skip("root alone can give up to read what it may not")
    (path := tmp_path / "mine").mkdir(0)
    stand_in = stand_in_for_ssh(tmp_path, "127.0.0.1")
    stand_in.write_text(stand_in.read_text().replace("exec", ssh))
    words = ["--hosts", "a,b", "--ssh", str(stand_in), "--run-dir", str(path), script("")]
    host: Any = SimpleNamespace(name="b", facts={"shared": False}, process=SimpleNamespace(returncode=1))
    heard: list[str] = []
    directory: Any = SimpleNamespace(path=str(path), record=str(path / "record"))
    _keep(parse_arguments(words), [host], directory, heard.append)
    assert heard == [one.format(path) for one in said]


@pytest.mark.long
def test_hosts_may_have_addresses_of_ipv6_alone(hocket: Any, script: Any, tmp_path: Path) -> None:
    """Two names of this host, reached at ::1 by what stands in for ssh."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    ssh = stand_in_for_ssh(tmp_path, "::1")
    path = script(
        "import os, torch\nfrom torch import distributed as dist\ndist.init_process_group('hocket')\n"
        "total = torch.ones(1)\ndist.all_reduce(total)\nprint(os.environ['MASTER_ADDR'], total.item())\n"
        "dist.destroy_process_group()\n"
    )
    process = hocket("run", "--hosts", "[fd00::1]:1,user@[fd00::2]", "--ssh", str(ssh), path, cwd=tmp_path)
    out, err = process.communicate(timeout=deadline(100))
    assert process.returncode == 0, err
    assert "2 ranks on 2 hosts, which meet at [::1]:" in err
    assert sorted(out.splitlines()) == ["[fd00::1      0] ::1 2.0", "[user@fd00::2 1] ::1 2.0"]


def _ranks(process: "subprocess.Popen[str]", count: int) -> dict[int, int]:
    """Wait until the ranks have said that they run; their processes."""
    found: dict[int, int] = {}
    assert process.stdout is not None
    while len(found) < count:
        words = process.stdout.readline().split()
        assert words, process.communicate()[1]
        found[int(words[-2])] = int(words[-1])
    return found


def _end(what: str, site: Site, process: "subprocess.Popen[str]", ranks: dict[int, int]) -> Callable[[], None]:
    """Do what ends a job; return what undoes it."""
    second = list(site.hosts)[1]
    if what == "SIGINT":
        process.send_signal(signal.SIGINT)
    elif what == "launcher":
        process.kill()
    elif what == "rank":
        os.kill(ranks[1], signal.SIGKILL)
    elif what == "connection":  # the process of sshd that serves the second host's connection
        for pid in _below({site.daemons[second].pid}):
            os.kill(pid, signal.SIGKILL)
    else:
        links = [link for link in site.fabric.counters() if second in link]
        for link in links:
            site.fabric.cut(link)
        return lambda: [site.fabric.mend(link) for link in links] and None
    return lambda: None


@pytest.mark.long
@pytest.mark.parametrize(
    "what",
    ["launcher", "SIGINT", "rank", "connection", "cable"],
)
def test_whatever_ends_a_job_nothing_is_left_on_any_host(what: str, site: Site, script: Any, tmp_path: Path) -> None:
    process = site.start("--shutdown-timeout", "2", "--lost-after", "5", script(textwrap.dedent(SLEEP)))
    try:
        ranks = _ranks(process, 2)
        undo = _end(what, site, process, ranks)
        began_s = time.monotonic()
        try:
            while set(site.left(tmp_path)) - {process.pid} and time.monotonic() < began_s + deadline(GONE_S):
                time.sleep(0.05)
            took_s = time.monotonic() - began_s
            assert set(site.left(tmp_path)) <= {process.pid}  # the command itself is in the user's sight
        finally:
            undo()
        print(f"{what}: nothing left after {took_s:.1f} s")
        err = process.communicate(timeout=deadline(30))[1]
        print(err)
    finally:
        process.kill()
        process.wait()
    host = list(site.hosts.values())[1]
    expected = {
        "SIGINT": (130, "SIGINT: the ranks have 2 s"),
        "launcher": (-signal.SIGKILL, ""),
        "rank": (137, "rank 1 failed first: killed by SIGKILL"),
        "connection": (1, f"{host} failed: the connection to it is lost"),
        "cable": (1, f"{host} failed: the connection to it is lost"),
    }[what]
    assert process.returncode == expected[0]
    assert expected[1] in err


@pytest.mark.long
def test_a_link_that_comes_back_ends_no_job(site: Site, script: Any, tmp_path: Path) -> None:
    process = site.start("--no-run-dir", script(textwrap.dedent(SLEEP).replace("600", "25")))
    _ranks(process, 2)
    undo = _end("cable", site, process, {})
    try:
        time.sleep(8.0)  # as long as it takes a switch to start anew
    finally:
        undo()
    out, err = process.communicate(timeout=deadline(90))
    print(out, err)
    assert process.returncode == 0
    assert site.left(tmp_path) == []


@pytest.mark.long
def test_a_host_whose_ranks_have_left_the_others_is_named(site: Site, script: Any) -> None:
    source = TRAIN.replace("for x, y in loader:", "import sys\nfor x, y in loader:\n    left(x)")
    source = source.replace(
        "import os, torch", "left = lambda x: os.environ['RANK'] == '1' and sys.exit(0)\nimport os, torch"
    )
    err = site.start("--no-run-dir", "--no-preflight", script(source)).communicate(timeout=deadline(120))[1]
    print(err)
    one, two = site.hosts.values()
    assert f"{one} failed: exit status 1" in err
    assert f"the ranks of {two} had ended before, exit status 0" in err


FIREWALL = """
table inet test {
 chain input {
  type filter hook input priority 0; policy drop;
  iif lo accept
  ct state established,related accept
  tcp dport { 22, 20000-20100 } accept
 }
}
"""


@pytest.mark.long
def test_behind_a_firewall_all_ports_are_those_that_the_kernel_is_to_hand_out(site: Site, script: Any) -> None:
    nft = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin")
    if nft is None:
        pytest.skip("needs nftables")
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    before = ports.read_text()

    def on_all(*command: str, said: str = "") -> None:
        for host in site.hosts:
            subprocess.run(site.fabric.command_in(host, list(command)), input=said, text=True, check=True)

    try:
        on_all(nft, "-f", "-", said=FIREWALL)
        err = site.start("--no-run-dir", script(TRAIN)).communicate(timeout=deadline(60))[1]
        assert "cannot connect to the first host" in err
        remedy = 'sysctl -w net.ipv4.ip_local_port_range="20000 20100"'
        assert remedy in err
        on_all("sh", "-c", remedy.replace("sysctl -w net.ipv4.ip_local_port_range=", f"echo > {ports} "))
        process = site.start("--no-run-dir", script(TRAIN))
        out, err = process.communicate(timeout=deadline(120))
        print(out, err)
        assert process.returncode == 0
    finally:
        on_all(nft, "flush", "ruleset")
        on_all("sh", "-c", f"echo {before.strip()} > {ports}")


def test_a_host_is_lost_after_a_whole_number_of_seconds(monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    assert parse_arguments(["--hosts", "a", script("")]).lost_after_s == 60
    assert parse_arguments(["--hosts", "a", "--lost-after", "7", script("")]).lost_after_s == 7
    with pytest.raises(ArgumentError, match="--lost-after 4: give a whole number of seconds, 5 or more"):
        parse_arguments(["--lost-after", "4", script("")])
    monkeypatch.setenv("HOCKET_LOST_AFTER", "90")
    assert parse_arguments(["--hosts", "a", script("")]).lost_after_s == 90
    monkeypatch.setenv("HOCKET_LOST_AFTER", "soon")
    with pytest.raises(ArgumentError, match="HOCKET_LOST_AFTER=soon: give"):
        parse_arguments(["--hosts", "a", script("")])


@pytest.mark.long
@pytest.mark.parametrize("what", ["launcher", "cable"])
def test_of_sixteen_ranks_on_eight_hosts_nothing_is_left(
    what: str, eight_hosts: Site, script: Any, tmp_path: Path
) -> None:
    undo: Callable[[], None] = lambda: None  # noqa: E731
    flags = ("--no-preflight", "--no-run-dir", "--lost-after", "5")
    process = eight_hosts.start(*flags, script(textwrap.dedent(SLEEP)), slots=[2] * 8)
    try:
        ranks = _ranks(process, 16)
        assert sorted(ranks) == list(range(16))
        undo = _end(what, eight_hosts, process, ranks)
        began_s = time.monotonic()
        process.wait(deadline(GONE_S))
        while eight_hosts.left(tmp_path) and time.monotonic() < began_s + deadline(GONE_S):
            time.sleep(0.05)
        print(f"nothing left after {time.monotonic() - began_s:.1f} s")
        assert eight_hosts.left(tmp_path) == []
        assert process.returncode == (1 if what == "cable" else -signal.SIGKILL)
    finally:
        undo()
        process.kill()
        process.communicate()


def test_hosts_that_cannot_work_together_are_named_before_anything_starts(site: Site, tmp_path: Path) -> None:
    process = site.start(str(tmp_path / "train.py"))
    assert process.communicate(timeout=deadline(60))[1].startswith("hocket run: there is no script")
    (tmp_path / "train.py").write_text("")
    hosts = f"{next(iter(site.hosts.values()))},192.0.2.1"
    command = [sys.executable, "-m", "hocket", "run", "--hosts", hosts, "--ssh", f"ssh -F {site.directory}/config"]
    ran = subprocess.run(
        site.fabric.command_in(next(iter(site.hosts)), [*command, str(tmp_path / "train.py")]),
        capture_output=True, text=True, timeout=deadline(90), check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    reach = f"ssh -F {site.directory}/config 192.0.2.1"
    assert f"hocket run: 192.0.2.1 is not reached by ssh; try `{reach} true`" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert site.left(tmp_path) == []
