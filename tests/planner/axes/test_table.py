"""The table of axes, held against Plan and against the page that shows it."""

from dataclasses import fields
from pathlib import Path

import pytest

from hocket.planner import AXES, Axis, Plan

PAGE = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text()


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_the_page_has_the_row_of_every_axis(axis: Axis) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{axis.field}`")]
    assert any(row.endswith(f"| {axis.does} | {axis.costs} |") for row in rows)


def test_names_and_fields_are_those_of_one_axis_and_stand_in_the_plan() -> None:
    assert len({axis.name for axis in AXES}) == len(AXES)
    of_axes = [field for axis in AXES for field in axis.fields.values()]
    assert len(set(of_axes)) == len(of_axes)
    assert set(of_axes) <= {one.name for one in fields(Plan)}
