from pathlib import Path

import numpy as np
from PIL import Image

from hocket.workloads.edsr.picture import Panel, draw, hardest_crop


def test_the_hardest_crop_is_where_the_error_is() -> None:
    reference = np.zeros((64, 96, 3), np.uint8)
    image = reference.copy()
    image[24:32, 72:80] = 200
    top, left = hardest_crop(image, reference, side=16)
    assert top <= 24
    assert top + 16 >= 32
    assert left <= 72
    assert left + 16 >= 80


def test_the_strip_shows_every_panel_in_order(tmp_path: Path) -> None:
    panels = [Panel(np.full((8, 8, 3), level, np.uint8), str(level), "caption") for level in (10, 90, 170)]
    path = tmp_path / "picture.png"
    draw(panels, "headline", path)
    assert [file.name for file in tmp_path.iterdir()] == ["picture.png"]
    with Image.open(path) as image:
        row = np.asarray(image)[image.height // 2, :, 0]
    shown = [int(level) for level in row if level != 255]
    assert shown == sorted(shown)
    assert set(shown) == {10, 90, 170}
