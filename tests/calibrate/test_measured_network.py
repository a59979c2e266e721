"""The ranks' network: wires inside hosts and between them are told apart where there are both."""

from __future__ import annotations

import pytest
import torch

from hocket.calibrate._measured_network import measured_network
from hocket.parallel.mesh import join
from hocket.planner import Network
from tests.comm.host_world import run


def _measured() -> tuple[Network, float]:
    return measured_network(torch.device("cpu"), join())


@pytest.mark.long
@pytest.mark.flaky(reruns=2)  # it measures, on a machine that may be busy
def test_shared_memory_inside_hosts_is_told_from_the_wire_between_them() -> None:
    found = run([0, 0, 1, 1], _measured)
    assert len({repr(one) for one in found}) == 1  # what all ranks agree on
    network, share = found[0]
    assert (network.world, network.local) == (4, 2)
    assert network.inside_Bps > network.rank_Bps  # Gloo over loopback is slower than shared memory
    assert 0 < network.host_Bps <= 2.5 * network.rank_Bps  # two groups share what leaves a host
    assert 0 < share <= 1


@pytest.mark.long
@pytest.mark.parametrize("layout", [[0, 0, 1], [0, 1, 0, 1], [0, 0], [0, 1]])
def test_ranks_that_lie_in_no_blocks_of_hosts_are_a_ring_of_equals(layout: list[int]) -> None:
    network, _ = run(layout, _measured)[0]
    assert (network.world, network.local) == (len(layout), 1)
    assert network.inside_Bps == network.host_Bps == network.rank_Bps
