"""A job of several hosts over the system's OpenSSH: one process of `_node` a host, merged, watched and ended here."""

import contextlib
import io
import ipaddress
import json
import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, BinaryIO

from hocket import _early
from hocket.comm import rendezvous

from ._arguments import LaunchArguments
from ._child import Child
from ._console import outputs
from ._doctor import Diagnosis
from ._facts import switches
from ._failure import JobEnded, LaunchError
from ._hosts import BEAT_S, LOST, MARK, passed_on
from ._job import PASSED_ON, SAVED
from ._listener import Notices, time_to_end
from ._merge import Merger, RankStream
from ._preflight import PORTS, compare, judge, rounds
from ._run_directory import LaunchDirectory, worth_saying

_READY_S = 60.0  # for a host to import Python and say what it is; a shared disk may be slow
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=1")
_TIMED_OUT = 124
_LATE_S = 3.0  # beyond the ranks' grace, for a host to end what it has, before its connection is cut
_LOST_S = 1.0  # for the others to end after a host is lost, before their ranks get 2 s more, and SIGKILL
_LOOK_S = 0.1  # between two looks whether anybody has given up
_KEEP_S = 60.0  # for a host to send its logs and records


class _Host:
    """One host: its connection, and what it said of itself."""

    def __init__(
        self, name: str, ranks: int, command: Sequence[str], errors_to: str, look: Callable[[], None] = lambda: None
    ) -> None:
        self.name = name
        self._command = command
        self._look = look  # raises when the user has given up
        self.ranks = ranks
        self.facts: dict[str, Any] = {}
        with open(errors_to, "wb") as stderr:
            # A session of its own: a Ctrl-C is for us, and we pass it on.
            try:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
                )
            except OSError as error:
                raise LaunchError(
                    f"{command[0]!r} cannot be started: {error.strerror}; install OpenSSH, or give --ssh"
                ) from None
        self._lock = threading.Lock()

    def tell(self, message: dict[str, Any] | None) -> None:
        """Send a line, an empty one as a sign of life."""
        assert self.process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):  # it has gone, which its end tells
            self.process.stdin.write((json.dumps(message) if message else "").encode() + b"\n")
            self.process.stdin.flush()

    def hear(self, noise: Callable[[bytes], None]) -> dict[str, Any]:
        """Return what the host says next. Lines that a login shell prints go to `noise`.

        Raises:
            LaunchError: It has ended, or says nothing in time.
            JobEnded: Nobody waits for it any more.
        """
        assert self.process.stdout is not None
        fd, line, deadline_s = self.process.stdout.fileno(), b"", time.monotonic() + _READY_S
        while True:
            self._look()
            if not select.select([fd], [], [], _LOOK_S)[0]:
                if time.monotonic() < deadline_s:
                    continue
                raise LaunchError(
                    f"{self.name} said nothing in {_READY_S:.0f} s after ssh had been started; if "
                    f"`{self._reach()} true` does not end either, what its login starts (.bashrc, say) waits there"
                )
            letter = os.read(fd, 1)  # one by one: what follows is the ranks' output, which others read
            if not letter:
                status = self.process.wait()
                reach = self._reach()
                raise LaunchError(
                    f"{self.name} is not reached by ssh; try `{reach} true`"
                    if status == LOST
                    else f"on {self.name} Hocket did not start (exit status {status}); is it installed there, for that "
                    f"Python? Try `{reach} {sys.executable} -c 'import hocket'`"
                )
            line += letter
            if letter == b"\n":
                said, mark, rest = line.partition(MARK.encode())  # a login shell may end without a new line
                if said:
                    noise(said.rstrip(b"\n"))
                if mark:
                    found: dict[str, Any] = json.loads(rest)
                    return found
                line = b""

    def _reach(self) -> str:
        return shlex.join([*self._command[: self._command.index(_OPTIONS[0])], self.name])


