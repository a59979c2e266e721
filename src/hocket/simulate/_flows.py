"""Plain flows between nodes: how long messages take that wait for nothing but the time."""

from collections.abc import Sequence

import numpy as np

from hocket.cluster import Cluster

from ._fair import Floats, Indices
from ._loop import run
from ._network import Wires
from ._settings import Settings
from ._tasks import LoadTrace, Outcome, SimulationError, Tasks


def simulate_flows(
    cluster: Cluster,
    source: Sequence[int] | Indices,
    destination: Sequence[int] | Indices,
    nbytes: Sequence[float] | Floats,
    *,
    start_s: Sequence[float] | Floats | None = None,
    settings: Settings | None = None,
    seed: int = 0,
    trace: LoadTrace | None = None,
) -> Outcome:
    """Run messages over a cluster's links, each from its own start.

    Args:
        cluster: Where.
        source: Nodes, by index, where messages begin.
        destination: Nodes where they end; not their own sources.
        nbytes: How long they are; 0 takes the latency only.
        start_s: When they begin; 0 if not given.
        settings: What to count besides latency and bandwidth.
        seed: Of ECMP's hash.
        trace: Written with the load of every link over time, if given.

    Raises:
        SimulationError: if a message goes to its own source.
        ClusterError: if no path joins two nodes.
    """
    counted = settings or Settings()
    tail, head = np.asarray(source, dtype=np.int64), np.asarray(destination, dtype=np.int64)
    sizes = np.asarray(nbytes, dtype=np.float64)
    for row in np.flatnonzero(tail == head)[:1].tolist():
        raise SimulationError(f"message {row} goes from {cluster.node_names[tail[row]]} to itself; leave it out")
    wires = Wires(cluster, counted, seed)
    messages = wires.messages(tail, head, sizes)
    none = np.zeros(0, dtype=np.int64)
    tasks = Tasks(
        messages.delay_s,
        sizes,
        messages.usage,
        none,
        none,
        earliest_s=np.zeros(len(sizes)) if start_s is None else np.asarray(start_s, dtype=np.float64),
        weight=messages.weight,
        limit_Bps=messages.limit_Bps,
        congestion=counted.congestion,
    )
    return run(tasks, wires.capacity_Bps, trace=trace)
