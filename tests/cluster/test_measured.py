"""Measured clusters explain the measurements that they were made from."""

import itertools

import pytest

from hocket import cluster
from hocket.cluster import ClusterError, MeasuredRank, PingFit
from hocket.simulate import simulate_flows

RANKS = [MeasuredRank(host, 10e9, 2**30, 1e11) for host in ("a", "a", "b", "b")]
NEAR, FAR = PingFit(1e-6, 8e9), PingFit(30e-6, 1e9)
PINGS = {(0, 1): NEAR, (2, 3): NEAR, (0, 2): FAR, (1, 3): FAR}


def test_a_line_goes_through_times_on_a_line() -> None:
    found = cluster.fit_ping({size: 2e-6 + size / 5e9 for size in (0, 1000, 10**5, 10**7)})
    assert found.latency_s == pytest.approx(2e-6)
    assert found.rate_Bps == pytest.approx(5e9)


def test_times_that_make_no_line_are_refused() -> None:
    with pytest.raises(ClusterError, match="measure two or more"):
        cluster.fit_ping({8: 1e-6})
    with pytest.raises(ClusterError, match="took no longer"):
        cluster.fit_ping({8: 2e-6, 1000: 1e-6})


def test_messages_on_the_cluster_take_the_measured_times() -> None:
    found = cluster.from_measurements("mine", RANKS, PINGS)
    assert found.world == 4
    assert found.ranks_per_host() == 2
    for (a, b), ping in PINGS.items():
        for nbytes in (0.0, 1e6):
            outcome = simulate_flows(found, found.ranks[[a]], found.ranks[[b]], [nbytes])
            assert outcome.seconds == pytest.approx(ping.latency_s + nbytes / ping.rate_Bps, rel=1e-9)
    assert cluster.from_toml(cluster.to_toml(found)) == found


@pytest.mark.parametrize("hosts", [3, 4, 6])
def test_a_slow_host_has_a_slow_port_and_the_others_have_theirs(hosts: int) -> None:
    ranks = [MeasuredRank(f"h{number}", 10e9, 2**30, 1e11) for number in range(hosts)]
    slow = PingFit(80e-6, 0.1e9)
    pings = {
        (a, b): slow if 1 in (a, b) else PingFit(30e-6, (1 + 0.02 * ((a + b) % 3)) * 1e9)
        for a, b in itertools.combinations(range(hosts), 2)
    }
    found = cluster.from_measurements("mine", ranks, pings)
    for (a, b), ping in pings.items():
        outcome = simulate_flows(found, found.ranks[[a]], found.ranks[[b]], [1e6])
        assert outcome.seconds == pytest.approx(ping.latency_s + 1e6 / ping.rate_Bps, rel=0.05)


def test_hosts_of_two_generations_have_their_ports() -> None:
    ranks = [MeasuredRank(f"h{number}", 10e9, 2**30, 1e11) for number in range(4)]
    pings = {(a, b): PingFit(30e-6, 1e9 if a < 2 else 10e9) for a, b in itertools.combinations(range(4), 2)}
    found = cluster.from_measurements("mine", ranks, pings)
    for (a, b), ping in pings.items():
        outcome = simulate_flows(found, found.ranks[[a]], found.ranks[[b]], [1e6])
        assert outcome.seconds == pytest.approx(ping.latency_s + 1e6 / ping.rate_Bps, rel=1e-6)


def test_hosts_that_vary_as_measurements_do_are_alike() -> None:
    ranks = [MeasuredRank(f"h{number}", 10e9, 2**30, 1e11) for number in range(4)]
    rates = [1.0, 1.1, 0.9, 1.2, 0.8, 1.05]
    pairs = itertools.combinations(range(4), 2)
    pings = {pair: PingFit(30e-6, rate * 1e9) for pair, rate in zip(pairs, rates, strict=True)}
    ports = cluster.from_measurements("mine", ranks, pings)
    (rate,) = {rate for rate in ports.capacity_Bps.tolist() if rate < 5e9}
    assert rate == pytest.approx(1.025e9)


def test_a_cluster_that_was_not_seen_is_refused() -> None:
    with pytest.raises(ClusterError, match="no message between the 2 hosts"):
        cluster.from_measurements("mine", RANKS, {(0, 1): NEAR})
    with pytest.raises(ClusterError, match="no ranks"):
        cluster.from_measurements("mine", [], {})
