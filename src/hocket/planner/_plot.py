"""Curves as a picture: throughput by workers, both axes logarithmic, the ideal dashed. A function of data."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from ._curve import Curve

_COLOURS = ("#2a9d8f", "#e76f51", "#457b9d", "#e9c46a", "#8d5a97", "#333333")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 760, 420, 80, 50, 40, 200


def curves_svg(curves: Sequence[Curve], *, title: str, unit: str = "samples") -> str:
    """Draw curves as SVG.

    Args:
        curves: At least one, with at least one point.
        title: Above the picture.
        unit: Of the vertical axis, per second.
    """
    first = curves[0].points[0]
    ends = sorted({point.workers for curve in curves for point in curve.points})
    ideal = [(count, first.throughput / first.efficiency / first.workers * count) for count in (ends[0], ends[-1])]
    rates = [point.throughput for curve in curves for point in curve.points] + [rate for _, rate in ideal]
    x0, x1 = math.log2(ends[0]) - 0.1, math.log2(ends[-1]) + 0.1
    y0, y1 = math.log10(min(rates)) - 0.05, math.log10(max(rates)) + 0.05

    def place(workers: float, rate: float) -> tuple[float, float]:
        across = (math.log2(workers) - x0) / (x1 - x0)
        up = (math.log10(rate) - y0) / (y1 - y0)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return " L ".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in points))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">workers</text>',
        f'<text x="16" y="{_HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 16 {_HEIGHT / 2})">'
        f"{escape(unit)} per second</text>",
    ]
    for count in ends:
        x, _ = place(count, 10**y0)
        parts.append(f'<path d="M {x:.1f} {_TOP} V {_HEIGHT - _BOTTOM}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{count}</text>')
    for exponent in range(math.ceil(y0), math.floor(y1) + 1):
        _, y = place(ends[0], 10**exponent)
        parts.append(f'<path d="M {_LEFT} {y:.1f} H {_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10**exponent:,}</text>')
    parts.append(f'<path d="M {path(ideal)}" fill="none" stroke="#999" stroke-dasharray="5 4"/>')
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [(point.workers, point.throughput) for point in curve.points]
        parts.append(f'<path d="M {path(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in (place(*point) for point in points):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        y = _TOP + 18 * number + 10
        parts.append(f'<path d="M {_WIDTH - _RIGHT + 12} {y} h 24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 42}" y="{y + 4}">{escape(curve.name)}</text>')
    return "\n".join([*parts, "</svg>\n"])
