"""Networks with parameters: star, leaf-spine, fat tree, BiGraph, Dragonfly+, torus, rails."""

from itertools import product
from math import ceil, prod
from typing import Any, Literal

from pydantic import Field, model_validator

from ._fields import Count, Ratio, Seconds
from ._graph_builder import GraphBuilder
from ._servers import PlainHost
from ._topology import Topology


class Single(Topology):
    """One server alone."""

    topology: Literal["single"] = "single"

    def lay_out(self, layout: GraphBuilder) -> None:
        """Add the server; its NICs lead nowhere."""
        self.server.place(layout, "host0")


class Star(Topology):
    """Servers around one switch."""

    topology: Literal["star"] = "star"
    hosts: Count = Field(ge=1)

    def lay_out(self, layout: GraphBuilder) -> None:
        """Add the switch and the servers."""
        centre = self.switch(layout, "switch0")
        self.fill(layout, [centre] * (self.hosts * self.server.ports))


class LeafSpine(Topology):
    """Leaf switches with ports, each joined to every spine; `taper` says how many times fewer spines (rounded up)."""

    topology: Literal["leafspine"] = "leafspine"
    leaves: Count = Field(ge=1)
    ports: Count = Field(ge=1)
    spines: Count | None = Field(default=None, ge=1)
    taper: Ratio = Field(default=1.0, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> "LeafSpine":
        self.whole_servers(self.ports)
        if self.spines is not None and self.taper != 1:
            raise ValueError("`spines` and `taper` both say how many spines there are; give one of them")
        if self.taper > self.ports:
            rule = f"`taper` {self.taper:g} of {self.ports} ports leaves less than one spine"
            raise ValueError(f"{rule}; give {self.ports} at most, or a file with links that are slower upwards")
        return self

    def lay_out(self, layout: GraphBuilder) -> None:
        """Add leaves, spines and servers, leaf by leaf."""
        spines = self.spines or ceil(self.ports / self.taper)
        leaves = [self.switch(layout, f"leaf{index}") for index in range(self.leaves)]
        tops = [self.switch(layout, f"spine{index}") for index in range(spines)]
        for leaf, top in product(leaves, tops):
            layout.link(leaf, top, self.bandwidth, self.latency)
        self.fill(layout, [leaf for leaf in leaves for _ in range(self.ports)])


class FatTree(Topology):
    """The k-ary fat tree of Al-Fares et al. (SIGCOMM 2008): k pods of k/2 edge and k/2 aggregation switches.

    Every edge switch has k/2 ports; `taper` divides the bandwidth of the links above the edge switches.
    """

    topology: Literal["fattree"] = "fattree"
    k: Count = Field(ge=2, multiple_of=2)
    taper: Ratio = Field(default=1.0, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> "FatTree":
        self.whole_servers(self.k // 2)
        return self

    def lay_out(self, layout: GraphBuilder) -> None:
        """Add pods, then cores, then servers, edge by edge."""
        half = self.k // 2
        upward = self.bandwidth / self.taper
        edges: list[int] = []
        aggregations: list[list[int]] = []
        for pod in range(self.k):
            lower = [self.switch(layout, f"pod{pod}.edge{index}") for index in range(half)]
            upper = [self.switch(layout, f"pod{pod}.aggregation{index}") for index in range(half)]
            for a, b in product(lower, upper):
                layout.link(a, b, upward, self.latency)
            edges += lower
            aggregations.append(upper)
        for index, offset in product(range(half), range(half)):
            core = self.switch(layout, f"core{index * half + offset}")
            for upper in aggregations:
                layout.link(upper[index], core, upward, self.latency)
        self.fill(layout, [edge for edge in edges for _ in range(half)])


class BiGraph(Topology):
    """EFLOPS's network: as many upper as lower switches, every upper joined to every lower, ports at both.

    Ports, and so ranks, are in the order: upper switch 0 with its slots, the other upper ones, the lower ones likewise.
    A `trunk` of t cables between two switches acts as one link of t times the bandwidth, loads evened out.
    Source: EFLOPS (HPCA 2020), abstract and public notes.
    """

    topology: Literal["bigraph"] = "bigraph"
    upper: Count = Field(ge=1)
    ports: Count = Field(ge=1)
    trunk: Count = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> "BiGraph":
        self.whole_servers(self.ports)
        return self

    def lay_out(self, layout: GraphBuilder) -> None:
        """Add both parts, the links between them, and the servers."""
        uppers = [self.switch(layout, f"upper{index}") for index in range(self.upper)]
        lowers = [self.switch(layout, f"lower{index}") for index in range(self.upper)]
        for a, b in product(uppers, lowers):
            layout.link(a, b, self.trunk * self.bandwidth, self.latency)
        self.fill(layout, [switch for switch in uppers + lowers for _ in range(self.ports)])


class DragonflyPlus(Topology):
    """Groups that are leaf-spines inside; spines of different groups are joined (Shpiner et al., HiPINEB 2017).

    Each spine has `globals` cables to other groups, dealt so that every pair of groups has as many. Minimal routes.
    """

    topology: Literal["dragonfly+"] = "dragonfly+"
    groups: Count = Field(ge=2)
    leaves: Count = Field(ge=1)
    spines: Count = Field(ge=1)
    ports: Count = Field(ge=1)
    globals: Count = Field(ge=1)
    hosts: Count | None = Field(default=None, ge=1)  # fewer than there are ports for
    global_latency: Seconds | None = None

    @model_validator(mode="after")
    def _fits(self) -> "DragonflyPlus":
        self.whole_servers(self.ports)
        if self.spines * self.globals % (self.groups - 1):
            raise ValueError(
                f"{self.spines} spines with {self.globals} global cables each do not reach {self.groups - 1} other "
                f"groups evenly; make spines * globals a multiple of {self.groups - 1}"
            )
        capacity = self.groups * self.leaves * self.ports // self.server.ports
        if self.hosts is not None and self.hosts > capacity:
            raise ValueError(f"{self.hosts} hosts do not fit: there are ports for {capacity}")
        return self

    def lay_out(self, layout: GraphBuilder) -> None:
        """Add the groups, then the global cables, then the servers, leaf by leaf."""
        leaves: list[int] = []
        spines: list[list[int]] = []
        for group in range(self.groups):
            lower = [self.switch(layout, f"group{group}.leaf{index}") for index in range(self.leaves)]
            upper = [self.switch(layout, f"group{group}.spine{index}") for index in range(self.spines)]
            for a, b in product(lower, upper):
                layout.link(a, b, self.bandwidth, self.latency)
            leaves += lower
            spines.append(upper)
        others = self.groups - 1
        latency = self.latency if self.global_latency is None else self.global_latency
        for a in range(self.groups):
            for b in range(a + 1, self.groups):
                for turn in range(self.spines * self.globals // others):
                    # Global port q of a group leads to the group (q mod others) + 1 further on.
                    here = (turn * others + (b - a - 1)) // self.globals
                    there = (turn * others + (a - b - 1) % self.groups) // self.globals
                    layout.link(spines[a][here], spines[b][there], self.bandwidth, latency)
        self.fill(layout, [leaf for leaf in leaves for _ in range(self.ports)], servers=self.hosts)


class Torus(Topology):
    """Hosts in a grid of two or three dimensions that wraps around; they forward, dimension by dimension.

    Rank order is row-major: the last dimension runs fastest. A dimension of two has one cable between the two.
    """

    topology: Literal["torus"] = "torus"
    routing: Literal["shortest", "ecmp"] = "shortest"
    dims: tuple[Count, ...] = Field(min_length=1, max_length=3)

    @model_validator(mode="before")
    @classmethod
    def _dims_by_text(cls, values: Any) -> Any:
        """`dims = "4x4"`, as it is written on a command line."""
        if isinstance(values, dict) and isinstance(values.get("dims"), str):
            try:
                values = {**values, "dims": tuple(int(part) for part in values["dims"].split("x"))}
            except ValueError:
                raise ValueError(f"dims {values['dims']!r} are no sizes; write 4x4 or 4x4x2") from None
        return values

    @model_validator(mode="after")
    def _fits(self) -> "Torus":
        if any(size < 1 for size in self.dims):
            raise ValueError(f"dims {self.dims} hold a size below 1")
        if self.server.kind != "host" or self.server.ranks != 1:
            raise ValueError("the hosts of a torus are its switches too; `server` must be a plain host with one rank")
        return self

    def lay_out(self, layout: GraphBuilder) -> None:
        """Add the hosts, then the cables of one dimension after the other: routes prefer the first dimensions."""
        server = self.server
        assert isinstance(server, PlainHost)
        capability = self.reduction.capability() if self.reduction else None
        for index in range(prod(self.dims)):
            node = layout.node(
                f"host{index}",
                "host",
                host=f"host{index}",
                forwards=True,
                memory_Bps=server.memory_bandwidth,
                memory_nbytes=server.memory or 0,
                reduction=capability,
                rates=server.rates(),
            )
            layout.ranks.append(node)
        for dim, size in enumerate(self.dims):
            stride = prod(self.dims[dim + 1 :])
            for index in range(prod(self.dims)):
                place = index // stride % size
                if size > 2 or (size == 2 and place == 0):
                    onward = index + ((place + 1) % size - place) * stride
                    layout.link(index, onward, self.bandwidth, self.latency)


class Rails(Topology):
    """Servers with several NICs, NIC j of each at rail switch j; `spines` join the rails, if there are any."""

    topology: Literal["rails"] = "rails"
    hosts: Count = Field(ge=1)
    spines: Count = Field(default=0, ge=0)

    def lay_out(self, layout: GraphBuilder) -> None:
        """Add the rails, the spines and the servers."""
        rails = [self.switch(layout, f"rail{index}") for index in range(self.server.ports)]
        tops = [self.switch(layout, f"spine{index}") for index in range(self.spines)]
        for rail, top in product(rails, tops):
            # All spines together carry what one rail's hosts send.
            layout.link(rail, top, self.bandwidth * self.hosts / self.spines, self.latency)
        self.fill(layout, rails * self.hosts)


TOPOLOGIES: dict[str, type[Topology]] = {
    "single": Single,
    "star": Star,
    "leafspine": LeafSpine,
    "fattree": FatTree,
    "bigraph": BiGraph,
    "dragonfly+": DragonflyPlus,
    "torus": Torus,
    "rails": Rails,
}
