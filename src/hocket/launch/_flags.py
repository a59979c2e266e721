"""The flags of `hocket run`: torchrun's as the installed torch has them, and a few of our own."""

import argparse
import os
from typing import NoReturn

from hocket._tasks import described

from ._failure import ArgumentError

USAGE = "hocket run -n N [flags] [--] script.py [arguments of the script]"
LOST_AFTER_S = 60
GRACE_S = 10  # for ranks to end by themselves when the job is interrupted or another rank has failed


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message)


def argument_parser() -> argparse.ArgumentParser:
    """Make torchrun's parser with our flags added."""
    from torch.distributed.run import get_args_parser

    return _with_ours(get_args_parser())


# What torch's parser gives where nothing is said, as far as it is read for one host (a test compares).
_UNSAID = {
    "nnodes": "1:1", "node_rank": 0, "rdzv_backend": "static", "rdzv_endpoint": "", "max_restarts": 0,
    "master_addr": "127.0.0.1", "master_port": None, "local_addr": None, "role": "default", "log_dir": None,
    "redirects": "0", "tee": "0",
}  # fmt: skip
_LEFT_TO_ELASTIC = {"TORCHELASTIC_HEALTH_CHECK_PORT", "TORCHELASTIC_ENABLE_FILE_TIMER"}


def light_parser() -> argparse.ArgumentParser | None:
    """Make a parser of our flags and of those of torchrun's that one host without restarts needs; without torch.

    None where the environment asks for more: torchrun's own variables, or tasks of srun or mpirun.
    """
    try:
        tasks = described()
    except ValueError:
        return None
    if (
        _LEFT_TO_ELASTIC & os.environ.keys()
        or any(name.startswith("PET_") for name in os.environ)
        or (tasks is not None and tasks.size > 1)
    ):
        return None
    torchruns = argparse.ArgumentParser(add_help=False)
    torchruns.add_argument("--nproc-per-node", "--nproc_per_node", default="1")
    for names in (("--standalone",), ("-m", "--module"), ("--no-python", "--no_python")):
        torchruns.add_argument(*names, action="store_true")
    torchruns.add_argument("training_script")
    torchruns.add_argument("training_script_args", nargs=argparse.REMAINDER)
    torchruns.set_defaults(**_UNSAID)
    return _with_ours(torchruns, light=True)


def _with_ours(torchruns: argparse.ArgumentParser, *, light: bool = False) -> argparse.ArgumentParser:
    ours = _Parser(
        prog="hocket run",
        usage=USAGE,
        parents=[torchruns],
        conflict_handler="resolve",
        allow_abbrev=not light,  # what the light one does not know is for the other
        add_help=not light,
        description="Start a script as N ranks of this host, merge what they print, and end when they do. "
        "For several hosts give --hosts, or start one `hocket run` on each, as with torchrun.",
    )
    group = ours.add_argument_group("Hocket's own flags")
    group.add_argument(
        "-n",
        "--np",
        "--workers",
        dest="nproc_per_node",
        metavar="N",
        default=argparse.SUPPRESS,
        help="ranks on each host: a number, auto, cpu or gpu (torchrun's --nproc-per-node)",
    )
    group.add_argument(
        "-x",
        dest="environment",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set a variable in the ranks' environment; may be given several times",
    )
    group.add_argument("--timeout", type=float, metavar="SECONDS", help="end the job after so long (exit status 124)")
    group.add_argument(
        "--fabric",
        metavar="CLUSTER",
        help="run in an emulated cluster: a fabric that is up, or a cluster (name, spec, .toml file) to emulate",
    )
    group.add_argument(
        "--aggregate",
        action="store_true",
        help="start an aggregator for the ranks of --fabric; ranks that share one host's memory use none",
    )
    group.add_argument(
        "--plan",
        metavar="FILE",
        help="train by the plan in this TOML file: hocket.Trainer and hocket.distribute take it up by themselves; "
        '"auto": hocket.Trainer measures, and takes what the planner finds',
    )
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument(
        "--hosts",
        metavar="A:4,B:4",
        help="start on these hosts by ssh, so many ranks on each; all ends with this command",
    )
    hosts.add_argument("--hostfile", metavar="FILE", help='the same from a file of lines "HOST slots=4" or "HOST:4"')
    group.add_argument("--ssh", metavar="COMMAND", default="ssh", help='how to reach a host, such as "ssh -p 2222"')
    group.add_argument(
        "--lost-after",
        type=int,
        metavar="SECONDS",
        help="how long a host of --hosts may be out of reach before it is taken for dead, and the job ends "
        f"[default: HOCKET_LOST_AFTER, else {LOST_AFTER_S}]",
    )
    group.add_argument(
        "--no-preflight",
        dest="preflight",
        action="store_false",
        help="do not measure the links between hosts, and start also on hosts that differ from the first",
    )
    directory = group.add_mutually_exclusive_group()
    directory.add_argument(
        "--run-dir", metavar="DIR", help="directory of this run: settings, logs, record [default: runs/NAME-TIME]"
    )
    directory.add_argument("--no-run-dir", action="store_true", help="make no such directory, as does --run-dir off")
    group.add_argument(
        "--kubernetes",
        metavar="FILE",
        help="write manifests that start this command in --nnodes pods of -n ranks, and start nothing here",
    )
    group.add_argument("--image", metavar="IMAGE", default="hocket", help="container image for --kubernetes")
    group.add_argument("--dry-run", action="store_true", help="show what would be launched, and launch nothing")
    group.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="print a summary as JSON on stdout at the end; what the ranks print goes to stderr",
    )
    group.add_argument(
        "--shutdown-timeout",
        "--shutdown_timeout",
        type=int,
        metavar="SECONDS",
        help="how long ranks may take to end by themselves before they get SIGKILL "
        f"[default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else {GRACE_S}]",
    )
    # Ours are read first: what a user of torchrun knows comes after.
    ours._optionals.title = "torchrun's flags"
    ours._action_groups.remove(group)
    ours._action_groups.insert(0, group)
    return ours


def own_flags(flags: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags that say what starts where, and the rest: what each host's launcher gets too."""
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in (
        ("-n", "--np", "--workers", "--nproc-per-node", "--nproc_per_node"), ("-x",), ("--timeout",), ("--hosts",),
        ("--hostfile",), ("--ssh",), ("--lost-after",), ("--plan",), ("--run-dir",),
        ("--kubernetes",), ("--image",), ("--nnodes",),
    ):  # fmt: skip
        ours.add_argument(*names, action="append")
    for name in ("--json", "--no-preflight", "--no-run-dir", "--dry-run"):
        ours.add_argument(name, action="store_true")
    return ours.parse_known_args(flags)
