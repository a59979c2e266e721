"""Curves as a picture: throughput by workers on logarithmic axes, and efficiency below it. A function of data.

Bands are the intervals of predictions, diamonds are measurements. Every curve has its own pair of colour and dash.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from xml.sax.saxutils import escape

from ._curve import Curve

_COLOURS = ("#1b7f6f", "#d1495b", "#30638e", "#c98a00", "#7b4a8b", "#333333")
_DASHES = ("", "7 4", "2 3", "10 3 2 3")
_WIDTH, _LEFT, _RIGHT = 860, 80, 250
_UPPER, _LOWER = (40, 340), (380, 560)  # from top to bottom
_HEIGHT = _LOWER[1] + 50
_DIAMONDS = " (diamonds: measured)"

Place = Callable[[float, float], tuple[float, float]]


def curves_svg(
    curves: Sequence[Curve],
    *,
    title: str,
    unit: str = "samples",
    measured: Mapping[str, Mapping[int, float]] | None = None,
) -> str:
    """Draw curves as SVG.

    Args:
        curves: At least one, with at least one point.
        title: Above the picture.
        unit: Of the vertical axis, per second.
        measured: Throughput by workers, for some curves by their names.
    """
    said = {curve.name: (measured or {}).get(curve.name, {}) for curve in curves}
    counts = {point.workers for curve in curves for point in curve.points}
    ends = sorted(counts.union(*said.values()))
    ideal = [(count, _alone(curves[0]) * count) for count in (ends[0], ends[-1])]
    rates = [rate for curve in curves for point in curve.points for rate in (point.throughput, *point.interval)]
    rates = [
        rate for rate in (*rates, *(rate for _, rate in ideal), *(r for p in said.values() for r in p.values())) if rate
    ]
    shares = [point.efficiency for curve in curves for point in curve.points]
    shares += [rate / count / _alone(curve) for curve in curves for count, rate in said[curve.name].items()]
    words = max(len(curve.name) + (len(_DIAMONDS) if said[curve.name] else 0) for curve in curves)
    width = _WIDTH + max(0, 7 * words - _RIGHT + 52)
    least = math.floor(10 * min(*shares, 0.9)) / 10
    upper = _scale(ends, math.log10(min(rates)) - 0.05, math.log10(max(rates)) + 0.05, _UPPER, math.log10)
    lower = _scale(ends, least, max(1.0, *shares) + 0.03, _LOWER, float)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">workers</text>',
    ]
    for (top, bottom), text in ((_UPPER, f"{unit} per second"), (_LOWER, "efficiency")):
        middle = (top + bottom) / 2
        turned = f'transform="rotate(-90 16 {middle})"'
        parts.append(f'<text x="16" y="{middle}" text-anchor="middle" {turned}>{escape(text)}</text>')
    last = -math.inf
    for count in ends:
        x, _ = lower(count, least)
        for top, bottom in (_UPPER, _LOWER):
            parts.append(f'<path d="M {x:.1f} {top} V {bottom}" stroke="#eee"/>')
        if x - last > 30:  # labels do not overlap
            parts.append(f'<text x="{x:.1f}" y="{_LOWER[1] + 16}" text-anchor="middle">{count}</text>')
            last = x
    for place, ticks, word in ((upper, _ticks(min(rates), max(rates)), "{:,g}"), (lower, _tenths(least), "{:.0%}")):
        for tick in ticks:
            _, y = place(ends[0], tick)
            parts.append(f'<path d="M {_LEFT} {y:.1f} H {_WIDTH - _RIGHT}" stroke="#ddd"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{word.format(tick)}</text>')
    parts.append(f'<path d="{_path(upper, ideal)}" fill="none" stroke="#999" stroke-dasharray="1 4"/>')
    for number, curve in enumerate(curves):
        parts += _curve(number, curve, upper, lower, said[curve.name])
    return "\n".join([*parts, "</svg>\n"])


def _curve(number: int, curve: Curve, upper: Place, lower: Place, said: Mapping[int, float]) -> list[str]:
    """Return a curve in both panels, its measurements, and its line of the legend."""
    # Colours repeat after dashes have changed: 24 curves can be told apart.
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]
    line = f'fill="none" stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")
    parts = []
    if all(point.interval[0] > 0 for point in curve.points):
        there = [(point.workers, point.interval[1]) for point in curve.points]
        back = [(point.workers, point.interval[0]) for point in reversed(curve.points)]
        bar = f' stroke="{colour}" stroke-width="6" stroke-opacity="0.12"' if len(there) == 1 else ""
        parts.append(f'<path d="{_path(upper, [*there, *back])} Z" fill="{colour}" fill-opacity="0.12"{bar}/>')
    parts.append(f'<path d="{_path(upper, [(point.workers, point.throughput) for point in curve.points])}" {line}/>')
    parts.append(f'<path d="{_path(lower, [(point.workers, point.efficiency) for point in curve.points])}" {line}/>')
    for point in curve.points:
        for x, y in (upper(point.workers, point.throughput), lower(point.workers, point.efficiency)):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    for count, rate in said.items():
        for x, y in (upper(count, rate), lower(count, rate / count / _alone(curve))):
            parts.append(f'<path d="M {x:.1f} {y - 5:.1f} l 5 5 l -5 5 l -5 -5 Z" fill="white" stroke="{colour}"/>')
    y = _UPPER[0] + 18 * number + 10
    parts.append(f'<path d="M {_WIDTH - _RIGHT + 12} {y} h 34" {line}/>')
    words = escape(curve.name) + (_DIAMONDS if said else "")
    return [*parts, f'<text x="{_WIDTH - _RIGHT + 52}" y="{y + 4}">{words}</text>']


def _alone(curve: Curve) -> float:
    first = curve.points[0]
    return first.throughput / first.efficiency / first.workers


def _scale(
    ends: Sequence[int], least: float, most: float, between: tuple[int, int], of: Callable[[float], float]
) -> Place:
    """Return where a panel has a number of workers and a value; values are mapped by `of` and then linearly."""
    x0, x1 = math.log2(ends[0]) - 0.1, math.log2(ends[-1]) + 0.1
    top, bottom = between

    def place(workers: float, value: float) -> tuple[float, float]:
        across, up = (math.log2(workers) - x0) / (x1 - x0), (of(value) - least) / (most - least)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), bottom - up * (bottom - top)

    return place


def _path(place: Place, points: Sequence[tuple[float, float]]) -> str:
    return "M " + " L ".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in points))


def _ticks(least: float, most: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten, or only the powers where that would be many."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    digits = (1, 2, 5) if len(powers) < 5 else (1,)
    return [digit * 10.0**power for power in powers for digit in digits if least <= digit * 10.0**power <= most]


def _tenths(least: float) -> list[float]:
    each = 1 if least >= 0.5 else 2
    return [tenth / 10 for tenth in range(round(10 * least), 11) if (10 - tenth) % each == 0]
