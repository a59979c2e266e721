"""The command `hocket`: one verb, one file of this folder, loaded when it is asked for.

A verb is a module here with a function of its name, annotated as typer wants it; or with a `typer.Typer` of its
name, if it has verbs of its own. One line in `_VERBS` makes it known; it is offered as soon as its module is there.
"""

import errno
import importlib
import importlib.util
import inspect
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from hocket import __version__
from hocket._extras import MissingExtraError
from hocket._last_garbage import leave_out_last_collection

from ._output import BAD_INPUT, bad_input

__all__ = ["main"]

# In the order of `hocket --help`: what it does, and the settings of its `typer.Typer.command`.
_VERBS: dict[str, tuple[str, dict[str, Any]]] = {
    "run": (
        "Run a script on several ranks; takes torchrun's flags.",
        # The flags are torchrun's, and what stands after the script is the script's: typer passes all on.
        {
            "add_help_option": False,
            "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
        },
    ),
    "train": ("Train a bundled workload on several ranks.", {}),
    "check": ("Compare a script on one rank and on several: the losses must agree.", {}),
    "bench": ("Measure collectives and training steps beside other systems.", {}),
    "plan": ("Choose how to train a model on many workers: the fastest plan that fits, and why.", {}),
    "calibrate": ("Measure a model and its ranks, and keep that for automatic plans.", {}),
    "predict": ("Predict throughput, efficiency and cost by workers, and what another network would do.", {}),
    "explain": ("Say why a run is slow, who was late, and why it hangs.", {}),
    "top": ("Watch a running job: steps, memory, and who waits for whom.", {}),
    "report": ("Write one HTML page about a run, and all its ranks in one trace.", {}),
    "compare": ("Show two timelines or runs side by side, predicted or measured.", {}),
    "schedule": ("Look at collective algorithms and pipeline orders: list, show, verify and time them.", {}),
    "tune": ("Measure the algorithms on real ranks and write which is the fastest where.", {}),
    "simulate": ("Predict collectives, training steps and pipelines on any cluster.", {}),
    "cluster": ("Look at clusters: list, show, probe and fit them.", {}),
    "fabric": ("Emulate a cluster on this machine: up, down, status, check, exec.", {}),
    "aggregator": ("Reduce inside the network: serve collectives to the ranks of jobs.", {}),
    "checkpoint": ("Look at checkpoints: verify them, and export their weights as safetensors.", {}),
    "doctor": ("Say what on this machine stands in the way of training, and what to do about it.", {}),
    "clean": ("Remove what crashed jobs have left.", {}),
}

_INTERRUPTED = 130  # 128 + SIGINT
_UNREAD = 141  # 128 + SIGPIPE
_UNREACHABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EIO)  # another user's run, say


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, this process's own by default; ends in SystemExit with the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = next((word for word in words if not word.startswith("-")), None)
    _open_closed()
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries would end in messages of their own: relative paths lead nowhere
        if asked:
            bad_input(asked, "the working directory was removed: cd to another, or into the one that has its name now")
    if arguments is None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may have what its encoding has not
            sys.stdout.reconfigure(errors="replace")
        leave_out_last_collection()
    if asked == "run":  # what follows is passed on as it is: the parser would take a "--" of the script's arguments
        words.insert(words.index(asked) + 1, "--")
    try:
        _application(asked)(args=words, prog_name="hocket")
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


def _open_closed() -> None:
    """Open /dev/null as each standard stream that is closed: else files and sockets would get their numbers.

    Programs that we start inherit it, as they do a stream that is open.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            opened = open(os.devnull, mode)  # noqa: SIM115 - as long as the process
            os.set_inheritable(opened.fileno(), True)
            setattr(sys, name, opened)


def _end_of_output(command: str, error: OSError) -> NoReturn:
    """End the program if stdout takes no more; say so unless nobody reads it. Any other error is raised again."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is tried again at the exit
    if error.errno == errno.EPIPE:
        raise SystemExit(_UNREAD) from None
    print(f"{command}: what was to be written is lost: {error.strerror}", file=sys.stderr)
    raise SystemExit(1) from None


class _Verbs(TyperGroup):
    """The verbs: none ends in a traceback after Ctrl-C, without an optional package, or where stdout takes no more."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, and write what `--help` and `--version` ask for."""
        try:
            return super().parse_args(ctx, args)
        except OSError as error:
            _end_of_output("hocket", error)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb that was asked for, and what is under it."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # the interpreter's own, at the exit, would come too late to tell
        except KeyboardInterrupt:
            raise SystemExit(_INTERRUPTED) from None
        except OSError as error:
            if error.filename is not None and error.errno in _UNREACHABLE:
                bad_input(ctx.invoked_subcommand, f"{os.fsdecode(error.filename)!r}: {error.strerror}")
            _end_of_output(f"hocket {ctx.invoked_subcommand}", error)
        except MissingExtraError as error:
            print(f"hocket {ctx.invoked_subcommand}: {error}", file=sys.stderr)
            raise SystemExit(BAD_INPUT) from None


def _application(asked: str | None) -> typer.Typer:
    """Return the application with one verb loaded; of the others only what `hocket --help` shows."""
    application = typer.Typer(
        cls=_Verbs,
        help="Train on many devices the model that you have written for one.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback()(_options)
    for verb, (summary, settings) in _VERBS.items():
        if importlib.util.find_spec(f"{__name__}.{verb}") is None:
            continue
        if verb != asked:
            application.command(verb, short_help=summary)(_not_loaded)  # which is shown whole
            continue
        loaded = getattr(importlib.import_module(f"{__name__}.{verb}"), verb)
        if isinstance(loaded, typer.Typer):
            for one in loaded.registered_commands:
                one.short_help = (one.help or inspect.getdoc(one.callback) or "").partition("\n")[0]
            application.add_typer(loaded, name=verb, help=summary)
        else:
            application.command(verb, **settings)(loaded)
    return application


def _not_loaded() -> None:
    raise AssertionError("a verb that was not asked for was called")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hocket {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version  # its callback has done all
