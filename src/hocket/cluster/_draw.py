"""Clusters drawn: as text for the terminal, and as SVG."""

from collections import Counter
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from hocket.units import format_rate, format_time

from ._cluster import KINDS, Cluster

Indices = NDArray[np.int64]

_SHOWN = 24  # nodes whose links the text lists one by one
_PLURALS = {
    "memory": "memories",
    "switch": "switches",
    "pcie": "PCIe switches",
    "nvswitch": "NVSwitches",
    "nic": "NICs",
}


def describe(cluster: Cluster) -> str:
    """Return the cluster as text: what it holds, its classes of links, what reduces, each switch's neighbours."""
    counts = Counter(cluster.kinds)
    parts = [f"{counts[kind]} {_noun(kind, counts[kind])}" for kind in KINDS if counts[kind]]
    lines = [
        f"{cluster.name}: {cluster.world} ranks; {', '.join(parts)}; {len(cluster.link_tail)} directed links",
        f"routing: {cluster.routing}" + (f", and {len(cluster.tables)} given routes" if cluster.tables else ""),
        "",
        *_link_classes(cluster),
    ]
    if cluster.reductions:
        lines += ["", *_reductions(cluster)]
    if cluster.reached:
        told = ", ".join(
            f"{name} {value if isinstance(value, str) else format(value, '.6g')}"
            for name, value in cluster.reached.items()
        )
        lines += ["", f"reached by trainings: {told}"]
    lines += ["", *_neighbours(cluster)]
    return "\n".join(lines)


def _noun(kind: str, count: int) -> str:
    return (
        kind.replace("pcie", "PCIe switch").replace("nvswitch", "NVSwitch").replace("nic", "NIC")
        if count == 1
        else (_PLURALS.get(kind, f"{kind}s"))
    )


def _link_classes(cluster: Cluster) -> list[str]:
    classes: Counter[tuple[str, str, float, float]] = Counter()
    columns = (cluster.link_tail, cluster.link_head, cluster.capacity_Bps, cluster.latency_s)
    for tail, head, rate, latency in zip(*(column.tolist() for column in columns), strict=True):
        classes[cluster.kinds[tail], cluster.kinds[head], rate, latency] += 1
    rows = [
        (f"{tail} -> {head}", str(count), format_rate(rate), format_time(latency))
        for (tail, head, rate, latency), count in sorted(classes.items())
    ]
    head = ("links", "number", "bandwidth", "latency")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(4)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def _reductions(cluster: Cluster) -> list[str]:
    kinds = Counter(cluster.reductions.values())
    lines = []
    for able, count in kinds.items():
        modes = []
        if able.low_latency:
            modes.append(f"low-latency trees, {able.outstanding} operations of {able.payload} B outstanding")
        if able.streaming:
            modes.append(f"streaming at {able.efficiency:.0%} of a link")
        lines.append(f"{count} switches reduce: {'; '.join(modes)}; up to {able.groups} groups")
    return lines


def _neighbours(cluster: Cluster) -> list[str]:
    """Return every node that passes things on, with what it is linked to; runs of names are drawn together."""
    order = np.argsort(cluster.link_tail, kind="stable")
    start = np.searchsorted(cluster.link_tail[order], np.arange(len(cluster) + 1))
    centres = np.flatnonzero(cluster.forwards).tolist()
    lines = []
    for node in centres[:_SHOWN]:
        heads = cluster.link_head[order[start[node] : start[node + 1]]].tolist()
        lines.append(f"{cluster.node_names[node]}: {_runs([cluster.node_names[head] for head in heads])}")
    if len(centres) > _SHOWN:
        lines.append(f"... and {len(centres) - _SHOWN} more; --json has them all")
    return lines


def _runs(names: list[str]) -> str:
    """Return the names one after the other; those that count up are written "host0..host7"."""
    parts: list[list[str]] = []
    for name in names:
        if parts and _next(parts[-1][-1]) == name:
            parts[-1].append(name)
        else:
            parts.append([name])
    return ", ".join(part[0] if len(part) == 1 else f"{part[0]}..{part[-1]}" for part in parts)


