"""Aggregators and clients of one test, on threads, over loopback."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from hocket.aggregator import AggregationClient, Aggregator, Level, Limits
from hocket.testing import deadline

TOKEN = b"a token of a test, long enough"


@contextmanager
def aggregators(count=1, limits=None, parent=None, tokens=(TOKEN,)):
    """Runs aggregators; after the first, the others are its children."""
    servers, threads = [], []
    try:
        for number in range(count):
            above = parent if number == 0 else servers[0].address
            server = Aggregator(("127.0.0.1", 0), tokens, parent=above, limits=limits or Limits(), name=f"agg{number}")
            thread = threading.Thread(target=server.run, daemon=True)
            thread.start()
            servers.append(server)
            threads.append(thread)
        yield servers if count > 1 else servers[0]
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.stop()
            thread.join(deadline(10))
            assert not thread.is_alive()


class LongWire:
    """Stands between an aggregator and one who connects to `address`; what the former says comes later, or never."""

    def __init__(self, server, delay_s=0.0):
        self.cut = threading.Event()  # once it is set nothing is carried, no end of a side either
        self._server, self._delay_s = server, delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        try:
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._server.address)
                threading.Thread(target=self._carry, args=(near, far, 0.0), daemon=True).start()
                threading.Thread(target=self._carry, args=(far, near, self._delay_s), daemon=True).start()
        except OSError:
            return

    def _carry(self, source, target, delay_s):
        try:
            while data := source.recv(1 << 16):
                if self.cut.is_set():
                    continue
                time.sleep(delay_s)
                target.sendall(data)
            if not self.cut.is_set():
                target.shutdown(socket.SHUT_WR)
        except OSError:
            return


def on_threads(total, one):
    """Calls `one(position)` on a thread for each member and returns the results in order."""
    with ThreadPoolExecutor(total) as pool:
        return list(pool.map(one, range(total)))


def members(server, total, action, *args, name="world", **settings):
    """Calls `action(group, *args)` on a thread for each member and returns the results in order."""

    def one(position):
        client = AggregationClient(server.address, TOKEN, **settings)
        try:
            group = client.join(name, total, position, label=f"rank {position}")
            group.wait(deadline(20))
            return action(group, *args)
        finally:
            client.close()

    return on_threads(total, one)


def members_of_tree(servers, shape, action, *args):
    """The same below a root, `servers[0]`, and leaves that have as many members each as `shape` says."""
    total = sum(shape)
    firsts = [sum(shape[:i]) for i in range(len(shape))]

    def one(position):
        leaf = max(i for i, first in enumerate(firsts) if first <= position)
        levels = (
            Level(shape[leaf], position - firsts[leaf], position, 1),
            Level(len(shape), leaf, firsts[leaf], shape[leaf]),
        )
        client = AggregationClient(servers[1 + leaf].address, TOKEN)
        try:
            group = client.join("tree", total, position, levels=levels, label=f"rank {position}")
            group.wait(deadline(20))
            return action(group, *args)
        finally:
            client.close()

    return on_threads(total, one)
