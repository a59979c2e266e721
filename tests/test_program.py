"""Warnings and errors name the program's line, whoever calls whom in between."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hocket._program import program_line, warn


def _line_of(text: str) -> int:
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {text}"))


def test_a_warning_from_inside_of_torch_names_the_programs_line():
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).sum()
    y.register_hook(_of_the_package("told"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        y.backward()  # here
    assert [(str(one.message), one.filename, one.lineno) for one in told] == [("told", __file__, _line_of("here"))]


def test_a_place_is_told_once_and_an_error_is_raised_where_warnings_are_errors():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(2):
            _of_the_package("once")()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="raised"):
            _of_the_package("raised")()


def test_the_line_is_that_of_the_caller():
    assert program_line() == f"{__file__}:{_line_of('line')}"  # line


def _of_the_package(text: str) -> Callable[..., None]:
    """A function that warns, as if it stood in a file of the package."""
    package = str(Path(warn.__code__.co_filename).parent / "parallel" / "made_for_a_test.py")
    names = {"warn": warn, "text": text}
    exec(compile("def told(*_):\n    warn(text)", package, "exec"), names)
    return names["told"]
