"""`hocket cluster`: the clusters that are known, what they look like, and what this machine is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ._output import bad_input, print_json

cluster = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@cluster.command("list", help="The catalogue, the topologies with parameters, and the servers for their ports.")
def list_(as_json: _Json = False) -> None:
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
    as_json: _Json = False,
) -> None:
    """Show a cluster: what it holds, its links, and what is joined to what."""
    from hocket.cluster import ClusterError, describe, draw_svg, load, to_toml

    try:
        found = load(what)
    except ClusterError as error:
        bad_input("cluster show", error)
    if svg is not None:
        try:
            svg.write_text(draw_svg(found))
        except OSError as error:
            bad_input("cluster show", f"--svg: {str(svg)!r} cannot be written: {error}")
        typer.echo(f"wrote {svg}", err=True)
    if as_json:
        print_json(_document(found))
    elif toml or explicit:
        typer.echo(to_toml(found, explicit=explicit), nl=False)
    else:
        typer.echo(describe(found))


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
    """The first sentence of a docstring, on one line."""
    return " ".join((text or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _parameters(form: Any) -> list[str]:
    return [name for name in form.model_fields if name not in ("name", "about", "topology", "kind", "server")]
