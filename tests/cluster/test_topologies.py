"""Builders make the networks that their papers describe."""

import networkx
import numpy as np
import pytest

from hocket import cluster
from hocket.cluster import Cluster

SMALL = [
    "star:hosts=5",
    "leafspine:leaves=3,ports=4,taper=2",
    "fattree:k=4",
    "bigraph:upper=4,ports=2",
    "dragonfly+:groups=3,leaves=2,spines=2,ports=2,globals=1",
    "dragonfly+:groups=4,leaves=2,spines=3,ports=3,globals=2,hosts=20",
    "torus:dims=4x3",
    "torus:dims=2x3x4",
    "rails:hosts=3,server=eflops,server.devices=2,spines=2",
    "rails:hosts=2,server=dgx-h100",
    "star:hosts=2,server=commodity",
    "star:hosts=2,server=dgx1",
    "star:hosts=2,server=ac922",
    "star:hosts=2,server.ranks=3",
    "single:server=dgx-a100",
]


def as_graph(described: Cluster) -> "networkx.DiGraph[int]":
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    graph.add_nodes_from(range(len(described)))
    graph.add_edges_from(zip(described.link_tail.tolist(), described.link_head.tolist(), strict=True))
    return graph


@pytest.mark.parametrize("spec", SMALL)
def test_all_ranks_reach_each_other_by_paths_of_least_cost_over_nodes_that_forward(spec: str) -> None:
    described = cluster.load(spec)
    world = described.world
    source, destination = (grid.ravel() for grid in np.meshgrid(described.ranks, described.ranks))
    routes = described.routes(source, destination)
    graph = as_graph(described)
    for node in range(len(described)):  # an endpoint is split: what enters it does not leave it
        if not described.forwards[node]:
            for head in list(graph.successors(node)):
                graph.add_edge(("out", node), head)
                graph.remove_edge(node, head)
    for link, (a, b) in enumerate(zip(described.link_tail.tolist(), described.link_head.tolist(), strict=True)):
        start = a if described.forwards[a] else ("out", a)
        graph.edges[start, b]["cost"] = int(described.link_cost[link])
    for flow in range(0, world * world, 7):
        a, b = int(source[flow]), int(destination[flow])
        links = routes[flow]
        if a == b:
            assert len(links) == 0
            continue
        assert described.link_tail[links[0]] == a
        assert described.link_head[links[-1]] == b
        assert (described.link_head[links[:-1]] == described.link_tail[links[1:]]).all()
        assert described.forwards[described.link_head[links[:-1]]].all()
        start = a if described.forwards[a] else ("out", a)
        least = networkx.shortest_path_length(graph, start, b, weight="cost")
        assert described.link_cost[links].sum() == least


def test_a_star_joins_any_two_hosts_by_two_links() -> None:
    star = cluster.load("star:hosts=8,bandwidth=100Gbit/s,latency=1us")
    assert star.world == 8
    assert len(star) == 9
    routes = star.routes(star.ranks[[0, 3]], star.ranks[[7, 2]])
    assert routes.hops.tolist() == [2, 2]
    assert [star.link_names[link] for link in routes[0]] == ["host0->switch0", "switch0->host7"]
    assert set(star.capacity_Bps) == {12.5e9}
    assert set(star.latency_s) == {1e-6}


def test_a_tapered_leaf_spine_has_fewer_spines_and_as_many_links_from_each_leaf() -> None:
    described = cluster.load("leafspine:leaves=4,ports=6,taper=1.5")
    assert sum(name.startswith("spine") for name in described.node_names) == 4
    assert described.world == 24
    leaf = described.node("leaf0")
    assert int((described.link_tail == leaf).sum()) == 6 + 4
    with pytest.raises(cluster.ClusterError, match="`taper` 20 of 6 ports leaves less than one spine"):
        cluster.load("leafspine:leaves=4,ports=6,taper=20")


def test_a_k_ary_fat_tree_has_the_published_counts() -> None:
    k = 6
    described = cluster.load(f"fattree:k={k}")
    assert described.world == k**3 // 4
    assert described.kinds.count("switch") == 5 * k * k // 4
    switches = [node for node, kind in enumerate(described.kinds) if kind == "switch"]
    assert {int((described.link_tail == switch).sum()) for switch in switches} == {k}


def test_a_bigraph_is_complete_between_its_parts_and_empty_within() -> None:
    described = cluster.load("bigraph:upper=3,ports=2,trunk=2")
    for a in range(3):
        for b in range(3):
            joined = (described.link_tail == described.node(f"upper{a}")) & (
                described.link_head == described.node(f"lower{b}")
            )
            assert described.capacity_Bps[joined].tolist() == [2 * 12.5e9]
    hops = described.routes(described.ranks[[0, 0, 0]], described.ranks[[1, 6, 2]]).hops
    # Facts 2.7 count switches: the same one 1, of the other part 2, of the same part 3; links are one more.
    assert hops.tolist() == [2, 3, 4]


def test_a_bigraph_s_ranks_go_through_the_upper_switches_then_the_lower() -> None:
    described = cluster.load("bigraph:upper=2,ports=2")
    first = described.routes(described.ranks, np.full(8, described.node("upper0")))
    over = [described.node_names[described.link_head[first[rank][0]]] for rank in range(8)]
    assert over == ["upper0", "upper0", "upper1", "upper1", "lower0", "lower0", "lower1", "lower1"]


