"""A wiring made real: namespaces, veth cables with a rate in each direction, addresses and routes.

Everything is asked of the kernel by netlink (pyroute2), each namespace through a socket that was opened inside it.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from ._errors import FabricError
from ._namespace import enter, new_network
from ._wiring import Node, Port, Wiring

MTU = 9000
_FRAME = MTU + 14  # Ethernet's header; preamble and gap are not counted
_LATE_S = 200e-6  # how late the kernel's timer may wake a link without its rate suffering
_QUEUE_NBYTES = 256 << 20  # as much as senders may have on the way: nothing is dropped, as with flow control
_MOST_BPS = (1 << 32) - 1  # of TBF's 32-bit rate; nothing that one machine emulates comes near
_ON_LINK = 4  # RTNH_F_ONLINK: the gateway is at the other end, whatever its address
_NEEDED: dict[str, int] = {
    "ipv4/conf/all/rp_filter": 0,  # with several equal ways, the way back may be another
    "ipv4/conf/default/rp_filter": 0,
}
_WANTED: dict[str, int | str] = {
    "ipv6/conf/all/disable_ipv6": 1,  # its own messages would be counted on the links
    "ipv6/conf/default/disable_ipv6": 1,
    # Addresses, protocol and ports; by these fields (policy 3, since Linux 5.12), since policy 1 trusts the random
    # number that the sender's socket has put on its packets, which real switches never see.
    "ipv4/fib_multipath_hash_fields": 0x37,
    "ipv4/fib_multipath_hash_policy": 3,
    # Nothing is lost here, so that the oldest control just keeps the links full. BBR, some machines' default, paces by
    # a model of the path, and left a tenth of the links empty where flows share them in both directions.
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_limit_output_bytes": 4 * _FRAME,  # of a connection in its host's own queue, before others' frames
    "ipv4/tcp_slow_start_after_idle": 0,
    "ipv4/tcp_no_metrics_save": 1,
}


class Networks:
    """The namespaces of a wiring; they live as long as the descriptors in `fds`, and what runs in them.

    Raises:
        FabricError: the kernel refuses something.
    """

    def __init__(self, wiring: Wiring, seed: int) -> None:
        self._wiring = wiring
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.fds: list[int] = []  # file descriptor of every node's namespace
        try:
            for _ in wiring.nodes:
                self.fds.append(new_network())
            for index, node in enumerate(wiring.nodes):
                with self._inside(index) as ip:
                    _set_up(index, node, seed)
                    self._cables(ip, index, node)
            for index, node in enumerate(wiring.nodes):
                with self._inside(index) as ip:
                    self._ports(ip, node)
                    self._routes(ip, node)
        except NetlinkError as error:
            raise FabricError(f"the kernel refused a part of the fabric: {error}") from error
        finally:
            enter(self._home)

    @contextlib.contextmanager
    def _inside(self, index: int) -> Iterator[Any]:
        enter(self.fds[index])
        try:
            with IPRoute() as ip:
                yield ip
        finally:
            enter(self._home)

    def _cables(self, ip: Any, index: int, node: Node) -> None:
        """Yield every cable once, from the node that comes first."""
        for number, port in enumerate(node.ports):
            if (port.peer, port.peer_port) < (index, number):
                continue
            other = self._wiring.nodes[port.peer].ports[port.peer_port]
            peer = {"ifname": other.interface, "net_ns_fd": self.fds[port.peer], "address": other.mac, "mtu": MTU}
            ip.link("add", ifname=port.interface, kind="veth", address=port.mac, mtu=MTU, peer=peer)

    def _ports(self, ip: Any, node: Node) -> None:
        loopback = ip.link_lookup(ifname="lo")[0]
        ip.link("set", index=loopback, state="up")
        numbers = [ip.link_lookup(ifname=port.interface)[0] for port in node.ports]
        # On the first port, since engines are told by an interface's name where to listen.
        ip.addr("add", index=numbers[0] if numbers else loopback, address=node.address, prefixlen=32)
        for number, port in zip(numbers, node.ports, strict=True):
            # One segment a packet, or 64 KiB would pass at once whatever the rate.
            ip.link("set", index=number, state="up", gso_max_segs=1)
            _shape(ip, "add", number, port)
            far = self._wiring.nodes[port.peer]
            mac = far.ports[port.peer_port].mac
            ip.neigh("add", dst=far.address, lladdr=mac, ifindex=number, state="permanent")

    def _routes(self, ip: Any, node: Node) -> None:
        nodes = self._wiring.nodes
        numbers = [ip.link_lookup(ifname=port.interface)[0] for port in node.ports]

        def hop(port: int) -> dict[str, Any]:
            return {"gateway": nodes[node.ports[port].peer].address, "oif": numbers[port]}

        for goal, ports in node.routes:
            to: dict[str, Any] = {"dst": f"{nodes[goal].address}/32", "prefsrc": node.address}
            if len(ports) == 1:
                ip.route("add", **to, **hop(ports[0]), flags=_ON_LINK)
            else:
                ip.route("add", **to, multipath=[{**hop(port), "flags": _ON_LINK, "hops": 0} for port in ports])
        for port in sorted({port for _, _, port in node.given}):
            ip.route("add", dst="0.0.0.0/0", table=_table(port), **hop(port), flags=_ON_LINK)
        for source, goal, port in node.given:
            ip.rule(
                "add",
                table=_table(port),
                src=nodes[source].address,
                src_len=32,
                dst=nodes[goal].address,
                dst_len=32,
                priority=100,
            )

    def counters(self) -> dict[str, int]:
        """Return the bytes that have left onto every directed link, headers counted."""
        counted = {}
        for index, node in enumerate(self._wiring.nodes):
            enter(self.fds[index])
            try:
                with open("/proc/thread-self/net/dev") as file:
                    lines = dict(line.split(":", 1) for line in file.read().splitlines()[2:])
            finally:
                enter(self._home)
            sent = {name.strip(): int(rest.split()[8]) for name, rest in lines.items()}
            counted.update({port.link: sent[port.interface] for port in node.ports})
        return counted

    def cut(self, link: str, broken: bool) -> None:
        """Let a directed link lose everything, or carry again. Raises FabricError: there is no such link."""
        for index, node in enumerate(self._wiring.nodes):
            for port in node.ports:
                if port.link == link:
                    try:
                        with self._inside(index) as ip:
                            number = ip.link_lookup(ifname=port.interface)[0]
                            if broken:  # says that it has sent: TCP ends a connection soon whose host cannot send
                                ip.tc("replace", "blackhole", number, 0)
                            else:
                                _shape(ip, "replace", number, port)
                    except NetlinkError as error:
                        raise FabricError(f"the kernel does not change link {link}: {error}") from error
                    return
        raise FabricError(f"{self._wiring.cluster} has no link {link!r} between its hosts and switches")


def _set_up(index: int, node: Node, seed: int) -> None:
    """Write the settings of the namespace that we are in; older kernels lack some that are only wanted."""
    # Switches with one seed would all decide alike (polarisation); 0 would mean the kernel's own, a random one.
    own_seed = (seed * 1_000_003 + index * 7919) % ((1 << 32) - 1) + 1
    for name, value in {**_WANTED, "ipv4/fib_multipath_hash_seed": own_seed}.items():
        with contextlib.suppress(OSError):
            _write(name, value)
    for name, value in {**_NEEDED, "ipv4/ip_forward": int(node.forwards)}.items():
        _write(name, value)


def _write(name: str, value: int | str) -> None:
    with open(f"/proc/sys/net/{name}", "w") as file:
        file.write(str(value))


def _shape(ip: Any, action: str, number: int, port: Port) -> None:
    """Add a token bucket that holds one frame and what the timer may be late."""
    rate_Bps = max(1, min(round(port.rate_Bps), _MOST_BPS))
    ip.tc(action, "tbf", number, 0, rate=rate_Bps, burst=_FRAME + round(rate_Bps * _LATE_S), limit=_QUEUE_NBYTES)


def _table(port: int) -> int:
    return 1000 + port
