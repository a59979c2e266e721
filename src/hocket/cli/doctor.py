"""`hocket doctor`: what stands in the way."""

from dataclasses import asdict
from typing import Annotated

import typer

from ._output import bad_input, print_json

_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "error": typer.colors.RED}


def doctor(
    bandwidth: Annotated[bool, typer.Option("--bandwidth", help="Also measure how fast memory is copied.")] = False,
    hosts: Annotated[
        str | None, typer.Option(metavar="A,B", help="Compare these hosts instead, and measure their links, by ssh.")
    ] = None,
    ssh: Annotated[str, typer.Option(metavar="COMMAND", help="How to reach a host.")] = "ssh",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what on this machine, or between hosts, stands in the way of training, and what to do about it.

    The exit code is 1 if something will make training fail, else 0.
    """
    from hocket.launch import LaunchError, examine, examine_hosts, read_hosts

    findings = []
    try:
        for finding in (
            examine(bandwidth=bandwidth) if hosts is None else examine_hosts(read_hosts(hosts, None, 1), ssh)
        ):
            findings.append(finding)
            if not as_json:
                status = typer.style(f"{finding.status:8}", fg=_COLOURS[finding.status])
                typer.echo(f"{status} {finding.name}: {finding.found}")
                if finding.remedy:
                    typer.echo(f"         -> {finding.remedy}")
    except ValueError as error:
        bad_input("doctor", error)
    except LaunchError as error:
        typer.echo(f"hocket doctor: {error}", err=True)
        raise typer.Exit(1) from None
    healthy = all(finding.status != "error" for finding in findings)
    if as_json:
        print_json({"healthy": healthy, "findings": [asdict(finding) for finding in findings]})
    if not healthy:
        raise typer.Exit(1)
