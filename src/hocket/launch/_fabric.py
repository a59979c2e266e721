"""`hocket run --fabric`: ranks in the hosts of an emulated cluster.

The launcher becomes itself anew inside the host of rank 0, where the ranks' store then listens, as on a real cluster;
each rank enters its own host before its program starts.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from hocket.cluster import ClusterError, load
from hocket.fabric import Fabric, FabricError, FabricInputError, Wiring, check, fabrics, wire

from ._failure import ArgumentError, LaunchError

INSIDE_VARIABLE = "HOCKET_RUN_FABRIC"
NAMESPACE_VARIABLE = "HOCKET_NETWORK_NAMESPACE"
"""By which a rank's worker knows where to go; it takes it out of the program's environment."""

_MOST_SHARDS: Final = 4


class PlacementError(ArgumentError):
    """The fabric that was asked for cannot be used; the message says what to change."""


@dataclass(frozen=True)
class Sites:
    """Where aggregators stand."""

    roots: tuple[str, ...]  # switches or hosts; several share long messages
    # switch whose aggregator is the host's own, a child of the root, for every host with ranks; empty without a tree
    leaves: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostPlacement:
    """Where ranks go."""

    fabric: Fabric  # fabric that is up
    hosts: tuple[str, ...]  # name of the host of every rank

    @property
    def address(self) -> str:
        """Where the ranks meet: the host of rank 0."""
        return self.fabric.address(self.hosts[0])

    def environment(self, rank: int) -> dict[str, str]:
        """Return what a rank's environment has besides torchrun's variables, those about its host among them."""
        host = self.hosts[rank]
        order = list(dict.fromkeys(self.hosts))
        return {
            **self.fabric.environment(host),
            NAMESPACE_VARIABLE: self.fabric.namespace(host),
            "LOCAL_RANK": str(self.hosts[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(self.hosts.count(host)),
            "GROUP_RANK": str(order.index(host)),
            "GROUP_WORLD_SIZE": str(len(order)),
        }

    def sites(self) -> Sites:
        """Return where aggregators serve these ranks best."""
        return sites(self.fabric.wiring, self.hosts)

    def close(self) -> None:
        """Take the fabric down if it was made for this run."""
        if self.fabric.owner == os.getpid():
            self.fabric.close()


def sites(wiring: Wiring, hosts: Sequence[str]) -> Sites:
    """Return where aggregators serve ranks in these hosts best.

    Beside the switch that is nearest to all. If hosts are at several switches, and some switch has more than one of
    them, then beside each of these too, so that what leaves it is as long as what one host sends. Without switches: on
    hosts that have no ranks, or else on the first.
    """
    used = tuple(dict.fromkeys(hosts))
    root = wiring.central_switch(used)
    if root is None:
        spare = tuple(host for host in wiring.hosts if host not in used)
        return Sites(spare[:_MOST_SHARDS] or used[:1])
    leaves = {host: wiring.access_switch(host) for host in used}
    below = {leaf: list(leaves.values()).count(leaf) for leaf in leaves.values()}
    if None in below or len(below) == 1 or max(below.values()) == 1:
        return Sites((root,))
    return Sites((root,), {host: leaf for host, leaf in leaves.items() if leaf is not None})


def spread(wiring: Wiring, ranks: int) -> tuple[str, ...]:
    """Return the host of every rank.

    As many ranks as the cluster has: as it says. No more than there are hosts: one to a host, in order. Else blocks of
    consecutive ranks on every host, which differ by one at most.
    """
    hosts = wiring.hosts
    if not hosts:
        raise PlacementError(f"{wiring.cluster} has no hosts, so no rank has a place")
    if ranks == len(wiring.ranks):
        return tuple(wiring.nodes[node].name for node in wiring.ranks)
    if ranks <= len(hosts):
        return hosts[:ranks]
    return tuple(hosts[rank * len(hosts) // ranks] for rank in range(ranks))


def planned(word: str, ranks: int) -> tuple[str, ...]:
    """Return the hosts that ranks would get, without making anything.

    Raises:
        PlacementError: there is no such fabric or cluster.
    """
    try:
        up = [state.wiring for state in fabrics() if state.alive and state.name == word]
        return spread(up[0] if up else wire(load(word)), ranks)
    except (ClusterError, FabricError) as error:
        raise PlacementError(f"--fabric {word}: {error}") from None


def inside(ranks: int) -> HostPlacement | None:
    """Return where the ranks go if this process has entered a fabric by `enter_fabric`; its children cannot tell so.

    Raises:
        LaunchError: that fabric has ended meanwhile.
    """
    name = os.environ.pop(INSIDE_VARIABLE, None)
    if name is None:
        return None
    try:
        fabric = Fabric.attach(name)
    except FabricError as error:
        raise LaunchError(f"--fabric {name}: it has ended: {error}") from None
    return HostPlacement(fabric, spread(fabric.wiring, ranks))


def enter_fabric(word: str, ranks: int, arguments: Sequence[str]) -> NoReturn:
    """Make the fabric, unless one of this name is up, and become `hocket run` inside the host of rank 0.

    Raises:
        PlacementError: there is no such fabric or cluster, or it can be no fabric.
        LaunchError: the kernel does not allow it.
    """
    try:
        if any(state.alive and state.name == word for state in fabrics()):
            fabric = Fabric.attach(word)
        else:
            fabric = Fabric(load(word))
            found = check(fabric)
            if not found.ok:
                print(f"hocket run: {found.describe()}", file=sys.stderr, flush=True)
        first = spread(fabric.wiring, ranks)[0]
    except (ClusterError, FabricInputError) as error:
        raise PlacementError(f"--fabric {word}: {error}") from None
    except FabricError as error:
        raise LaunchError(f"--fabric {word}: {error}") from None
    os.environ[INSIDE_VARIABLE] = fabric.name
    # An emulated host has no name server, of which torch warns at every connection of every rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    command = fabric.command_in(first, [sys.executable, "-m", "hocket", "run", *arguments])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)
