"""Clusters as text: TOML documents, in a builder's form or node by node, and specs for the command line."""

import itertools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hocket.units import format_bytes, format_flops, format_rate, format_time

from ._cluster import _ENDPOINTS, FORMAT_RATES, Cluster
from ._errors import ClusterError
from ._fields import Bytes, Count, Rate, RatesTable, Reached, ReductionField, ReductionTable, Seconds, TomlTable, check
from ._graph_builder import GraphBuilder
from ._topologies import TOPOLOGIES


class _Node(RatesTable):
    name: str = Field(min_length=1)
    kind: str = "host"
    host: str | None = None
    rank: bool | None = None  # whether a rank runs here; if no node says true, on devices and hosts without any
    forwards: bool | None = None
    reduction: ReductionField = None
    memory_bandwidth: Rate | None = None
    memory: Bytes | None = None


class _Link(TomlTable):
    ends: tuple[str, str]
    bandwidth: Rate
    latency: Seconds = 0.0
    back_bandwidth: Rate | None = None
    back_latency: Seconds | None = None
    one_way: bool = False
    cost: Count = Field(default=1, ge=1)


class _RouteTable(TomlTable):
    path: tuple[str, ...] = Field(min_length=2)
    both_ways: bool = False


class _Explicit(TomlTable):
    name: str = Field(default="cluster", min_length=1)
    about: str = ""
    routing: Literal["shortest", "ecmp"] = "shortest"
    ranks: tuple[str, ...] | None = None
    nodes: tuple[_Node, ...] = Field(min_length=1)
    links: tuple[_Link, ...] = ()
    routes: tuple[_RouteTable, ...] = ()
    reached: Reached = Field(default_factory=dict)


def build(values: Mapping[str, Any]) -> Cluster:
    """Return the cluster that a document, read already, describes.

    Args:
        values: A builder's parameters with `topology`; otherwise `nodes`, `links` and `routes`.

    Raises:
        ClusterError: naming the place in the document, the value found, and the remedy.
    """
    if not values.keys() & {"topology", "nodes"}:
        found = f"it has {', '.join(map(repr, values))}" if values else "it is empty"
        raise ClusterError(
            f"no cluster is described: {found}; say topology (of {', '.join(TOPOLOGIES)}), or nodes and links"
        )
    if "topology" not in values:
        return _build_explicit(check(_Explicit, values))
    topology = values["topology"]
    if not isinstance(topology, str) or topology not in TOPOLOGIES:
        raise ClusterError(f"{topology!r} is unknown; known are {', '.join(TOPOLOGIES)}", path="topology")
    return check(TOPOLOGIES[topology], values).build()


def _build_explicit(form: _Explicit) -> Cluster:
    layout = GraphBuilder()
    for index, node in enumerate(form.nodes):
        host = node.name if node.host is None and node.kind == "host" else node.host
        layout.node(
            node.name,
            node.kind,
            host=host,
            forwards=node.forwards,
            reduction=node.reduction.capability() if node.reduction else None,
            memory_Bps=node.memory_bandwidth or 0.0,
            memory_nbytes=node.memory or 0,
            path=f"nodes[{index}]",
            rates=node.rates(),
        )
    layout.ranks = _ranks(form, layout)
    for index, link in enumerate(form.links):
        a, b = (layout.find(end, f"links[{index}].ends[{side}]") for side, end in enumerate(link.ends))
        if a == b:
            raise ClusterError(f"{link.ends[0]!r} is linked to itself; name two nodes", path=f"links[{index}].ends")
        layout.one_way(a, b, link.bandwidth, link.latency, link.cost)
        if not link.one_way:
            latency = link.latency if link.back_latency is None else link.back_latency
            layout.one_way(b, a, link.back_bandwidth or link.bandwidth, latency, link.cost)
    tables = _tables(form, layout)
    # Ranks must be reached; a host whose devices are may stand for them alone.
    linked = {end for link in layout.links for end in link[:2]}
    for rank in layout.ranks if linked else ():
        if rank not in linked:
            rule = f"{layout.names[rank]!r} has no link; add one to `links`, or leave it out"
            raise ClusterError(rule, path=f"nodes[{rank}]")
    return layout.freeze(form.name, form.routing, tables=tables, reached=form.reached)


