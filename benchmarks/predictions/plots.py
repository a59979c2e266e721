"""Curves as SVG: a function of data, both axes logarithmic."""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_COLOURS = ("#e76f51", "#2a9d8f", "#457b9d", "#e9c46a", "#8d5a97", "#333333")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 760, 420, 80, 50, 40, 190


def curves(
    title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, dashed: str = ""
) -> str:
    """Lines through points; those whose name begins with `dashed` are dashed."""
    points = [point for line in lines.values() for point in line]
    spans = [(min(column), max(column)) for column in zip(*points, strict=True)]
    (x0, x1), (y0, y1) = ((math.log10(low) - 0.02, math.log10(high) + 0.02) for low, high in spans)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x0) / (x1 - x0)
        up = (math.log10(y) - y0) / (y1 - y0)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="16" y="{_HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 16 {_HEIGHT / 2})">'
        f"{escape(y_label)}</text>",
    ]
    for axis, (low, high) in enumerate(((x0, x1), (y0, y1))):
        for exponent in range(math.ceil(low), math.floor(high) + 1):
            x, y = place(10**exponent, 10**y0) if axis == 0 else place(10**x0, 10**exponent)
            end = (x, _TOP) if axis == 0 else (_WIDTH - _RIGHT, y)
            parts.append(f'<path d="M {x:.1f} {y:.1f} L {end[0]:.1f} {end[1]:.1f}" stroke="#ddd"/>')
            anchor, dx, dy = ("middle", 0, 18) if axis == 0 else ("end", -6, 4)
            parts.append(
                f'<text x="{x + dx:.1f}" y="{y + dy:.1f}" text-anchor="{anchor}">10<tspan dy="-5" font-size="9">'
                f"{exponent}</tspan></text>"
            )
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        dash = ' stroke-dasharray="5 4"' if dashed and name.startswith(dashed) else ""
        path = " L ".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in line))
        parts.append(f'<path d="M {path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for point in line:
            x, y = place(*point)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        y = _TOP + 18 * number + 10
        parts.append(f'<path d="M {_WIDTH - _RIGHT + 12} {y} h 24" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 42}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