class _Signals:
    """What the launcher was told by signals, in their order; a context that puts the handlers back."""

    def __init__(self) -> None:
        self.arrived: list[signal.Signals] = []
        self.to_pass_on: list[int] = []  # those that end nothing here
        self._before: dict[signal.Signals, Any] = {}
        self._notices = Notices()

    def __enter__(self) -> "_Signals":
        _early.leave()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        self._before[PASSED_ON] = signal.signal(PASSED_ON, lambda number, _: self.to_pass_on.append(number))
        if _early.noticed(PASSED_ON):
            self.to_pass_on.append(PASSED_ON)
        # A launcher that is stopped gives no signs of life, and the hosts would end the job.
        self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._notices.are_new(number):
            self.arrived.append(signal.Signals(number))

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run_on_hosts(
    arguments: LaunchArguments, stdout: BinaryIO, stderr: BinaryIO, directory: LaunchDirectory | None
) -> tuple[str, int]:
    """Start the job on all of `arguments.hosts`, and follow it to its end; return the outcome and the exit code.

    Raises:
        LaunchError: A host is not reached, or the hosts differ, or do not reach each other.
    """
    out, err = outputs(stdout, stderr)
    if arguments.as_json:
        out = err

    def say(text: str) -> None:
        if directory is not None:
            directory.note([text])
        err.lines(err.styled("hocket: ", "bold"), [text.encode(errors="replace")])

    deadline_s = None if arguments.timeout_s is None else time.monotonic() + arguments.timeout_s
    hosts: list[_Host] = []
    ended, started, outcome = threading.Event(), False, ""
    with _Signals() as signals, Merger(arguments.grace_s + _LATE_S) as merger:

        def look() -> None:
            if signals.arrived:
                raise JobEnded("interrupted", 128 + signals.arrived[0])
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise JobEnded("timed-out", _TIMED_OUT)

        try:
            width = max(map(len, arguments.hosts))
            for name, ranks in arguments.hosts.items():
                errors_to = merger.pipe(RankStream(err, b""))
                hosts.append(_Host(name, ranks, _command(arguments, name), errors_to, look))
            threading.Thread(target=_beat, args=(hosts, ended), daemon=True).start()
            _refuse(_prepare(arguments, hosts, lambda line: err.lines(b"", [line]), directory), arguments, say)
            first = hosts[0].facts
            say(
                f"{sum(arguments.hosts.values())} ranks on {len(hosts)} hosts, which meet at "
                + (f"[{first['address']}]" if ":" in first["address"] else first["address"])
                + f":{first['port']}"
            )
            for index, host in enumerate(hosts):
                host.tell(
                    {
                        "arguments": _node_arguments(arguments, hosts, index, directory),
                        "label": host.name,
                        "run_dir_given": arguments.run_dir_given,
                        "prefix": f"[{host.name:{width}} ${{rank}}] ",
                    }
                )
                assert host.process.stdout is not None
                merger.adopt(host.process.stdout.fileno(), RankStream(out, b""))
            merger.close_ends()
            started = True
            merger.watch(Child(index, host.process) for index, host in enumerate(hosts))
            outcome, code = _follow(arguments, hosts, merger, signals, deadline_s, say)
            return outcome, code
        except JobEnded as given_up:
            say(f"{given_up.outcome} before all hosts were reached, exit status {given_up.exit_code}")
            return given_up.outcome, given_up.exit_code
        finally:
            merger.close_ends()
            # Where a host is cut off, the launchers of others may wait for it, and end when their connection does.
            lost = any(host.process.poll() == LOST for host in hosts)
            _end(hosts, signal.SIGTERM, _LOST_S if lost else arguments.grace_s + _LATE_S if started else 0.0)
            ended.set()
            # Who was ended because of that has another status.
            if outcome == "failed" and (well := [host.name for host in hosts if host.process.returncode == 0]):
                say(
                    f"the ranks of {', '.join(well)} had ended before, exit status 0; if the others still trained: all "
                    "take the same steps, so look for an exit, or a shorter loop, that not all ranks reach"
                )
            if directory is not None and started:
                _keep(arguments, hosts, directory, say)


def _command(arguments: LaunchArguments, host: str) -> list[str]:
    # What Python itself needs to start goes on the command line; the rest, which may be secret, through the connection.
    early = [f"{name}={os.environ[name]}" for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ]
    python = ["/usr/bin/env", *early, sys.executable, *switches(), "-u", "-m", "hocket.launch._node"]
    return _remote(arguments, host, [*python, str(arguments.lost_after_s)])


def _remote(arguments: LaunchArguments, host: str, command: list[str]) -> list[str]:
    # The last of the questions that ssh asks, one a second, has a second for its answer.
    patience = ["-o", f"ServerAliveCountMax={arguments.lost_after_s - 1}"]
    return [*shlex.split(arguments.ssh), *_OPTIONS, *patience, host, "--", shlex.join(["exec", *command])]


