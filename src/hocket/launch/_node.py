"""One host's part of a job of several hosts: what `hocket run --hosts` starts on each by ssh.

It speaks with its launcher by lines. On stdout, before anything else, it says what this host is; on stdin it hears
where to work, what to check, when to start, which signals came, and every second that the launcher lives. Should that
end, or stay silent, this host's ranks are ended: a launcher that was killed and a cable that was cut leave nothing.
"""

import contextlib
import fcntl
import ipaddress
import json
import os
import pwd
import select
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hocket import _early, _sweep

from ._facts import program_facts, resources
from ._hosts import LOST, MARK
from ._job import SAVED
from ._probe import ProbeServer, listen, probe

if TYPE_CHECKING:
    from ._result import LaunchResult

_GRACE_S = 2.0  # for the ranks to end by themselves then
_REACH_S = 5.0
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


class _Lifeline:
    """The launcher's end of the connection, read by lines, with a deadline."""

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s  # of silence it is taken for dead, or cut off
        self._fd = os.dup(0)
        os.set_inheritable(self._fd, False)
        with open(os.devnull) as null:  # rank 0 must not read from the lifeline
            os.dup2(null.fileno(), 0)
        self._kept = b""

    def line(self) -> str | None:
        """Return the next line; None if the launcher has gone, or is silent for too long."""
        deadline_s = time.monotonic() + self._lost_after_s
        while b"\n" not in self._kept:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline_s - time.monotonic()))
            chunk = os.read(self._fd, 1 << 16) if ready else b""
            if not chunk:
                return None
            self._kept += chunk
        line, _, self._kept = self._kept.partition(b"\n")
        return line.decode()

    def order(self) -> dict[str, Any]:
        """Return the next order, which is no sign of life; ends the process if there is none, or it is to end."""
        while (line := self.line()) == "":
            pass
        if line is None:
            raise SystemExit("the launcher has gone")
        found: dict[str, Any] = json.loads(line)
        if "signal" in found:  # another host was not reached, or the user gave up
            raise SystemExit(128 + int(found["signal"]))
        return found

    def follow(self) -> None:
        """Pass on the launcher's signals, and end this process and its ranks when the launcher has gone."""
        while (line := self.line()) is not None:
            if line:
                os.kill(os.getpid(), json.loads(line)["signal"])
        os.kill(os.getpid(), signal.SIGTERM)
        # The main thread may wait for a host that is cut off, and then hears no signal: the ranks are ended here, too.
        own = f"{os.getpid()}-{_sweep.start_ticks(os.getpid())}-"  # as names of jobs of this process begin
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        jobs = {job for pid in pids if (job := _sweep.job_of(pid) or "").startswith(own)}
        for job in jobs:
            _sweep.end_processes(partial(_sweep.job_processes, job), _GRACE_S)
        time.sleep(1.0)
        os._exit(1)  # the job's warden ends what is left


def main() -> None:
    """Be one host of a job."""
    _early.keep_notices()  # until there are ranks to pass them on to
    lifeline = _Lifeline(float(sys.argv[1]))
    _say({"address": _address()})
    order = lifeline.order()
    os.environ.update(order["environment"])
    facts, secret = _facts(order), order["secret"]
    address = facts["address"]
    server = listen() if order["index"] == 0 else None
    facts["port"] = server.getsockname()[1] if server else 0
    if (interface := _interface(address)) and interface != "lo":
        for name in _INTERFACES:
            os.environ.setdefault(name, interface)
    prober = ProbeServer(secret)
    facts["probe_port"] = prober.port
    _say(facts)
    while "arguments" not in (order := lifeline.order()):
        if "probe" in order:
            address, port = order["probe"]
            _say(probe(address, port, secret))
        elif "clock" in order:
            _say({"clock_s": time.time()})
        else:
            _say(_reach(order["master_addr"], order["master_port"]))
    prober.close()
    if server is not None:
        server.close()
    threading.Thread(target=lifeline.follow, name="hocket-lifeline", daemon=True).start()
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", order["prefix"])
    from ._arguments import parse_arguments
    from ._failure import ArgumentError, LaunchError
    from ._launch import run

    try:
        given = order["run_dir_given"]
        result = run(replace(parse_arguments(order["arguments"]), label=order["label"], run_dir_given=given))
    except (ArgumentError, LaunchError) as error:
        raise SystemExit(f"hocket run: {error}") from None
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status(result))  # all is cleaned up, and the end of a store waits for a host that is cut off


def _status(result: "LaunchResult") -> int:
    """Return the exit status for the launcher of the job, to which some numbers say more than that a rank failed."""
    return 1 if result.outcome == "failed" and result.exit_code in (SAVED, LOST) else result.exit_code


def _say(message: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(message)}", flush=True)


def _facts(order: dict[str, Any]) -> dict[str, Any]:
    """Return what must be alike on all hosts, and how this one is reached; go to the job's directory."""
    facts: dict[str, Any] = {"host": socket.gethostname(), "address": _address(order["beyond"]), "problem": None}
    try:
        os.chdir(order["directory"])
        if order["script"] is not None and os.path.isfile(order["script"]):
            with open(order["script"]):
                pass
    except PermissionError as error:
        facts["problem"] = f"{_user()} may not enter or read {error.filename} there; open it to this user"
    except OSError as error:
        facts["problem"] = (
            f"the working directory {order['directory']} is not there ({error.strerror}); share it, or copy it"
        )
    facts["shared"] = order["shared"] is not None and os.path.exists(order["shared"])
    has = [name for _, name in socket.if_nameindex()]
    named = {name: os.environ[name] for name in _INTERFACES if name in os.environ}
    facts["interfaces"] = {name: word for name, word in named.items() if word.isalnum() and word not in has}
    facts["has_interfaces"] = has
    return {**facts, "versions": program_facts(order["script"]), "resources": resources()}


def _user() -> str:
    try:
        return f"user {pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"user {os.getuid()}"


def _address(beyond: str | None = None) -> str:
    """Return the address at which the launcher reached this host; it is known to be reachable.

    `beyond` is another host's, for a launcher that reached this one by loopback, as where the host's name is 127.0.1.1.
    """
    words = os.environ.get("SSH_CONNECTION", "").split()
    address = words[2] if len(words) == 4 else "127.0.0.1"
    if beyond is not None and ipaddress.ip_address(address).is_loopback:
        family = socket.AF_INET6 if ":" in beyond else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as any_socket:
            any_socket.connect((beyond, 9))  # by which nothing is sent
            return str(any_socket.getsockname()[0])
    return address


def _interface(address: str) -> str | None:
    if ":" in address:
        asked = ipaddress.ip_address(address.partition("%")[0])
        with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
            return next((words[5] for words in map(str.split, file) if int(words[0], 16) == int(asked)), None)
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


def _reach(address: str, port: int) -> dict[str, Any]:
    """Try the place where the ranks are to meet."""
    begin_s = time.monotonic()
    try:
        socket.create_connection((address, port), timeout=_REACH_S).close()
    except OSError as error:
        return {"problem": f"cannot connect to the first host at {address}, port {port}: {error}"}
    return {"problem": None, "latency_s": time.monotonic() - begin_s}


if __name__ == "__main__":
    main()