def _next(name: str) -> str:
    """Return the name that counts one further; empty if it does not end in a number."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    return f"{stem}{int(digits) + 1}" if digits else ""


_COLOURS = {
    "device": "#2a9d8f",
    "host": "#2a9d8f",
    "memory": "#8ab17d",
    "cpu": "#8ab17d",
    "pcie": "#e9c46a",
    "nvswitch": "#f4a261",
    "nic": "#457b9d",
    "switch": "#e76f51",
}
_ROW, _LEAST, _WIDTH, _BOW = 90, 6, 1200, 90


def draw_svg(cluster: Cluster) -> str:
    """Return the cluster as SVG: ranks at the bottom, every other node above what it is nearest to.

    Lines are as thick as their links are wide; every node has its name and links as a title, which browsers show.
    """
    levels = _levels(cluster)
    rows = [np.flatnonzero(levels == level) for level in range(int(levels.max()) + 1)]
    place, height = _places(cluster, rows)
    widest = float(cluster.capacity_Bps.max()) if len(cluster.capacity_Bps) else 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11"><title>{escape(cluster.name)}</title><rect width="100%" height="100%" fill="white"/>'
    ]
    drawn: set[tuple[int, int]] = set()
    for link, (tail, head) in enumerate(zip(cluster.link_tail.tolist(), cluster.link_head.tolist(), strict=True)):
        if (head, tail) in drawn or (tail, head) in drawn:
            continue
        drawn.add((tail, head))
        rate, latency = float(cluster.capacity_Bps[link]), float(cluster.latency_s[link])
        (x1, y1), (x2, y2) = place[tail], place[head]
        title = f"{cluster.link_names[link]}: {format_rate(rate)}, {format_time(latency)}"
        # Nodes of one level are joined by a bow over those between them, the higher the further they are apart.
        top = y1 - 2 * min(_BOW, 14 + 0.12 * abs(x2 - x1))
        way = f"Q {(x1 + x2) / 2:.1f} {top:.1f}" if y1 == y2 else "L"
        parts.append(
            f'<path d="M {x1:.1f} {y1:.1f} {way} {x2:.1f} {y2:.1f}" fill="none" stroke="#888" stroke-opacity="0.7" '
            f'stroke-width="{0.5 + 1.5 * rate / widest:.2f}"><title>{escape(title)}</title></path>'
        )
    for row in rows:
        size = max(_LEAST, min(26.0, 0.7 * _WIDTH / (len(row) + 1)))
        for node in row.tolist():
            x, y = place[node]
            name = escape(cluster.node_names[node])
            ring = ' stroke="black" stroke-width="2"' if node in cluster.reductions else ""
            parts.append(
                f'<rect x="{x - size / 2:.1f}" y="{y - 9:.1f}" width="{size:.1f}" height="18" rx="3" '
                f'fill="{_COLOURS[cluster.kinds[node]]}"{ring}><title>{name} ({cluster.kinds[node]})</title></rect>'
            )
            if len(row) <= 20:
                below = 22
                parts.append(f'<text x="{x:.1f}" y="{y + below:.1f}" text-anchor="middle">{name}</text>')
    parts.append("</svg>\n")
    return "\n".join(parts)


def _levels(cluster: Cluster) -> Indices:
    """Return how many links every node is from the nearest rank; hosts and devices are at the bottom in any case."""
    level = np.full(len(cluster), -1, dtype=np.int64)
    level[cluster.ranks] = 0
    reach = 0
    while True:
        near = np.zeros(len(cluster), dtype=bool)
        near[cluster.link_head[level[cluster.link_tail] == reach]] = True
        near &= level < 0
        if not near.any():
            break
        reach += 1
        level[near] = reach
    level[level < 0] = 0
    return level


def _places(cluster: Cluster, rows: list[Indices]) -> tuple[dict[int, tuple[float, float]], float]:
    """Return each node's place, in order on its level by the mean place of what it stands on, and the full height.

    Levels within which nodes are joined leave space for the bows above them.
    """
    level_of = np.empty(len(cluster), dtype=np.int64)
    for level, row in enumerate(rows):
        level_of[row] = level
    joined = set(level_of[cluster.link_tail[level_of[cluster.link_tail] == level_of[cluster.link_head]]].tolist())
    heights = [_ROW * 0.5 + _BOW * (level in joined) for level in range(len(rows))]
    height = sum(heights) + _ROW * 0.5 * len(rows) + 10
    place: dict[int, tuple[float, float]] = {}
    order_by_tail = np.argsort(cluster.link_tail, kind="stable")
    start = np.searchsorted(cluster.link_tail[order_by_tail], np.arange(len(cluster) + 1))
    heads = cluster.link_head[order_by_tail]
    y = height - 10
    for level, row in enumerate(rows):
        weight = {}
        y -= _ROW * 0.5
        for node in row.tolist():
            near = heads[start[node] : start[node + 1]].tolist() if level else []
            below = [place[head][0] for head in near if head in place]
            weight[node] = sum(below) / len(below) if below else 0.0
        order = sorted(row.tolist(), key=lambda node: (weight[node], node))
        for position, node in enumerate(order):
            x = _WIDTH * (position + 0.5) / len(order)
            place[node] = (x, y)
        y -= heights[level]
    return place, height
