"""Routes where hosts have inner fabrics: within each host, through the network, and within the other host.

A host does not carry what is for others, so a path between hosts leaves the first once and enters the second once.
Inner paths are found once per shape of host (a cluster has few), and the network's between its switches only; of all
pairs of ports the cheapest makes the path.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._routes import NoPathError, Router, Routes, mix, ragged

Indices = NDArray[np.int64]

_FAR = 2**29
_CHUNK = 1 << 14  # flows whose pairs of ports are compared in one go


def has_inner_fabrics(hosts: Indices, forwards: NDArray[np.bool_], tail: Indices, head: Indices) -> bool:
    """Return whether paths can be taken apart at hosts: some have several nodes, and none touches another directly."""
    inside = hosts[tail] == hosts[head]
    touching = (hosts[tail] >= 0) & (hosts[head] >= 0) & ~inside
    several = np.bincount(hosts[hosts >= 0], minlength=1).max() > 1
    lone = np.bincount(hosts[hosts >= 0], minlength=1)[hosts] == 1
    carries = (hosts >= 0) & lone & forwards  # a host that is one node and forwards is a switch, too
    return bool(several and not touching.any() and not carries.any())


@dataclass(frozen=True, eq=False)
class _HostShape:
    """Hosts that are alike, by the numbers that nodes have within the host.

    `inner` finds paths between its nodes, and `distance` is what they cost. The others are of its cables to the network
    and from it: the node that they are at, and their own cost.
    """

    inner: Router
    distance: Indices
    out_node: Indices
    out_cost: Indices
    in_node: Indices
    in_cost: Indices


class HostRouter:
    """As `Router`, for clusters of which `has_inner_fabrics` holds."""

    def __init__(
        self, hosts: Indices, forwards: NDArray[np.bool_], tail: Indices, head: Indices, cost: Indices, ecmp: bool
    ) -> None:
        self._hosts, self._tail, self._head, self._ecmp = hosts, tail, head, ecmp
        network = (hosts[tail] < 0) & (hosts[head] < 0)
        self._network_links = np.flatnonzero(network)
        # The network alone: hosts are there as nodes without links, so that numbers stay the same.
        self._network = Router(forwards, tail[network], head[network], cost[network], ecmp)
        count = int(hosts.max()) + 1
        node_order = np.argsort(hosts, kind="stable")
        self._nodes = _Lists(node_order, hosts[node_order], count)
        self._number = np.full(len(hosts), -1, dtype=np.int64)
        inside = (hosts[tail] == hosts[head]) & (hosts[tail] >= 0)
        self._links = _listed(np.flatnonzero(inside), hosts[tail], count)
        leaving = (hosts[tail] >= 0) & (hosts[head] < 0)
        entering = (hosts[tail] < 0) & (hosts[head] >= 0)
        self._out = _listed(np.flatnonzero(leaving), hosts[tail], count)
        self._in = _listed(np.flatnonzero(entering), hosts[head], count)
        self._shape_of = np.empty(count, dtype=np.int64)
        self._shapes: list[_HostShape] = []
        known: dict[tuple[bytes, ...], int] = {}
        for host in range(count):
            nodes, links = self._nodes[host], self._links[host]
            self._number[nodes] = np.arange(len(nodes))
            ways, doors = self._out[host], self._in[host]
            columns = (
                forwards[nodes],
                self._number[tail[links]],
                self._number[head[links]],
                cost[links],
                self._number[tail[ways]],
                cost[ways],
                self._number[head[doors]],
                cost[doors],
            )
            key = tuple(column.tobytes() for column in columns)
            if key not in known:
                known[key] = len(self._shapes)
                self._shapes.append(_shape(*columns))
            self._shape_of[host] = known[key]

    def routes(self, source: Indices, destination: Indices, seed: int) -> Routes:
        """Return the links of each flow; a flow from a node to itself takes none.

        Raises:
            NoPathError: naming the first flow that has no path.
        """
        from_host, to_host = self._hosts[source], self._hosts[destination]
        pieces: list[tuple[Indices, Indices]] = []
        exits, entries = np.full(len(source), -1, dtype=np.int64), np.full(len(source), -1, dtype=np.int64)
        # Nodes of a host that nothing inside joins, as devices that meet at a switch outside, leave it and come back.
        same = (from_host >= 0) & (from_host == to_host)
        same[same] = self._joined_inside(source[same], destination[same])
        apart = np.flatnonzero(~same & ((from_host >= 0) | (to_host >= 0)))
        for begin in range(0, len(apart), _CHUNK):
            flows = apart[begin : begin + _CHUNK]
            exits[flows], entries[flows] = self._doors(source[flows], destination[flows], seed)
        # First to the own door, or to the destination if it is in the same host.
        until = np.where(exits >= 0, self._tail[exits], np.where(same, destination, source))
        pieces += self._inside(source, until)
        out = np.flatnonzero(exits >= 0)
        pieces.append((out, exits[out]))
        begin_at = np.where(exits >= 0, self._head[exits], source)
        end_at = np.where(entries >= 0, self._tail[entries], destination)
        crossing = np.flatnonzero(~same)
        named = source[crossing], destination[crossing]
        across = self._network.routes(begin_at[crossing], end_at[crossing], seed, named=named)
        pieces.append((np.repeat(crossing, across.hops), self._network_links[across.links]))
        into = np.flatnonzero(entries >= 0)
        pieces.append((into, entries[into]))
        door = np.where(entries >= 0, self._head[entries], destination)
        pieces += self._inside(door, destination)
        owner = np.concatenate([piece[0] for piece in pieces])
        links = np.concatenate([piece[1] for piece in pieces])
        offsets = np.zeros(len(source) + 1, dtype=np.int64)
        np.cumsum(np.bincount(owner, minlength=len(source)), out=offsets[1:])
        return Routes(offsets, links[np.argsort(owner, kind="stable")])

    def _joined_inside(self, source: Indices, destination: Indices) -> NDArray[np.bool_]:
        """Return whether a path within their host joins nodes of one."""
        found = np.zeros(len(source), dtype=np.bool_)
        shapes = self._shape_of[self._hosts[source]]
        for number, shape in enumerate(self._shapes):
            flows = np.flatnonzero(shapes == number)
            found[flows] = shape.distance[self._number[source[flows]], self._number[destination[flows]]] < _FAR
        return found

    def _inside(self, source: Indices, destination: Indices) -> list[tuple[Indices, Indices]]:
        """Return the paths within hosts, by shape; nodes outside of hosts stay where they are."""
        host = self._hosts[source]
        moving = np.flatnonzero((host >= 0) & (source != destination))
        pieces = []
        for number, shape in enumerate(self._shapes):
            flows = moving[self._shape_of[host[moving]] == number]
            if not len(flows):
                continue
            found = shape.inner.routes(self._number[source[flows]], self._number[destination[flows]], 0)
            owner = np.repeat(flows, found.hops)
            pieces.append((owner, self._links.values[self._links.start[host[owner]] + found.links]))
        return pieces

    def _doors(self, source: Indices, destination: Indices, seed: int) -> tuple[Indices, Indices]:
        """Return the cables by which flows leave and enter hosts; -1 where an end is in the network itself."""
        out_owner, out_link, out_cost = self._ways(source, self._out, leaving=True)
        in_owner, in_link, in_cost = self._ways(destination, self._in, leaving=False)
        # All pairs of a way out and a way in of the same flow.
        counts = np.bincount(in_owner, minlength=len(source))
        first = np.cumsum(counts) - counts
        pick, partner = ragged(first[out_owner], counts[out_owner])
        owner, leave, enter = out_owner[pick], out_link[pick], in_link[partner]
        at = np.where(leave >= 0, self._head[leave], source[owner])
        to = np.where(enter >= 0, self._tail[enter], destination[owner])
        total = out_cost[pick] + in_cost[partner] + self._network.distance(at, to)
        least = np.full(len(source), _FAR, dtype=np.int64)
        np.minimum.at(least, owner, total)
        lost = np.flatnonzero(least >= _FAR)
        if len(lost):
            raise NoPathError(int(source[lost[0]]), int(destination[lost[0]]))
        good = np.flatnonzero(total == least[owner])
        ties = np.bincount(owner[good], minlength=len(source))
        chosen = np.cumsum(ties) - ties
        if self._ecmp:
            key = mix(source.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed & (2**64 - 1)))
            chosen = chosen + (mix(key ^ destination.astype(np.uint64)) % ties.astype(np.uint64)).astype(np.int64)
        return leave[good[chosen]], enter[good[chosen]]

    def _ways(self, node: Indices, doors: "_Lists", *, leaving: bool) -> tuple[Indices, Indices, Indices]:
        """Return the cables of each flow's host, and what the way inside to them costs; flow by flow.

        Of cables to one node of the network those alone to which the way costs least: no cheapest path has another.
        """
        nodes, flow = np.unique(node, return_inverse=True)
        owner, link, cost = self._all_ways(nodes, doors, leaving=leaving)
        beyond = (self._head if leaving else self._tail)[link]
        _, place = np.unique(owner * len(self._hosts) + beyond, return_inverse=True)
        least = np.full(len(owner), _FAR, dtype=np.int64)
        np.minimum.at(least, place, cost)
        kept = cost == least[place]
        counts = np.bincount(owner[kept], minlength=len(nodes))
        flows, way = ragged((np.cumsum(counts) - counts)[flow], counts[flow])
        return flows, link[kept][way], cost[kept][way]

    def _all_ways(self, node: Indices, doors: "_Lists", *, leaving: bool) -> tuple[Indices, Indices, Indices]:
        """Return all cables of each node's host, and what the way inside to them costs; node by node."""
        host = self._hosts[node]
        counts = np.where(host >= 0, doors.count[host], 1)
        owner, entry = ragged(np.where(host >= 0, doors.start[host], 0), counts)
        outside = host[owner] < 0
        link = np.where(outside, -1, doors.values[np.minimum(entry, len(doors.values) - 1)])
        cost = np.zeros(len(owner), dtype=np.int64)
        for number, shape in enumerate(self._shapes):
            rows = np.flatnonzero(~outside & (self._shape_of[host[owner]] == number))
            door = entry[rows] - doors.start[host[owner[rows]]]
            here = self._number[node[owner[rows]]]
            if leaving:
                cost[rows] = shape.distance[here, shape.out_node[door]] + shape.out_cost[door]
            else:
                cost[rows] = shape.distance[shape.in_node[door], here] + shape.in_cost[door]
        return owner, link, cost


