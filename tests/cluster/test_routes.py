"""Routes: spread by the hash, given by table, the same every time, and quick."""

import numpy as np
import pytest

from hocket import cluster
from hocket.cluster import ClusterError
from hocket.cluster._routes import Indices, Router

from ..pace import timed

LEAF_SPINE = "leafspine:leaves=8,ports=8"


def test_ecmp_spreads_flows_and_depends_on_the_seed_only() -> None:
    described = cluster.load(LEAF_SPINE)
    ranks = described.ranks
    source, destination = ranks, np.roll(ranks, 8)
    first, again = described.routes(source, destination, seed=3), described.routes(source, destination, seed=3)
    other = described.routes(source, destination, seed=4)
    assert (first.links == again.links).all()
    assert (first.links != other.links).any()
    load = np.bincount(first.links, minlength=len(described.link_tail))
    up = np.array([name.startswith("leaf") and "->spine" in name for name in described.link_names])
    assert load[up].sum() == 64
    assert 2 <= load[up].max() <= 6  # a hash collides; never all on one


def test_a_flow_s_path_does_not_depend_on_the_flows_beside_it() -> None:
    described = cluster.load(LEAF_SPINE)
    ranks = described.ranks
    together = described.routes(ranks[:-1], ranks[1:])
    for flow in (0, 7, 30):
        alone = described.routes(ranks[[flow]], ranks[[flow + 1]])
        assert (alone[0] == together[flow]).all()


def test_ecmp_chooses_every_path_about_as_often() -> None:
    described = cluster.load(LEAF_SPINE)
    ranks = described.ranks
    counts = np.zeros(len(described.link_tail))
    for seed in range(200):
        routes = described.routes(ranks[:8], ranks[8:16], seed=seed)
        counts += np.bincount(routes.links, minlength=len(counts))
    up = [link for link, name in enumerate(described.link_names) if name.startswith("leaf0->spine")]
    assert len(up) == 8
    # 1,600 choices among 8: 200 each, standard deviation 13.2; five of them are allowed
    assert np.abs(counts[up] - 200).max() < 66


def test_flows_of_one_host_are_hashed_one_by_one() -> None:
    described = cluster.load("leafspine:leaves=2,ports=8,server=eflops,server.devices=8")
    routes = described.routes(described.ranks[:8], described.ranks[8:])
    spines = {name for flow in range(8) for link in routes[flow] if "spine" in (name := described.link_names[link])}
    assert len(spines) > 4  # all by one spine would make two names


def test_a_plan_of_devices_is_routed_as_quickly_as_one_of_hosts() -> None:
    described = cluster.load("leafspine:leaves=64,ports=16,server=dgx-a100")
    random = np.random.default_rng(1)
    source = random.integers(0, described.world, 65_536)
    destination = (source + random.integers(1, described.world, 65_536)) % described.world
    routes, took_s = timed(lambda: described.routes(described.ranks[source], described.ranks[destination]))
    assert took_s < 8  # 0.7 s on an idle core
    assert routes.hops.max() == 8


def test_shortest_takes_the_first_of_equal_paths() -> None:
    described = cluster.load(LEAF_SPINE + ",routing=shortest")
    ranks = described.ranks
    routes = described.routes(ranks[:8], ranks[8:16])
    assert {described.node_names[described.link_head[routes[flow][1]]] for flow in range(8)} == {"spine0"}


PAIR = """
[[nodes]]
name = "a"
[[nodes]]
name = "b"
[[nodes]]
name = "s"
kind = "switch"
[[nodes]]
name = "t"
kind = "switch"
[[links]]
ends = ["a", "s"]
bandwidth = "1 GB/s"
[[links]]
ends = ["s", "b"]
bandwidth = "1 GB/s"
[[links]]
ends = ["a", "t"]
bandwidth = "1 GB/s"
[[links]]
ends = ["t", "b"]
bandwidth = "1 GB/s"
"""


