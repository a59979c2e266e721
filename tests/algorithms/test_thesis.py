"""Every algorithm, for many worlds: it executes to what numpy says, and moves what its closed form says."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from hocket.algorithms import Algorithm, algorithms
from hocket.schedule import Collective, Schedule, lower_bounds, needs, verify

from .numpy_world import expected, run

WORLDS = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    12,
    13,
    15,
    16,
    17,
    18,
    20,
    24,
    25,
    27,
    31,
    32,
    33,
    36,
    45,
    48,
    64,
    128,
    130,
)
SMALL = 9  # up to here every dtype and operator, from here on one of them by turns: the transfers are the same
LARGE = 33  # from here on one dtype and operator
CASES = (("sum", np.int64), ("max", np.int32), ("min", np.float32), ("xor", np.uint8), ("sum", np.float64))
VARIANTS = {
    "ring": ({"rings": 3}, {"rings": 2, "orders": None}),
    "halving_doubling": ({"order": "doubling"},),
    "hdrm": ({"order": "doubling"},),
    "double_tree": ({"pieces": 2}, {"pieces": 17}),
    "torus": ({"at_once": True}, *({"dims": dims} for dims in ((2, 2, 2), (3, 2, 4), (5, 1, 9), (4, 4, 4), (4, 8, 4)))),
    "leaders": tuple(
        {"local": local, "between": between}
        for local, between in ((2, "halving_doubling"), (3, "ring"), (4, "recursive_doubling"), (5, "direct"))
    ),
    "rails": tuple(
        {"local": local, "inside": inside, "between": between}
        for local, inside, between in (
            (2, "direct", "halving_doubling"),
            (3, "ring", "ring"),
            (4, "ring", "halving_doubling"),
            (5, "direct", "circulant"),
        )
    ),
    "aggregation_tree": ({"arity": 2}, {"arity": 3, "pieces": 4}, {"local": 2, "arity": 2}, {"local": 5}),
    "binomial": ({"pieces": 5},),
    "chain": ({"pieces": 2}, {"pieces": 9}),
}
# By how much the closed form of the busiest ports may be above what the schedule does; exact for all others.
BOUNDED = {"double_tree": Fraction(7, 5)}


def variants(algorithm: Algorithm) -> tuple[dict[str, object], ...]:
    """Parameters besides the defaults: a row of `VARIANTS`, or what the algorithm itself says is worth a try."""
    hosts = ({"local": 2}, {"local": 3}) if "local" in algorithm.parameters else ()
    return VARIANTS.get(algorithm.name, (*map(dict, algorithm.variants[1:]), *hosts))


def served(algorithm: Algorithm) -> list[tuple[Collective, dict[str, object]]]:
    found = []
    for world in WORLDS:
        for kind in algorithm.kinds:
            roots = {0, world - 1, world // 2 if world < LARGE else 0} if Collective(kind, world).rooted else {0}
            for collective in (Collective(kind, world, root) for root in sorted(roots)):
                for parameters in ({}, *variants(algorithm)):
                    if algorithm.serves(collective, **parameters) is None:
                        found.append((collective, parameters))
    return found


@pytest.fixture(scope="module", params=algorithms(), ids=lambda one: one.name)
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    return request.param


@pytest.fixture(scope="module")
def built(algorithm: Algorithm) -> list[tuple[Schedule, dict[str, object]]]:
    """Return what all tests of an algorithm look at, made once: pytest runs them one after the other."""
    return [(algorithm.build(collective, **parameters), parameters) for collective, parameters in served(algorithm)]


def port_load(schedule: Schedule) -> tuple[Fraction, Fraction, int]:
    """Summed over the steps: what the busiest port passes and the busiest rank reduces, in units of S, its messages."""
    wire = reduced = messages = 0
    for step in schedule.steps:
        length = (step.stop - step.start).astype(np.int64)
        out, into, work = (np.zeros(schedule.endpoints, np.int64) for _ in range(3))
        np.add.at(out, step.source, length)
        np.add.at(into, step.destination, length)
        np.add.at(work, step.destination, length * step.reduce)
        ranks = slice(schedule.world)
        wire += int(max(out[ranks].max(), into[ranks].max(), length.max())) * step.repeat
        reduced += int(work[ranks].max()) * step.repeat
        pairs = np.unique(step.source.astype(np.int64) * schedule.endpoints + step.destination)
        ends = np.concatenate([pairs // schedule.endpoints, pairs % schedule.endpoints + schedule.endpoints])
        posted = np.bincount(ends, minlength=2 * schedule.endpoints).reshape(2, -1)[:, ranks]
        messages += max(1, int(posted.max())) * step.repeat  # a step in which only switches send has a message too
    vector = schedule.chunks // schedule.collective.blocks * schedule.collective.vector_blocks
    return Fraction(wire, vector), Fraction(reduced, vector), messages


def inside_load(schedule: Schedule, local: int) -> tuple[int, Fraction, int]:
    """Steps that stay within hosts; what of the busiest port of each step does, in units of S; and its messages."""
    host = np.concatenate([np.arange(schedule.world) // local, -1 - np.arange(schedule.endpoints - schedule.world)])
    steps = wire = messages = 0
    for step in schedule.steps:
        length = (step.stop - step.start).astype(np.int64)
        near = host[step.source] == host[step.destination]
        passed, within = (np.zeros((2, schedule.endpoints), np.int64) for _ in range(2))
        for way, ends in enumerate((step.source, step.destination)):
            np.add.at(passed[way], ends, length)
            np.add.at(within[way], ends, length * near)
        passed, within = (one[:, : schedule.world] for one in (passed, within))
        pairs = np.unique(np.stack([step.source[near], step.destination[near]]), axis=1)
        steps += int(near.all()) * step.repeat
        wire += int(within[passed == passed.max()].max()) * step.repeat
        messages += max((int(np.bincount(ends).max(initial=0)) for ends in pairs), default=0) * step.repeat
    vector = schedule.chunks // schedule.collective.blocks * schedule.collective.vector_blocks
    return steps, Fraction(wire, vector), messages


@pytest.mark.sampled(4)
def test_executes_to_what_numpy_says(built: list[tuple[Schedule, dict[str, object]]]) -> None:
    for number, (schedule, parameters) in enumerate(built):
        collective = schedule.collective
        generator = np.random.default_rng(collective.world)
        turn = number % len(CASES)
        cases = (
            CASES if collective.world <= SMALL else CASES[turn : turn + 1] if collective.world < LARGE else CASES[:1]
        )
        for operator, dtype in cases:
            data = generator.integers(0, 100, (collective.world, schedule.chunks, 1)).astype(dtype)
            value, must = expected(collective, schedule.chunks, data, operator)
            got = run(schedule, data, operator)
            same = np.isclose(got, value, rtol=1e-6).all(axis=2)
            assert same[must].all(), f"{collective} {parameters} {operator} {dtype}"


def test_verifies_clean(built: list[tuple[Schedule, dict[str, object]]]) -> None:
    for schedule, parameters in built:
        assert verify(schedule) == (), f"{schedule.collective} {parameters}"


@pytest.mark.sampled(4)
def test_moves_what_the_closed_form_says(algorithm: Algorithm, built: list[tuple[Schedule, dict[str, object]]]) -> None:
    for schedule, parameters in built:
        collective = schedule.collective
        form = algorithm.form(collective, **parameters)
        where = f"{collective} {parameters}"
        assert schedule.step_count == form.steps, where
        assert max(schedule.sent()[: schedule.world]) == form.sent, where
        wire, reduced, messages = port_load(schedule)
        slack = BOUNDED.get(algorithm.name, 1)
        assert wire <= form.wire <= slack * wire, where
        assert reduced <= form.reduced <= slack * reduced, where
        bound, need = lower_bounds(collective, in_network=algorithm.in_network), needs(schedule)
        assert need.moved >= bound.moved, where
        assert need.reduced >= bound.reduced, where
        assert messages <= form.messages <= (2 if "at_once" in parameters else slack) * messages, where
        if collective.world > 1 and isinstance(local := parameters.get("local"), int):
            inside = (form.steps_inside, form.wire_inside, form.messages_inside)
            assert inside == inside_load(schedule, local), where


def test_serves_thirty_worlds_or_all_powers_of_two(built: list[tuple[Schedule, dict[str, object]]]) -> None:
    worlds = {schedule.world for schedule, _ in built}
    assert len(worlds) >= 30 or worlds >= {1, 2, 4, 8, 16, 32, 64, 128}
