"""What a command line of `hocket run` asks for: the program, ranks and hosts, where they meet; or why it cannot be."""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hocket._limits import usable_cores
from hocket.comm import timeout_setting

from ._facts import MASTER_PORT
from ._failure import ArgumentError
from ._flags import GRACE_S, LOST_AFTER_S, argument_parser, light_parser, own_flags
from ._run_directory import NOWHERE, RUN_VARIABLE, default_run_directory
from ._slurm import become_node, ranks_of_node

if TYPE_CHECKING:
    from ._fabric import HostPlacement

_NO_FILE = "{}: a script from a pipe can be read by one rank only; write it to a file"
_LEAST_LOST_AFTER_S = 5


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Open a block whose ValueError is an ArgumentError."""
    try:
        yield
    except ValueError as error:
        raise ArgumentError(str(error)) from None


@dataclass(frozen=True)
class LaunchArguments:
    """What to launch.

    Attributes:
        flags: Torchrun's own arguments, as its parser gives them, completed with our defaults.
        nproc: Ranks on this host.
        kind: "script", "module" or "command": what `target` is.
        target: The program.
        arguments: The program's arguments.
        environment: What the ranks' environment has besides ours.
        timeout_s: When to end the job, in seconds after its start.
        fabric: An emulated cluster to run in: a fabric's name, or a cluster's; None for this host itself.
        placement: Where in it the ranks go, once the launcher is inside.
        dry_run: Show what would be launched.
        as_json: Give the summary as JSON on stdout; the ranks then print on stderr.
        aggregate: Start an aggregator beside the ranks, which use it where they are on several (emulated) hosts.
        hosts: Ranks of each host that is to be reached by ssh, in the order of ranks; empty for this host alone.
        ssh: Command that opens a connection to a host.
        lost_after_s: How long such a host may be out of reach before it is taken for dead.
        preflight: Refuse hosts whose versions or script differ.
        host_flags: Flags that each host's own launcher gets, as they were given.
        label: Name of this host in a job of several hosts, for messages.
        run_dir: Directory of this run; None for none.
        run_dir_given: Whether the user has named it.
        kubernetes: File to write manifests to, instead of starting anything.
        image: Container image that they name.
        ranks_of_pod: Ranks of each pod, as given: a number, "auto", "cpu" or "gpu".
        light: Whether nothing is asked of the ranks of this host that needs torch in the launcher.
    """

    flags: argparse.Namespace
    nproc: int
    kind: str
    target: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    fabric: str | None = None
    placement: "HostPlacement | None" = None
    dry_run: bool = False
    as_json: bool = False
    aggregate: bool = False
    hosts: Mapping[str, int] = field(default_factory=dict)
    ssh: str = "ssh"
    lost_after_s: int = LOST_AFTER_S
    preflight: bool = True
    host_flags: tuple[str, ...] = ()
    label: str = ""
    run_dir: str | None = None
    run_dir_given: bool = False
    kubernetes: str | None = None
    image: str = "hocket"
    ranks_of_pod: str = "1"
    light: bool = False

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return str(self.flags.nnodes) in ("1", "1:1")

    @property
    def private(self) -> bool:
        """Whether the ranks meet in the job's own directory: one launcher has them all."""
        return self.one_host and self.flags.rdzv_backend in ("static", "c10d")

    @property
    def operation_timeout_s(self) -> float | None:
        """What HOCKET_TIMEOUT says to the ranks, in seconds; None where it is not set."""
        return timeout_setting({**os.environ, **self.environment})

    @property
    def grace_s(self) -> int:
        """Seconds between the signal that asks a rank to end and SIGKILL."""
        return int(self.flags.shutdown_timeout)


def parse_arguments(argv: Sequence[str], *, kept: bool = False) -> LaunchArguments:
    """Read a command line.

    Args:
        argv: The words after `hocket run`.
        kept: Whether the run has a directory if the words do not say so.

    Raises:
        ArgumentError: It cannot be carried out.
        SystemExit: It asked for help, which has been printed.
    """
    argv = list(argv)
    light = light_parser()
    split = None if light is None else _script_index(argv, light)
    if split is None:
        light, split = None, _script_index(argv, argument_parser())
    if split is None:
        try:
            argument_parser().parse_known_args(argv)
        except ArgumentError as error:
            if "training_script" not in str(error):
                raise
        unknown = argument_parser().parse_known_args([*argv, "script.py"])[1]
        if "-" in argv:
            raise ArgumentError(_NO_FILE.format("-"))
        raise ArgumentError(f"unknown flag {unknown[0]}" if unknown else "say which script to run, after the flags")
    target = argv[split + 1 :] if argv[split] == "--" else argv[split:]
    if not target:
        raise ArgumentError('say which script to run, after the "--"')
    given, rest = own_flags(argv[:split])
    flags = (light or argument_parser()).parse_args([*argv[:split], target[0]])
    if flags.run_dir in NOWHERE:  # a directory of this name is ./off
        flags.run_dir, flags.no_run_dir = None, True
    counted = given.np is not None or "PET_NPROC_PER_NODE" in os.environ
    arguments = _complete(flags, target[0], tuple(target[1:]), counted=counted)
    with _refused():
        _ = arguments.operation_timeout_s
    run_dir = flags.run_dir or (default_run_directory(target[0], os.environ) if kept and not flags.no_run_dir else None)
    return replace(
        arguments,
        light=light is not None,
        host_flags=tuple(rest),
        run_dir=run_dir,
        run_dir_given=bool(flags.run_dir or RUN_VARIABLE in os.environ),
    )


