"""Constants of a cluster, fitted to a measured sweep of a collective: nccl-tests' or `hocket bench`'s, or a table."""

import contextlib
import dataclasses
import json
import math
import re
import statistics
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from hocket.schedule import Collective
from hocket.units import parse_bytes

from .._findings import PlanError
from ..network import Constants, Network

_LEAST = 3  # sizes
# What mpirun --tag-output (Open MPI 5: "[prterun-host-1@1,0]<stdout>:"), srun -l, torchrun --tee ("[default0]:"),
# kubectl logs --prefix ("[pod/x/y] ") and pdsh ("host1: ") put before a line.
_LAUNCHER = re.compile(r"^(\[\S+?\](<std\w+>)?:?|\d+:|[\w.-]+:(?=\s))\s*")
# An OSU micro-benchmark's title, as "OSU MPI-CUDA All-to-All Personalized Exchange Latency Test v7.3".
_OSU = re.compile(r"#\s*OSU \S+ (?:(.+?) (?:Personalized Exchange )?Latency|(.+)) Test\b")
_BLOCKS = ("allgather", "alltoall", "gather", "scatter")  # of which OSU's size is one rank's block
_SIZES = ("bytes", "nbytes", "size", "b")
_TIMES = {"microseconds": 1e-6, "us": 1e-6, "time_us": 1e-6, "milliseconds": 1e-3, "ms": 1e-3, "seconds": 1.0, "s": 1.0}
_ROUNDED = 0.1  # GB/s, more than rounding moves a rate
_OFF = 0.3  # of a fit's median error, with which it says nothing
_FASTER = 0.9  # of what the links carry, the least time that is put down to noise
_SHARES, _STARTS = (0.01, 1.0), (1e-9, 1.0)  # between which constants are
_TOLD = 0.2  # of the largest size's time, the part of the links with which it tells what they reach
_STARTED = 0.05  # of the smallest size's time, the part of a start with which it tells how long that takes
_SURER = 0.2  # a fit's median error, up to which it makes predictions surer: links are assumed to within 30%
# Errors of more than a tenth count less: one disturbed size of 18 had moved what the links reach by a quarter.
_ROBUST: Final = {"loss": "soft_l1", "f_scale": 0.1}
_WRONG: Final = "nccl-tests found wrong results, and times of wrong results tell nothing; mend that first"


def read_sweep(text: str, *, kind: str = "", ranks: int = 0) -> dict[int, float]:
    """Return seconds by bytes; of a size that was measured several times the median.

    Args:
        text: nccl-tests' output of any version, of which the times out of place are taken; a collective's latency by
            the OSU micro-benchmarks; `hocket bench --json`; or lines "bytes,microseconds", whose header may say another
            order or unit ("bytes,seconds").
        kind: Of the collective that it should be, as "all_reduce".
        ranks: That should have taken part.

    Raises:
        PlanError: fewer than three sizes are in it, columns are not what they are said to be, or it is of another
            collective or of other ranks, which it says or the rates tell.
    """
    found: dict[int, list[float]] = {}
    read = _bench(text) if text.lstrip().startswith("{") else _lines(text)
    if kind and read.kind and _plain(kind) != _plain(read.kind):
        raise PlanError(f"the sweep is of {read.kind}, not of {kind}; say so with --collective")
    if ranks and read.ranks and ranks != read.ranks:
        raise PlanError(f"the sweep is of {read.ranks} ranks, not of {ranks}; say so with -n")
    if kind and ranks:
        factor = Collective(kind, ranks).bus_factor
        for algbw, busbw in read.rates:
            if abs(busbw - factor * algbw) > _ROUNDED:
                rule = f"of {kind} on {ranks} ranks busbw is {factor:.4g} of algbw; correct --collective or -n"
                raise PlanError(f"a row has algbw {algbw:g} and busbw {busbw:g} GB/s, and {rule}")
    blocks = 1
    if read.osu and _plain(read.kind) in _BLOCKS:
        if not ranks:
            raise PlanError(f"OSU's sizes of {read.kind} are of one rank's block; say how many ranks took part")
        blocks = ranks
    points = [(blocks * nbytes, seconds) for nbytes, seconds in read.points]
    for nbytes, seconds in points:
        if not (0 < seconds < math.inf and nbytes > 0):
            raise PlanError(f"{nbytes} bytes in {seconds:g} s are no measurement; give more than 0 of both")
        found.setdefault(nbytes, []).append(seconds)
    if len(found) < _LEAST:
        read_of = f"{len(found)} size was" if len(found) == 1 else f"{len(found)} sizes were"
        raise PlanError(f"{read_of} read; give lines of bytes,microseconds or nccl-tests' output, 3 or more")
    return {nbytes: statistics.median(times) for nbytes, times in found.items()}


