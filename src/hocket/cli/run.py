"""`hocket run`: a script on several ranks."""

import contextlib
import os
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import typer

from hocket import _early

from ._output import bad_input, print_json

if TYPE_CHECKING:
    from hocket.launch import LaunchArguments


def run(context: typer.Context) -> None:
    """Run a script on several ranks of this host, or of several hosts, as torchrun does."""
    from hocket import launch

    try:
        if context.args[:1] in (["-h"], ["--help"]):
            launch.argument_parser().print_help()
            return
        with interrupts_kept():  # some flags are read by torch
            arguments = launch.parse_arguments(context.args, kept=True)
        if arguments.kubernetes is not None:
            _write_manifests(arguments)
            return
        step = None
        if not arguments.hosts and arguments.one_host:
            try:
                step = launch.step_command(context.args, arguments.nproc, os.environ)
            except ValueError as error:
                raise launch.ArgumentError(str(error)) from None
        if step is not None and arguments.dry_run:
            last = len(step) - len(arguments.arguments)  # what follows is the script's own
            own = [word for word in step[:last] if word != "--dry-run"]
            typer.echo(launch.batch_script([*own, *step[last:]], os.environ))
            return
        if step is not None:
            if not {"HOCKET_SECRET", "HOCKET_SECRET_FILE"} & os.environ.keys():
                os.environ["HOCKET_SECRET"] = secrets.token_hex(32)  # srun hands it to the launchers of all nodes
            _early.leave()
            raise typer.Exit(launch.run_step(step))
        if arguments.dry_run:
            _show(arguments)
            return
        if arguments.fabric is not None and arguments.placement is None:
            _early.leave()
            launch.enter_fabric(arguments.fabric, arguments.nproc, context.args)
        result = launch.run(arguments)
    except launch.ArgumentError as error:
        bad_input("run", error)
    except launch.LaunchError as error:
        typer.echo(f"hocket run: {error}", err=True)
        raise typer.Exit(1) from None
    if arguments.as_json:
        print_json(result.as_json())
    with contextlib.suppress(OSError, ValueError):  # nobody reads; closed
        sys.stdout.flush()
    _early.all_said()
    raise typer.Exit(result.exit_code)


def _write_manifests(arguments: "LaunchArguments") -> None:
    from hocket.launch import ArgumentError, write_manifests

    try:
        trainer, job_set = write_manifests(arguments)
    except OSError as error:
        raise ArgumentError(f"--kubernetes {arguments.kubernetes}: {error.strerror}") from None
    typer.echo(f"with Kubeflow Trainer: kubectl apply -f {trainer}")
    typer.echo(f"with JobSet alone:     kubectl apply -f {job_set}")


def _show(arguments: "LaunchArguments") -> None:
    from hocket.launch import dry_run

    planned = dry_run(arguments)
    if arguments.as_json:
        print_json(planned)
        return
    variables = [f"{key}={shlex.quote(value)}" for key, value in planned["environment"].items()]
    line = " ".join([*variables, shlex.join(planned["command"])])
    hosts = planned["emulated_hosts"]
    for host, ranks in arguments.hosts.items():
        typer.echo(f"{host}: {ranks} x {line}")
    if arguments.hosts:
        return
    for rank in range(arguments.nproc):
        typer.echo(f"{f'{hosts[rank]}: ' if hosts else ''}LOCAL_RANK={rank} {line}")
    typer.echo(f"rendezvous: {planned['rendezvous']}; hosts: {planned['hosts']}; restarts: {planned['restarts']}")


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end if SIGINT came meanwhile; a second SIGINT ends the process at once.

    Extension modules written in C call Python code while they set themselves up. Some clear an error that it raises,
    so that a Ctrl-C in such a moment would have no effect; others abort the process. (Both seen with torch on a busy
    machine, in about one of twenty launches.) So nothing is raised before the import is over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        del frame
        if asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        asked = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
