"""A cluster as cables between namespaces: what is inside a host becomes one node, and every route is worked out.

A `Wiring` is plain data, so that the keeper of a fabric can read it without loading numpy. Nodes have one address each
and their links none ("unnumbered" in routers' words): a route names the port and the neighbour's own address.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ._errors import FabricError, FabricInputError

if TYPE_CHECKING:
    from hocket.cluster import Cluster


MOST_NODES = 1 << 10  # each is a namespace with a route to every host; addresses would do for 16 times as many


@dataclass(frozen=True, slots=True)
class Port:
    """One end of a cable.

    Attributes:
        interface: Name inside the node.
        link: Directed link that leaves here, as `Cluster.link_names` has it.
        rate_Bps: Bytes per second of the link.
        latency_s: Latency by the description; it is not emulated.
        mac: The port's hardware address.
        peer: Index of the node at the other end.
        peer_port: Number of the port at the other end.
    """

    interface: str
    link: str
    rate_Bps: float
    latency_s: float
    mac: str
    peer: int
    peer_port: int


@dataclass(frozen=True, slots=True)
class Node:
    """A host or a network switch.

    Attributes:
        name: Name of the host or switch.
        kind: "host" or "switch".
        address: IPv4 address of the node.
        forwards: Whether it passes on what is for others.
        ports: Cables of the node.
        routes: Ports that lead to every other node, by its index; several share the flows by hash.
        given: Explicit routes: (source node, destination node, port).
    """

    name: str
    kind: str
    address: str
    forwards: bool
    ports: tuple[Port, ...]
    routes: tuple[tuple[int, tuple[int, ...]], ...]
    given: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Wiring:
    """All nodes of a fabric.

    Attributes:
        cluster: The name of the cluster.
        nodes: Hosts first, in the cluster's order, then switches.
        ranks: Index of the host of every rank of the cluster.
    """

    cluster: str
    nodes: tuple[Node, ...]
    ranks: tuple[int, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts, in order."""
        return tuple(node.name for node in self.nodes if node.kind == "host")

    def index(self, name: str) -> int:
        """Return the node of this name.

        Raises:
            FabricError: there is none.
        """
        for index, node in enumerate(self.nodes):
            if node.name == name:
                return index
        known = ", ".join(node.name for node in self.nodes[:8])
        raise FabricInputError(
            f"{self.cluster} has no host or switch {name!r}; its {len(self.nodes)} nodes begin {known}"
        )

    def hops(self, source: int, goal: int) -> int:
        """Return how many links lead from a node to another, by the first of equal ways.

        Raises:
            FabricError: none do.
        """
        count = 0
        while source != goal:
            node = self.nodes[source]
            ports = dict(node.routes).get(goal)
            if ports is None:
                raise FabricError(f"{self.cluster}: no way leads from {node.name} to {self.nodes[goal].name}")
            source, count = node.ports[ports[0]].peer, count + 1
        return count

    def central_switch(self, hosts: Iterable[str]) -> str | None:
        """Return the first switch from which the farthest of these hosts is nearest; None without switches."""
        goals = sorted({self.index(host) for host in hosts})
        switches = [index for index, node in enumerate(self.nodes) if node.kind == "switch"]
        if not switches:
            return None
        return self.nodes[min(switches, key=lambda at: max(self.hops(at, goal) for goal in goals))].name

    def access_switch(self, host: str) -> str | None:
        """Return the switch at a host's first port; None if there is none."""
        ports = self.nodes[self.index(host)].ports
        peer = self.nodes[ports[0].peer] if ports else None
        return peer.name if peer is not None and peer.kind == "switch" else None

    def as_json(self) -> dict[str, Any]:
        """Return the wiring as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Wiring":
        """Return what `as_json` gave."""
        nodes = []
        for node in value["nodes"]:
            ports = tuple(Port(**port) for port in node["ports"])
            routes = tuple((goal, tuple(through)) for goal, through in node["routes"])
            given = tuple((a, b, port) for a, b, port in node["given"])
            nodes.append(Node(**{**node, "ports": ports, "routes": routes, "given": given}))
        return cls(value["cluster"], tuple(nodes), tuple(value["ranks"]))


def wire(cluster: "Cluster") -> Wiring:
    """Return the cables and routes of a cluster: devices, NICs and all else inside a host become one node.

    Routes are of least total cost over the network's links; where several ports lead on at the same cost, "ecmp"
    uses all of them and "shortest" the first link. Explicit paths come before both.

    Raises:
        FabricInputError: a link has no way back, a host no way to another, or there are too many nodes.
    """
    names, kinds, place = _nodes(cluster)
    if len(names) > MOST_NODES:
        raise FabricInputError(
            f"{cluster.name}: {len(names)} hosts and switches are more than the {MOST_NODES} of one machine's fabric: "
            "take fewer hosts, or predict: hocket simulate, hocket predict"
        )
    ends = list(zip(cluster.link_tail.tolist(), cluster.link_head.tolist(), strict=True))
    outside = [link for link, (tail, head) in enumerate(ends) if place[tail] != place[head]]
    back = _pairs(cluster, {link: (place[ends[link][0]], place[ends[link][1]]) for link in outside})
    ports_of: list[list[int]] = [[] for _ in names]
    where: dict[int, int] = {}
    for link in outside:
        tail = place[ends[link][0]]
        where[link] = len(ports_of[tail])
        ports_of[tail].append(link)
    heads = {link: place[ends[link][1]] for link in outside}
    costs = cluster.link_cost.tolist()
    forwards = [kind == "switch" for kind in kinds]
    for index, kind in enumerate(cluster.kinds):
        if kind == "host" and cluster.forwards[index]:
            forwards[place[index]] = True
    routes = _routes(ports_of, heads, costs, forwards, cluster.routing == "ecmp")
    _refuse_islands(cluster.name, names, {index for index, kind in enumerate(kinds) if kind == "host"}, routes)
    given = _given(cluster, place, where, len(names))
    nodes = tuple(
        Node(
            name=name,
            kind=kind,
            address=_address(index, kind),
            forwards=forwards[index],
            ports=tuple(
                Port(
                    interface=f"eth{number}",
                    link=cluster.link_names[link],
                    rate_Bps=float(cluster.capacity_Bps[link]),
                    latency_s=float(cluster.latency_s[link]),
                    mac=_mac(index, number),
                    peer=heads[link],
                    peer_port=where[back[link]],
                )
                for number, link in enumerate(ports_of[index])
            ),
            routes=tuple((goal, tuple(where[link] for link in links)) for goal, links in sorted(routes[index].items())),
            given=tuple(given[index]),
        )
        for index, (name, kind) in enumerate(zip(names, kinds, strict=True))
    )
    return Wiring(cluster.name, nodes, tuple(place[node] for node in cluster.ranks.tolist()))


def _nodes(cluster: "Cluster") -> tuple[list[str], list[str], list[int]]:
    """Return the names and kinds of the fabric's nodes, and where each node of the cluster went."""
    names = list(cluster.host_names)
    kinds = ["host"] * len(names)
    place = []
    for name, kind, host in zip(cluster.node_names, cluster.kinds, cluster.hosts.tolist(), strict=True):
        if host >= 0:
            place.append(host)
            continue
        place.append(len(names))
        names.append(name)
        kinds.append("host" if kind in ("host", "device") else "switch")
    return names, kinds, place