@pytest.mark.parametrize(("groups", "spines", "cables"), [(3, 2, 1), (5, 4, 2), (6, 18, 20)])
def test_a_dragonfly_plus_joins_every_pair_of_groups_by_as_many_cables(groups: int, spines: int, cables: int) -> None:
    described = cluster.load(f"dragonfly+:groups={groups},leaves=1,spines={spines},ports=1,globals={cables}")
    group = np.array(
        [int(name[5:].partition(".")[0]) if name.startswith("group") else -1 for name in described.node_names]
    )
    tail, head = group[described.link_tail], group[described.link_head]
    crossing = (tail >= 0) & (head >= 0) & (tail != head)
    counts = np.zeros((groups, groups), dtype=int)
    np.add.at(counts, (tail[crossing], head[crossing]), 1)
    assert set(counts[~np.eye(groups, dtype=bool)]) == {spines * cables // (groups - 1)}
    for name in (name for name in described.node_names if "spine" in name):
        assert int((crossing & (described.link_tail == described.node(name))).sum()) == cables


def test_a_torus_routes_its_first_dimension_first() -> None:
    described = cluster.load("torus:dims=4x4")
    way = described.routes(described.ranks[[0]], described.ranks[[6]])[0]  # from (0, 0) to (1, 2)
    assert described.link_head[way].tolist() == [4, 5, 6]
    around = described.routes(described.ranks[[0]], described.ranks[[3]])[0]
    assert described.link_head[around].tolist() == [3]


def test_a_torus_of_two_has_one_cable_between_its_two() -> None:
    assert len(cluster.load("torus:dims=2").link_tail) == 2


def test_a_commodity_server_shares_one_nic_and_its_pcie_uplinks() -> None:
    described = cluster.load("star:hosts=2,server=commodity,server.devices=8")
    routes = described.routes(described.ranks[:8], described.ranks[8:])
    load = np.bincount(routes.links, minlength=len(described.link_tail))
    names = described.link_names
    assert load[names.index("host0.nic0->switch0")] == 8
    assert load[names.index("host0.pcie0->host0.cpu0")] == 4


def test_an_eflops_server_s_traffic_to_the_network_never_meets_the_root_complex() -> None:
    described = cluster.load("star:hosts=2,server=eflops,server.devices=8")
    routes = described.routes(described.ranks[:8], described.ranks[8:])
    load = np.bincount(routes.links, minlength=len(described.link_tail))
    assert load.max() == 1
    cpus = [node for node, kind in enumerate(described.kinds) if kind == "cpu"]
    assert not np.isin(described.link_head[routes.links], cpus).any()


def test_a_dgx1_has_six_nvlinks_per_device_and_pcie_where_there_is_none() -> None:
    described = cluster.load("single:server=dgx1")
    for device in described.ranks:
        nvlinks = (described.link_tail == device) & np.isin(described.link_head, described.ranks)
        assert described.capacity_Bps[nvlinks].sum() == 6 * 25e9
    way = described.routes(described.ranks[[0]], described.ranks[[5]])[0]
    kinds = [described.kinds[node] for node in described.link_head[way]]
    assert kinds == ["pcie", "cpu", "cpu", "pcie", "device"]


def test_nvswitches_of_the_fourth_generation_reduce_and_of_the_third_do_not() -> None:
    assert cluster.aggregation_tree(cluster.load("single:server=dgx-h100")).depth == 1
    with pytest.raises(cluster.ClusterError, match="none of its switches reduces"):
        cluster.aggregation_tree(cluster.load("single:server=dgx-a100"))


def test_rail_switches_join_nics_of_one_number() -> None:
    described = cluster.load("rails:hosts=3,server=eflops,server.devices=2")
    same = described.routes(described.ranks[[0]], described.ranks[[2]])[0]
    assert [described.node_names[node] for node in described.link_head[same]] == [
        "host0.pcie0",
        "host0.nic0",
        "rail0",
        "host1.nic0",
        "host1.pcie0",
        "host1.gpu0",
    ]


@pytest.mark.parametrize("name", cluster.CATALOGUE)
def test_every_preset_says_what_it_is_and_has_routes(name: str) -> None:
    described = cluster.preset(name)
    assert described.name == name
    last = described.world - 1
    assert described.routes(described.ranks[[0]], described.ranks[[last]]).hops[0] >= 2


def test_presets_have_the_published_sizes() -> None:
    sharp = cluster.preset("sharp-1500")
    assert (len(sharp.host_names), sharp.world, sharp.ranks_per_host()) == (1500, 60_000, 40)
    lassen = cluster.preset("lassen")
    assert lassen.ranks_per_host() == 4
    assert cluster.preset("eflops-like").world == 64
    assert len(cluster.preset("summit").host_names) == 4608


@pytest.mark.parametrize("spec", ["star:hosts=1000000000", "rails:hosts=99999999999", "torus:dims=100000x100000"])
def test_a_network_that_no_memory_holds_is_refused(spec: str) -> None:
    with pytest.raises(cluster.ClusterError, match="more than the 1048576 that fit in memory"):
        cluster.load(spec)


def test_a_network_of_too_many_links_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fat tree of k = 1000 has 250 million hosts, of a number that says nothing of it."""
    monkeypatch.setattr("hocket.cluster._graph_builder._MOST_LINKS", 1000)
    with pytest.raises(cluster.ClusterError, match="more than the 1000 links that fit in memory"):
        cluster.load("fattree:k=10")