def _ranks(form: _Explicit, layout: GraphBuilder) -> list[int]:
    if form.ranks is not None:
        found = [layout.find(name, f"ranks[{index}]") for index, name in enumerate(form.ranks)]
        if twice := next((name for index, name in enumerate(form.ranks) if name in form.ranks[:index]), None):
            raise ClusterError(f"{twice!r} stands twice; a node with several ranks is several nodes", path="ranks")
    elif any(node.rank for node in form.nodes):
        found = [index for index, node in enumerate(form.nodes) if node.rank]
    else:
        devices = [index for index, kind in enumerate(layout.kinds) if kind == "device"]
        served = {layout.hosts[index] for index in devices}
        found = sorted(
            devices
            + [index for index, kind in enumerate(layout.kinds) if kind == "host" and layout.hosts[index] not in served]
        )
        found = [index for index in found if form.nodes[index].rank is None]
    if not found:
        raise ClusterError("no node is a device or a host, so no rank runs anywhere; add one", path="nodes")
    return found


def _tables(form: _Explicit, layout: GraphBuilder) -> dict[tuple[int, int], tuple[int, ...]]:
    joined = {(link[0], link[1]): index for index, link in reversed(list(enumerate(layout.links)))}
    tables = {}
    for index, route in enumerate(form.routes):
        nodes = [layout.find(name, f"routes[{index}].path[{hop}]") for hop, name in enumerate(route.path)]
        for way in (nodes, nodes[::-1]) if route.both_ways else (nodes,):
            for hop, pair in enumerate(itertools.pairwise(way)):
                if pair not in joined:
                    a, b = (layout.names[node] for node in pair)
                    raise ClusterError(
                        f"no link leads from {a} to {b}; add it to `links`", path=f"routes[{index}].path[{hop}]"
                    )
            tables[way[0], way[-1]] = tuple(joined[pair] for pair in itertools.pairwise(way))
    for index, route in enumerate(form.routes):
        if len(set(route.path)) < len(route.path):
            raise ClusterError("the path meets a node twice; leave the loop out", path=f"routes[{index}].path")
    return tables


def from_toml(text: str, *, source: str = "") -> Cluster:
    """Return the cluster that a TOML document describes.

    Args:
        text: The document.
        source: Its file's name, for errors.

    Raises:
        ClusterError: naming the place in the document, the value found, and the remedy.
    """
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ClusterError(f"this is no TOML: {error}", path=source) from None
    try:
        return build(values)
    except ClusterError as error:
        if not source:
            raise
        problem = ClusterError(f"{source}: {error}")
        problem.path = error.path
        raise problem from None


def from_spec(spec: str) -> Cluster:
    """Return the cluster of a spec such as `star:hosts=8,bandwidth=100Gbit/s` or `star:hosts=2,server.kind=eflops`.

    Raises:
        ClusterError: naming the parameter, the value found, and the remedy.
    """
    topology, _, rest = spec.partition(":")
    values: dict[str, Any] = {"topology": topology}
    for item in filter(None, rest.split(",")):
        key, equals, text = item.partition("=")
        if not equals:
            raise ClusterError(f"{item!r} is no parameter; write NAME=VALUE, as in star:hosts=8", path=spec)
        *tables, last = key.strip().split(".")
        table = values
        if last in table and not isinstance(table[last], dict) and not tables:
            raise ClusterError(f"{key.strip()!r} is given twice; give it once", path=spec)
        for name in tables:
            inner = table.setdefault(name, {})
            table[name] = inner if isinstance(inner, dict) else {"kind": inner}
            table = table[name]
        value: Any = {"true": True, "false": False}.get(text.strip(), text.strip())
        if isinstance(table.get(last), dict) and isinstance(value, str):
            value = {"kind": value, **table[last]}
        table[last] = value
    return build(values)


