"""Finds what a loop decides by a number of its samples: an update left out, another loss, the end of training.

Ranks that decide alike do so by numbers of their own samples, and one device by one of the whole batch, so that nothing
that ranks could compare tells of it. The program's text does: it is read where a number is taken, and the number
followed through the names of that function.
"""

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any, Final

from hocket._program import program_frame

_BACK: Final = {"backward", "manual_backward"}
_TRAINS: Final = _BACK | {"step", "zero_grad"}
_OF_ALL: Final = {"average", "total", "all_reduce", "all_gather", "broadcast", "gather", "reduce"}
"""What gives every rank one number; names of methods and functions of any package."""

_AS_ALL: Final = {"isnan", "isinf", "isfinite"}  # one device finds what any rank finds
_LONGEST: Final = 60  # characters of a line that are shown
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_BRANCHES: Final = (ast.If, ast.While, ast.IfExp)


def decision() -> str:
    """Return what the program decides by the number that its running line takes, with that line; "" for nothing."""
    frame = program_frame()
    return "" if frame is None else _decided(frame.f_code, frame.f_lasti)


@lru_cache(256)
def _decided(code: CodeType, instruction: int) -> str:
    """Return what is decided by what an instruction gives."""
    place = next((one for i, one in enumerate(code.co_positions()) if i == instruction // 2), (None,) * 4)
    text = _text(code.co_filename)
    node = None if text is None or None in place else text.at(place)
    if text is None or node is None:
        return ""
    function = text.function(node)
    names = _followed(function, text.given(node))
    branches: list[Any] = [
        one for one in text.above(node) if isinstance(one, _BRANCHES) and _asks_itself(one.test, node)
    ]
    branches += _branches(function, names)
    decided = [one.lineno for one in branches if _changes_training(one, text, function)]
    for line in (*decided, *_schedules(function, node, names)):
        what = linecache.getline(code.co_filename, line).strip()
        return f"line {line}: {what if len(what) <= _LONGEST else f'{what[:_LONGEST]}...'}"
    return ""


class _Text:
    """A program's file as a tree, of which every node knows what it is part of."""

    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source)
        self._above = {part: node for node in ast.walk(self._tree) for part in ast.iter_child_nodes(node)}

    def at(self, place: tuple[Any, ...]) -> ast.expr | None:
        """Return the expression at a place: first and last line, first and last column."""
        every = (node for node in ast.walk(self._tree) if isinstance(node, ast.expr))
        places = ((one, (one.lineno, one.end_lineno, one.col_offset, one.end_col_offset)) for one in every)
        return next((one for one, its in places if its == place), None)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Give what a node is part of, the nearest first, up to its function."""
        while (one := self._above.get(node)) is not None:
            yield one
            if isinstance(one, _FUNCTIONS):
                return
            node = one

    def function(self, node: ast.AST) -> ast.AST:
        return next((one for one in self.above(node) if isinstance(one, _FUNCTIONS)), self._tree)

    def given(self, node: ast.AST) -> set[str]:
        """Return the names that an expression's value is given to, unless it becomes that of all ranks on its way."""
        for one in self.above(node):
            if _is_of_all(one):
                return set()
            if isinstance(one, ast.NamedExpr):
                return {one.target.id}
            if isinstance(one, ast.stmt):
                return set[str]().union(*(names for names, value in _pairs(one) if node in ast.walk(value)))
        return set()


@lru_cache(16)
def _text(file: str) -> _Text | None:
    try:
        return _Text("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):  # a program that was changed since it began
        return None


def _pairs(statement: ast.AST) -> list[tuple[set[str], ast.expr]]:
    """Return what a statement gives to which names."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        targets = [statement.target]
    else:
        return []
    if (value := statement.value) is None:
        return []
    pairs = [(one, value) for one in targets]
    for one in targets:
        if isinstance(one, ast.Tuple) and isinstance(value, ast.Tuple) and len(one.elts) == len(value.elts):
            pairs = [*zip(one.elts, value.elts, strict=True)]
    return [(names, value) for one, value in pairs if (names := _stored(one))]


def _stored(target: ast.AST) -> set[str]:
    """Return the names, also of attributes, that are given a value; a place in a list or a dict has none."""
    if isinstance(target, ast.Tuple | ast.List | ast.Starred):
        return set[str]().union(*map(_stored, ast.iter_child_nodes(target)))
    return {_name(target)} - {""}


def _targets(node: ast.AST) -> set[str]:
    return set[str]().union(*(names for names, _ in _pairs(node)))


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _loaded(node: ast.AST, *, own: bool = False) -> set[str]:
    """Return the names that are read in an expression; if `own`, not what is made a number of all ranks."""
    if isinstance(node, ast.Lambda) or own and _is_of_all(node):
        return set()
    here = {_name(node)} - {""} if isinstance(getattr(node, "ctx", None), ast.Load) else set()
    return here.union(*(_loaded(one, own=own) for one in ast.iter_child_nodes(node)))


def _is_of_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _called(node) in _OF_ALL


def _called(node: ast.AST) -> str:
    return _name(node.func).removeprefix(".") if isinstance(node, ast.Call) else ""


def _parts(function: ast.AST) -> list[ast.AST]:
    """Return all that a function, or a statement, is made of, but what is in functions within it."""
    found: list[ast.AST] = []
    todo = list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            found.append(node)
            todo += ast.iter_child_nodes(node)
    return found


def _followed(function: ast.AST, names: set[str]) -> set[str]:
    """Return the names whose values depend on what these have been given, also as a count of how often it was so."""
    given = [pair for one in _parts(function) for pair in _pairs(one)]
    # Names that are also given a number of all ranks: nobody knows which it is where it is read.
    safe = set[str]().union(*(targets for targets, value in given if any(map(_is_of_all, ast.walk(value)))))
    found = names - safe
    while True:
        more = {name for targets, value in given if _loaded(value, own=True) & found for name in targets}
        for branch in _branches(function, found):
            more = more.union(*map(_targets, ast.walk(branch)))
        if not (more := more - found - safe):
            return found
        found |= more


def _branches(function: ast.AST, names: set[str]) -> list[Any]:
    found = [one for one in _parts(function) if isinstance(one, _BRANCHES) and _asks(one.test, names)]
    return sorted(found, key=lambda one: one.lineno)


def _asks(test: ast.AST, names: set[str]) -> bool:
    """Return whether a test compares one of these numbers with another than 0: that is as one device finds it."""
    if _called(test) in _AS_ALL or not names:
        return False
    if isinstance(test, ast.Compare):
        return bool(_loaded(test, own=True) & names) and not _is_with_nothing(test)
    return any(_asks(one, names) for one in ast.iter_child_nodes(test))


def _asks_itself(test: ast.AST, node: ast.AST) -> bool:
    """Return whether a test compares the value of an expression that is part of it, as `_asks` does that of a name."""
    if test is not node and node not in ast.walk(test) or _called(test) in _AS_ALL or _is_of_all(test):
        return False
    if isinstance(test, ast.Compare):
        return not _is_with_nothing(test) and (test is node or not any(map(_is_whole, _between(test, node))))
    return any(_asks_itself(one, node) for one in ast.iter_child_nodes(test))


def _between(test: ast.AST, node: ast.AST) -> list[ast.AST]:
    return [one for one in ast.walk(test) if one is not node and node in ast.walk(one)]


def _is_whole(node: ast.AST) -> bool:
    return _is_of_all(node) or _called(node) in _AS_ALL


def _is_with_nothing(test: ast.Compare) -> bool:
    return any(isinstance(one, ast.Constant) and one.value in (0, None) for one in (test.left, *test.comparators))


def _changes_training(branch: Any, text: _Text, function: ast.AST) -> bool:
    """Return whether what a branch decides changes what is trained: which steps are taken, with which loss."""
    trained = _trained_by(function)
    if isinstance(branch, ast.IfExp):
        return any(_targets(one) & trained or _called(one) in _TRAINS for one in text.above(branch))
    if isinstance(branch, ast.While):
        return True
    for one in (part for statement in (*branch.body, *branch.orelse) for part in (statement, *_parts(statement))):
        if isinstance(one, ast.Continue | ast.Break) or _targets(one) & trained or _called(one) in _TRAINS:
            return True
        if _name(one) == ".param_groups":
            return True
    return False


def _schedules(function: ast.AST, node: ast.AST, names: set[str]) -> list[int]:
    """Return the lines in which a schedule of learning rates is given such a number: `step(loss)` goes by plateaus."""
    steps = [one for one in _parts(function) if _called(one) == "step"]
    given = [(one.lineno, part) for one in steps if isinstance(one, ast.Call) for part in one.args]
    return sorted(line for line, part in given if _loaded(part, own=True) & names or _takes(part, node))


def _takes(part: ast.AST, node: ast.AST) -> bool:
    return part is node or node in ast.walk(part) and not any(map(_is_of_all, (part, *_between(part, node))))


def _trained_by(function: ast.AST) -> set[str]:
    """Return the names that what is back-propagated depends on."""
    parts = _parts(function)
    given = [pair for one in parts for pair in _pairs(one)]
    found = set[str]().union(*(_loaded(one) for one in parts if _called(one) in _BACK))
    while more := set[str]().union(*(_loaded(value) for targets, value in given if targets & found)) - found:
        found |= more
    return found
