"""The check says whether the machine carries what is described, and does not flatter."""

from pathlib import Path

import pytest

from hocket.fabric import check
from hocket.fabric._check import ways

from .conftest import Up


def test_slow_links_fill_and_the_check_is_content(up: Up) -> None:
    fabric = up("star:hosts=3,bandwidth=4Mbit/s")
    carried = pytest.approx(500e3, rel=0.08)
    tries = [check(fabric, seconds=1.0)]
    while any(rate_Bps != carried for rate_Bps in tries[-1].carried_Bps.values()) and len(tries) < 4:
        tries.append(check(fabric, seconds=1.0))  # where much else runs, a second is not always one
    found = tries[-1]
    assert found.ok, found.describe()
    assert found.share <= 1.0
    for link, rate_Bps in found.carried_Bps.items():
        assert rate_Bps == carried, link
    assert "carries the described load" in found.describe()


def test_links_that_no_such_machine_carries_are_called_so(up: Up) -> None:
    found = check(up("star:hosts=4,bandwidth=400Gbit/s"), seconds=0.2)
    assert not found.ok
    assert found.share < 0.5
    assert "CANNOT CARRY" in found.describe()


def test_a_flow_held_back_by_one_link_of_its_way_is_no_fault_of_the_machine(up: Up, tmp_path: Path) -> None:
    path = tmp_path / "narrow.toml"
    links = [("a", "s", 40), ("b", "s", 40), ("s", "t", 4), ("c", "t", 40), ("d", "t", 40)]
    path.write_text(
        "".join(f'[[nodes]]\nname = "{name}"\n' for name in "abcd")
        + "".join(f'[[nodes]]\nname = "{name}"\nkind = "switch"\n' for name in "st")
        + "".join(f'[[links]]\nends = ["{x}", "{y}"]\nbandwidth = "{rate} Mbit/s"\n' for x, y, rate in links)
    )
    fabric = up(str(path))
    at = {name: fabric.wiring.index(name) for name in "abcd"}
    assert set(ways(fabric.wiring, at["a"], at["d"])) == {"a->s", "s->t", "t->d"}
    tries = [check(fabric, seconds=0.8)]
    while not tries[-1].ok and len(tries) < 8:  # where much else runs, the machine may indeed be at fault for a while
        tries.append(check(fabric, seconds=0.8))
    found = tries[-1]
    assert found.ok, [one.describe() for one in tries]
    assert found.carried_Bps["s->t"] == pytest.approx(500e3, rel=0.1)
    assert found.carried_Bps["b->s"] < 1e6  # of 5e6: both its flows are held back at the trunk


def test_one_host_has_nothing_to_check(up: Up) -> None:
    found = check(up("star:hosts=1"))
    assert found.ok
    assert "nothing to check" in found.describe()