def _refuse(found: Iterator[Diagnosis], arguments: LaunchArguments, say: Callable[[str], None]) -> None:
    """Say what was found; raise LaunchError for what training would fail of."""
    for one in found:
        if one.status == "error" and arguments.preflight:
            raise LaunchError(f"{one.found}; {one.remedy}, or skip this check with --no-preflight")
        say(one.found if one.remedy is None else f"{one.found} ({one.remedy})")


def _prepare(
    arguments: LaunchArguments, hosts: list[_Host], noise: Callable[[bytes], None], directory: LaunchDirectory | None
) -> Iterator[Diagnosis]:
    """Let every host say what it is, compare, see that each reaches the first, and measure how fast they reach others.

    A host that is not reached is a LaunchError.
    """
    secret = rendezvous.job_secret() or secrets.token_hex(32).encode()  # by which they know each other
    order = {
        "environment": {**passed_on(), **arguments.environment, rendezvous.SECRET_VARIABLE: secret.decode()},
        "secret": secret.decode(),
        "directory": os.getcwd(),
        "script": arguments.target if arguments.kind == "script" else None,
        "shared": None if directory is None else os.path.join(directory.path, "run.json"),
    }
    # What is told before they say that they are there may go to a program of a login shell.
    addresses = [host.hear(noise)["address"] for host in hosts]
    order["beyond"] = next((one for one in addresses if not ipaddress.ip_address(one).is_loopback), None)
    for index, host in enumerate(hosts):
        host.tell({**order, "index": index})
    for host in hosts:
        host.facts = host.hear(noise)
        if host.facts["problem"]:
            raise LaunchError(f"{host.name}: {host.facts['problem']}")
    for host in hosts:
        host.tell({"clock": True})
        host.facts["ahead_s"] = host.hear(noise)["clock_s"] - time.time()
    address, port = hosts[0].facts["address"], hosts[0].facts["port"]
    for host in hosts[1:]:
        host.tell({"master_addr": address, "master_port": port})
    for host in hosts[1:]:
        found = host.hear(noise)
        if found["problem"]:
            raise LaunchError(
                f"{host.name} {found['problem']}. A firewall may stand between them ({PORTS}), or {address} be an "
                "address of another network: name the first host by the address that the others reach"
            )
    yield from compare({host.name: host.facts for host in hosts})
    if arguments.preflight:
        links = {}
        for pairs in rounds(len(hosts)):
            for sender, receiver in pairs:
                facts = hosts[receiver].facts
                hosts[sender].tell({"probe": [facts["address"], facts["probe_port"]]})
            for sender, receiver in pairs:
                facts = hosts[receiver].facts
                to = facts["address"], facts["probe_port"]
                links[hosts[sender].name, hosts[receiver].name] = {**hosts[sender].hear(noise), "to": to}
        yield from judge([host.name for host in hosts], links)


def examine_hosts(hosts: Mapping[str, int], ssh: str) -> Iterator[Diagnosis]:
    """Look at these hosts as `hocket run --hosts` does before it starts anything; yield what is found.

    Raises:
        LaunchError: One is not reached by ssh, or does not reach the first.
    """
    arguments = LaunchArguments(Namespace(), 1, "command", "true", (), hosts=hosts, ssh=ssh)
    ended, reached = threading.Event(), []
    try:
        for name, ranks in hosts.items():
            reached.append(_Host(name, ranks, _command(arguments, name), os.devnull))
        threading.Thread(target=_beat, args=(reached, ended), daemon=True).start()
        yield from _prepare(arguments, reached, lambda _: None, None)
        for host in reached:
            has = host.facts["resources"]
            yield Diagnosis(
                host.name, "ok", f"{has['host']} at {host.facts['address']}: {has['cores']} cores, "
                f"{has['memory'] / 2**30:.1f} GiB, {len(has['gpus'])} GPUs, torch {host.facts['versions']['torch']}",
            )  # fmt: skip
    finally:
        ended.set()
        _end(reached, signal.SIGTERM, 0.0)


def _node_arguments(
    arguments: LaunchArguments, hosts: list[_Host], index: int, directory: LaunchDirectory | None
) -> list[str]:
    """Return the command line of one host's own `hocket run`."""
    first, host = hosts[0].facts, hosts[index]
    own = [
        f"--nnodes={len(hosts)}", f"--node-rank={index}", f"--nproc-per-node={host.ranks}",
        f"--master-addr={first['address']}", f"--master-port={first['port']}",
        "--no-run-dir" if directory is None else f"--run-dir={directory.path}",
    ]  # fmt: skip
    for name, value in arguments.environment.items():
        own += ["-x", f"{name}={value}"]
    return [*arguments.host_flags, *own, "--", arguments.target, *arguments.arguments]


