"""What an algorithm is: a builder of schedules, what it serves, and its closed form."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hocket.schedule import Collective, Schedule, ScheduleError, Wire


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """The closed form of an algorithm: what it costs, written from the formula and not from its schedule.

    Every rank has one port, which sends and receives at once. A step costs the latency once, however many messages a
    rank has in it, since they are posted together; the bytes of those messages pass the port one after the other, and
    so do the bytes that are reduced. A switch has a port for each neighbour and reduces at the rate of the wire. Where
    posting costs time too, as where a processor copies into sockets, give `Wire.message_s`: without it the direct
    algorithms, all of whose messages are of one step, look better than they are. Bytes are in units of S, the vector
    by which nccl-tests measure (`Collective.vector_blocks`).

    Args:
        steps: Steps one after the other, each of which costs a latency.
        sent: The most that any rank sends.
        wire: What the busiest port of each step passes, summed over the steps; `sent` where all ranks do the same.
        reduced: What the busiest rank of each step reduces, summed over the steps.
        steps_inside: How many of `steps` stay within a host.
        wire_inside: How much of `wire` stays within a host.
        messages: Messages of the busiest rank of each step, sent or received, summed over the steps; -1 for one a step.
        messages_inside: How many of `messages` stay within a host; -1 for one a step.
    """

    steps: int
    sent: Fraction
    wire: Fraction
    reduced: Fraction = Fraction(0)
    steps_inside: int = 0
    wire_inside: Fraction = Fraction(0)
    messages: int = -1
    messages_inside: int = -1

    def __post_init__(self) -> None:
        if self.messages < 0:
            object.__setattr__(self, "messages", self.steps)
        if self.messages_inside < 0:
            object.__setattr__(self, "messages_inside", self.steps_inside)

    def seconds(self, nbytes: int, wire: Wire, inside: Wire | None = None) -> float:
        """Return the time for a vector of `nbytes`; steps that stay within a host use `inside` if it is given."""
        near = inside or wire
        return (
            (self.steps - self.steps_inside) * wire.latency_s
            + self.steps_inside * near.latency_s
            + (self.messages - self.messages_inside) * wire.message_s
            + self.messages_inside * near.message_s
            + float(self.wire - self.wire_inside) * nbytes * wire.seconds_per_byte
            + float(self.wire_inside) * nbytes * near.seconds_per_byte
            + float(self.reduced) * nbytes * wire.reduce_seconds_per_byte
        )


_VALUES = {bool: "truth value", int: "whole number", str: "word"}
_ALONE = ClosedForm(0, Fraction(0), Fraction(0))


@functools.cache
def _defaults(builder: Callable[..., Schedule]) -> Mapping[str, Any]:
    given = inspect.signature(builder).parameters.values()
    return {one.name: one.default for one in given if one.kind is inspect.Parameter.KEYWORD_ONLY}


def _everything(collective: Collective, **parameters: Any) -> None:
    return None


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Algorithm:
    """One way to carry out some collectives. `algorithm(collective, **parameters)` builds its schedule.

    Args:
        name: Name as in `get(name)` and in tables of choices.
        title: Name for people.
        source: Paper or document that it is from.
        kinds: Kinds of collectives that it serves, see `hocket.schedule.KINDS`.
        builder: Makes the schedule for two ranks or more; its keyword arguments are the algorithm's parameters, and
            their defaults the algorithm's.
        closed_form: The same arguments, none left out -> `ClosedForm`.
        limit: The same arguments, none left out -> why they cannot be served, or None.
        variants: Parameters worth a try when a table of choices is made.
        in_network: Whether switches must reduce.
        planned: Parameters with which the planner considers it in a group of any ranks; `local`, ranks on each host, is
            added where there is such a parameter. None where the closed form holds on one network only, or promises
            too much as long as posting a message costs nothing.
        along_hosts: Whether a rank sends to the next one only, so that one stream enters each host and one leaves it.
    """

    name: str
    title: str
    source: str
    kinds: tuple[str, ...]
    builder: Callable[..., Schedule]
    closed_form: Callable[..., ClosedForm]
    limit: Callable[..., str | None] = _everything
    variants: tuple[Mapping[str, Any], ...] = ({},)
    in_network: bool = False
    planned: tuple[Mapping[str, Any], ...] = ({},)
    along_hosts: bool = False

    def __repr__(self) -> str:
        return f"<algorithm {self.name}: {', '.join(self.kinds)}>"

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Names and defaults."""
        return _defaults(self.builder)

    @property
    def description(self) -> str:
        """The builder's docstring."""
        return inspect.getdoc(self.builder) or ""

    def serves(self, collective: Collective, **parameters: Any) -> str | None:
        """Return the reason why it cannot do this, or None if it can."""
        if collective.kind not in self.kinds:
            return f"{self.name} serves {', '.join(self.kinds)}, not {collective.kind}"
        for name in parameters.keys() - self.parameters.keys():
            known = ", ".join(self.parameters) or "none"
            return f"{self.name} has no parameter {name!r}; there are: {known}"
        for name, value in parameters.items():
            default = self.parameters[name]
            if type(default) in _VALUES and not isinstance(value, type(default)):
                wanted = _VALUES[type(default)]
                return f"{self.name}: {name}={value!r} is no {wanted}; the default is {default!r}"
        reason = None if collective.world == 1 else self.limit(collective, **{**self.parameters, **parameters})
        return reason and f"{self.name}, {collective}: {reason}"

    def build(self, collective: Collective, **parameters: Any) -> Schedule:
        """Make the schedule; one rank has nothing to transfer.

        Raises:
            ScheduleError: with the reason that `serves` gives.
        """
        if reason := self.serves(collective, **parameters):
            raise ScheduleError(reason)
        if collective.world == 1:
            return Schedule(self.name, collective, collective.blocks, ())
        return self.builder(collective, **parameters)

    __call__ = build

    def form(self, collective: Collective, **parameters: Any) -> ClosedForm:
        """Return the closed form.

        Raises:
            ScheduleError: with the reason that `serves` gives.
        """
        if reason := self.serves(collective, **parameters):
            raise ScheduleError(reason)
        if collective.world == 1:
            return _ALONE
        return self.closed_form(collective, **{**self.parameters, **parameters})

    def sent(self, collective: Collective, **parameters: Any) -> Fraction:
        """Return the most that any rank sends, in units of S, by the closed form."""
        return self.form(collective, **parameters).sent

    def steps(self, collective: Collective, **parameters: Any) -> int:
        """Return the number of steps, by the closed form."""
        return self.form(collective, **parameters).steps

    def cost(
        self, collective: Collective, nbytes: int, wire: Wire, *, inside: Wire | None = None, **parameters: Any
    ) -> float:
        """Return the seconds for a vector of `nbytes`, by the closed form; see `ClosedForm` for what is counted."""
        return self.form(collective, **parameters).seconds(nbytes, wire, inside)


def algorithm(
    *,
    title: str,
    source: str,
    kinds: tuple[str, ...],
    form: Callable[..., ClosedForm],
    limit: Callable[..., str | None] = _everything,
    variants: tuple[Mapping[str, Any], ...] = ({},),
    in_network: bool = False,
    planned: tuple[Mapping[str, Any], ...] = ({},),
    along_hosts: bool = False,
) -> Callable[[Callable[..., Schedule]], Algorithm]:
    """Make an `Algorithm` of the function that builds its schedules, under the function's name."""

    def wrap(builder: Callable[..., Schedule]) -> Algorithm:
        name = builder.__name__
        return Algorithm(name, title, source, kinds, builder, form, limit, variants, in_network, planned, along_hosts)

    return wrap
