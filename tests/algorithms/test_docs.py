from __future__ import annotations

import re
from pathlib import Path

from hocket.algorithms import algorithms

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def test_every_algorithm_is_documented_with_what_it_serves_and_its_parameters() -> None:
    rows = {line.split("|")[1].strip(" `"): line for line in PAGE.splitlines() if line.startswith("| `")}
    assert list(rows) == [one.name for one in algorithms()]
    for one in algorithms():
        parameters = re.findall(r"`(\w+)`", rows[one.name].split("|")[-2])
        assert parameters == list(one.parameters), one.name
        assert all(kind in rows[one.name] for kind in one.kinds) or "every collective" in rows[one.name]


def test_the_examples_run() -> None:
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(code, names)
    assert str(names["choices"].pick("all_reduce", 12, 1 << 20)) == "circulant"
    assert names["choices"].pick("all_reduce", 12, 1 << 24).origin == "user"
