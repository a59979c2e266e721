"""`hocket cluster`: the clusters that are known, what they look like, and what this machine is."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ._output import RANKS, Json, check_place, one_error, print_json, write_file

cluster = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@cluster.command("list", help="The catalogue, the topologies with parameters, and the servers for their ports.")
def list_(as_json: Json = False) -> None:
    """Show what `hocket cluster show` and every `--cluster` take."""
    import tomllib

    from hocket.cluster import CATALOGUE, SERVERS, TOPOLOGIES, preset_text

    abouts = {name: str(tomllib.loads(preset_text(name)).get("about", "")) for name in CATALOGUE}
    topologies = {name: (_first(form.__doc__), _parameters(form)) for name, form in TOPOLOGIES.items()}
    servers = {name: (_first(form.__doc__), _parameters(form)) for name, form in SERVERS.items()}
    if as_json:
        print_json(
            {
                "catalogue": abouts,
                "topologies": {name: {"about": what, "parameters": keys} for name, (what, keys) in topologies.items()},
                "servers": {name: {"about": what, "parameters": keys} for name, (what, keys) in servers.items()},
            }
        )
        return
    typer.echo("The catalogue:")
    for name, about in abouts.items():
        typer.echo(f"  {name:12} {about}")
    for title, rows in (
        ("Topologies, as in star:hosts=8,bandwidth=100Gbit/s", topologies),
        ("Servers, as in star:hosts=2,server=eflops,server.devices=4", servers),
    ):
        typer.echo(f"\n{title}:")
        for name, (about, keys) in rows.items():
            typer.echo(f"  {name:12} {about}")
            typer.echo(f"  {'':12} {', '.join(keys)}")


@cluster.command()
def show(
    what: Annotated[str, typer.Argument(metavar="CLUSTER", help="lassen, bigraph:upper=4,ports=2, or a .toml file.")],
    svg: Annotated[Path | None, typer.Option(help="Also draw it into this file.")] = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print it as a TOML document instead.")] = False,
    explicit: Annotated[bool, typer.Option("--explicit", help="With --toml: node by node and link by link.")] = False,
    as_json: Json = False,
) -> None:
    """Show a cluster: what it holds, its links, and what is joined to what."""
    from hocket.cluster import describe, draw_svg, load, to_toml

    with one_error("cluster show"):
        found = load(what)
        if found.reached:
            from hocket.planner import Constants

            Constants.of(found.reached)  # what predictions would refuse
    if svg is not None:
        write_file("cluster show", svg, draw_svg(found), "--svg: ")
        typer.echo(f"wrote {svg}", err=True)
    if as_json:
        print_json(_document(found))
    elif toml or explicit:
        typer.echo(to_toml(found, explicit=explicit), nl=False)
    else:
        typer.echo(describe(found))


@cluster.command()
def probe(
    n: Annotated[int, typer.Option(*RANKS, min=1, help="Ranks on this host; not inside a job.")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="Write the TOML document into this file; else it is printed.")
    ] = None,
    name: Annotated[str, typer.Option(help="Of the cluster.")] = "measured",
    sizes: Annotated[str, typer.Option(help="Comma-separated bytes of the messages.")] = "8B,1KiB,64KiB,1MiB,8MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Messages there and back of each size and pair.")] = 20,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which the measurement is given up.")] = 300.0,
    as_json: Json = False,
) -> None:
    """Measure this machine, or the machines of a job, and describe it as a cluster.

    Started plainly it measures N ranks on this host. Started on every rank of a job, as in
    `hocket run -n 2 --nnodes 4 ... -m hocket cluster probe --out mine.toml`, it measures those.
    """
    import os

    from hocket.units import parse_bytes

    from ._bench.world import BenchError
    from .bench import check_memory

    check_place("cluster probe", out, "--out: ")
    in_job = "WORLD_SIZE" in os.environ
    with one_error("cluster probe", BenchError), one_error("cluster probe"):
        wanted = sorted({parse_bytes(word) for word in sizes.split(",")})
        if len(wanted) < 2 and (in_job or n > 1):
            raise ValueError(
                f"--sizes {sizes}: latency and bandwidth make a line of times, which takes two sizes or more"
            )
        check_memory(wanted, 1 if in_job else min(n, 2))
        result = _measured(n, wanted, rounds, timeout, in_job)
        if result is None:  # another rank speaks
            return
        _tell(name, result, out, as_json)


@cluster.command()
def fit(
    what: Annotated[str, typer.Argument(metavar="CLUSTER", help="Where it was measured; as for `show`.")],
    sweep: Annotated[
        Path, typer.Argument(help="nccl-tests' output, `hocket bench --json`, or lines of bytes,microseconds.")
    ],
    ranks: Annotated[int, typer.Option(*RANKS, min=2, help="How many ranks took part.")],
    collective: Annotated[str, typer.Option(help="What was measured.")] = "all_reduce",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the cluster with its constants here.")] = None,
    as_json: Json = False,
) -> None:
    """Fit what a cluster's links reach to a measured sweep; predictions take it from then on."""
    import dataclasses

    from hocket.cluster import build, load, to_toml
    from hocket.planner import Constants, Network, fit_sweep, read_sweep

    with one_error("cluster fit"):
        found = load(what)
        try:
            text = sweep.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{str(sweep)!r} cannot be read: {error}") from None
        points = read_sweep(text, kind=collective, ranks=ranks)
        constants, error_share = fit_sweep(points, Network.of(found), kind=collective, ranks=ranks)
        names = ["inside_share" if ranks <= found.ranks_per_host() else "network_share"]
        if told := constants.collective_s != Constants.of(found.reached).collective_s:
            names.append("collective_s")
        fitted: dict[str, Any] = {name: float(f"{getattr(constants, name):.4g}") for name in names}
        reached = {**found.reached, **fitted, "swept": constants.swept}
        made = dataclasses.replace(found, reached=reached, recipe=None)
        if found.recipe is not None:
            made = build({**found.recipe, "reached": reached})
    if out is not None:
        write_file("cluster fit", out, to_toml(made))
    if as_json:
        print_json({"cluster": found.name, "sizes": len(points), "fitted": fitted, "median_error": error_share})
        return
    typer.echo(f"{len(points)} sizes of {collective} on {ranks} ranks of {found.name}; median error {error_share:.1%}")
    for name, value in fitted.items():
        typer.echo(f"  {name} = {value:g}")
    if not told:
        typer.echo("  collective_s is as it was: sizes as large as these do not tell it")
    if out is not None:
        typer.echo(f"wrote {out}")


