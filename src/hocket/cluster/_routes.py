"""Ways through a cluster for many flows at once.

A flow takes a path of least cost. Where several links lead on at the same cost, `shortest` takes the first and
`ecmp` takes the one that a hash of the flow names, as a switch does: the same pair always takes the same path, and
different pairs may meet on one link while another stays idle.

Hosts that hang on one switch are stripped first, again and again: what remains is a small core of switches, and
distances are only worked out there, once per destination.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._errors import ClusterError

Indices = NDArray[np.int64]

_FAR = np.int32(2**30)
_BATCH = 1 << 21  # candidates looked at in one go: bounds the memory, tens of MiB


@dataclass(frozen=True, eq=False)
class Routes:
    """The links that each of several flows takes, in compressed rows.

    Attributes:
        offsets: int64, one more than there are flows.
        links: int64; those of flow i are `links[offsets[i]:offsets[i + 1]]`, from its source on.
    """

    offsets: Indices
    links: Indices

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, flow: int) -> Indices:
        if not 0 <= flow < len(self):
            raise IndexError(flow)
        return self.links[self.offsets[flow] : self.offsets[flow + 1]]

    @property
    def hops(self) -> Indices:
        """How many links each flow crosses."""
        return np.diff(self.offsets)


def ragged(starts: Indices, counts: Indices) -> tuple[Indices, Indices]:
    """Return the owner and the value of every element of ranges that start at `starts` and are `counts` long."""
    owner = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    return owner, np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts) + starts[owner]


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread the bits of 64-bit words: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Router:
    """Finds paths in one graph; keeps the distances that it has worked out.

    `forwards` says of each node whether it passes on what is for others; links lead from `tail` to `head` and add
    `cost`, 1 or more, to a path's. With `ecmp` flows spread over paths of equal cost.
    """

    def __init__(self, forwards: NDArray[np.bool_], tail: Indices, head: Indices, cost: Indices, ecmp: bool) -> None:
        self._ecmp = ecmp
        self._forwards = forwards
        self._tail, self._head, self._cost = tail, head, cost
        self._strip(len(forwards))
        core = np.flatnonzero(self._depth == 0)
        self._core_of = np.full(len(forwards), -1, dtype=np.int64)
        self._core_of[core] = np.arange(len(core))
        self._core = core
        inside = np.flatnonzero((self._depth[tail] == 0) & (self._depth[head] == 0))
        self._out = inside[np.argsort(tail[inside], kind="stable")]
        self._in = inside[np.argsort(head[inside], kind="stable")]
        bounds = np.arange(len(core) + 1)
        self._out_start = np.searchsorted(self._core_of[tail[self._out]], bounds)
        self._in_start = np.searchsorted(self._core_of[head[self._in]], bounds)
        self._slot = np.full(len(core), -1, dtype=np.int64)  # row of `_distances` of each destination known
        self._distances = np.zeros((0, len(core)), dtype=np.int32)

    def _strip(self, count: int) -> None:
        """Find the nodes that hang on one other that forwards; `_depth` is 0 for what remains, the core."""
        self._depth = np.zeros(count, dtype=np.int64)
        self._parent = np.full(count, -1, dtype=np.int64)
        self._up = np.full(count, -1, dtype=np.int64)
        self._down = np.full(count, -1, dtype=np.int64)
        links: dict[tuple[int, int], list[int]] = {}
        neighbours: list[set[int]] = [set() for _ in range(count)]
        pairs = zip(self._tail.tolist(), self._head.tolist(), strict=True)
        for link, (a, b) in enumerate(pairs):
            links.setdefault((a, b), []).append(link)
            neighbours[a].add(b)
            neighbours[b].add(a)
        forwards = self._forwards.tolist()
        order: list[int] = []
        queue = [node for node in range(count) if len(neighbours[node]) == 1]
        for node in queue:
            if len(neighbours[node]) != 1:
                continue
            (parent,) = neighbours[node]
            up, down = links.get((node, parent), []), links.get((parent, node), [])
            if not forwards[parent] or len(up) != 1 or len(down) != 1:
                continue
            self._parent[node], self._up[node], self._down[node] = parent, up[0], down[0]
            neighbours[node].clear()
            neighbours[parent].discard(node)
            order.append(node)
            if len(neighbours[parent]) == 1:
                queue.append(parent)
        for node in reversed(order):  # parents are stripped after their children, so their depth is known first
            self._depth[node] = self._depth[self._parent[node]] + 1

    def routes(
        self, source: Indices, destination: Indices, seed: int, *, named: tuple[Indices, Indices] | None = None
    ) -> Routes:
        """Return the links of each flow; a flow from a node to itself takes none.

        `named` are the ends by which the hash knows the flows, if they are parts of longer ones.

        Raises:
            ClusterError: naming the first flow that has no path.
        """
        flows = len(source)
        at, to = source.copy(), destination.copy()
        ups: list[tuple[Indices, Indices]] = []
        downs: list[tuple[Indices, Indices]] = []
        for climb, up, fall, down in self._to_the_core(at, to):
            ups.append((climb, up))
            downs.append((fall, down))
        across = self._walk(*(named or (source, destination)), at, to, seed)
        pieces = [*ups, *across, *reversed(downs)]
        owner = np.concatenate([piece[0] for piece in pieces]) if pieces else np.zeros(0, dtype=np.int64)
        links = np.concatenate([piece[1] for piece in pieces]) if pieces else np.zeros(0, dtype=np.int64)
        offsets = np.zeros(flows + 1, dtype=np.int64)
        np.cumsum(np.bincount(owner, minlength=flows), out=offsets[1:])
        return Routes(offsets, links[np.argsort(owner, kind="stable")])

    def _to_the_core(self, at: Indices, to: Indices) -> Iterator[tuple[Indices, Indices, Indices, Indices]]:
        """Move the ends of flows to the core, or to where both meet below it; `at` and `to` are overwritten.

        Yields:
            Which flows go up from `at`, and by which links; which come down to `to`, and by which links.
        """
        while True:
            apart = at != to
            climb = np.flatnonzero(apart & (self._depth[at] > 0) & (self._depth[at] >= self._depth[to]))
            fall = np.flatnonzero(apart & (self._depth[to] > 0) & (self._depth[to] >= self._depth[at]))
            if not len(climb) and not len(fall):
                return
            yield climb, self._up[at[climb]], fall, self._down[to[fall]]
            at[climb], to[fall] = self._parent[at[climb]], self._parent[to[fall]]

    def distance(self, source: Indices, destination: Indices) -> Indices:
        """Return what the cheapest path of each flow costs; 2^30 or more where there is none."""
        at, to, total = source.copy(), destination.copy(), np.zeros(len(source), dtype=np.int64)
        for climb, up, fall, down in self._to_the_core(at, to):
            total[climb] += self._cost[up]
            total[fall] += self._cost[down]
        apart = np.flatnonzero(at != to)
        here, there = self._core_of[at[apart]], self._core_of[to[apart]]
        self._learn(np.unique(there))
        total[apart] += self._distances[self._slot[there], here]
        return total

    def _walk(
        self, source: Indices, destination: Indices, at: Indices, to: Indices, seed: int
    ) -> list[tuple[Indices, Indices]]:
        """Cross the core: of each hop the flows that make it and the links that they take."""
        flows = np.flatnonzero(at != to)
        if not len(flows):
            return []
        here, there = self._core_of[at[flows]], self._core_of[to[flows]]
        self._learn(np.unique(there))
        rows = self._slot[there]
        lost = np.flatnonzero(self._distances[rows, here] >= _FAR)
        if len(lost):
            raise NoPathError(int(source[flows[lost[0]]]), int(destination[flows[lost[0]]]))
        words = np.uint64(seed & (2**64 - 1)) + np.uint64(0x9E3779B97F4A7C15)
        key = mix(mix(source[flows].astype(np.uint64) + words) ^ destination[flows].astype(np.uint64))
        hops = []
        while len(flows):
            link = np.empty(len(flows), dtype=np.int64)
            degrees = self._out_start[here + 1] - self._out_start[here]
            begin = 0
            for end in _cuts(degrees):
                link[begin:end] = self._step(here[begin:end], rows[begin:end], there[begin:end], key[begin:end])
                begin = end
            hops.append((flows, link))
            here = self._core_of[self._head[link]]
            onward = np.flatnonzero(here != there)
            flows, here, there, rows, key = flows[onward], here[onward], there[onward], rows[onward], key[onward]
        return hops

    def _step(self, here: Indices, rows: Indices, there: Indices, key: NDArray[np.uint64]) -> Indices:
        start = self._out_start[here]
        owner, position = ragged(start, self._out_start[here + 1] - start)
        link = self._out[position]
        nxt = self._core_of[self._head[link]]
        passes = self._forwards[self._head[link]] | (nxt == there[owner])
        nearer = self._distances[rows[owner], nxt] + self._cost[link] == self._distances[rows[owner], here[owner]]
        good = np.flatnonzero(passes & nearer)
        counts = np.bincount(owner[good], minlength=len(here))
        first = np.cumsum(counts) - counts
        if not self._ecmp:
            return np.asarray(link[good[first]])
        # The node belongs to the hash, else every switch on the way would decide alike (polarisation).
        choice = mix(key ^ mix(self._core[here].astype(np.uint64))) % counts.astype(np.uint64)
        return np.asarray(link[good[first + choice.astype(np.int64)]])

    def _learn(self, wanted: Indices) -> None:
        """Work out the distances to these destinations of the core, if not yet known."""
        new = wanted[self._slot[wanted] < 0]
        if not len(new):
            return
        size = max(1, _BATCH // max(1, len(self._in)))
        blocks = [self._search(new[begin : begin + size]) for begin in range(0, len(new), size)]
        self._slot[new] = len(self._distances) + np.arange(len(new))
        self._distances = np.concatenate([self._distances, *blocks])

    def _search(self, targets: Indices) -> NDArray[np.int32]:
        """Return the cost from every node of the core to each target: Dial's buckets, all targets at once."""
        width = len(self._core)
        distance = np.full(len(targets) * width, _FAR, dtype=np.int32)
        start = np.arange(len(targets)) * width + targets
        distance[start] = 0
        buckets: dict[int, list[Indices]] = {0: [start]}
        while buckets:
            level = min(buckets)
            reached = np.unique(np.concatenate(buckets.pop(level)))
            reached = reached[distance[reached] == level]
            row, node = reached // width, reached % width
            expand = (level == 0) | self._forwards[self._core[node]]
            row, node = row[expand], node[expand]
            owner, position = ragged(self._in_start[node], self._in_start[node + 1] - self._in_start[node])
            link = self._in[position]
            seen = row[owner] * width + self._core_of[self._tail[link]]
            reach = level + self._cost[link]
            for far in np.unique(reach).tolist():
                cells = seen[(reach == far) & (distance[seen] > far)]
                if len(cells):
                    distance[cells] = far
                    buckets.setdefault(far, []).append(cells)
        return distance.reshape(len(targets), width)


class NoPathError(ClusterError):
    """Two nodes that no path joins, by index; `Cluster` turns it into an error with their names."""

    def __init__(self, source: int, destination: int) -> None:
        super().__init__(f"no path leads from node {source} to node {destination}")
        self.source = source
        self.destination = destination


def _cuts(degrees: Indices) -> list[int]:
    """Return where to cut a list of flows so that no piece looks at more than a batch of links."""
    total = np.cumsum(degrees)
    if not len(total) or total[-1] <= _BATCH:
        return [len(degrees)]
    marks = np.searchsorted(total, np.arange(_BATCH, int(total[-1]), _BATCH), side="right")
    return [*(int(mark) for mark in np.unique(marks) if 0 < mark < len(degrees)), len(degrees)]
