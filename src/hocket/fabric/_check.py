"""Can this machine carry what a fabric's links describe? Asked with real traffic on all hosts at once.

Every host sends to its next neighbour and to the one half way round. Bandwidth is shared max-min fairly if and only if
every flow crosses a link that is full (Bertsekas and Gallager, Data Networks, 6.5.2). So if a flow crosses none, what
holds it back is no link of the fabric but this machine, and what would be measured on the fabric is not to be trusted.
"""

import contextlib
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import _traffic
from ._fabric import Fabric
from ._wiring import Wiring

ENOUGH = 0.93  # of a link: the rest is for timers that wake late
_SETTLE_S = 0.4  # connections are made, and queues fill
_PORT = 9


@dataclass(frozen=True)
class Check:
    """What was seen.

    Attributes:
        ok: Whether every flow filled a link.
        share: How full the fullest link of the worst flow was, 1 for what is described.
        worst: Worst flow, "host0->host3"; empty if there were none.
        seconds: Seconds that were measured.
        carried_Bps: What every directed link carried.
        busy: Part of this machine's cores that was in use, by whomever, 0 to 1.
    """

    ok: bool
    share: float
    worst: str
    seconds: float
    carried_Bps: dict[str, float]
    busy: float

    def as_json(self) -> dict[str, Any]:
        """Return the check as plain values."""
        return asdict(self)

    def describe(self) -> str:
        """Return one line for people."""
        if not self.worst:
            return "nothing to check: one host has nobody to talk to"
        if self.ok:
            return (
                f"this machine carries the described load: every flow of the test filled a link to {self.share:.1%} "
                f"or more, with its cores {self.busy:.0%} in use"
            )
        return (
            f"THIS MACHINE CANNOT CARRY THE DESCRIBED LOAD: the fullest link of {self.worst} reached "
            f"{self.share:.1%} of its bandwidth, with the cores {self.busy:.0%} in use. Times measured on this fabric "
            "would be the machine's, not the cluster's: describe slower links or fewer hosts, or stop what else runs"
        )


def check(fabric: Fabric, *, seconds: float = 0.6) -> Check:
    """Send on all hosts at once, and see whether the links fill; takes about two seconds.

    Args:
        fabric: Fabric that is up, and idle.
        seconds: Seconds to measure.
    """
    flows = _flows(len(fabric.hosts))
    if not flows:
        return Check(True, 1.0, "", 0.0, {}, 0.0)
    with contextlib.ExitStack() as stack:
        started = [_start(stack, fabric, host, flows, seconds) for host in range(len(fabric.hosts))]
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        for process in started:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("go\n")
                process.stdin.flush()
        time.sleep(_SETTLE_S)
        before, cores = fabric.counters(), _cores()
        begin_s = time.monotonic()
        time.sleep(seconds)
        after, cores_after = fabric.counters(), _cores()
        took_s = time.monotonic() - begin_s
    carried = {link: (after[link] - before[link]) / took_s for link in after}
    described = {port.link: port.rate_Bps for node in fabric.wiring.nodes for port in node.ports}
    full = {link: carried[link] / described[link] for link in carried}
    shares = {flow: max(full[link] for link in ways(fabric.wiring, *flow)) for flow in flows}
    source, goal = min(shares, key=lambda flow: shares[flow])
    total = cores_after[0] - cores[0]
    return Check(
        ok=shares[source, goal] >= ENOUGH,
        share=min(1.0, shares[source, goal]),
        worst=f"{fabric.hosts[source]}->{fabric.hosts[goal]}",
        seconds=took_s,
        carried_Bps=carried,
        busy=1 - (cores_after[1] - cores[1]) / total if total else 0.0,
    )


def ways(wiring: Wiring, source: int, goal: int) -> list[str]:
    """Return the links of all ways that a flow from a node to another may take."""
    links: list[str] = []
    seen = {source}
    queue = [source]
    for at in queue:
        if at == goal:
            continue
        node = wiring.nodes[at]
        given = [port for a, b, port in node.given if (a, b) == (source, goal)]
        for port in given or dict(node.routes).get(goal, ()):
            links.append(node.ports[port].link)
            if node.ports[port].peer not in seen:
                seen.add(node.ports[port].peer)
                queue.append(node.ports[port].peer)
    return links


def _flows(hosts: int) -> list[tuple[int, int]]:
    shifts = sorted({1, hosts // 2} - {0}) if hosts > 1 else []
    return [(host, (host + shift) % hosts) for host in range(hosts) for shift in shifts]


def _start(
    stack: contextlib.ExitStack, fabric: Fabric, host: int, flows: Sequence[tuple[int, int]], seconds: float
) -> "subprocess.Popen[str]":
    nodes = fabric.wiring.nodes
    goals = [nodes[goal].address for source, goal in flows if source == host]
    coming = sum(1 for _, goal in flows if goal == host)
    limit_s = seconds + _SETTLE_S + 0.2
    command = fabric.command_in(nodes[host].name, ["-"])[:-1]
    python = [command[0], "-I", "-S", _traffic.__file__, str(_PORT), str(limit_s), str(coming), *goals]
    process: subprocess.Popen[str] = stack.enter_context(
        subprocess.Popen([*command, *python], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )
    stack.callback(process.kill)
    return process


def _cores() -> tuple[int, int]:
    """Return the ticks of all cores since the start of the machine: in all, and idle."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]
