"""Has `int(windows.shape[0] / 4)` be a number of each batch where code gives it to shapes alone, as Swin's code does.

Else `int` gives what is the sample's, and a check of it. What a shape is given is computed for each batch; what might
choose something, an entry of a list say, is not left to that.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from ..batches import TracedNumber

_SHAPING: Final = frozenset(("expand", "new_empty", "new_full", "new_ones", "new_zeros", "repeat", "reshape", "view"))


class _IntKind(type):
    """What `isinstance(value, int)` asks."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, int)


class SizeInt(metaclass=_IntKind):
    """Stands for `int` in a file of the user's."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a number of each batch, if it is only a shape's, else what `int` does."""
        frame = sys._getframe(1)
        one = args[0] if len(args) == 1 else None
        if isinstance(one, TracedNumber) and frame.f_lineno in _lines_of_sizes(frame.f_code.co_filename):
            return one.recorder.computed(_whole, (one,))
        return int(*args, **kwargs)


def size_ints(homes: list[ModuleType]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Return those files of the user's that have such lines, with what stands for `int` in them."""
    for home in homes:
        if "int" not in vars(home) and _lines_of_sizes(str(getattr(home, "__file__", ""))):
            yield home, "int", SizeInt


def _whole(number: float) -> int:
    return int(number)


@functools.cache
def _lines_of_sizes(file: str) -> frozenset[int]:
    """Return the lines `name = int(...)` whose name only shapes are given; none if the file does else with `int`."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return frozenset()
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    known = {id(call.func) for call in calls}
    known |= {
        id(one) for call in calls if _is_name(call.func, "isinstance") for arg in call.args for one in ast.walk(arg)
    }
    for node in nodes:
        hints = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        known |= {id(one) for hint in hints if hint is not None for one in ast.walk(hint)}
    if any(_is_name(node, "int") and id(node) not in known for node in nodes):
        return frozenset()
    return frozenset(line for node in nodes if isinstance(node, ast.FunctionDef) for line in _sizes_in(node))


def _sizes_in(function: ast.FunctionDef) -> Iterator[int]:
    nodes = list(ast.walk(function))
    shapes: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPING:
            shapes.update(map(id, node.args))
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_name(node.value.func, "int"):
            names = {one.id for one in node.targets if isinstance(one, ast.Name)}
            uses = [one for one in nodes if isinstance(one, ast.Name) and one.id in names and one not in node.targets]
            if len(names) == len(node.targets) and all(id(one) in shapes for one in uses):
                yield node.lineno


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