class _Read(NamedTuple):
    """What a sweep says."""

    points: list[tuple[int, float]]  # bytes, seconds
    kind: str = ""  # of the collective, in its own words
    ranks: int = 0
    rates: list[tuple[float, float]] = []  # algbw and busbw, GB/s  # noqa: RUF012
    osu: bool = False


def _plain(kind: str) -> str:
    return re.sub("[-_ ]", "", kind).lower().replace("bcast", "broadcast")


def _bench(text: str) -> _Read:
    try:
        read = json.loads(text)
        rows = [row for row in read["rows"] if row["system"] == "hocket" and not row["registered"]]
        points = [(row["nbytes"], row["median_s"]) for row in rows]
        return _Read(points, read.get("collective", ""), max((row["n"] for row in rows), default=0))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PlanError("this JSON is no measurement of `hocket bench`; give what its --json prints") from None


def _lines(text: str) -> _Read:
    size, time, unit_s, named = 0, 1, 1e-6, 2  # of a table, and how many columns it has
    column = None  # of nccl-tests' time
    wrong, osu = list[int](), False  # columns of how many results were wrong; whether OSU printed it
    found, rates, kinds, runs = [], list[tuple[float, float]](), [""], [list[str]()]
    for number, line in enumerate(text.splitlines(), 1):
        plain = _LAUNCHER.sub("", line.strip())
        words = re.split(r"[,;\s]+", plain.lstrip("# "))
        if plain.startswith("#"):
            if title := _OSU.match(plain):
                osu = True
                kinds.append(title[1] or title[2])
            elif words[0] == "size" and "time" in words:  # the names of columns, which versions have other numbers of
                column = words.index("time")
                wrong = [at for at, word in enumerate(words) if word == "#wrong"]
            elif words[0] == "Rank" and len(words) > 1 and words[1].isdecimal():
                if words[1] in runs[-1]:  # another run's list begins
                    runs.append([])
                runs[-1].append(words[1])
            elif words[:3] == ["Collective", "test", "starting:"]:
                kinds.append(words[-1].removesuffix("_perf"))
            elif words[:4] == ["Out", "of", "bounds", "values"] and "FAILED" in words:
                raise PlanError(f"line {number}: {line.strip()!r}: {_WRONG}")
            continue
        names = [word.lower() for word in words]
        if len(names) >= 2 and any(name in _SIZES for name in names):
            size = next(at for at, name in enumerate(names) if name in _SIZES)
            told = [at for at, name in enumerate(names) if name in _TIMES]
            if len(told) != 1:
                raise PlanError(f"line {number}: {line!r} names no unit of time; write bytes,microseconds")
            time, named = told[0], len(names)
            unit_s = _TIMES[names[time]]
        elif len(words) >= 7 and words[0].isdecimal() and not osu:
            nbytes = int(words[0])
            if not nbytes:  # fewer bytes than ranks
                continue
            column = _time_of(words, nbytes) if column is None else column
            if column is None or column + 1 >= len(words) or not _agree(nbytes, *words[column : column + 2]):
                rule = "no column of microseconds goes with the GB/s behind it; give nccl-tests' output with its header"
                raise PlanError(f"line {number}: {line.strip()!r}: {rule}")
            if any(words[at : at + 1] not in ([], ["0"], ["N/A"]) for at in wrong):
                raise PlanError(f"line {number}: {line.strip()!r}: {_WRONG}")
            found.append((nbytes, float(words[column]) * 1e-6))
            with contextlib.suppress(ValueError, IndexError):  # a line that was cut off
                rates.append((float(words[column + 1]), float(words[column + 2])))
        elif len(words) >= 2:
            if len(words) > 2 and len(words) != named and words[0][:1].isdecimal() and not osu:
                rule = "which of these is the time, no header says; write bytes,microseconds above them"
                raise PlanError(f"line {number}: {line.strip()!r}: {rule}")
            try:
                found.append((parse_bytes(words[size]), float(words[time]) * unit_s))
            except ValueError:
                continue
    counts = [max(map(int, run), default=-1) + 1 for run in runs]
    for said in (kinds[1:], [f"{count} ranks" for count in counts]):
        if len(set(said)) > 1:
            raise PlanError(f"it has runs of {' and of '.join(dict.fromkeys(said))}; give one of them")
    return _Read(found, kinds[-1], counts[-1], rates, osu)


