"""Aggregators beside the ranks of one launch, with a token of its own, ended with the job."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hocket._sweep import JOB_VARIABLE

from ._failure import LaunchError
from ._job import Job

if TYPE_CHECKING:
    from ._fabric import HostPlacement

ADDRESS_VARIABLE = "HOCKET_AGGREGATOR"
_START_S = 30.0
_PAUSE_S, _TRIES = 1.0, 5  # from one start to the next: 0, 1, 3, 7, 15 times as long
_LASTED_S = 60.0  # what has run so long, did start


@dataclass(slots=True)
class _Aggregator:
    """One aggregator, by what it is started again."""

    role: str
    place: str  # a node of the emulated cluster, or an address of this host
    more: list[str]  # options
    address_file: str  # beside it lies what it said when it could not start
    listen: str
    process: subprocess.Popen[bytes] = field(init=False)
    started_s: float = field(init=False)
    tries: int = 0

    def ending(self) -> str:
        """Return how it ended, and why if it said so."""
        status = self.process.poll()
        if status is None or status < 0:
            return "it does not listen" if status is None else signal.Signals(-status).name
        with open(f"{self.address_file}.said", errors="replace") as file:
            said = file.readline().strip()
        return f"exit status {status}" + (f": {said}" if said else "")


class Aggregators:
    """What one launch has started.

    In an emulated cluster they run beside switches, as `hocket.launch._fabric.sites` says: one, or a tree of which
    every rank has a leaf near it; or on hosts to spare. Else there is one on this host. Raises LaunchError: one did not
    start.
    """

    def __init__(self, job: Job, placement: "HostPlacement | None" = None) -> None:
        self._job = job  # job in whose directory the token lies, and which ends the processes
        self._placement = placement  # where the ranks go in an emulated cluster; None for this host
        self._deadline_s = time.monotonic() + _START_S
        self._token_file = os.path.join(job.directory, "aggregator-token")
        with open(os.open(self._token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        self._by_host: Mapping[str, str] = {}
        self._running: list[_Aggregator] = []
        if placement is None:
            self._address = self._listen("aggregator", ["127.0.0.1"], [])["127.0.0.1"]
            return
        sites = placement.sites()
        roots = self._listen("root", sites.roots, [])
        self._address = ",".join(roots.values())
        if sites.leaves:
            addresses = self._listen("leaf", list(dict.fromkeys(sites.leaves.values())), ["--parent", self._address])
            self._by_host = {host: addresses[place] for host, place in sites.leaves.items()}

    def environment(self, host: str | None) -> dict[str, str]:
        """Return the variables that a rank's environment must have to use them.

        `host` is where the rank is, by its name in the emulated cluster.
        """
        address = self._address if host is None else self._by_host.get(host, self._address)
        return {ADDRESS_VARIABLE: address, "HOCKET_AGGREGATOR_TOKEN_FILE": self._token_file}

    def revive(self) -> Iterator[str]:
        """Start again, at its old address, what has ended; ranks go on without it, and come back. Yield what to say."""
        for one in [one for one in self._running if one.process.poll() is not None]:
            lasted_s = time.monotonic() - one.started_s
            if lasted_s > _LASTED_S:
                one.tries = 0
            if one.tries == _TRIES:
                self._running.remove(one)
                yield (
                    f"the aggregator is not started again: {one.role} at {one.place} ended after each of {_TRIES} "
                    f"starts ({one.ending()}); the ranks go on without it"
                )
            elif lasted_s >= _PAUSE_S * (2**one.tries - 1):
                yield f"the aggregator is started again: {one.role} at {one.place}, which ended ({one.ending()})"
                one.tries += 1
                with contextlib.suppress(OSError):  # too many processes: the next try is as good
                    self._start(one)

    def _start(self, one: _Aggregator) -> None:
        fabric = None if self._placement is None else self._placement.fabric
        options = ["--listen", one.listen, "--token-file", self._token_file, "--address-file", one.address_file]
        name = ["--name", f"{one.role} at {one.place}"]
        command = [sys.executable, "-m", "hocket", "aggregator", *options, *name, *one.more]
        one.started_s = time.monotonic()
        with open(f"{one.address_file}.said", "wb") as said:
            one.process = subprocess.Popen(
                fabric.command_in(one.place, command) if fabric else command,
                env={**os.environ, JOB_VARIABLE: self._job.name},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,  # Ctrl-C is for the ranks; it is ended after them
            )
        self._job.add_rank(one.process.pid)
        if self._placement is not None:
            _before_others(one.process.pid)

    def _listen(self, role: str, places: Sequence[str], more: list[str]) -> dict[str, str]:
        """Start one at each place; return the address of each, once it listens."""
        started = []
        for place in places:
            host = place if self._placement is None else self._placement.fabric.address(place)
            file = os.path.join(self._job.directory, f"aggregator-address-{role}-{host}")
            started.append(_Aggregator(role, place, more, file, f"{host}:0"))
            self._start(started[-1])
        for one in started:
            while not os.path.exists(one.address_file):
                if one.process.poll() is not None or time.monotonic() > self._deadline_s:
                    raise LaunchError(f"the aggregator at {one.place} did not start ({one.ending()})")
                time.sleep(0.01)
            with open(one.address_file) as written:
                one.listen = written.read().strip()
        self._running += started
        return {one.place: one.listen for one in started}


def _before_others(pid: int) -> None:
    """Give the aggregator priority: a switch shares no processor with its hosts, but a process in its place does."""
    with contextlib.suppress(OSError, AttributeError):  # where it may not, times are a little longer
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(2))
