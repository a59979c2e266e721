"""What builders write while they lay out a cluster, before it is frozen."""

import itertools
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from ._cluster import _ENDPOINTS, FORMAT_RATES, KINDS, Cluster, Reduction
from ._errors import ClusterError

_MOST_LINKS = 1 << 23  # of a fat tree of half a million hosts there are three million


class GraphBuilder:
    """Nodes and links in the order in which they are added; `freeze` makes the `Cluster`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kinds: list[str] = []
        self.hosts: list[int] = []
        self.host_names: list[str] = []
        self.ranks: list[int] = []
        self.forwards: list[bool] = []
        self.rates: dict[str, list[float]] = {name: [] for name in ("flops", *FORMAT_RATES)}
        self.memory: list[float] = []
        self.sizes: list[int] = []
        self.links: list[tuple[int, int, float, float, int]] = []
        self.reductions: dict[int, Reduction] = {}
        self._known: dict[str, int] = {}
        self._host_index: dict[str, int] = {}

    def host(self, name: str) -> int:
        """Return the index of the host of this name, which is made if it is new."""
        if name not in self._host_index:
            self._host_index[name] = len(self.host_names)
            self.host_names.append(name)
        return self._host_index[name]

    def node(
        self,
        name: str,
        kind: str,
        *,
        host: str | None = None,
        forwards: bool | None = None,
        reduction: Reduction | None = None,
        memory_Bps: float = 0.0,
        memory_nbytes: int = 0,
        path: str = "",
        rates: Mapping[str, float] = MappingProxyType({}),
    ) -> int:
        """Add a node; its index. Raises ClusterError if the kind is unknown or the name is taken."""
        if kind not in KINDS:
            raise ClusterError(f"{kind!r} is no kind of node; known are {', '.join(KINDS)}", path=f"{path}.kind")
        if name in self._known:
            raise ClusterError(f"{name!r} is taken by an earlier node; names are given once", path=f"{path}.name")
        self._known[name] = index = len(self.names)
        self.names.append(name)
        self.kinds.append(kind)
        self.hosts.append(self.host(host) if host is not None else -1)
        self.forwards.append(kind not in _ENDPOINTS if forwards is None else forwards)
        for rate, column in self.rates.items():
            column.append(rates.get(rate, 0.0))
        self.memory.append(memory_Bps)
        self.sizes.append(memory_nbytes)
        if reduction is not None:
            self.reductions[index] = reduction
        return index

    def add(self, part: "GraphBuilder", name: str) -> int:
        """Add what a host consists of, laid out as `part`, whose names go on behind the host's; its first index."""
        first = len(self.names)
        self.names += [name + rest for rest in part.names]
        self._known.update(zip(self.names[first:], itertools.count(first)))
        self.hosts += [self.host(name)] * len(part.names)
        self.kinds += part.kinds
        self.forwards += part.forwards
        self.memory += part.memory
        self.sizes += part.sizes
        for rate, column in self.rates.items():
            column += part.rates[rate]
        self.ranks += [first + rank for rank in part.ranks]
        self.reductions.update((first + node, does) for node, does in part.reductions.items())
        self.links += [(first + a, first + b, rate, latency, cost) for a, b, rate, latency, cost in part.links]
        return first

    def find(self, name: str, path: str) -> int:
        """Return the index of a node that a document names. Raises ClusterError if it has not been added."""
        if name not in self._known:
            raise ClusterError(f"there is no node {name!r}; add it to `nodes`", path=path)
        return self._known[name]

    def link(self, a: int, b: int, rate_Bps: float, latency_s: float, cost: int = 1) -> None:
        """Add a cable: one directed link each way, the one from `a` to `b` first."""
        self.one_way(a, b, rate_Bps, latency_s, cost)
        self.one_way(b, a, rate_Bps, latency_s, cost)

    def one_way(self, a: int, b: int, rate_Bps: float, latency_s: float, cost: int = 1) -> None:
        """Add one directed link. Raises ClusterError if there are too many."""
        if len(self.links) >= _MOST_LINKS:
            raise ClusterError(f"the network has more than the {_MOST_LINKS} links that fit in memory")
        self.links.append((a, b, rate_Bps, latency_s, cost))

    def freeze(
        self,
        name: str,
        routing: str,
        *,
        tables: Mapping[tuple[int, int], tuple[int, ...]] | None = None,
        reached: Mapping[str, float | str] | None = None,
        recipe: Mapping[str, object] | None = None,
    ) -> Cluster:
        """Return the cluster that has been laid out."""
        tail, head, rate_Bps, latency_s, cost = np.array(self.links, dtype=np.float64).reshape(-1, 5).T.copy()
        return Cluster(
            name=name,
            node_names=tuple(self.names),
            kinds=tuple(self.kinds),
            hosts=np.array(self.hosts, dtype=np.int64),
            host_names=tuple(self.host_names),
            ranks=np.array(self.ranks, dtype=np.int64),
            link_tail=tail.astype(np.int64),
            link_head=head.astype(np.int64),
            capacity_Bps=rate_Bps,
            latency_s=latency_s,
            link_cost=cost.astype(np.int64),
            forwards=np.array(self.forwards, dtype=bool),
            reductions=dict(self.reductions),
            routing=routing,
            tables=dict(tables or {}),
            **{rate: np.array(column, dtype=np.float64) for rate, column in self.rates.items()},
            memory_Bps=np.array(self.memory, dtype=np.float64),
            memory_nbytes=np.array(self.sizes, dtype=np.int64),
            reached=dict(reached or {}),
            recipe=recipe,
        )