def test_a_given_route_comes_before_the_routing() -> None:
    plain = cluster.from_toml(PAIR)
    given = cluster.from_toml(PAIR + '[[routes]]\npath = ["a", "t", "b"]\n')

    def way(described: cluster.Cluster, a: str, b: str) -> list[str]:
        links = described.routes(np.array([described.node(a)]), np.array([described.node(b)]))[0]
        return [described.link_names[link] for link in links]

    assert way(plain, "a", "b") == ["a->s", "s->b"]
    assert way(given, "a", "b") == ["a->t", "t->b"]
    assert way(given, "b", "a") == ["b->s", "s->a"]
    assert cluster.from_toml(cluster.to_toml(given)) == given


def test_what_no_path_joins_is_named() -> None:
    island = (
        "".join(f'[[nodes]]\nname = "{name}"\n' for name in "cd") + '[[links]]\nends = ["c", "d"]\nbandwidth = 1e9\n'
    )
    described = cluster.from_toml(PAIR + island)
    with pytest.raises(ClusterError, match="no path leads from a to c"):
        described.routes(np.array([0]), np.array([described.node("c")]))


def test_hosts_do_not_forward_unless_they_say_so() -> None:
    chain = "".join(f'[[nodes]]\nname = "{name}"\n' for name in "abc")
    links = "".join(f'[[links]]\nends = ["{a}", "{b}"]\nbandwidth = 1e9\n' for a, b in ("ab", "bc"))
    described = cluster.from_toml(chain + links)
    with pytest.raises(ClusterError, match="no path leads from a to c"):
        described.routes(np.array([0]), np.array([2]))
    willing = cluster.from_toml(chain.replace('"b"\n', '"b"\nforwards = true\n') + links)
    assert willing.routes(np.array([0]), np.array([2])).hops.tolist() == [2]


def test_nodes_outside_of_the_cluster_are_refused() -> None:
    described = cluster.load("star:hosts=2")
    with pytest.raises(ClusterError, match=r"outside of 0\.\.2"):
        described.routes(np.array([0]), np.array([3]))


@pytest.mark.parametrize("spec", ["bigraph:upper=32,ports=32", "leafspine:leaves=64,ports=32", "sharp-1500"])
def test_65536_flows_are_routed_within_seconds(spec: str) -> None:
    described = cluster.load(spec)
    random = np.random.default_rng(1)
    source = random.integers(0, described.world, 65_536)
    destination = (source + random.integers(1, described.world, 65_536)) % described.world
    routes, took_s = timed(lambda: described.routes(described.ranks[source], described.ranks[destination]))
    assert len(routes) == 65_536
    assert took_s < 5  # 0.1 to 0.5 s on an idle core


def test_devices_of_a_host_that_meet_at_a_switch_outside_are_joined_there() -> None:
    nodes = [f'{{name="{host}{n}",kind="device",host="{host}"}}' for host in "ab" for n in range(2)]
    links = [f'{{ends=["{host}{n}","s"],bandwidth="10 GB/s"}}' for host in "ab" for n in range(2)]
    text = f'nodes = [{", ".join(nodes)}, {{name="s",kind="switch"}}]\nlinks = [{", ".join(links)}]\n'
    described = cluster.from_toml(text)

    def way(a: str, b: str) -> list[str]:
        found = described.routes(np.array([described.node(a)]), np.array([described.node(b)]))[0]
        return [described.link_names[link] for link in found]

    assert way("a0", "a1") == ["a0->s", "s->a1"]
    assert way("b1", "a0") == ["b1->s", "s->a0"]
    assert way("b1", "b1") == []
    apart = cluster.from_toml(text.replace('"b1","s"', '"b1","t"').replace("}]\n", '}, {name="t",kind="switch"}]\n', 1))
    with pytest.raises(ClusterError, match="no path leads from b0 to b1"):
        apart.routes(np.array([apart.node("b0")]), np.array([apart.node("b1")]))


def test_of_cables_to_one_switch_only_the_nearest_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    described = cluster.load("star:hosts=2,server=dgx-h100")  # eight NICs each: 64 pairs of cables
    asked: list[int] = []
    distance = Router.distance

    def counted(self: Router, source: Indices, destination: Indices) -> Indices:
        asked.append(len(source))
        return distance(self, source, destination)

    described.routes(described.ranks[:8], described.ranks[8:])  # shapes of hosts are known now
    monkeypatch.setattr(Router, "distance", counted)
    described.routes(described.ranks[:8], described.ranks[8:])
    assert asked == [8]
