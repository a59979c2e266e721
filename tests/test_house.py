"""The rules of the house that no linter holds; `benchmarks/house.py` prints the figures of the same rules."""

import importlib.util
import pkgutil
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).parents[1]

# Class names that a family shares: one in each bundled workload.
FAMILIES = {"HeldOut": "hocket.workloads.", "Size": "hocket.workloads."}


def yardstick() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", CHECKOUT / "benchmarks" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def house() -> object:
    return yardstick().House.read(CHECKOUT)


def test_a_class_name_has_one_meaning(house) -> None:
    twice = {
        name: homes
        for name, homes in house.used_twice().items()
        if name not in FAMILIES or not all(home.startswith(FAMILIES[name]) for home in homes)
    }
    assert twice == {}


def test_no_package_imports_the_private_modules_of_another(house) -> None:
    assert house.private_imports() == []


def test_each_part_of_the_package_has_a_layer() -> None:
    # `make lint` checks the arrows; a new file without a layer is what one forgets.
    contracts = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one["type"] == "layers")
    there = {name for _, name, _ in pkgutil.iter_modules([str(CHECKOUT / "src" / "hocket")])}
    assert there - {"__main__"} <= {name for layer in layers for name in re.findall(r"\w+", layer)}


def test_no_modules_import_each_other_in_a_circle(house) -> None:
    assert house.circles() == []


def test_the_source_says_package_and_space_not_room() -> None:
    word = re.compile(r"(?<![a-z])rooms?(?![a-z])", re.IGNORECASE)
    source = CHECKOUT / "src" / "hocket"
    said = [
        f"{path.relative_to(source)}:{number}"
        for path in sorted(source.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if word.search(line)
    ]
    assert said == []


def test_the_yardstick_sees_what_it_counts(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "upper/__init__.py": "from ._a import A as A\n",
        "upper/_a.py": "from hocket.lower._b import helper\nfrom ._c import C\nclass A: ...\nclass Twice: ...\n",
        "upper/_c.py": "def late():\n    from ._a import A\nclass C: ...\n",
        "lower/__init__.py": "",
        "lower/_b.py": "def helper(): ...\nclass Twice: ...\n",
    }
    for name, text in files.items():
        path = tmp_path / "src" / "hocket" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    small = yardstick().House.read(tmp_path)
    assert small.private_imports() == ["hocket.upper._a: hocket.lower._b"]
    assert small.used_twice() == {"Twice": ["hocket.lower._b", "hocket.upper._a"]}
    assert small.circles() == [["hocket.upper._a", "hocket.upper._c"]]
    assert small.units("upper")[1] == {("_a", "_c"), ("_c", "_a")}
    assert small.names_shown() == {"hocket": 2, "hocket/lower": 1, "hocket/upper": 2}
