"""Programs that decide by data, sizes, modes, counters and random numbers are equal under a plan, or refused."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from hocket.testing import run_ranks

from . import guard_programs as guards


def drawn(count: int) -> list[guards.Program]:
    """Return so many programs, the same ones always."""
    found: list[guards.Program] = []

    @settings(max_examples=count, deadline=None, database=None, derandomize=True, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(guards.programs())
    def collect(program: guards.Program) -> None:
        found.append(program)

    collect()
    return found


def check(outcomes: list[str], programs: list[guards.Program]) -> Counter[str]:
    """Fail with the programs that are neither equal nor refused; return how many are what."""
    for outcome, program in zip(outcomes, programs, strict=True):
        assert outcome == "equal" or outcome.startswith("refused"), (program, outcome)
    return Counter(outcome.partition(":")[0] for outcome in outcomes)


def tensor(count: int) -> Counter[str]:
    programs = drawn(count)
    ranks = run_ranks(guards.tensor, 2, programs, timeout_s=60 + count)
    assert ranks[0] == ranks[1]  # refused alike, with one error
    return check(ranks[0], programs)


def test_programs_over_two_ranks_are_equal_or_refused() -> None:
    assert tensor(15)["equal"] >= 12


def test_programs_in_two_stages_are_equal_or_refused() -> None:
    programs = drawn(8)
    check([guards.pipeline(program) for program in programs], programs)


@pytest.mark.long
def test_200_programs_over_two_ranks_are_equal_or_refused() -> None:
    assert tensor(200)["equal"] >= 160


@pytest.mark.long
def test_200_programs_in_two_stages_are_equal_or_refused() -> None:
    programs = drawn(200)
    check([guards.pipeline(program) for program in programs], programs)
