"""Does a schedule keep its contract? Every contribution exactly once, whatever the order within a step."""

from ._findings import Finding
from ._ir import Schedule
from ._play import Race, play
from ._trace import explain


def verify(schedule: Schedule, *, limit: int = 20) -> tuple[Finding, ...]:
    """Play a schedule on symbols and compare what every rank holds with the contract.

    Concurrent transfers may end in any order: if the order of two writes matters, and what comes of it is part of a
    result, the contract is broken too. With up to a few hundred ranks the contributions are counted one by one, which
    is exact. Beyond, each rank contributes a random number of 64 bits from a fixed seed, and sums are compared: a false
    sum passes with a probability of about 2**-64 for each chunk and rank. Whether a transfer reaches its peer, and
    whether waits can be circular, is no question here: a transfer names both ends, and steps are ordered. (Programs of
    other systems can be wrong there; `from_msccl` finds it.)

    Args:
        schedule: Any schedule.
        limit: Number of findings, at most.

    Returns:
        The findings; none if the schedule keeps its contract and has no race.

    Raises:
        MemoryError: the vectors are cut into more than 2**28 pieces in all.
    """
    outcome = play(schedule)
    findings = [explain(schedule, int(endpoint), int(chunk)) for endpoint, chunk in outcome.wrong[:limit]]
    blamed = {(finding.step, finding.endpoint, finding.chunk) for finding in findings}
    for race in dict.fromkeys((race.step, race.endpoint, race.chunk) for race in outcome.races):
        if race not in blamed and len(findings) < limit:
            findings.append(_harmless(schedule, next(r for r in outcome.races if _key(r) == race)))
    return tuple(findings)


def _key(race: Race) -> tuple[int, int, int]:
    return race.step, race.endpoint, race.chunk


def _harmless(schedule: Schedule, race: Race) -> Finding:
    who = schedule.describe(race.endpoint)
    message = (
        f"step {race.step}, transfer {race.transfer}: {who} gets chunk {race.chunk} more than once in this step; what "
        "remains depends on which comes last, though no result depends on it. Give them different steps, or drop one"
    )
    return Finding("race", False, race.endpoint, race.chunk, race.step, race.transfer, message)
