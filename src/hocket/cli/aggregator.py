"""`hocket aggregator`: a process that reduces inside the network."""

import logging
import os
import resource
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._output import bad_input, check_place, print_json, write_file

if TYPE_CHECKING:
    from hocket.aggregator import Stats


def aggregator(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where clients connect; port 0 takes a free one.")],
    token_file: Annotated[Path, typer.Option(help="The jobs' tokens, one a line; nobody else may read the file.")],
    parent: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The aggregator above, in a tree.")] = None,
    max_connections: Annotated[int | None, typer.Option(help="Clients at once.")] = None,
    max_groups: Annotated[int | None, typer.Option(help="Groups of one token at once.")] = None,
    max_members: Annotated[int | None, typer.Option(help="Members of a group at this aggregator.")] = None,
    max_operations: Annotated[int | None, typer.Option(help="Operations at once in one group.")] = None,
    max_bytes: Annotated[str | None, typer.Option(help="Memory for what is under way: 1GiB.")] = None,
    window: Annotated[str | None, typer.Option(help="What one member may have under way in one group: 1MiB.")] = None,
    stall: Annotated[float | None, typer.Option(help="Seconds until a client that reads nothing is dropped.")] = None,
    address_file: Annotated[Path | None, typer.Option(help="Write the address into this file once it listens.")] = None,
    name: Annotated[str, typer.Option(help="How errors call this aggregator.")] = "aggregator",
    as_json: Annotated[bool, typer.Option("--json", help="Print the final counters as JSON.")] = False,
) -> None:
    """Serve collectives to the ranks of jobs: each sends its contribution once and receives the result once.

    Ends cleanly, with its counters, on SIGINT and SIGTERM.
    """
    from hocket.aggregator import Aggregator, Limits, parse_address, read_tokens
    from hocket.units import parse_bytes

    check_place("aggregator", address_file, "--address-file ")
    given: dict[str, Any] = {
        "connections": max_connections,
        "groups": max_groups,
        "members": max_members,
        "operations": max_operations,
        "stall_s": stall,
    }
    logging.basicConfig(format="hocket aggregator: %(message)s", level=os.environ.get("LOGLEVEL", "WARNING"))
    try:
        given["nbytes"] = None if max_bytes is None else int(parse_bytes(max_bytes))
        given["window_nbytes"] = None if window is None else int(parse_bytes(window))
        given["segment_nbytes"] = min(given["window_nbytes"], 1 << 20) if window is not None else None
        server = Aggregator(
            parse_address(listen),
            read_tokens(token_file),
            parent=None if parent is None else parse_address(parent),
            limits=Limits(**{key: value for key, value in given.items() if value is not None}),
            name=name,
        )
    except ValueError as error:
        bad_input("aggregator", error)
    except OSError as error:
        bad_input("aggregator", f"it cannot listen at {listen}: {error.strerror}; is the port taken?")
    _allow_connections(server.limits.connections)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    address = ":".join(map(str, server.address))
    print(f"hocket aggregator: listening at {address}", file=sys.stderr, flush=True)
    if address_file is not None:
        write_file("aggregator", address_file, address + "\n", "--address-file ")
    server.run()
    if as_json:
        print_json(asdict(server.stats()))
    else:
        typer.echo(_summary(server.stats()))


def _allow_connections(count: int) -> None:
    """Raise the limit of file descriptors: each connection is one, and the usual limit is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + 64  # with as many to a parent
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _summary(stats: "Stats") -> str:
    served = ", ".join(f"{count} {kind}" for kind, count in sorted(stats.operations.items())) or "no operation"
    return (
        f"served {served} for {stats.groups} groups ({stats.groups_failed} failed) and {stats.connections} clients; "
        f"{stats.refused} connections refused; {stats.received_nbytes} bytes in, {stats.sent_nbytes} out; "
        f"busy {stats.busy_s:.1f} of {stats.wall_s:.1f} s"
    )
