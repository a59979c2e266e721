"""The source in figures: size, folders, import arrows, circles, private imports, class names used twice.

    python benchmarks/house.py                      this checkout
    python benchmarks/house.py OLD NEW              two checkouts, one column each
    python benchmarks/house.py --details            the places behind the figures, too

It reads the source as text and imports none of it, so it measures any commit with the same yardstick.
"""

import argparse
import ast
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FIELD_OF_SIGHT = 12  # names that a folder shows at a glance


@dataclass
class House:
    """One checkout, parsed.

    Attributes:
        root: Folder of the package.
        trees: Parsed source of every module, by its dotted name.
        files: Path of every module, by its dotted name.
        arrows: Modules that a module imports, by its dotted name; inside functions and for type checkers, too.
    """

    root: Path
    trees: dict[str, ast.Module] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    arrows: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, checkout: Path) -> "House":
        """Return the house that stands in a checkout."""
        house = cls(checkout / "src" / "hocket")
        for path in sorted(house.root.rglob("*.py")):
            parts = path.relative_to(house.root.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            house.files[name] = path
            house.trees[name] = ast.parse(path.read_text())
        for name, tree in house.trees.items():
            house.arrows[name] = set(house.imports(name, tree)) - {name}
        return house

    def imports(self, module: str, tree: ast.AST) -> Iterator[str]:
        """Yield the modules of the house that a module imports, wherever the import stands."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.trees)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    package = module if self.files[module].name == "__init__.py" else module.rpartition(".")[0]
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*above, base] if base else above)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    if inner in self.trees:
                        yield inner
                    elif base in self.trees:
                        yield base

    def units(self, package: str) -> tuple[set[str], set[tuple[str, str]]]:
        """Return a package's loose modules and sub-packages, and the arrows between them.

        The package's own `__init__` counts where a unit imports it, and not for what it re-exports.
        """
        home = f"hocket.{package}"

        def unit(name: str) -> str:
            return name[len(home) + 1 :].split(".")[0] or "__init__"

        inside = {name for name in self.trees if f"{name}.".startswith(f"{home}.")}
        arrows = {
            (unit(name), unit(target)) for name in inside - {home} for target in self.arrows[name] if target in inside
        }
        return {unit(name) for name in inside}, {(a, b) for a, b in arrows if a != b}

    def circles(self) -> list[list[str]]:
        """Return the groups of modules that import each other, through their own files."""
        # A package's __init__ re-exports what is inside: an arrow to it would close a circle with all of it.
        plain = {name for name, path in self.files.items() if path.name != "__init__.py"}
        return _components({name: self.arrows[name] & plain for name in plain})

    def private_imports(self) -> list[str]:
        """Return each import of another package's private module, as `where: what`."""
        return sorted(
            f"{name}: {target}"
            for name, targets in self.arrows.items()
            for target in targets
            if (package := _private_owner(target)) and not f"{name}.".startswith(f"{package}.")
        )

    def classes(self) -> dict[str, list[str]]:
        """Return the modules that define each class name."""
        homes = defaultdict(list)
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(name)
        return homes

    def used_twice(self) -> dict[str, list[str]]:
        """Return the class names that more than one place defines."""
        return {name: homes for name, homes in sorted(self.classes().items()) if len(homes) > 1}

    def names_shown(self) -> dict[str, int]:
        """Return how many names each folder shows: its modules and its folders."""
        shown = {}
        for folder in [self.root, *(path for path in sorted(self.root.rglob("*")) if path.is_dir())]:
            inside = [
                path
                for path in folder.iterdir()
                if (path.suffix == ".py" and path.name != "__init__.py") or any(path.glob("**/*.py"))
            ]
            if inside:
                shown[str(folder.relative_to(self.root.parent))] = len(inside)
        return shown


def _private_owner(module: str) -> str | None:
    """Return the top package whose private module this is, or None for a public one."""
    parts = module.split(".")
    if len(parts) < 3 or not any(part.startswith("_") for part in parts[2:]):
        return None
    return ".".join(parts[:2])


def _components(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(arrows[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(arrows):
        if node not in index:
            visit(node)
    return sorted(found)


def _lines(house: House) -> list[int]:
    return [len(path.read_text().splitlines()) for path in house.files.values()]


def _tests(house: House) -> int:
    return sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        for path in (house.root.parent.parent / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    )


def _arrows(package: str) -> Callable[[House], str]:
    def count(house: House) -> str:
        units, arrows = house.units(package)
        return f"{len(arrows)} among {len(units)}"

    return count


def _one_importer(house: House) -> int:
    importers = defaultdict(set)
    for name, targets in house.arrows.items():
        for target in targets:
            importers[target].add(name)
    return sum(
        len(importers[name]) == 1 and len(path.read_text().splitlines()) < 60 and path.name != "__init__.py"
        for name, path in house.files.items()
    )


FIGURES: dict[str, Callable[[House], object]] = {
    "files of src": lambda house: len(house.files),
    "lines of src": lambda house: f"{sum(_lines(house)):,}",
    "median lines of a file": lambda house: round(statistics.median(_lines(house))),
    "longest file, lines": lambda house: max(_lines(house)),
    "files under 60 lines with one importer": _one_importer,
    "most names in a folder": lambda house: (
        lambda shown: f"{max(shown.values())} ({max(shown, key=lambda folder: shown[folder])})"
    )(house.names_shown()),
    f"folders with more than {FIELD_OF_SIGHT} names": lambda house: sum(
        count > FIELD_OF_SIGHT for count in house.names_shown().values()
    ),
    "import arrows inside parallel": _arrows("parallel"),
    "import arrows inside comm": _arrows("comm"),
    "circles of modules": lambda house: len(house.circles()),
    "imports of another package's private module": lambda house: len(house.private_imports()),
    "classes": lambda house: sum(map(len, house.classes().values())),
    "class names used more than once": lambda house: len(house.used_twice()),
    "test functions": _tests,
}


def main() -> None:
    """Print the table, and with --details the places behind it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).resolve().parents[1]])
    parser.add_argument("--details", action="store_true", help="print the places behind the figures of the last one")
    arguments = parser.parse_args()
    houses = [House.read(path) for path in arguments.checkouts]
    print("| |" + "|".join(f" {path.resolve().name} " for path in arguments.checkouts) + "|")
    print("|---|" + "---:|" * len(houses))
    for name, figure in FIGURES.items():
        print(f"| {name} |" + "|".join(f" {figure(house)} " for house in houses) + "|")
    if arguments.details:
        _print_details(houses[-1])


def _print_details(house: House) -> None:
    print("\nfolders with more names than one sees at a glance")
    for folder, count in sorted(house.names_shown().items(), key=lambda item: -item[1]):
        if count > FIELD_OF_SIGHT:
            print(f"  {count:3} {folder}")
    print("\ncircles")
    for group in house.circles():
        print("  " + " <-> ".join(group))
    print("\nimports of another package's private module")
    for line in house.private_imports():
        print(f"  {line}")
    print("\nclass names used more than once")
    for name, homes in house.used_twice().items():
        print(f"  {name}: {', '.join(home.removeprefix('hocket.') for home in homes)}")


if __name__ == "__main__":
    main()