class _Lists:
    """Values by host: those of host h are `values[start[h]:start[h] + count[h]]`."""

    def __init__(self, values: Indices, hosts: Indices, count: int) -> None:
        kept = hosts >= 0
        self.values = values[kept]
        self.count = np.bincount(hosts[kept], minlength=count)
        self.start = np.cumsum(self.count) - self.count

    def __getitem__(self, host: int) -> Indices:
        return self.values[self.start[host] : self.start[host] + self.count[host]]


def _listed(links: Indices, host_of: Indices, count: int) -> _Lists:
    """Return the links by the host that `host_of` gives them, in their own order within a host."""
    order = np.argsort(host_of[links], kind="stable")
    return _Lists(links[order], host_of[links[order]], count)


def _shape(
    forwards: NDArray[np.bool_],
    tail: Indices,
    head: Indices,
    cost: Indices,
    out_node: Indices,
    out_cost: Indices,
    in_node: Indices,
    in_cost: Indices,
) -> _HostShape:
    inner = Router(forwards, tail, head, cost, ecmp=False)
    nodes = np.arange(len(forwards))
    source, destination = np.repeat(nodes, len(nodes)), np.tile(nodes, len(nodes))
    distance = inner.distance(source, destination).reshape(len(nodes), len(nodes))
    return _HostShape(inner, distance, out_node, out_cost, in_node, in_cost)
