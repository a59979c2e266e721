"""`hocket schedule` on the order of a pipeline."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hocket.cli._output import bad_input, print_json

if TYPE_CHECKING:
    from hocket.schedule.pipeline import PipelineOrder


_MOST = 1_000_000  # forwards of an order: each is an object, and is visited more than once


@dataclass(frozen=True)
class Timed:
    """With what an order is timed, as it stands on the command line."""

    forward: str  # a micro-batch's forward through one stage
    backward: str  # its backward
    message: str  # a message between two stages, without a cluster
    nbytes: str | None  # bytes of a message, on a cluster
    cluster: str | None  # where; None for messages of a given time
    at_once: float | None  # how many ranks compute at full speed at once; None for all


def refuse_endless(stages: int, micro_batches: int) -> None:
    """Raise ScheduleError for an order that would take hours to write out."""
    from hocket.schedule import ScheduleError

    if stages * micro_batches > _MOST:
        said = f"{stages} stages with {micro_batches} micro-batches are {stages * micro_batches:,} forwards"
        raise ScheduleError(f"{said}, and an order holds {_MOST:,} at most; give fewer")


def text_of(path: Path) -> str:
    """Return the text of a file, also a second time where it is a pipe."""
    if not path.is_fifo():
        return path.read_text("utf-8-sig")
    if path not in _piped:
        _piped[path] = path.read_text("utf-8-sig")
    return _piped[path]


_piped: dict[Path, str] = {}


def asked(
    verb: str, words: list[str], ranks: int | None, stages: int | None, micro_batches: int | None
) -> PipelineOrder | None:
    """Return the order that is meant: by name, or from a file, broken or not; None if a collective is meant."""
    from hocket.schedule import ScheduleError
    from hocket.schedule.pipeline import NAMED_ORDERS, PipelineOrder, pipeline_order

    word = " ".join(words)
    try:
        if word in NAMED_ORDERS:
            usual = NAMED_ORDERS[word].stages or (2 if word == "interleaved" else 1)
            each = (stages // ranks if ranks and stages else 0) or usual
            ranks = ranks or (stages // each if stages else 4)
            if (stages or ranks * each) != ranks * each:
                raise ScheduleError(f"--stages {stages} is no multiple of {ranks} ranks; give as many to each")
            refuse_endless(ranks * each, micro_batches or 8)
            return pipeline_order(word, ranks, each, micro_batches or 8)
        path = Path(word)
        text = text_of(path) if path.suffix == ".txt" or path.is_file() or path.is_fifo() else ""
        lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
        if next((line for line in lines if line), "").split()[:1] != ["order"]:
            return None
        order = PipelineOrder.parse(text)
    except (OSError, UnicodeDecodeError):
        return None
    except ScheduleError as error:
        bad_input(f"schedule {verb}", error)
    given = {"-n": (ranks, order.world), "--stages": (stages, order.stages)}
    given["--micro-batches"] = micro_batches, order.micro_batches
    for option, (wanted, found) in given.items():
        if wanted not in (None, found):
            bad_input(
                f"schedule {verb}", f"{option} {wanted}: the order {order.name} in {word} has {found}; leave it out"
            )
    return order


def show(order: PipelineOrder, *, text: bool, as_json: bool) -> None:
    """Print an order as a grid over time, as text that is read back, or as JSON."""
    from hocket.schedule import pipeline

    if text:
        typer.echo(str(order), nl=False)
        return
    if as_json:
        print_json(_facts(order) | {"ranks": [[str(action) for action in rank] for rank in order.ranks]})
        return
    typer.echo(pipeline.describe(order))
    typer.echo(pipeline.grid(order), nl=False)
    _echo_memory(order)


def check(order: PipelineOrder, *, in_flight: float | None, as_json: bool) -> None:
    """Print what is wrong with an order; the exit code is 1 if anything is."""
    from hocket.schedule import pipeline

    if in_flight is not None and not in_flight >= 0:  # also of nan, which is less than nothing and nothing less
        bad_input("schedule verify", f"--in-flight {in_flight:g}: give a number of micro-batches, as 4 or 3.5")
    found = pipeline.verify(order, in_flight=in_flight)
    if as_json:
        print_json(_facts(order) | {"can_be_carried_out": not found, "findings": [asdict(one) for one in found]})
    else:
        typer.echo(pipeline.describe(order) if not found else f"{order.name}: BROKEN")
        for one in found:
            typer.echo(f"  {one}")
        if found:
            typer.echo(pipeline.grid(order, found), nl=False)
        else:
            work = order.world * order.stages_per_rank * order.micro_batches
            typer.echo(f"every forward and backward once and in order ({work} of each); nobody waits for ever")
            _echo_memory(order)
    if found:
        raise typer.Exit(1)


def time(order: PipelineOrder, given: Timed, *, trace: Path | None, as_json: bool) -> None:
    """Print how long an order takes."""
    from hocket.cluster import load
    from hocket.planner import expected_order, expected_step
    from hocket.schedule.pipeline import verify
    from hocket.simulate import StageWork, order_graph, simulate_order, simulate_step
    from hocket.timeline import write_perfetto
    from hocket.units import parse_bytes, parse_time

    found = verify(order, limit=1)
    if found:
        bad_input("schedule time", f"the order {order.name} cannot be carried out: {found[0]}")
    timing: Any
    try:
        work = StageWork(parse_time(given.forward), parse_time(given.backward), hop=parse_time(given.message))
        works = [work] * order.stages
        if given.cluster is None:
            if given.nbytes is not None:
                raise ValueError("--bytes needs a --cluster whose links they cross; without one give --message 1ms")
            timing = simulate_order(order, works, given.at_once or float("inf"))
            expected = expected_order(timing.seconds, timing.idle_share)
        else:
            if given.at_once is not None or parse_time(given.message):
                flag = "--message" if given.at_once is None else "--at-once"
                raise ValueError(f"{flag} is for an order without --cluster")
            graph = order_graph(order, works, parse_bytes(given.nbytes or "1MB"))
            where = load(given.cluster)
            timing = simulate_step(graph, where, trace=trace is not None)
            expected = expected_step(graph, where)
        if trace is not None:
            write_perfetto(timing.timeline if given.cluster else timing.timeline(), trace)
            typer.echo(f"wrote {trace}; open it at https://ui.perfetto.dev", err=True)
    except ValueError as error:
        bad_input("schedule time", error)
    except OSError as error:
        bad_input("schedule time", f"--trace: {str(trace)!r} cannot be written: {error}")
    if as_json:
        facts = {"seconds": timing.seconds, "expected": expected.facts(), "idle_share": timing.idle_share}
        print_json(_facts(order) | facts)
        return
    by = given.cluster or f"messages of {given.message}"
    typer.echo(f"{order.name}: {order.world} ranks, {order.stages} stages, {order.micro_batches} micro-batches; {by}")
    typer.echo(f"step time   {timing.seconds * 1e3:.3f} ms, predicted")
    low, high = (f"{end * 1e3:.3f}" for end in expected.interval_s)
    reached = ", with what runs reach of links" if given.cluster else ""
    typer.echo(f"expected    {expected.seconds * 1e3:.3f} ms{reached}; {low} to {high} ms hold 80% of runs")
    typer.echo(f"idle share  {timing.idle_share:.1%}")


def _facts(order: PipelineOrder) -> dict[str, Any]:
    ranks = range(order.world)
    return {
        "order": order.name,
        "world": order.world,
        "stages": order.stages,
        "micro_batches": order.micro_batches,
        "idle_share_of_equal_stages": None if order.played.stuck else order.idle_share(),
        "warm_up": [order.warm_up(rank) for rank in ranks],
        "in_flight": [order.in_flight(rank) for rank in ranks],
        "weights_left": [order.weights_left(rank) for rank in ranks],
    }


def _echo_memory(order: PipelineOrder) -> None:
    ranks = range(min(order.world, 16))
    rows = [("forwards before the first backward", order.warm_up), ("micro-batches in flight", order.in_flight)]
    if order.halves:
        rows.append(("micro-batches whose weights are left", order.weights_left))
    more = " ..." if order.world > len(ranks) else ""
    for label, of in rows:
        typer.echo(f"{label + ', by rank:':46} " + " ".join(f"{of(rank):g}" for rank in ranks) + more)
