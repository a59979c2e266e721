"""What people see: the grid, the picture, and where a finding points."""

import time
import xml.etree.ElementTree as ElementTree

from hocket.algorithms import get
from hocket.schedule import Collective, Schedule, Step, describe, grid, svg, verify
from hocket.testing import deadline

from .brute_force import ring

GRID = """\
step    0     1     2     3
rank 0  0+>1  2+>1  1=>1  0=>1
rank 1  1+>2  0+>2  2=>2  1=>2
rank 2  2+>0  1+>0  0=>0  2=>0
"""


def test_the_grid_says_what_each_rank_sends():
    assert grid(ring(3)) == GRID
    assert describe(ring(3)) == "ring: all_reduce world=3, 3 chunks, 4 steps, 12 transfers"


def test_switches_have_rows_and_ranges_and_long_cells_are_short():
    schedule = Schedule(
        "tree",
        Collective("all_reduce", 5),
        4,
        (Step.of(range(5), 5, 0, 4, reduce=True), Step.of(5, range(5), 0, 4, reduce=False)),
        ("leaf",),
    )
    text = grid(schedule)
    assert "rank 4       0:4+>leaf  .\n" in text
    assert "switch leaf  .          0:4=>0 0:4=>1 0:4=>2 and 2 more\n" in text
    assert describe(schedule).endswith("2 steps, 10 transfers, 1 reducing switch")


def test_a_finding_is_marked_where_it_happens():
    steps = list(ring(3).each_step())
    twice = [*(list(c) + [c[0]] for c in steps[1].columns[:4])]
    steps[1] = Step.of(*twice, reduce=True)
    schedule = Schedule("ring", Collective("all_reduce", 3), 3, tuple(steps))
    findings = verify(schedule)
    assert "2+>1 2+>1!" in grid(schedule, findings)
    assert 'stroke="#e00"' in svg(schedule, findings)
    assert 'stroke="#e00"' not in svg(schedule)


def test_large_schedules_are_cut_and_say_so():
    text = grid(ring(100))
    assert "36 more ranks and switches are not shown." in text
    assert "134 more steps are not shown." in text


def test_the_picture_has_an_arrow_for_every_transfer():
    root = ElementTree.fromstring(svg(ring(4)))
    arrows = [e for e in root.iter() if e.get("marker-end")]
    assert len(arrows) == 24
    assert sum(1 for arrow in arrows if arrow.get("stroke-dasharray")) == 12


def test_a_step_of_a_million_transfers_is_drawn_in_seconds() -> None:
    schedule = get("one_shot")(Collective("all_reduce", 1000))
    begin_s = time.monotonic()
    assert "rank 63  0+>64 0+>65 0+>66 and 996 more" in grid(schedule)
    svg(schedule)
    assert time.monotonic() - begin_s < deadline(5)
