"""Aggregators and clients of one test, on threads, over loopback."""

import threading
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