def _measured(n: int, sizes: list[int], rounds: int, timeout_s: float, in_job: bool) -> dict[str, Any] | None:
    if not in_job:
        from ._bench.world import run_world

        spec = {"sizes": sizes, "rounds": rounds}
        return run_world("hocket.cli._probe.rank", spec, n, what="messages", mpi=False, timeout_s=timeout_s)
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from hocket.parallel.mesh import own_gpu

    from ._probe.rank import measure

    device = own_gpu() if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "hocket"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        return measure(sizes, rounds, device)
    finally:
        dist.destroy_process_group()


def _tell(name: str, result: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from ._probe.report import document, table, to_cluster, unlike_hosts

    found, pings = to_cluster(name, result)
    text = document(found, pings, result)
    if out is not None:
        write_file("cluster probe", out, text, "--out: ")
        typer.echo(f"wrote {out}", err=True)
    if as_json:
        print_json({**result, "cluster": _document(found)})
    elif out is None:
        typer.echo(text, nl=False)
    else:
        for line in [*table(pings, result), *unlike_hosts(found)]:
            typer.echo(line)


def _document(found: Any) -> dict[str, Any]:
    names = found.node_names
    return {
        "name": found.name,
        "routing": found.routing,
        "ranks": [names[node] for node in found.ranks.tolist()],
        "nodes": [
            {
                "name": name,
                "kind": found.kinds[node],
                "host": found.host_names[found.hosts[node]] if found.hosts[node] >= 0 else None,
                "reduces": node in found.reductions,
            }
            for node, name in enumerate(names)
        ],
        "links": [
            {
                "name": found.link_names[link],
                "capacity_Bps": float(found.capacity_Bps[link]),
                "latency_s": float(found.latency_s[link]),
            }
            for link in range(len(found.link_tail))
        ],
    }


def _first(text: str | None) -> str:
    """Return the first sentence of a docstring, on one line."""
    return " ".join((text or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _parameters(form: Any) -> list[str]:
    return [name for name in form.model_fields if name not in ("name", "about", "topology", "kind", "server")]
