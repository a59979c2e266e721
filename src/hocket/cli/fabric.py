"""`hocket fabric`: clusters emulated on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._output import Json, bad_input, print_columns, print_json

if TYPE_CHECKING:
    from hocket.fabric import Check, Fabric, FabricState

fabric = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="The fabric's; not needed if only one is up.")]
_LATENCY = "latency is not emulated (this kernel offers no delay queue to us): links add what the kernel takes"


@fabric.command()
def up(
    cluster: Annotated[str, typer.Argument(help="A name, a spec (star:hosts=8,bandwidth=100Mbit/s) or a .toml file.")],
    name: Annotated[str | None, typer.Option(help="To find it by; made up if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Of the hash by which switches spread flows.")] = 0,
    checked: Annotated[bool, typer.Option("--check/--no-check", help="See whether this machine can carry it.")] = True,
    as_json: Json = False,
) -> None:
    """Make a cluster of this machine: a network namespace for each host and switch, cables with the described rates.

    It stays up until `hocket fabric down`. The exit code is 1 if this machine cannot carry the described load.
    """
    from hocket.cluster import load
    from hocket.fabric import Fabric, check

    with _refused("up"):
        made = Fabric(load(cluster), name=name, seed=seed, owner=None)
        found = check(made) if checked else None
    if as_json:
        print_json({"name": made.name, **_shape(made), "check": found.as_json() if found else None})
    else:
        wiring = made.wiring
        typer.echo(
            f"fabric {made.name} is up: {len(made.hosts)} hosts, {len(wiring.nodes) - len(made.hosts)} switches, "
            f"{sum(len(node.ports) for node in wiring.nodes)} directed links; {_LATENCY}"
        )
        if found is not None:
            typer.echo(found.describe())
        typer.echo(f"hocket run --fabric {made.name} -n {len(wiring.ranks) or len(made.hosts)} script.py")
    if found is not None and not found.ok:
        raise typer.Exit(1)


@fabric.command()
def down(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which; all of yours if none.")] = None,
    as_json: Json = False,
) -> None:
    """Take fabrics down: what runs in their hosts is ended, and nothing of them remains.

    Also removes what is left of fabrics whose keeper and warden have both been killed.
    """
    from hocket.fabric import Fabric, clear_stale

    clear_stale()
    asked = names if names else [state.name for state in _states() if state.owner is None]
    with _refused("down"):
        for one in asked:
            Fabric.attach(one).close()
    if as_json:
        print_json({"down": asked})
        return
    typer.echo(f"taken down: {', '.join(asked)}" if asked else "no fabric is up")


@fabric.command()
def status(
    name: _Name = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Also measure the load for so long.")] = 0.5,
    as_json: Json = False,
) -> None:
    """Show the fabrics that are up, what their links have carried, and their load now."""
    from hocket.fabric import Fabric
    from hocket.units import format_bytes

    shown: list[dict[str, Any]] = []
    with _refused("status"):
        for one in [name] if name else [state.name for state in _states()]:
            made = Fabric.attach(one)
            shown.append({"name": one, **_shape(made), "links": _links(made, seconds)})
    if as_json:
        print_json({"fabrics": shown})
        return
    if not shown:
        typer.echo("no fabric is up")
    for value in shown:
        typer.echo(f"fabric {value['name']}: {value['cluster']}, kept by process {value['keeper']}; {_LATENCY}")
        print_columns(
            ("link", "described", "carried", "load"),
            [
                (one["name"], f"{one['rate_Bps'] / 125e3:g} Mbit/s", format_bytes(one["nbytes"]), f"{one['load']:.0%}")
                for one in value["links"]
            ],
        )


@fabric.command("check")
def check_(
    name: _Name = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure.")] = 0.6,
    as_json: Json = False,
) -> None:
    """See with real traffic whether this machine can carry what a fabric describes; the exit code is 1 if not."""
    from hocket.fabric import check

    made = _the_one("check", name)
    with _refused("check"):
        found: Check = check(made, seconds=seconds)
    if as_json:
        print_json({"name": made.name, **found.as_json()})
    else:
        typer.echo(found.describe())
    if not found.ok:
        raise typer.Exit(1)


# What follows HOST is not read by us: a -h there is the program's own.
@fabric.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def exec_(
    host: Annotated[str, typer.Argument(help="Where: a host, or beside a switch.")],
    command: Annotated[list[str], typer.Argument(help="The program and its arguments.")],
    name: Annotated[
        str | None, typer.Option("--name", help="The fabric's, before the program; not needed if only one is up.")
    ] = None,
) -> None:
    """Run a command inside a host."""
    import os

    if command[0] == "--name" and len(command) > 1:
        name, command = command[1], command[2:]
    elif command[0].startswith("--name="):
        name, command = command[0].partition("=")[2], command[1:]
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        bad_input("fabric exec", f"{host}: say which program to run there")
    made = _the_one("exec", name)
    with _refused("exec"):
        words = made.command_in(host, command)
        os.environ.update(made.environment(host))
    os.execv(words[0], words)


@contextlib.contextmanager
def _refused(verb: str) -> Iterator[None]:
    """End with one error: with 2 of what the user has asked for, with 1 of what the kernel or the fabric refuses."""
    from hocket.cluster import ClusterError
    from hocket.fabric import FabricError, FabricInputError

    try:
        yield
    except (ClusterError, FabricInputError) as error:
        bad_input(f"fabric {verb}", error)
    except FabricError as error:
        typer.echo(f"hocket fabric {verb}: {error}", err=True)
        raise typer.Exit(1) from None


def _states() -> list[FabricState]:
    from hocket.fabric import fabrics

    return [state for state in fabrics() if state.alive]


def _the_one(verb: str, name: str | None) -> Fabric:
    from hocket.fabric import Fabric

    names = [state.name for state in _states()]
    if name is None and len(names) != 1:
        bad_input(f"fabric {verb}", f"say which: {', '.join(names)}" if names else "no fabric is up")
    with _refused(verb):
        return Fabric.attach(name or names[0])


def _shape(made: Fabric) -> dict[str, Any]:
    nodes = [
        {"name": node.name, "kind": node.kind, "address": node.address, "forwards": node.forwards}
        for node in made.wiring.nodes
    ]
    facts = {"cluster": made.wiring.cluster, "keeper": made.keeper, "owner": made.owner}
    return {**facts, "latency": _LATENCY, "nodes": nodes}


def _links(made: Fabric, seconds: float) -> list[dict[str, Any]]:
    before, begin_s = made.counters(), time.monotonic()
    time.sleep(seconds)
    after, took_s = made.counters(), time.monotonic() - begin_s
    return [
        {
            "name": port.link,
            "rate_Bps": port.rate_Bps,
            "latency_s": port.latency_s,
            "nbytes": after[port.link],
            "load": (after[port.link] - before[port.link]) / took_s / port.rate_Bps,
        }
        for node in made.wiring.nodes
        for port in node.ports
    ]
