"""`Cluster`: a directed graph of devices, hosts, NICs, switches and links, with the ways through it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ._errors import ClusterError, NoSuchNodeError
from ._hosts import HostRouter, has_inner_fabrics
from ._routes import NoPathError, Router, Routes

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]

KINDS = ("device", "host", "cpu", "memory", "pcie", "nvswitch", "nic", "switch")
"""What a node can be. `cpu` is a root complex, `memory` joins the ranks of a host that have no device each."""

ROUTINGS = ("shortest", "ecmp")

FORMAT_RATES = ("float8_flops", "float16_flops", "tf32_flops", "float32_flops")
"""Rates of products in formats that have one of their own, beside `flops`; fields of clusters and of documents."""

# Endpoints do not carry what is for others; `forwards` says otherwise where they do (hosts of a torus).
_ENDPOINTS = frozenset({"device", "host"})


@dataclass(frozen=True)
class Reduction:
    """What a switch that reduces can do (SHARP's terms: facts of the vendor's documentation, 2.6 and 3.13).

    Attributes:
        groups: How many groups (communicators on a tree) it serves at a time.
        outstanding: Operations of one group that may be under way, W; a low-latency tree's window.
        payload: Bytes of one operation, P.
        low_latency: Whether it can reduce small messages in the window, operation by operation.
        streaming: Whether it can reduce long messages as they pass.
        efficiency: Share of the link that streaming reaches.
        delay_s: What reducing one operation adds to its way through the switch.
    """

    groups: int = 64
    outstanding: int = 2
    payload: int = 256
    low_latency: bool = True
    streaming: bool = False
    efficiency: float = 0.95
    delay_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices, hosts, switches and the directed links between them.

    Everything is held by index: of nodes, of directed links, of hosts. A cable is two links, which may differ.

    Attributes:
        name: What it is called.
        node_names: Name of every node, each once.
        kinds: Kind of every node, one of `KINDS`.
        hosts: int64, each node's index into `host_names`, or -1 outside of all hosts.
        host_names: Name of every host.
        ranks: int64; the node that rank r runs on is `ranks[r]`. In order of the nodes' indices unless a builder says
            otherwise; a host stands for its device where none is modelled.
        link_tail: int64 per directed link: the node that sends.
        link_head: int64: the node that receives.
        capacity_Bps: float64, bytes per second.
        latency_s: float64, seconds.
        link_cost: int64, 1 or more; routes are of least total cost, then of least index.
        forwards: bool per node: whether it passes on what is for others.
        reductions: What each node that can reduce can do, by node.
        routing: "shortest", or "ecmp": where paths cost the same, a hash of the flow decides.
        tables: Paths that are given explicitly, as links, by (source, destination); they come before `routing`.
        flops: Floating-point operations per second of every node, 0 where unknown or none.
        float8_flops: The same of matrix products in float8, 0 where unknown or none.
        float16_flops: The same in float16, where bfloat16 has another rate.
        tf32_flops: The same in TF32.
        float32_flops: The same in float32 as IEEE has it, 0 where it is `flops` or unknown.
        memory_Bps: Memory bandwidth of every node in bytes per second, 0 where unknown or none.
        memory_nbytes: Memory of every node in bytes, 0 where unknown or none.
        reached: What trainings reach of nominal rates here, by the planner's names of constants; none if unknown.
        recipe: The document that a builder made it from, if one did; `to_toml` writes it.
    """

    name: str
    node_names: tuple[str, ...]
    kinds: tuple[str, ...]
    hosts: Indices
    host_names: tuple[str, ...]
    ranks: Indices
    link_tail: Indices
    link_head: Indices
    capacity_Bps: Floats
    latency_s: Floats
    link_cost: Indices
    forwards: NDArray[np.bool_]
    reductions: Mapping[int, Reduction] = field(default_factory=dict)
    routing: str = "shortest"
    tables: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    flops: Floats = field(default_factory=lambda: np.zeros(0))
    memory_Bps: Floats = field(default_factory=lambda: np.zeros(0))
    memory_nbytes: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    float8_flops: Floats = field(default_factory=lambda: np.zeros(0))
    float16_flops: Floats = field(default_factory=lambda: np.zeros(0))
    tf32_flops: Floats = field(default_factory=lambda: np.zeros(0))
    float32_flops: Floats = field(default_factory=lambda: np.zeros(0))
    reached: Mapping[str, float | str] = field(default_factory=dict)
    recipe: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        for name in ("flops", *FORMAT_RATES, "memory_Bps", "memory_nbytes"):
            given = getattr(self, name)
            if not len(given):
                object.__setattr__(self, name, np.zeros(len(self.node_names), dtype=given.dtype))
        if self.routing not in ROUTINGS:
            raise ClusterError(f"{self.routing!r} is no routing; known are {', '.join(ROUTINGS)}", path="routing")
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    def __len__(self) -> int:
        return len(self.node_names)

    def __eq__(self, other: object) -> bool:
        """Return whether both describe the same graph with the same routes; how it was described does not count."""
        if not isinstance(other, Cluster):
            return NotImplemented
        return all(
            np.array_equal(mine, getattr(other, name)) if isinstance(mine, np.ndarray) else mine == getattr(other, name)
            for name, mine in vars(self).items()
            if name in Cluster.__dataclass_fields__ and name != "recipe"
        )

    __hash__ = None  # type: ignore[assignment]  # arrays inside

    def __repr__(self) -> str:
        return f"<Cluster {self.name}: {len(self.ranks)} ranks, {len(self)} nodes, {len(self.link_tail)} links>"

    @property
    def world(self) -> int:
        """How many ranks it holds."""
        return len(self.ranks)

    @cached_property
    def link_names(self) -> tuple[str, ...]:
        """Of every directed link, as "host0->switch"; parallel ones are numbered from the second, "#1"."""
        seen: dict[tuple[int, int], int] = {}
        names = []
        for pair in zip(self.link_tail.tolist(), self.link_head.tolist(), strict=True):
            again = seen[pair] = seen.get(pair, -1) + 1
            names.append(f"{self.node_names[pair[0]]}->{self.node_names[pair[1]]}" + (f"#{again}" if again else ""))
        return tuple(names)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.node_names)}

    def node(self, name: str) -> int:
        """Return the index of a node.

        Raises:
            NoSuchNodeError: a ClusterError and a KeyError, if there is none of this name.
        """
        try:
            return self._by_name[name]
        except KeyError:
            some = ", ".join(self.node_names[:4])
            raise NoSuchNodeError(f"{self.name} has no node {name!r}; its {len(self)} nodes begin {some}") from None

    @cached_property
    def router(self) -> Router | HostRouter:
        """What finds the paths; its distances are kept for the next question."""
        if has_inner_fabrics(self.hosts, self.forwards, self.link_tail, self.link_head):
            ecmp = self.routing == "ecmp"
            return HostRouter(self.hosts, self.forwards, self.link_tail, self.link_head, self.link_cost, ecmp)
        return Router(self.forwards, self.link_tail, self.link_head, self.link_cost, self.routing == "ecmp")

    @cached_property
    def _table(self) -> tuple[Indices, Indices, Indices]:
        """The explicit paths: sorted keys, and their links in compressed rows."""
        keys = sorted(self.tables)
        packed = np.array([a * len(self) + b for a, b in keys], dtype=np.int64)
        offsets = np.cumsum([0, *(len(self.tables[key]) for key in keys)])
        return packed, offsets, np.array([link for key in keys for link in self.tables[key]], dtype=np.int64)

    def routes(self, source: Indices, destination: Indices, *, seed: int = 0) -> Routes:
        """Return the links that flows take, all at once.

        Args:
            source: int64, the nodes where the flows start.
            destination: int64 of the same length, where they end; a flow to its own node takes no link.
            seed: Seed of the hash by which ECMP spreads flows; other routings ignore it.

        Raises:
            ClusterError: if a node does not exist, or no path joins two.
        """
        source, destination = np.asarray(source, dtype=np.int64), np.asarray(destination, dtype=np.int64)
        if source.shape != destination.shape or source.ndim != 1:
            raise ClusterError(
                f"flows need as many sources as destinations, found {source.shape} and {destination.shape}"
            )
        if len(source) and (
            min(source.min(), destination.min()) < 0 or max(source.max(), destination.max()) >= len(self)
        ):
            raise ClusterError(
                f"a flow names a node outside of 0..{len(self) - 1}; give indices of nodes, not of ranks"
            )
        try:
            found = self.router.routes(source, destination, seed) if not self.tables else None
            return found or self._routes_by_table(source, destination, seed)
        except NoPathError as error:
            a, b = self.node_names[error.source], self.node_names[error.destination]
            raise ClusterError(f"{self.name}: no path leads from {a} to {b}; link them, or give a route") from None

    def _routes_by_table(self, source: Indices, destination: Indices, seed: int) -> Routes:
        keys, offsets, links = self._table
        wanted = source * len(self) + destination
        entry = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        given = keys[entry] == wanted
        # A flow with a path of its own asks the router for the way from its node to itself, which is empty.
        rest = self.router.routes(source, np.where(given, source, destination), seed)
        counts = np.where(given, offsets[entry + 1] - offsets[entry], rest.hops)
        out = Routes(np.concatenate([[0], np.cumsum(counts)]), np.empty(int(counts.sum()), dtype=np.int64))
        for flow in range(len(source)):
            taken = links[offsets[entry[flow]] : offsets[entry[flow] + 1]] if given[flow] else rest[flow]
            out.links[out.offsets[flow] : out.offsets[flow + 1]] = taken
        return out

    def host_of_rank(self, rank: int) -> int:
        """Return the index into `host_names` of the host that a rank runs on, or -1."""
        return int(self.hosts[self.ranks[rank]])

    def ranks_per_host(self) -> int:
        """Return how many ranks each host holds.

        Raises:
            ClusterError: if hosts differ, or ranks stand outside of hosts.
        """
        counts = np.bincount(self.hosts[self.ranks] + 1, minlength=1)
        used = np.unique(counts[1:][counts[1:] > 0])
        if counts[0]:
            rule = 'stand in no host; give the nodes a `host`, or the kind "host"'
            raise ClusterError(f"{self.name}: {counts[0]} of {len(self.ranks)} ranks {rule}")
        if len(used) != 1:
            few, many = (int(np.flatnonzero(counts[1:] == count)[0]) for count in (used[0], used[-1]))
            told = f"{self.host_names[few]} holds {used[0]} and {self.host_names[many]} {used[-1]}"
            rule = "plans want as many ranks on each host; say which in `ranks`"
            raise ClusterError(f"{self.name}: its hosts hold different numbers of ranks: {told}; {rule}")
        return int(used[0])
