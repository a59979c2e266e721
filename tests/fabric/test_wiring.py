"""What of a cluster becomes what of a fabric."""

import pytest

from hocket import cluster
from hocket.fabric import FabricError, Wiring, wire

DIAMOND = """
routing = "shortest"
nodes = [
    { name = "a" }, { name = "b" },
    { name = "s", kind = "switch" }, { name = "t", kind = "switch" },
    { name = "u", kind = "switch" }, { name = "v", kind = "switch" },
]
links = [
    { ends = ["a", "s"], bandwidth = "10 MB/s", back_bandwidth = "20 MB/s" },
    { ends = ["s", "u"], bandwidth = "10 MB/s" },
    { ends = ["s", "v"], bandwidth = "10 MB/s" },
    { ends = ["u", "t"], bandwidth = "10 MB/s" },
    { ends = ["v", "t"], bandwidth = "10 MB/s" },
    { ends = ["t", "b"], bandwidth = "10 MB/s" },
]
"""


def through(wiring: Wiring, source: str, goal: str) -> list[list[str]]:
    """All ways from a node to another, as names."""
    at, to = wiring.index(source), wiring.index(goal)
    if at == to:
        return [[goal]]
    node = wiring.nodes[at]
    ways = []
    for port in dict(node.routes)[to]:
        ways += [[source, *way] for way in through(wiring, wiring.nodes[node.ports[port].peer].name, goal)]
    return ways


def test_all_inside_a_host_is_one_node_and_links_inside_it_are_none() -> None:
    wiring = wire(cluster.load("star:hosts=2,server=dgx1"))
    assert wiring.hosts == ("host0", "host1")
    assert [node.kind for node in wiring.nodes].count("switch") == len(wiring.nodes) - 2
    described = cluster.load("star:hosts=2,server=dgx1")
    outside = [
        name
        for name, tail, head in zip(described.link_names, described.link_tail, described.link_head, strict=True)
        if described.hosts[tail] != described.hosts[head]
    ]
    assert sorted(port.link for node in wiring.nodes for port in node.ports) == sorted(outside)
    assert wiring.ranks == tuple(described.host_of_rank(rank) for rank in range(described.world))


def test_each_direction_has_its_own_rate() -> None:
    rates = {port.link: port.rate_Bps for node in wire(cluster.from_toml(DIAMOND)).nodes for port in node.ports}
    assert (rates["a->s"], rates["s->a"]) == (10e6, 20e6)


def test_the_two_ends_of_a_cable_name_each_other() -> None:
    wiring = wire(cluster.load("leafspine:leaves=2,ports=2,spines=2"))
    for index, node in enumerate(wiring.nodes):
        for number, port in enumerate(node.ports):
            other = wiring.nodes[port.peer].ports[port.peer_port]
            assert (other.peer, other.peer_port) == (index, number)
    macs = [port.mac for node in wiring.nodes for port in node.ports]
    assert len(set(macs)) == len(macs)


def test_equal_ways_are_all_taken_with_ecmp_and_the_first_without() -> None:
    assert through(wire(cluster.from_toml(DIAMOND)), "a", "b") == [["a", "s", "u", "t", "b"]]
    ecmp = wire(cluster.from_toml(DIAMOND.replace('"shortest"', '"ecmp"')))
    assert through(ecmp, "a", "b") == [["a", "s", "u", "t", "b"], ["a", "s", "v", "t", "b"]]


@pytest.mark.parametrize(
    "spec", ["star:hosts=5", "bigraph:upper=2,ports=2", "fattree:k=4", "torus:dims=3x3", "leafspine:leaves=2,ports=2"]
)
def test_ways_are_as_long_as_the_cluster_s_own(spec: str) -> None:
    described = cluster.load(spec)
    wiring = wire(described)
    for a in range(described.world):
        for b in range(described.world):
            nodes = [described.ranks[a : a + 1], described.ranks[b : b + 1]]
            hops = int(described.routes(*nodes).hops[0])
            for way in through(wiring, described.node_names[nodes[0][0]], described.node_names[nodes[1][0]])[:4]:
                outside = len(way) - 1
                assert outside <= hops <= outside + 4  # links inside the hosts come on top
                assert hops == outside or described.kinds[nodes[0][0]] != "host"


def test_hosts_do_not_pass_on_what_is_for_others_unless_the_cluster_says_so() -> None:
    assert not any(node.forwards for node in wire(cluster.load("rails:hosts=2,server=dgx1")).nodes[:2])
    assert all(node.forwards for node in wire(cluster.load("torus:dims=4")).nodes)


def test_explicit_paths_come_before_others() -> None:
    text = DIAMOND + '[[routes]]\npath = ["a", "s", "v", "t", "b"]\n'
    wiring = wire(cluster.from_toml(text))
    s, a, b = (wiring.index(name) for name in "sab")
    ((source, goal, port),) = wiring.nodes[s].given
    assert (source, goal) == (a, b)
    assert wiring.nodes[s].ports[port].link == "s->v"


def test_a_link_without_a_way_back_is_refused_by_name() -> None:
    text = DIAMOND.replace('["t", "b"], bandwidth = "10 MB/s"', '["t", "b"], bandwidth = "10 MB/s", one_way = true')
    with pytest.raises(FabricError, match="t->b has no link back"):
        wire(cluster.from_toml(text))


def test_hosts_without_a_way_to_each_other_are_refused_by_name() -> None:
    text = """
nodes = [{ name = "a" }, { name = "m" }, { name = "b" }]
links = [{ ends = ["a", "m"], bandwidth = "10 MB/s" }, { ends = ["m", "b"], bandwidth = "10 MB/s" }]
"""
    with pytest.raises(FabricError, match="no way leads from a to b.*forwards = true"):
        wire(cluster.from_toml(text))
    assert wire(cluster.from_toml(text.replace('"m" }', '"m", forwards = true }', 1))).hops(0, 2) == 2


def test_plain_values_and_back() -> None:
    wiring = wire(cluster.from_toml(DIAMOND + '[[routes]]\npath = ["a", "s", "v", "t", "b"]\n'))
    assert Wiring.from_json(wiring.as_json()) == wiring
    with pytest.raises(FabricError, match="no host or switch 'z'"):
        wiring.index("z")


def test_the_central_switch_is_nearest_to_the_farthest_of_those_asked_for() -> None:
    wiring = wire(cluster.load("leafspine:leaves=3,ports=2,spines=2"))
    assert wiring.central_switch(wiring.hosts) == "spine0"
    assert wiring.central_switch(["host2", "host3"]) == "leaf1"
    assert wiring.hops(wiring.index("host0"), wiring.index("host5")) == 4
    assert wire(cluster.load("torus:dims=3")).central_switch(["host0"]) is None


def test_a_cluster_that_no_machine_emulates_is_refused_before_its_routes_are_found() -> None:
    with pytest.raises(FabricError, match="5001 hosts and switches are more than the 1024 of one machine's fabric"):
        wire(cluster.load("star:hosts=5000"))
