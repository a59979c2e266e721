"""`Fabric`: a cluster that is up on this machine, as its users see it."""

import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from hocket._extras import require

from . import _enter, _state, _sweep
from ._errors import FabricError, FabricInputError
from ._wiring import Node, Wiring, wire

if TYPE_CHECKING:
    from hocket.cluster import Cluster


_UP_DEADLINE_S = 60.0
_ANSWER_DEADLINE_S = 10.0
_DOWN_DEADLINE_S = 20.0


class Fabric:
    """A cluster emulated on this machine: a network namespace for each host and each network switch.

    Links are veth cables with the described bandwidth in each direction; switches forward by the described routes,
    and where several ways cost the same and the cluster says "ecmp", by a hash of addresses and ports. Latency is not
    emulated: what a link adds is what the kernel takes.

    As a context manager it is taken down at the end. However its owner ends, nothing of it remains.

    Args:
        cluster: Cluster to emulate.
        name: Name to find it by; made up if not given.
        seed: Seed of the switches' hashes.
        owner: The process with which it ends: this one, unless told otherwise; None if it is to stay.

    Raises:
        MissingExtraError: pyroute2 is not installed.
        FabricInputError: the cluster can be no fabric, or the name is taken.
        FabricError: the kernel does not allow it.
    """

    def __init__(
        self, cluster: "Cluster", *, name: str | None = None, seed: int = 0, owner: int | None | str = "this"
    ) -> None:
        wiring = wire(cluster)
        name = secrets.token_hex(4) if name is None else name
        file = _state.path_of(name)
        clear_stale()
        if os.path.lexists(file):
            if _state.read(file) is None:
                raise FabricInputError(
                    f"{file} is not this user's; choose another name, or set TMPDIR to a directory of yours"
                )
            raise FabricInputError(f"a fabric {name!r} is up; take it down first, or choose another name")
        order = {
            "name": name,
            "file": str(file),
            "socket": _state.socket_of(str(file)),
            "owner": os.getpid() if owner == "this" else owner,
            "seed": seed,
            "wiring": wiring.as_json(),
        }
        self._keeper: subprocess.Popen[str] | None = _start_keeper(order)
        state = _state.read(file)
        if state is None:
            raise FabricError(f"fabric {name!r} ended as soon as it was up")
        self._state = state

    @classmethod
    def attach(cls, name: str) -> "Fabric":
        """Return a fabric that is already up.

        Raises:
            FabricInputError: there is none of this name.
        """
        state = _state.read(_state.path_of(name))
        if state is None or not state.alive:
            names = ", ".join(repr(state.name) for state in _state.fabrics() if state.alive)
            raise FabricInputError(f"no fabric {name!r} is up; {f'up are {names}' if names else 'none is'}")
        fabric = cls.__new__(cls)
        fabric._state, fabric._keeper = state, None
        return fabric

    @property
    def name(self) -> str:
        """What it can be found by."""
        return self._state.name

    @property
    def owner(self) -> int | None:
        """The process with which it ends, if there is one."""
        return self._state.owner

    @property
    def keeper(self) -> int:
        """The process that holds the namespaces."""
        return self._state.keeper

    @property
    def wiring(self) -> Wiring:
        """What is built: nodes, cables, routes."""
        return self._state.wiring

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts, in order."""
        return self.wiring.hosts

    def address(self, node: str) -> str:
        """Return the IPv4 address of a host or switch, as the others reach it."""
        return self.node(node).address

    def node(self, name: str) -> Node:
        """Return a host or switch.

        Raises:
            FabricInputError: there is none of this name.
        """
        return self.wiring.nodes[self.wiring.index(name)]

    def interface(self, node: str) -> str:
        """Return the interface of a host or switch that has its address; "lo" where no cable ends."""
        ports = self.node(node).ports
        return ports[0].interface if ports else "lo"

    def namespace(self, node: str) -> str:
        """Return the path of a node's network namespace."""
        return self._state.namespaces[self.wiring.index(node)]

    def environment(self, node: str) -> dict[str, str]:
        """Return the variables by which a program in a host finds its place: interface, address, host, fabric."""
        interface = self.interface(node)
        return {
            "HOCKET_FABRIC": self.name,
            "HOCKET_HOST": f"{self.name}:{node}",
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
        }

    def command_in(self, node: str, command: Sequence[str], *, parent: int = 0) -> list[str]:
        """Return a command that becomes `command` inside a host or switch.

        Args:
            node: Name of the host or switch.
            command: The program and its arguments.
            parent: The process that will start it and with which it is killed; 0 for none.
        """
        user = self._state.user_namespace or "-"
        return [sys.executable, "-I", "-S", _enter.__file__, user, self.namespace(node), str(parent), *command]

    def run_in_host(
        self, host: str, command: Sequence[str], env: Mapping[str, str] | None = None, **settings: Any
    ) -> "subprocess.Popen[Any]":
        """Start a command in a host, or beside a switch; it is ended with the fabric.

        If the main thread starts it, it is killed as well when this process dies while the fabric stays.

        Args:
            host: Name of the host or switch.
            command: The program and its arguments.
            env: Variables added to this process's environment, after the fabric's own.
            settings: Settings as `subprocess.Popen` takes them.
        """
        environment = {**os.environ, **self.environment(host), **(env or {})}
        # The kernel means the thread that starts it; with another thread than the main one it would end too soon.
        main = threading.current_thread() is threading.main_thread()
        return subprocess.Popen(
            self.command_in(host, command, parent=os.getpid() if main else 0), env=environment, **settings
        )

    def counters(self) -> dict[str, int]:
        """Return the bytes that each directed link, by its name in the cluster, has carried, Ethernet headers too."""
        counted: dict[str, int] = self._ask(ask="counters")
        return counted

    def cut(self, link: str) -> None:
        """Let a directed link lose all that is sent on it, until `mend`."""
        self._ask(ask="cut", link=link, broken=True)

    def mend(self, link: str) -> None:
        """Let a directed link carry again."""
        self._ask(ask="cut", link=link, broken=False)

    def _ask(self, **question: Any) -> Any:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
                asker.settimeout(_ANSWER_DEADLINE_S)
                asker.connect(self._state.socket)
                with asker.makefile("rw") as lines:
                    lines.write(json.dumps(question) + "\n")
                    lines.flush()
                    reply = json.loads(lines.readline() or "{}")
        except (OSError, ValueError) as error:
            raise FabricError(f"the keeper of fabric {self.name!r} does not answer ({error}); is it up?") from None
        if "error" in reply:
            raise FabricError(reply["error"])
        return reply.get("answer")

    def close(self) -> None:
        """Take it down: what runs in its hosts is ended, and when this returns nothing of it is left.

        Raises:
            FabricError: it did not end within 20 s.
        """
        if self._state.alive:
            with contextlib.suppress(FabricError):
                self._ask(ask="end")
        end_s = time.monotonic() + _DOWN_DEADLINE_S
        while self._state.alive or self._has_file():
            if not self._state.alive:
                clear_stale()
            if time.monotonic() > end_s:
                raise FabricError(f"fabric {self.name!r} does not end; its keeper is process {self.keeper}")
            time.sleep(0.01)
        if self._keeper is not None:
            self._keeper.wait()

    def _has_file(self) -> bool:
        """Return whether the file of this fabric, and not of a later one of the same name, is still there."""
        state = _state.read(self._state.file)
        return state is not None and state.keeper == self.keeper

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def clear_stale() -> None:
    """Remove what is left of fabrics whose keeper and warden have both been killed."""
    for state in _state.fabrics():
        if not state.alive:
            _sweep.end_in_network(set(state.numbers), _sweep.GRACE_S, _sweep.belongs_to(state.name))
            _sweep.remove_files_of(state.keeper, (state.file, state.socket))


def _start_keeper(order: Mapping[str, Any]) -> "subprocess.Popen[str]":
    require("an emulated cluster", "pyroute2")
    keeper = subprocess.Popen(
        [sys.executable, "-m", "hocket.fabric._keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    with keeper.stdin, keeper.stdout, keeper.stderr:
        with contextlib.suppress(BrokenPipeError):
            keeper.stdin.write(json.dumps(order))
            keeper.stdin.close()
        if not select.select([keeper.stdout], [], [], _UP_DEADLINE_S)[0]:
            keeper.kill()
            keeper.wait()
            count = len(order["wiring"]["nodes"])
            raise FabricError(
                f"the fabric was not up after {_UP_DEADLINE_S:.0f} s; its {count} hosts and switches may be too many "
                "for this machine: describe a smaller cluster"
            )
        said = json.loads(keeper.stdout.readline() or "{}")
        if not said.get("up"):
            keeper.wait()
            raise FabricError(said.get("why") or f"its keeper died: {keeper.stderr.read().strip()}")
    return keeper