def _keep(
    arguments: LaunchArguments, hosts: list[_Host], directory: LaunchDirectory, say: Callable[[str], None]
) -> None:
    """Bring what hosts have in directories of their own into ours, and say what the records of all ranks tell."""
    for host in hosts:
        if host.facts["shared"] or host.process.returncode not in range(LOST):
            continue
        try:
            # Only what our launcher there has written, without links and paths that lead elsewhere; nothing where
            # another user's is that it could not read.
            words = ["sh", "-c", '! test -r "$0" || exec tar -C "$0" -cf - .', directory.path]
            command = _remote(arguments, host.name, words)
            ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=_KEEP_S, check=True)
            if not ran.stdout:  # it could not make one, and has said so
                continue
            with tarfile.open(fileobj=io.BytesIO(ran.stdout)) as archive:
                archive.extractall(directory.path, filter="data")
        except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
            why = str(error)
            if isinstance(error, subprocess.CalledProcessError):
                why = f"tar, or ssh, has ended there with exit status {error.returncode}"
            elif isinstance(error, subprocess.TimeoutExpired):
                why = f"they had not come in {_KEEP_S:.0f} s"
            say(f"logs and records of {host.name} stay there, in {directory.path}: {why}")
    for sentence in worth_saying(directory.record):
        say(sentence)
    if not arguments.run_dir_given:
        say(directory.kept())


def _beat(hosts: list[_Host], ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        for host in hosts:
            host.tell(None)


def _follow(
    arguments: LaunchArguments,
    hosts: list[_Host],
    merger: Merger,
    signals: _Signals,
    deadline_s: float | None,
    say: Callable[[str], None],
) -> tuple[str, int]:
    """Wait until all hosts have ended, or one has failed, or we are told to end."""
    while True:
        if merger.broken is not None:
            raise merger.broken
        if merger.output_closed:
            with contextlib.suppress(OSError):
                say(f"what the ranks print cannot be written: {merger.output_closed.strerror}")
            return merger.output_ended()
        if signals.arrived:
            number = signals.arrived[0]
            say(time_to_end(number, arguments.grace_s))
            _end(hosts, number, arguments.grace_s + _LATE_S, lambda: len(signals.arrived) > 1)
            return "interrupted", 128 + number
        if deadline_s is not None and time.monotonic() > deadline_s:
            return "timed-out", _TIMED_OUT
        while signals.to_pass_on:
            passed = signals.to_pass_on.pop()
            for host in hosts:
                host.tell({"signal": passed})
        statuses = [host.process.poll() for host in hosts]
        bad = [(host, status) for host, status in zip(hosts, statuses, strict=True) if status not in (None, 0, SAVED)]
        if bad:
            host, status = bad[0]
            assert status is not None
            what = (
                "the connection to it is lost, or its launcher there was killed"
                if status == LOST
                else f"exit status {status}"
            )
            say(f"{host.name} failed: {what}; the other hosts are ended")
            return "failed", 1 if status == LOST else status if status > 0 else 128 - status
        if None not in statuses:
            return ("saved", SAVED) if SAVED in statuses else ("finished", 0)
        time.sleep(0.05)


def _end(hosts: list[_Host], number: int, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
    """Pass on a signal, wait, and cut the connections: without them each host ends what it has by itself."""
    for host in hosts:
        host.tell({"signal": number})
    deadline_s, hurried = time.monotonic() + grace_s, False
    while any(host.process.poll() is None for host in hosts) and time.monotonic() < deadline_s:
        if hurry() and not hurried:
            hurried, deadline_s = True, min(deadline_s, time.monotonic() + _LATE_S)
            for host in hosts:  # another signal, which a host does not take for the first one, however soon it comes
                host.tell({"signal": signal.SIGTERM if number == signal.SIGQUIT else signal.SIGQUIT})
        time.sleep(0.02)
    for host in hosts:
        assert host.process.stdin is not None
        with contextlib.suppress(OSError):
            host.process.stdin.close()
    deadline_s = time.monotonic() + _LATE_S
    for host in hosts:
        try:
            host.process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:  # it is not reached, and ends by itself for want of signs of life
            host.process.kill()
            host.process.wait()
