"""Choices: which algorithm carries out which collective, as a table that people can read and change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hocket.schedule import KINDS, Collective, ScheduleError, Wire
from hocket.units import format_bytes, format_time, parse_bytes

from ._choice import Choice, parse_spelled, spell
from ._registry import algorithms

_SIZES: Final = tuple(1 << k for k in range(6, 33))  # 64 B to 4 GiB


@dataclass(frozen=True, slots=True)
class Choices:
    """Rows in order of precedence: the first that covers an operation is used."""

    rows: tuple[Choice, ...] = ()

    @classmethod
    def by_closed_form(
        cls,
        wire: Wire,
        world: int,
        *,
        local: int = 1,
        inside: Wire | None = None,
        kinds: Iterable[str] = KINDS,
        in_network: bool = False,
        sizes: Sequence[int] = _SIZES,
    ) -> Choices:
        """Take the fastest algorithm by its closed form for each of `sizes`, and join equal neighbours.

        Args:
            wire: Alpha and beta of one rank's port; see `ClosedForm` for what is counted, above all for `message_s`.
                Every rank has a port of its own: where those of a host share a NIC, two levels are better than the
                table says.
            world: Ranks of the group.
            local: Ranks on each host, one host's after another's; those with two levels are tried if it is above 1.
            inside: The same within a host; flat algorithms are held to cross hosts in every step.
            kinds: Kinds of collectives.
            in_network: Whether switches can reduce.
            sizes: Sizes in bytes, ascending; a row begins at the first size at which it is the fastest.
        """
        rows: list[Choice] = []
        for kind in kinds:
            times = {}
            for one in algorithms():
                levels = ({}, {"local": local}) if local > 1 and "local" in one.parameters else ({},)
                for parameters in ({**variant, **level} for variant in one.variants for level in levels):
                    collective = Collective(kind, world)
                    if (one.in_network and not in_network) or one.serves(collective, **parameters):
                        continue
                    form = one.form(collective, **parameters)
                    at = sizes[:1] if kind == "barrier" else sizes  # which has no size
                    times[spell(one.name, parameters)] = {size: form.seconds(size, wire, inside) for size in at}
            rows += cls.by_times(kind, world, times, local=local, origin="closed form").rows
        return cls(tuple(rows))

    @classmethod
    def by_times(
        cls,
        kind: str,
        world: int,
        times: Mapping[str, Mapping[int, float]],
        *,
        local: int = 1,
        origin: str = "measured",
    ) -> Choices:
        """Make the rows of one kind and group from times.

        Args:
            kind: Kind of collective.
            world: Ranks of the group.
            times: `{"double_tree pieces=16": {nbytes: seconds}}`; every algorithm for the same sizes.
            local: Ranks on each host.
            origin: What the rows say of where they come from.

        Raises:
            ScheduleError: no times, or not the same sizes for all.
        """
        sizes = sorted({size for by_size in times.values() for size in by_size})
        for label, by_size in times.items():
            if missing := [size for size in sizes if size not in by_size]:
                raise ScheduleError(f"times of {label!r} for {kind} lack {missing[0]} bytes, which others have")
        if not sizes:
            raise ScheduleError(f"no times for {kind} of {world} ranks; give one algorithm and size or more")
        rows, first = [], 0
        for after in range(1, len(sizes) + 1):
            if after < len(sizes) and _fastest(times, sizes[after]) == _fastest(times, sizes[first]):
                continue
            at = sizes[(first + after - 1) // 2]
            best = _fastest(times, at)
            name, parameters = parse_spelled(best)
            others = {label: by_size for label, by_size in times.items() if parse_spelled(label)[0] != name}
            second = _fastest(others, at) if others else None
            rows.append(
                Choice(
                    kind,
                    name,
                    parameters,
                    world,
                    local,
                    start=sizes[first] if first else 0,
                    stop=sizes[after] if after < len(sizes) else None,
                    nbytes=at,
                    seconds=times[best][at],
                    runner_up=second,
                    margin=times[second][at] / times[best][at] - 1 if second and times[best][at] > 0 else None,
                    origin=origin,
                )
            )
            first = after
        return cls(tuple(rows))

    @classmethod
    def parse(cls, text: str) -> Choices:
        """Read what a user writes: `all_reduce <64KiB recursive_doubling; all_reduce >=64KiB ring rings=2`.

        Each entry, between semicolons or on a line of its own, is a collective, optionally `world=N` and `local=N`, a
        range of sizes (`<64KiB`, `>=64KiB`, `64KiB-1MiB` or `*`) and an algorithm with its parameters. Later entries
        override earlier ones.

        Raises:
            ScheduleError: with the entry that is not understood.
        """
        choices = cls()
        for entry in filter(None, (part.split("#", 1)[0].strip() for part in text.replace(";", "\n").splitlines())):
            words = entry.split()
            shape: dict[str, int] = {}
            while len(words) > 1 and words[1].partition("=")[0] in ("world", "local"):
                name, _, number = words.pop(1).partition("=")
                if not number.isdecimal():
                    raise ScheduleError(f"choice {entry!r}: {name}={number}; give a whole number")
                shape[name] = int(number)
            if len(words) < 3:
                raise ScheduleError(f"choice {entry!r}; write it as: all_reduce >=64KiB ring rings=2")
            try:
                choices = choices.override(words[0], words[1], " ".join(words[2:]), **shape)
            except ScheduleError as error:
                raise ScheduleError(f"choice {entry!r}: {error}") from None
        return choices

    def override(
        self, kind: str, sizes: str, algorithm: str, *, world: int | None = None, local: int | None = None
    ) -> Choices:
        """Return the same table with one more row of the user's, which goes before all others.

        Args:
            kind: Kind of collective.
            sizes: `<64KiB`, `>=64KiB`, `64KiB-1MiB` or `*`.
            algorithm: A name, with parameters as in `double_tree pieces=16`.
            world: Ranks of the groups that it is for; None for all.
            local: Ranks a host of the groups that it is for; None for all.

        Raises:
            ScheduleError: an unknown word, or an algorithm that cannot serve this.
        """
        start, stop = parse_range(sizes)
        name, parameters = parse_spelled(algorithm)
        mine = Choice(kind, name, parameters, world, local, start, stop)
        return Choices((mine, *(part for row in self.rows for part in row.without(mine))))

    def __or__(self, other: Choices) -> Choices:
        """Return the rows of this table, then those of the other for what this one leaves open."""
        rows = list(other.rows)
        for mine in self.rows:
            rows = [part for row in rows for part in row.without(mine)]
        return Choices((*self.rows, *rows))

    def pick(self, kind: str, world: int, nbytes: int, *, local: int = 1) -> Choice:
        """Return the row for an operation.

        Raises:
            ScheduleError: no row covers it.
        """
        for row in self.rows:
            if row.covers(kind, world, nbytes, local):
                return row
        raise ScheduleError(
            f"no choice covers {kind} of {nbytes} bytes, world={world}, local={local}; add a row, or put "
            "Choices.by_closed_form(wire, world) behind the table with |"
        )

    def __str__(self) -> str:
        head = ("collective", "world", "local", "bytes", "algorithm", "at", "time", "runner-up", "margin", "from")
        table = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in table) + "\n"


def _fastest(times: Mapping[str, Mapping[int, float]], size: int) -> str:
    """Return the label with the least time; the first of equal ones."""
    return min(times, key=lambda label: times[label][size])


def _cells(row: Choice) -> tuple[str, ...]:
    def shown(value: Any, form: Any = str) -> str:
        return "-" if value is None else str(form(value))

    return (
        row.kind,
        "any" if row.world is None else str(row.world),
        "any" if row.local is None else str(row.local),
        format_range(row.start, row.stop),
        str(row),
        shown(row.nbytes, format_size),
        shown(row.seconds, lambda seconds: format_time(seconds, 3)),
        shown(row.runner_up),
        shown(row.margin, lambda margin: f"{margin:.1%}"),
        row.origin,
    )


_SIZE: Final = r"([\d.]+\s*[A-Za-z]*)"
_RANGE: Final = re.compile(rf"(<|<=|>=|>)\s*{_SIZE}|{_SIZE}\s*-\s*{_SIZE}|\*")


def parse_range(text: str) -> tuple[int, int | None]:
    """Read a range of sizes as bytes `(start, stop)`, the end not included, or None for no end.

    Raises:
        ScheduleError: what is no range, no size, or an empty range.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(f"size range {text!r}; write <64KiB, <=64KiB, >64KiB, >=64KiB, 64KiB-1MiB or *")
    comparison, size, low, high = match.groups()
    if comparison is None and low is None:
        return 0, None
    if comparison is None:
        start, stop = _nbytes(low, text), _nbytes(high, text)
    else:
        edge = _nbytes(size, text) + (comparison in ("<=", ">"))
        if comparison.startswith(">"):
            return edge, None
        start, stop = 0, edge
    if start >= stop:
        raise ScheduleError(f"size range {text!r} is empty")
    return start, stop


def _nbytes(size: str, text: str) -> int:
    try:
        return parse_bytes(size)
    except ValueError:
        raise ScheduleError(f"size {size!r} in {text!r}; write it as 512, 64KiB, 1.5MiB or 10MB") from None


def format_size(nbytes: int) -> str:
    """Return a size as ranges hold it, without a blank: "64KiB"."""
    return format_bytes(nbytes).replace(" ", "")


def format_range(start: int, stop: int | None) -> str:
    """Write a range so that `parse_range` reads it."""
    if stop is None:
        return f">={format_size(start)}" if start else "*"
    return f"{format_size(start)}-{format_size(stop)}" if start else f"<{format_size(stop)}"