def _script_index(argv: list[str], probe: argparse.ArgumentParser) -> int | None:
    """Return where the flags end: at the script, or at a "--" before it.

    argparse itself would take a "--" from the script's own arguments, and gives no index. The flags end at the first
    place where a parser that has read what stands before it is content with one word more, the script.
    """
    word = uuid.uuid4().hex
    for index, item in enumerate(argv):
        if item.startswith("-") and item != "--":
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # --help prints; it does so again when it is its turn
                found, rest = probe.parse_known_args([*argv[:index], word])
        except (ArgumentError, SystemExit):
            continue
        if found.training_script == word and not rest:
            return index
    return None


def _complete(flags: argparse.Namespace, target: str, arguments: tuple[str, ...], *, counted: bool) -> LaunchArguments:
    kind = "module" if flags.module else "command" if flags.no_python else "script"
    if flags.module and flags.no_python:
        raise ArgumentError("--module and --no-python exclude each other; leave one out")
    if kind == "script":
        _check_script(target)
    if flags.run_dir is not None and (not flags.run_dir or os.path.isfile(flags.run_dir)):
        raise ArgumentError(f"--run-dir {flags.run_dir!r}: give a directory, which need not exist")
    if (flags.hosts, flags.hostfile) != (None, None) and not _words(flags.ssh):
        raise ArgumentError(f"--ssh {flags.ssh!r} is no command; write 'ssh -p 2222', say")
    if flags.timeout is not None and not flags.timeout > 0:
        raise ArgumentError(f"--timeout {flags.timeout}: give a number of seconds above 0")
    flags.shutdown_timeout = _grace_s(flags.shutdown_timeout)
    if flags.aggregate and str(flags.nnodes) not in ("1", "1:1"):
        raise ArgumentError(
            "--aggregate is for one host; for several start `hocket aggregator` on one of them, and give its address "
            "to all with -x HOCKET_AGGREGATOR=HOST:PORT -x HOCKET_AGGREGATOR_TOKEN_FILE=FILE"
        )
    if not counted and flags.hosts is None and flags.hostfile is None:
        with _refused():
            flags.nproc_per_node = str(ranks_of_node(os.environ) or flags.nproc_per_node)
    ranks_of_pod = str(flags.nproc_per_node)
    nproc = _nproc(ranks_of_pod)
    if flags.kubernetes is not None and (flags.hosts, flags.hostfile, flags.fabric) != (None, None, None):
        raise ArgumentError("--kubernetes says where all ranks are; leave out --hosts, --hostfile, --fabric")
    if flags.kubernetes is not None and not re.fullmatch("1:1|0*[1-9][0-9]*", str(flags.nnodes)):
        raise ArgumentError(f"--nnodes {flags.nnodes}: with --kubernetes give the number of pods")
    flags.nproc_per_node = str(nproc)
    hosts = _hosts(flags, nproc)
    found = LaunchArguments(
        flags=flags,
        nproc=nproc,
        kind=kind,
        target=target,
        arguments=arguments,
        environment={
            **_environment(flags.environment),
            **_plan(flags.plan, sum(hosts.values()) or nproc, str(flags.nnodes)),
        },
        timeout_s=flags.timeout,
        fabric=flags.fabric,
        placement=_placement(flags.fabric, nproc),
        dry_run=flags.dry_run,
        as_json=flags.as_json,
        aggregate=flags.aggregate,
        hosts=hosts,
        ssh=flags.ssh,
        lost_after_s=_lost_after_s(flags.lost_after),
        preflight=flags.preflight,
        kubernetes=flags.kubernetes,
        image=flags.image,
        ranks_of_pod=ranks_of_pod,
    )
    if flags.kubernetes is not None:
        return found
    if flags.fabric is not None and not found.one_host:
        raise ArgumentError("--fabric emulates all hosts on this one; leave out --nnodes")
    if not hosts:
        if found.one_host and flags.fabric is None and not flags.dry_run:
            with _refused():
                become_node(flags)
        _choose_rendezvous(found)
    return found


def _hosts(flags: argparse.Namespace, nproc: int) -> Mapping[str, int]:
    """Return the ranks of each host that is to be reached by ssh."""
    if flags.hosts is None and flags.hostfile is None:
        return {}
    from ._hosts import read_hosts

    if str(flags.nnodes) not in ("1", "1:1") or flags.fabric is not None or flags.aggregate:
        raise ArgumentError("--hosts and --hostfile say where all ranks are; leave out --nnodes, --fabric, --aggregate")
    with _refused():
        return read_hosts(flags.hosts, flags.hostfile, nproc)


