"""`hocket simulate`: what collectives, training steps and pipelines would take on a cluster. No clock is involved."""

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._output import RANKS, Json, bad_input, one_error, print_json

if TYPE_CHECKING:
    from hocket.cluster import Cluster
    from hocket.planner import ExpectedTime
    from hocket.simulate import StepTiming

simulate = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_Cluster = Annotated[str, typer.Option(help="A name, a spec (star:hosts=8) or a .toml file.")]
_Seed = Annotated[int, typer.Option(help="Of the hash by which ECMP spreads flows.")]
_Trace = Annotated[Path | None, typer.Option(help="Write a trace for Perfetto into this file.")]
_World = Annotated[int | None, typer.Option(*RANKS, "--world", min=1, help="Ranks; all of the cluster's if not given.")]


@simulate.command()
def collective(
    cluster: _Cluster,
    size: Annotated[str, typer.Option("--bytes", help="Sizes of the vector: 1KiB,1MiB,64MiB.")] = "1KiB,1MiB,64MiB",
    kind: Annotated[str, typer.Option("--collective", help="all_reduce, all_gather, ...")] = "all_reduce",
    world: _World = None,
    seed: _Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare all algorithms that serve a collective on a cluster, by size; the fastest is marked."""
    from hocket.algorithms import candidates, cluster_tree, get, planned
    from hocket.cluster import ClusterError, load
    from hocket.planner import Constants, expected_collective
    from hocket.schedule import Collective
    from hocket.simulate import simulate_sizes
    from hocket.units import format_bytes, parse_bytes

    with one_error("simulate collective"):
        found = load(cluster)
        wanted = Collective(kind, _ranks(world, found))
        sizes = [parse_bytes(word) for word in size.split(",")]
        schedules = {one.name: one(wanted) for one in candidates(wanted)}
        with contextlib.suppress(ClusterError):  # hosts with different numbers of ranks have no two levels
            for one, given in planned(wanted, math.gcd(wanted.world, found.ranks_per_host())):
                if "local" in given:
                    words = ",".join(f"{name}={value}" for name, value in given.items())
                    schedules[f"{one.name}:{words}"] = one(wanted, **given)
        wide = max(22, *(len(name) + 1 for name in schedules))
        tree = get("aggregation_tree")
        if found.reductions and kind in tree.kinds:
            with contextlib.suppress(ClusterError):  # switches inside hosts reduce, and none that all ranks reach
                parents, switches = cluster_tree(found, range(wanted.world))
                schedules[tree.name] = tree(wanted, parents=parents, switches=switches)
        seconds = {
            name: [timing.seconds for timing in simulate_sizes(one, found, sizes, seed=seed)]
            for name, one in schedules.items()
        }
        fastest = [min(seconds, key=lambda name: seconds[name][at]) for at in range(len(sizes))]
        known = Constants.of(found.reached)
        expected = [
            expected_collective(schedules[name], found, [nbytes], constants=known, seed=seed)[0]
            for name, nbytes in zip(fastest, sizes, strict=True)
        ]
    if as_json:
        reached = [{"algorithm": name} | one.facts() for name, one in zip(fastest, expected, strict=True)]
        facts = {"cluster": found.name, "collective": str(wanted), "bytes": sizes, "seconds": seconds}
        print_json(facts | {"expected": reached, "basis": known.basis})
        return
    typer.echo(f"{wanted} on {found.name}, predicted at the rates of its links, in us; * is the fastest")
    typer.echo("".join([f"{'':{wide}}", *(f"{format_bytes(nbytes):>14}" for nbytes in sizes)]))
    for name, row in seconds.items():
        cells = [f"{'*' * (name == best)}{one * 1e6:.2f}" for one, best in zip(row, fastest, strict=True)]
        typer.echo(f"{name:{wide}}" + "".join(f"{cell:>14}" for cell in cells))
    typer.echo(f"the fastest, with what runs reach of links ({known.basis}), and the interval that holds 80% of them:")
    ends = [("expected", [one.seconds for one in expected])]
    ends += [(name, [one.interval_s[end] for one in expected]) for end, name in enumerate(("from", "to"))]
    for name, times in ends:
        typer.echo(f"{name:{wide}}" + "".join(f"{one * 1e6:14.2f}" for one in times))


@simulate.command()
def step(
    cluster: _Cluster,
    gradients: Annotated[str, typer.Option(help="Bytes of all gradients.")] = "100MB",
    buckets: Annotated[int, typer.Option(min=1, max=10_000, help="In how many parts they are reduced.")] = 4,
    forward: Annotated[str, typer.Option(help="Time of the forward pass.")] = "30ms",
    backward: Annotated[str, typer.Option(help="Time of the backward pass.")] = "60ms",
    algorithm: Annotated[str, typer.Option(help="Of the all-reduce; see `hocket schedule list`.")] = "ring",
    slowest: Annotated[
        float, typer.Option(min=1, max=1_000_000, help="How many times longer than the others rank 0 computes.")
    ] = 1.0,
    world: _World = None,
    seed: _Seed = 0,
    trace: _Trace = None,
    as_json: Json = False,
) -> None:
    """Predict a data-parallel training step: buckets are reduced while back-propagation goes on."""
    import numpy as np

    from hocket.cluster import load
    from hocket.planner import expected_step
    from hocket.simulate import StepGraph, simulate_step
    from hocket.units import parse_bytes, parse_time

    from ._schedules.resolve import resolve

    with one_error("simulate step"):
        found = load(cluster)
        schedule = resolve(algorithm, "all_reduce", _ranks(world, found), 0, cluster).schedule
        if schedule.collective.kind != "all_reduce":
            raise ValueError(
                f"--algorithm {algorithm}: {schedule.collective} averages no gradients; give an all_reduce"
            )
        ranks = schedule.world
        graph = StepGraph(ranks)
        graph.compute(None, parse_time(forward), name="forward")
        nbytes, each_s = parse_bytes(gradients) / buckets, parse_time(backward) / buckets
        for bucket in range(buckets):
            work = graph.compute(None, each_s, name=f"backward {bucket}")
            graph.collective(schedule, nbytes, name=f"bucket {bucket}", after=[work])
        slowdown = np.ones(ranks)
        slowdown[0] = slowest
        timing = simulate_step(graph, found, seed=seed, slowdown=slowdown, trace=trace is not None)
        expected = expected_step(graph, found, seed=seed, slowdown=slowdown)
    _report("step", timing, expected, trace, as_json)


def _ranks(world: int | None, cluster: "Cluster") -> int:
    """Return how many ranks take part, before anything is made for them."""
    if world is not None and world > cluster.world:
        raise ValueError(f"-n {world}: {cluster.name} has {cluster.world} ranks; take a larger cluster, or fewer ranks")
    return world or cluster.world


@simulate.command()
def pipeline(
    cluster: _Cluster,
    stages: Annotated[int, typer.Option(min=1, help="Stages of the pipeline, one rank each.")] = 4,
    micro: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 8,
    forward: Annotated[str, typer.Option(help="Time of a micro-batch's forward pass through one stage.")] = "10ms",
    backward: Annotated[str, typer.Option(help="Of its backward pass.")] = "20ms",
    activations: Annotated[str, typer.Option(help="Bytes between stages for one micro-batch.")] = "1MB",
    order: Annotated[str, typer.Option(help="gpipe, 1f1b, zero_bubble, or a file; see `hocket schedule`.")] = "gpipe",
    trace: _Trace = None,
    as_json: Json = False,
) -> None:
    """Predict a pipeline of equal stages, one on each rank."""
    from hocket.cluster import load
    from hocket.planner import expected_step
    from hocket.schedule.pipeline import pipeline_order
    from hocket.simulate import StageWork, order_graph, simulate_step
    from hocket.units import parse_bytes, parse_time

    from ._schedules.orders import refuse_endless

    with one_error("simulate pipeline"):
        refuse_endless(stages, micro)
        found = load(cluster)
        works = [StageWork(parse_time(forward), parse_time(backward))] * stages
        graph = order_graph(pipeline_order(order, stages, 1, micro), works, parse_bytes(activations))
        timing = simulate_step(graph, found, trace=trace is not None)
        expected = expected_step(graph, found)
    _report("pipeline", timing, expected, trace, as_json)


def _report(verb: str, timing: "StepTiming", expected: "ExpectedTime", trace: Path | None, as_json: bool) -> None:
    from hocket.timeline import write_perfetto

    if trace is not None:
        try:
            write_perfetto(timing.timeline, trace)
        except OSError as error:
            bad_input(f"simulate {verb}", f"--trace: {str(trace)!r} cannot be written: {error.strerror}")
        typer.echo(f"wrote {trace}; open it at https://ui.perfetto.dev", err=True)
    if as_json:
        print_json(
            {
                "cluster": timing.cluster.name,
                "seconds": timing.seconds,
                "expected": expected.facts(),
                "compute_s": timing.compute_s.tolist(),
                "exposed_s": timing.exposed_s.tolist(),
                "idle_share": timing.idle_share,
                "busiest": [vars(use) for use in timing.busiest()],
            }
        )
        return
    first, *others = timing.table()
    low, high = (f"{end * 1e3:.3f}" for end in expected.interval_s)
    told = ("with what runs reach of links", f"{expected.seconds * 1e3:.3f} ms ({low} to {high} ms hold 80%)")
    for label, value in (first, told, *others):
        typer.echo(f"{label:36} {value}")
