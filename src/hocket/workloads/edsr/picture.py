"""A strip of panels side by side with labels: what super-resolution looks like, not only what it measures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from hocket.workloads.edsr.photographs import Pixels

_PANEL_SIDE = 320  # pixels
_MARGIN = 10
_LABEL_HEIGHT = 48
_FONT_SIZE = 16
_INK, _FAINT_INK, _PAPER = (20, 20, 20), (110, 110, 110), (255, 255, 255)


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture of the strip, with a name and a second line in fainter ink."""

    pixels: Pixels
    title: str
    caption: str


def hardest_crop(image: Pixels, reference: Pixels, side: int) -> tuple[int, int]:
    """Return the top and left of the square crop where ``image`` is farthest from ``reference`` in squared error.

    With bicubic's image this picks the place with most to win, by a rule that does not look at the network. Corners
    lie on a grid of an eighth of ``side``.
    """
    error = np.square(image.astype(np.float64) - reference).sum(axis=2)
    # Sum over any rectangle from four corners of the running sum.
    running = np.pad(error.cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))
    window = running[side:, side:] - running[:-side, side:] - running[side:, :-side] + running[:-side, :-side]
    stride = max(1, side // 8)
    row, column = np.unravel_index(np.argmax(window[::stride, ::stride]), window[::stride, ::stride].shape)
    return int(row) * stride, int(column) * stride


def draw(panels: Sequence[Panel], headline: str, path: Path) -> None:
    """Write a PNG of the panels, each magnified to the same size without smoothing, under a headline."""
    title_font, font = ImageFont.load_default(_FONT_SIZE + 2), ImageFont.load_default(_FONT_SIZE)
    width = _MARGIN + len(panels) * (_PANEL_SIDE + _MARGIN)
    height = _MARGIN + _LABEL_HEIGHT // 2 + _MARGIN + _PANEL_SIDE + _LABEL_HEIGHT + _MARGIN
    strip = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(strip)
    pen.text((_MARGIN, _MARGIN), headline, fill=_INK, font=title_font)
    top = _MARGIN + _LABEL_HEIGHT // 2 + _MARGIN
    for number, panel in enumerate(panels):
        left = _MARGIN + number * (_PANEL_SIDE + _MARGIN)
        square = Image.fromarray(panel.pixels).resize((_PANEL_SIDE, _PANEL_SIDE), Image.Resampling.NEAREST)
        strip.paste(square, (left, top))
        pen.text((left, top + _PANEL_SIDE + 4), panel.title, fill=_INK, font=font)
        pen.text((left, top + _PANEL_SIDE + 4 + _LABEL_HEIGHT // 2), panel.caption, fill=_FAINT_INK, font=font)
    # Written beside its place and moved there, so that a picture is never half a picture.
    unfinished = path.with_suffix(".unfinished.png")
    strip.save(unfinished)
    unfinished.replace(path)