def _pairs(cluster: "Cluster", ends: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return each link's other direction in its cable; the k-th there belongs to the k-th back."""
    waiting: dict[tuple[int, int], list[int]] = {}
    back: dict[int, int] = {}
    for link, (tail, head) in ends.items():
        if partners := waiting.get((head, tail)):
            other = partners.pop(0)
            back[link], back[other] = other, link
        else:
            waiting.setdefault((tail, head), []).append(link)
    for links in waiting.values():
        if links:
            name = cluster.link_names[links[0]]
            raise FabricInputError(
                f"{cluster.name}: link {name} has no link back; a cable of a fabric has both directions"
            )
    return back


def _routes(
    ports_of: list[list[int]], heads: Mapping[int, int], costs: list[int], forwards: list[bool], ecmp: bool
) -> list[dict[int, list[int]]]:
    """Return for every node and every goal it can reach the links that begin a way of least cost."""
    into: list[list[tuple[int, int]]] = [[] for _ in ports_of]
    for tail, links in enumerate(ports_of):
        for link in links:
            into[heads[link]].append((tail, link))
    routes: list[dict[int, list[int]]] = [{} for _ in ports_of]
    for goal in range(len(ports_of)):
        far = _distances(goal, into, costs, forwards)
        for tail, links in enumerate(ports_of):
            if tail == goal or tail not in far:
                continue
            best = [
                link
                for link in links
                if (heads[link] == goal or forwards[heads[link]])
                and heads[link] in far
                and far[heads[link]] + costs[link] == far[tail]
            ]
            routes[tail][goal] = best if ecmp else best[:1]
    return routes


def _refuse_islands(cluster: str, names: list[str], hosts: set[int], routes: list[dict[int, list[int]]]) -> None:
    for host in sorted(hosts):
        if lacking := hosts - routes[host].keys() - {host}:
            raise FabricInputError(
                f"{cluster}: no way leads from {names[host]} to {names[min(lacking)]}; add a link, or let a host "
                "between them pass on what is for others (`forwards = true`)"
            )


def _distances(goal: int, into: list[list[tuple[int, int]]], costs: list[int], forwards: list[bool]) -> dict[int, int]:
    """Return what the cheapest way to the goal costs from each node that has one: Dijkstra, backwards."""
    far: dict[int, int] = {}
    queue = [(0, goal)]
    while queue:
        cost, node = heapq.heappop(queue)
        if node in far:
            continue
        far[node] = cost
        if node == goal or forwards[node]:
            for tail, link in into[node]:
                if tail not in far:
                    heapq.heappush(queue, (cost + costs[link], tail))
    return far


def _given(
    cluster: "Cluster", place: list[int], where: Mapping[int, int], count: int
) -> list[list[tuple[int, int, int]]]:
    """Return the cluster's explicit paths as decisions of each node on the way."""
    given: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
    for (source, destination), links in sorted(cluster.tables.items()):
        for link in links:
            if link in where:
                tail = place[int(cluster.link_tail[link])]
                decision = (place[source], place[destination], where[link])
                if decision not in given[tail]:
                    given[tail].append(decision)
    return given


def _address(index: int, kind: str) -> str:
    """Return addresses, the same for all fabrics: namespaces are worlds of their own."""
    return f"10.{64 if kind == 'host' else 128}.{index >> 8}.{index & 255}"


def _mac(index: int, port: int) -> str:
    """Locally administered, unicast."""
    digits = f"{(index << 16) | port:010x}"
    return ":".join(["02", *(digits[i : i + 2] for i in range(0, 10, 2))])