def _check_script(target: str) -> None:
    if not os.path.exists(target):
        python = re.fullmatch(r"python[\d.]*", os.path.basename(target))
        hint = "; leave it out: scripts run under this Python (--no-python starts other commands)" if python else ""
        raise ArgumentError(f"there is no script {target!r} in {os.getcwd()}{hint}")
    if not (os.path.isfile(target) or os.path.isdir(target)):
        raise ArgumentError(_NO_FILE.format(target))
    if os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        raise ArgumentError(f"{target} is a directory without a __main__.py; name the script in it")


def _grace_s(flag: int | None) -> int:
    if flag is None:
        said = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
        if not said.isdecimal():
            raise ArgumentError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={said}: give a whole number of seconds")
        return int(said)
    if flag < 0:
        raise ArgumentError(f"--shutdown-timeout {flag}: give 0 seconds or more")
    return flag


def _lost_after_s(flag: int | None) -> int:
    said = os.environ.get("HOCKET_LOST_AFTER") or str(LOST_AFTER_S)
    where, text = ("HOCKET_LOST_AFTER=", said) if flag is None else ("--lost-after ", str(flag))
    if not text.isdecimal() or int(text) < _LEAST_LOST_AFTER_S:
        raise ArgumentError(f"{where}{text}: give a whole number of seconds, {_LEAST_LOST_AFTER_S} or more")
    return int(text)


def _plan(path: str | None, nproc: int, nnodes: str) -> dict[str, str]:
    """Return the variable that hands the plan to the ranks, as JSON: other hosts need not have the file."""
    if path is None:
        return {}
    from hocket.planner import PLAN_VARIABLE, Plan, PlanError

    if path == "auto":
        return {PLAN_VARIABLE: "auto"}
    try:
        plan = Plan.from_toml(Path(path))
        fewest, _, most = nnodes.partition(":")
        if fewest == (most or fewest):
            plan.resolve(nproc * int(fewest))
    except PlanError as error:
        raise ArgumentError(f"--plan {path}: {error}") from None
    return {PLAN_VARIABLE: json.dumps(plan.to_json())}


def _placement(fabric: str | None, nproc: int) -> "HostPlacement | None":
    if fabric is None:
        return None
    from ._fabric import inside

    return inside(nproc)


def _nproc(text: str) -> int:
    try:
        if text.isdecimal():
            nproc = int(text)
        else:
            import torch
            from torch.distributed.run import determine_local_world_size

            nproc = int(determine_local_world_size(text))
            if text == "cpu" or (text == "auto" and not torch.accelerator.is_available()):
                nproc = min(nproc, usable_cores())  # torch knows of no quota
    except ValueError as error:
        raise ArgumentError(f"-n {text}: {error}; give a number of ranks, or auto, cpu or gpu") from None
    if nproc < 1:
        raise ArgumentError(f"-n {text}: give 1 rank or more, or auto, cpu or gpu")
    return nproc


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quotation without its end
        return []


def _environment(items: Sequence[str]) -> dict[str, str]:
    environment = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not (equals or key in os.environ):
            raise ArgumentError(f"-x {item}: give KEY=VALUE, or the name of a variable that is set here")
        environment[key] = value if equals else os.environ[key]
    return environment


def _choose_rendezvous(arguments: LaunchArguments) -> None:
    """On one host, a rendezvous of this job's own on a free port, as torchrun's --standalone, so that jobs never clash.

    The address is that of the host itself: its name may not resolve, and torchrun then hangs
    (https://github.com/pytorch/pytorch/issues/73656).
    """
    flags = arguments.flags
    unset = flags.rdzv_backend == "static" and not flags.rdzv_endpoint and flags.master_port is None
    if flags.standalone or (arguments.one_host and unset):
        here = _this_host()
        flags.rdzv_backend = "c10d"
        flags.rdzv_endpoint = f"{here}:0"
        flags.rdzv_id = str(uuid.uuid4())
        flags.local_addr = flags.local_addr or (arguments.placement.address if arguments.placement else here)
    if flags.master_port is None:
        flags.master_port = MASTER_PORT
    if flags.rdzv_backend in ("static", "c10d"):
        _check_resolves(re.sub(r":\d+$", "", flags.rdzv_endpoint) or flags.master_addr)


def _this_host() -> str:
    """Return "localhost", or what it stands for where nothing says so, as in a container without /etc/hosts."""
    try:
        socket.getaddrinfo("localhost", None)
    except OSError:
        return "127.0.0.1"
    return "localhost"


def _check_resolves(host: str) -> None:
    host = host.strip("[]")
    if "%" in host:
        raise ArgumentError(
            f"the rendezvous host {host!r} is one of a link, which each host names otherwise; give one that all reach"
        )
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        message = f"the rendezvous host {host!r} does not resolve on this host ({error.strerror})"
        raise ArgumentError(f"{message}; give its address, or add its name to /etc/hosts") from None