def _time_of(words: list[str], nbytes: int) -> int | None:
    """Return which column is microseconds, with GB/s behind it; sizes of which rates are rounded to 0 do not tell."""
    told = (at for at in range(2, len(words) - 1) if _agree(nbytes, *words[at : at + 2]) and float(words[at + 1]) > 0)
    return next(told, None)


def _agree(nbytes: int, microseconds: str, rate: str) -> bool:
    """Whether a time and a rate in GB/s, rounded to two digits, are of so many bytes."""
    try:
        expected, said = nbytes / float(microseconds) / 1e3, float(rate)
    except (ValueError, ZeroDivisionError):
        return False
    return abs(expected - said) <= 0.01 + 0.02 * expected


def fit_sweep(sweep: Mapping[int, float], network: Network, *, kind: str, ranks: int) -> tuple[Constants, float]:
    """Return what the links reach and what starting a collective costs, and the median error of the fit.

    Least squares of the logarithm of time, in which sizes that are far off count less; two constants: the share of the
    links that the group is bound by (inside a host, or between hosts), and `collective_s`, which stays what it was
    where the smallest size takes so long that a start is lost in it. What the sweep says nothing of is as sure as it
    was, and so are the links if the fit misses it by a fifth or more.

    Args:
        sweep: Seconds by bytes, as `read_sweep` gives.
        network: Where it was measured.
        kind: Of the collective, as "all_reduce".
        ranks: How many took part, the first of the cluster.

    Raises:
        PlanError: the cluster has not so many ranks, its links cannot have taken such times, or the sizes are too small
            to tell what they reach.
    """
    from scipy.optimize import least_squares

    if not 2 <= ranks <= network.world:
        raise PlanError(f"{network.name} has {network.world} ranks, and {ranks} were measured; give 2 or more of them")
    wires = dataclasses.replace(network.first(ranks), routed=None)  # as predictions with what was fitted take it
    share = "inside_share" if ranks <= wires.local else "network_share"
    known = Constants.of(network.reached)

    def made(values: list[float]) -> Constants:
        changed: dict[str, Any] = {share: min(1.0, math.exp(values[0]))}
        if len(values) > 1:
            changed["collective_s"] = math.exp(values[1])
        return dataclasses.replace(known, **changed)

    def residuals(values: list[float]) -> list[float]:
        constants = made(values)
        times = (wires.collective(kind, float(nbytes), ranks, 1, constants).seconds for nbytes in sweep)
        return [math.log(time / measured) for time, measured in zip(times, sweep.values(), strict=True)]

    (least_share, most_share), (least_s, most_s) = _SHARES, _STARTS
    begin = [math.log(0.7), math.log(min(0.5 * most_s, max(1e-7, 0.5 * min(sweep.values()))))]
    bounds = [math.log(least_share), math.log(least_s)], [math.log(most_share), math.log(most_s)]
    best = least_squares(residuals, begin, bounds=bounds, **_ROBUST)
    if max(known.collective_s, made(best.x.tolist()).collective_s) < _STARTED * sweep[min(sweep)]:
        best = least_squares(residuals, begin[:1], bounds=(bounds[0][:1], bounds[1][:1]), **_ROBUST)
    found, off = made(best.x.tolist()), dict(zip(sweep, residuals(best.x.tolist()), strict=True))
    error = statistics.median(abs(one) for one in off.values())
    largest = max(sweep)
    said = f"{largest} bytes in {sweep[largest] * 1e6:.4g} us of {kind} on {ranks} ranks of {network.name}"
    full = made([math.log(most_share), *best.x.tolist()[1:]])
    carry = wires.collective(kind, float(largest), ranks, 1, full).seconds
    if sweep[largest] < _FASTER * carry:
        rule = f"its links need {carry * 1e6:.4g} us at the least"
        raise PlanError(f"{said}: {rule}; correct the cluster, the ranks, the collective or the unit of the times")
    if error > _OFF or getattr(found, share) < 1.01 * least_share or found.collective_s > 0.99 * most_s:
        rule = f"no share of its links explains such times (a median error of {error:.0%})"
        raise PlanError(f"{said}: {rule}; correct the cluster, the ranks, the collective or the unit of the times")
    half = dataclasses.replace(found, **{share: getattr(found, share) / 2})
    slower, fitted = (wires.collective(kind, float(largest), ranks, 1, one).seconds for one in (half, found))
    if slower < (1 + _TOLD) * fitted:
        rule = "that is the start of a collective, and says nothing of what its links reach"
        raise PlanError(f"{said}: {rule}; measure larger sizes, too, up to 256 MiB or more")
    return dataclasses.replace(found, swept=ranks if error < _SURER else known.swept), error