def to_toml(cluster: Cluster, *, explicit: bool = False) -> str:
    """Return a document that describes the cluster; reading it gives an equal one.

    Args:
        cluster: What to describe.
        explicit: Write every node and link, also where a builder's few parameters would do.
    """
    if cluster.recipe is not None and not explicit:
        return _write(cluster.recipe)
    lines = [f"name = {_value(cluster.name)}", f"routing = {_value(cluster.routing)}"]
    names = cluster.node_names
    lines.append(f"ranks = {_value([names[node] for node in cluster.ranks.tolist()])}")
    if cluster.reached:
        lines.append(f"reached = {_value(cluster.reached)}")
    for index, name in enumerate(names):
        node: dict[str, object] = {"name": name, "kind": cluster.kinds[index]}
        if cluster.hosts[index] >= 0 and cluster.host_names[cluster.hosts[index]] != (
            name if node["kind"] == "host" else ""
        ):
            node["host"] = cluster.host_names[cluster.hosts[index]]
        if bool(cluster.forwards[index]) == (cluster.kinds[index] in _ENDPOINTS):
            node["forwards"] = bool(cluster.forwards[index])
        if index in cluster.reductions:
            node["reduction"] = ReductionTable.of(cluster.reductions[index]).model_dump()
        for rate in ("flops", *FORMAT_RATES):
            if value := float(getattr(cluster, rate)[index]):
                node[rate] = format_flops(value)
        if cluster.memory_Bps[index]:
            node["memory_bandwidth"] = format_rate(float(cluster.memory_Bps[index]))
        if cluster.memory_nbytes[index]:
            node["memory"] = format_bytes(int(cluster.memory_nbytes[index]))
        lines.append("\n[[nodes]]\n" + _write(node).rstrip())
    lines += [_link_table(cluster, link, pair) for link, pair in _cables(cluster)]
    for path in cluster.tables.values():
        nodes = [names[cluster.link_tail[path[0]]], *(names[cluster.link_head[link]] for link in path)]
        lines.append(f"\n[[routes]]\npath = {_value(nodes)}")
    return "\n".join(lines) + "\n"


def _cables(cluster: Cluster) -> list[tuple[int, bool]]:
    """Return the directed links that start a table, and whether the next one is their way back."""
    tail, head = cluster.link_tail, cluster.link_head
    cables, link = [], 0
    while link < len(tail):
        pair = (
            link + 1 < len(tail)
            and tail[link] == head[link + 1]
            and head[link] == tail[link + 1]
            and cluster.link_cost[link] == cluster.link_cost[link + 1]
        )
        cables.append((link, bool(pair)))
        link += 2 if pair else 1
    return cables


def _link_table(cluster: Cluster, link: int, pair: bool) -> str:
    rate, latency = float(cluster.capacity_Bps[link]), float(cluster.latency_s[link])
    ends = [cluster.node_names[cluster.link_tail[link]], cluster.node_names[cluster.link_head[link]]]
    table: dict[str, object] = {"ends": ends, "bandwidth": format_rate(rate), "latency": format_time(latency)}
    if not pair:
        table["one_way"] = True
    else:
        back = float(cluster.capacity_Bps[link + 1]), float(cluster.latency_s[link + 1])
        if back[0] != rate:
            table["back_bandwidth"] = format_rate(back[0])
        if back[1] != latency:
            table["back_latency"] = format_time(back[1])
    if cluster.link_cost[link] != 1:
        table["cost"] = int(cluster.link_cost[link])
    return "\n[[links]]\n" + _write(table).rstrip()


def _write(table: Mapping[str, object]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        plain = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{plain}"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items() if inner is not None) + " }"
    assert isinstance(value, list | tuple)
    return "[" + ", ".join(_value(inner) for inner in value) + "]"


def read(path: Path) -> Cluster:
    """Return the cluster that a TOML file describes.

    Raises:
        ClusterError: if it cannot be read, or naming the place in it, the value found, and the remedy.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"the file cannot be read: {error}", path=str(path)) from None
    return from_toml(text, source=str(path))
