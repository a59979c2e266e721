"""Bounds are those of the literature, and schedules are measured against them exactly."""

from fractions import Fraction

import pytest

from hocket.schedule import KINDS, Collective, Schedule, Step, Wire, lower_bounds, needs

from .brute_force import halving_doubling, ring


def test_ring_and_halving_doubling_move_as_little_as_can_be():
    for world in (2, 4, 8, 64):
        bound = lower_bounds(Collective("all_reduce", world))
        for schedule in (ring(world), halving_doubling(world)):
            assert needs(schedule).moved == bound.moved == Fraction(2 * (world - 1), world)
            assert needs(schedule).reduced == bound.reduced
    assert needs(ring(64)).steps == 126
    assert needs(halving_doubling(64)).steps == 12
    assert lower_bounds(Collective("all_reduce", 64)).steps == 6


def test_a_step_with_several_messages_a_rank_is_as_many_rounds():
    everyone = [(a, b) for a in range(5) for b in range(5) if a != b]
    shot = Schedule(
        "shot", Collective("all_reduce", 5), 1, (Step.of(*zip(*everyone, strict=True), reduce=True),)
    )  # fmt: skip
    assert shot.step_count == 1
    assert needs(shot).steps == 4 >= lower_bounds(shot.collective).steps


def test_a_switch_that_reduces_halves_the_bandwidth_bound():
    inside = lower_bounds(Collective("all_reduce", 1024), in_network=True)
    assert (inside.steps, inside.moved, inside.reduced) == (2, 1, 0)
    assert lower_bounds(Collective("all_reduce", 1024)).moved == Fraction(2046, 1024)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_needs_nothing_and_more_ranks_never_need_fewer_rounds(kind):
    assert needs_seconds(kind, 1) == 0
    times = [needs_seconds(kind, world) for world in range(2, 70)]
    assert times[0] > 0
    assert times == sorted(times)


def needs_seconds(kind, world):
    return lower_bounds(Collective(kind, world)).seconds(1 << 20, Wire(1e-6, 1e-9, 1e-10))


def test_seconds_are_alpha_beta_gamma():
    assert needs(ring(4)).seconds(1e6, Wire(1e-5, 1e-9, 1e-10)) == pytest.approx(6e-5 + 1.5e-3 + 0.75e-4)
