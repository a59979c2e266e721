"""What all networks have in common: cables, switches, and servers at their ports.

A topology has ports in an order; servers fill them from the first on, and take as many as they have NICs. Ranks are in
the order of the servers. Every cable has `bandwidth` in each direction and adds `latency`.
"""

from math import prod
from typing import Any, Literal

from pydantic import Field, model_validator

from ._cluster import Cluster
from ._errors import ClusterError
from ._fields import Rate, Reached, ReductionField, Seconds, TomlTable
from ._graph_builder import GraphBuilder
from ._servers import AnyServer, PlainHost

_MOST = 1 << 20  # hosts, leaves, ports, ..


class Topology(TomlTable):
    """A network and what stands at its ports; `build` lays it out."""

    name: str = ""
    about: str = ""
    bandwidth: Rate = 12.5e9
    latency: Seconds = 500e-9
    routing: Literal["shortest", "ecmp"] = "ecmp"
    reduction: ReductionField = None
    server: AnyServer = PlainHost()
    reached: Reached = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _server_by_name(cls, values: Any) -> Any:
        """`server = "eflops"` is a table with that kind; a table without a kind is a plain host's."""
        if isinstance(values, dict) and "server" in values:
            server = values["server"]
            if isinstance(server, str):
                server = {"kind": server}
            elif isinstance(server, dict):
                server = {"kind": "host", **server}
            values = {**values, "server": server}
        return values

    def build(self) -> Cluster:
        """Return the cluster that this describes."""
        layout = GraphBuilder()
        for name, count in self:
            sizes = count if isinstance(count, tuple) else (count,)
            if all(isinstance(one, int) for one in sizes) and prod(sizes) > _MOST:
                raise ClusterError(f"{prod(sizes)} are more than the {_MOST} that fit in memory", path=name)
        self.lay_out(layout)
        recipe = self.model_dump(exclude_defaults=True, exclude_none=True)
        recipe["topology"] = kind = str(self.topology)  # type: ignore[attr-defined]  # every one has it
        if "server" in recipe:
            recipe["server"] = {"kind": self.server.kind, **recipe["server"]}
        return layout.freeze(self.name or kind, self.routing, reached=self.reached, recipe=recipe)

    def lay_out(self, layout: GraphBuilder) -> None:
        """Add all nodes and links."""
        raise NotImplementedError

    def switch(self, layout: GraphBuilder, name: str) -> int:
        """Add a network switch, which reduces if this topology's do."""
        return layout.node(name, "switch", reduction=self.reduction.capability() if self.reduction else None)

    def fill(self, layout: GraphBuilder, switches: list[int], *, servers: int | None = None) -> None:
        """Put servers at ports, given as the switch of each port in order; a part of a server is not put."""
        count = len(switches) // self.server.ports if servers is None else servers
        server = GraphBuilder()
        ports = self.server.place(server, "")
        for index in range(count):
            first = layout.add(server, f"host{index}")
            mine = switches[index * len(ports) : (index + 1) * len(ports)]
            for port, switch in zip(ports, mine, strict=True):
                layout.link(first + port, switch, self.bandwidth, self.latency)

    def whole_servers(self, ports: int) -> None:
        """Refuse a network whose ports a whole number of servers does not fill."""
        if ports % self.server.ports:
            raise ValueError(
                f"{ports} ports at a switch are no multiple of the {self.server.ports} NICs of a server; "
                "choose `ports` so that servers fill them"
            )
