"""Whose code calls: the frame, its line for messages, and whether it only decides about an error."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from pathlib import Path
from typing import Any, Final

import torch

from ..batches import traced

HERE: Final = tuple(str(Path(file).parent) for file in (__file__, torch.__file__, traced.__code__.co_filename))


def calling_frame(besides: tuple[str, ...] = HERE) -> Any:
    """Return the frame of the code that is running, the user's or that of other folders; None if there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*besides, "<")):
        frame = frame.f_back
    return frame


def only_raises(frame: Any) -> bool:
    """Return whether code is in the condition of an `assert`, or of an `if` that does nothing but raise an error."""
    return frame is not None and any(
        begin <= frame.f_lineno <= end for begin, end in _demands(frame.f_code.co_filename)
    )


@functools.cache
def _demands(file: str) -> tuple[tuple[int, int], ...]:
    """Return the lines of such conditions in a file."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()
    leaving = ast.Return | ast.Break | ast.Continue
    found = [one.test for one in nodes if isinstance(one, ast.Assert)]
    found += [
        one.test
        for one in nodes
        if isinstance(one, ast.If)
        and isinstance(one.body[-1], ast.Raise)
        and one.body[0].lineno > (one.test.end_lineno or one.test.lineno)
        and not any(isinstance(inner, leaving) for step in one.body for inner in ast.walk(step))
    ]
    return tuple((test.lineno, test.end_lineno or test.lineno) for test in found)


def calling_line() -> str:
    """Return the line of the user's code that is running, for messages."""
    frame = calling_frame()
    if frame is None:
        return ""
    name = frame.f_code.co_filename
    return f"`{linecache.getline(name, frame.f_lineno).strip()}` ({Path(name).name}, line {frame.f_lineno}): "
