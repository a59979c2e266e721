"""Aggregators beside the ranks of one launch, with a token of its own, ended with the job."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hocket._sweep import JOB_VARIABLE

from ._failure import LaunchError
from ._job import Job

if TYPE_CHECKING:
    from ._fabric import HostPlacement

ADDRESS_VARIABLE = "HOCKET_AGGREGATOR"
_START_S = 30.0


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
        # what runs, and by what role, place, options and address it can be started again
        self._running: list[tuple[subprocess.Popen[bytes], str, str, list[str], str]] = []
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

    def revive(self) -> list[str]:
        """Start again, at its old address, what has ended; ranks go on without it, and come back. Return the names."""
        again = []
        for index, (process, role, place, more, address) in enumerate(self._running):
            if process.poll() is not None:
                new, _ = self._start(role, place, more, address)
                self._running[index] = (new, role, place, more, address)
                again.append(f"{role} at {place}, which ended ({_ending(process.returncode)})")
        return again

    def _start(self, role: str, place: str, more: list[str], address: str = "") -> tuple[subprocess.Popen[bytes], str]:
        """Start one; `place` is a node of the emulated cluster, or an address of this host."""
        fabric = None if self._placement is None else self._placement.fabric
        host = place if fabric is None else fabric.address(place)
        address_file = os.path.join(self._job.directory, f"aggregator-address-{role}-{host}")
        listen = address or f"{host}:0"
        options = ["--listen", listen, "--token-file", self._token_file, "--address-file", address_file]
        command = [sys.executable, "-m", "hocket", "aggregator", *options, "--name", f"{role} at {place}", *more]
        process = subprocess.Popen(
            fabric.command_in(place, command) if fabric else command,
            env={**os.environ, JOB_VARIABLE: self._job.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the ranks; it is ended after them
        )
        self._job.add_rank(process.pid)
        if self._placement is not None:
            _before_others(process.pid)
        return process, address_file

    def _listen(self, role: str, places: Sequence[str], more: list[str]) -> dict[str, str]:
        """Start one at each place; return the address of each, once it listens."""
        started = {place: self._start(role, place, more) for place in places}
        addresses = {}
        for place, (process, address_file) in started.items():
            while not os.path.exists(address_file):
                if process.poll() is not None or time.monotonic() > self._deadline_s:
                    status = process.poll()
                    raise LaunchError(
                        f"the aggregator at {place} did not start (exit status {status}); see `hocket aggregator`"
                    )
                time.sleep(0.01)
            with open(address_file) as file:
                addresses[place] = file.read().strip()
            self._running.append((process, role, place, more, addresses[place]))
        return addresses


def _ending(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _before_others(pid: int) -> None:
    """Give the aggregator priority: a switch shares no processor with its hosts, but a process in its place does."""
    with contextlib.suppress(OSError, AttributeError):  # where it may not, times are a little longer
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(2))
