"""One row of the table of choices, and how an algorithm with its parameters is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hocket.schedule import KINDS, Collective, Schedule, ScheduleError

from ._registry import get

Parameter = int | str | bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One row: what is used for messages of `start <= nbytes < stop`.

    Args:
        kind: Kind of collective, see `hocket.schedule.KINDS`.
        algorithm: Name of the algorithm, see `get`.
        parameters: Parameters of the algorithm.
        world: Ranks of the group; None for any.
        local: Ranks of the group on each host; None for any.
        start: First S of the range in bytes, see `Collective.vector_blocks`.
        stop: End of the range in bytes, not included; None for no end.
        nbytes: The size for which the times are: one in the middle of the range.
        seconds: Its time there.
        runner_up: The best other algorithm there, with its parameters.
        margin: How much longer that takes, as a part of `seconds`.
        origin: "closed form", "measured" or "user".
    """

    kind: str
    algorithm: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    world: int | None = None
    local: int | None = None
    start: int = 0
    stop: int | None = None
    nbytes: int | None = None
    seconds: float | None = None
    runner_up: str | None = None
    margin: float | None = None
    origin: str = "user"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScheduleError(f"collective {self.kind!r} is unknown; there are {', '.join(KINDS)}")
        if self.world is not None and (reason := self._reason(Collective(self.kind, self.world))):
            raise ScheduleError(reason)
        if self.kind not in get(self.algorithm).kinds:
            raise ScheduleError(f"{self.algorithm} serves {', '.join(get(self.algorithm).kinds)}, not {self.kind}")
        if unknown := sorted(self.parameters.keys() - get(self.algorithm).parameters.keys()):
            known = ", ".join(get(self.algorithm).parameters) or "none"
            raise ScheduleError(f"{self.algorithm} has no parameter {unknown[0]!r}; there are: {known}")

    def __str__(self) -> str:
        return spell(self.algorithm, self.parameters)

    def covers(self, kind: str, world: int, nbytes: int, local: int) -> bool:
        """Return whether the row is for such an operation."""
        return (
            self.kind == kind
            and self.world in (None, world)
            and self.local in (None, local)
            and self.start <= nbytes
            and (self.stop is None or nbytes < self.stop)
        )

    def without(self, other: "Choice") -> "list[Choice]":
        """Return what is left of the row where `other` goes before it; its times only where their size is left."""
        if self.kind != other.kind or other.world not in (None, self.world) or other.local not in (None, self.local):
            return [self]
        parts = []
        if self.start < other.start:
            parts.append(self._cut(self.start, other.start if self.stop is None else min(self.stop, other.start)))
        if other.stop is not None and (self.stop is None or other.stop < self.stop):
            parts.append(self._cut(max(self.start, other.stop), self.stop))
        return parts

    def _cut(self, start: int, stop: int | None) -> "Choice":
        if self.nbytes is not None and start <= self.nbytes and (stop is None or self.nbytes < stop):
            return replace(self, start=start, stop=stop)
        return replace(self, start=start, stop=stop, nbytes=None, seconds=None, runner_up=None, margin=None)

    def build(self, collective: Collective) -> Schedule:
        """Return the schedule that the row chooses.

        Raises:
            ScheduleError: a row for any group names an algorithm that cannot serve this one; with the reason.
        """
        if reason := self._reason(collective):
            raise ScheduleError(
                f"{reason}; the row {self.origin!r} of the choices names it, override it for this world"
            )
        return get(self.algorithm).build(collective, **self.parameters)

    def _reason(self, collective: Collective) -> str | None:
        return get(self.algorithm).serves(collective, **self.parameters)


def spell(name: str, parameters: Mapping[str, Parameter]) -> str:
    """Return an algorithm with its parameters as in `double_tree pieces=16`."""
    return " ".join([name, *(f"{key}={value}" for key, value in parameters.items())])


_MOST, _DIGITS = 1_000_000, 99  # of a parameter: rings, or pieces; Python reads only so many digits


def parse_spelled(text: str) -> tuple[str, dict[str, Parameter]]:
    """Read `double_tree pieces=16`."""
    name, *words = text.split() or [""]
    parameters: dict[str, Parameter] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise ScheduleError(f"algorithm {text!r}: {word!r} is no parameter; write it as name=value")
        if value.isdecimal() and (len(value) > _DIGITS or int(value) > _MOST):
            raise ScheduleError(f"algorithm {name!r}: {word[:40]!r} is too large; give {_MOST:,} at most")
        truth = {"true": True, "false": False}.get(value.lower())
        parameters[key] = int(value) if value.isdecimal() else value if truth is None else truth
    return get(name).name, parameters
