"""Documents: what is written is read back, and what is wrong is told with its place."""

from pathlib import Path

import pytest

from hocket import cluster
from hocket.cluster import ClusterError, describe, load

SPECS = [
    "star:hosts=3,bandwidth=100Gbit/s,latency=1.3us,reduction=true",
    "bigraph:upper=2,ports=4,server=eflops,server.devices=2",
    "torus:dims=3x3",
    "rails:hosts=2,server=dgx-h100,server.devices=4",
    "dragonfly+:groups=3,leaves=2,spines=2,ports=2,globals=1,reduction.outstanding=8",
    "star:hosts=2,server.ranks=3,routing=shortest",
]


@pytest.mark.parametrize("spec", SPECS)
def test_clusters_survive_being_written(spec: str) -> None:
    described = cluster.load(spec)
    assert cluster.from_toml(cluster.to_toml(described)) == described
    assert cluster.from_toml(cluster.to_toml(described, explicit=True)) == described


@pytest.mark.parametrize("name", cluster.CATALOGUE)
def test_presets_survive_being_written(name: str) -> None:
    described = cluster.preset(name)
    assert cluster.from_toml(cluster.to_toml(described)) == described


def test_devices_that_compute_products_in_float8_say_how_fast() -> None:
    rates = {"dgx-h100": 1979e12, "dgx-h200": 1979e12, "dgx-b200": 4500e12, "mi300x": 2614.9e12}
    rates |= {"dgx-a100": 0.0, "dgx1": 0.0, "ac922": 0.0}
    for kind, rate in rates.items():
        described = cluster.load(f"rails:hosts=2,server={kind}")
        assert set(described.float8_flops[described.ranks]) == {rate}, kind
    given = cluster.load("star:hosts=2,server.float8_flops=2TFLOP/s")
    assert set(given.float8_flops[given.ranks]) == {2e12}


@pytest.mark.parametrize(("kind", "gib"), [("dgx-a100", 80), ("dgx-h200", 140.4), ("dgx-b200", 179.1), ("mi300x", 192)])
def test_the_gigabytes_of_a_data_sheet_are_those_that_drivers_show(kind: str, gib: float) -> None:
    """Data sheets write GB for GiB: 7% of memory had been missing."""
    described = cluster.load(f"single:server={kind}")
    assert described.memory_nbytes[described.ranks[0]] / 2**30 == pytest.approx(gib, rel=0.001)


def test_devices_say_how_fast_products_are_in_each_format() -> None:
    """By the data sheets: TF32, IEEE float32, float16; 0 where there are no such units, or `flops` says it."""
    rates = {
        "dgx1": (0.0, 0.0, 125e12),
        "ac922": (0.0, 0.0, 125e12),
        "dgx-a100": (156e12, 19.5e12, 0.0),
        "dgx-h100": (494.7e12, 67e12, 0.0),
        "dgx-h200": (494.7e12, 67e12, 0.0),
        "dgx-b200": (1125e12, 75e12, 0.0),
        "mi300x": (0.0, 163.4e12, 0.0),
    }
    for kind, rate in rates.items():
        one = cluster.load(f"rails:hosts=2,server={kind}")
        names = ("tf32_flops", "float32_flops", "float16_flops")
        assert tuple(float(getattr(one, name)[one.ranks[0]]) for name in names) == rate, kind
        assert cluster.from_toml(cluster.to_toml(one)) == one
    assert {"tf32_flops", "float32_flops", "float16_flops", "float8_flops"} == set(cluster.FORMAT_RATES)


def test_other_parameters_make_another_cluster() -> None:
    assert cluster.load("star:hosts=3") != cluster.load("star:hosts=4")
    assert cluster.load("star:hosts=3") != cluster.load("star:hosts=3,latency=1us")


TWO = """
[[nodes]]
name = "a"
[[nodes]]
name = "b"
[[links]]
ends = ["a", "b"]
bandwidth = "1 GB/s"
"""


@pytest.mark.parametrize(
    ("text", "path", "told"),
    [
        ("", "", "no cluster is described: it is empty"),
        ("[data]\ndegree = 2\n", "", "it has 'data'; say topology (of single, star"),
        ('[topology]\nkind = "star"\n', "topology", "known are single, star"),
        (TWO.replace("1 GB/s", "1 GBs"), "links[0].bandwidth", 'write "25 GB/s" or "100 Gbit/s"'),
        (TWO.replace('"a", "b"', '"a", "c"'), "links[0].ends[1]", "there is no node 'c'"),
        (TWO.replace('"a", "b"', '"a", "a"'), "links[0].ends", "linked to itself"),
        (TWO.replace('name = "b"', 'name = "a"'), "nodes[1].name", "'a' is taken"),
        (TWO.replace('name = "b"', 'name = "b"\nkind = "toaster"'), "nodes[1].kind", "'toaster' is no kind"),
        (TWO.replace("bandwidth", "bandwith"), "links[0].bandwidth", "is missing"),
        (
            TWO + '[[routes]]\npath = ["a", "b", "a"]\n' + '[[routes]]\npath = ["b", "b"]\n',
            "routes[1].path[0]",
            "no link",
        ),
        (TWO + "latency = -1\n", "links[0].latency", "not negative"),
        ("nodes = []\n", "nodes", "has 0 entries; give 1 or more"),
        ('topology = "ring"\n', "topology", "known are single, star"),
        ('topology = "star"\n', "hosts", "is missing"),
        ('topology = "star"\nhosts = 0\n', "hosts", "must be 1 or more; found 0"),
        ('topology = "star"\nhosts = "eight"\n', "hosts", "must be a whole number, as 8; found 'eight'"),
        ('topology = "star"\nhosts = 2\nname = 3\n', "name", 'must be text in quotes, as "name"; found 3'),
        ('topology = "star"\nhosts = 2\nrouting = "fast"\n', "routing", "must be 'shortest' or 'ecmp'; found 'fast'"),
        ('topology = "star"\nhosts = 2\nserver = "dgx"\n', "server", "'dgx' is unknown; known are 'host', "),
        ('topology = "star"\nhosts = 2\nserver = 3\n', "server", "must be a table, as { key = value }; found 3"),
        ('topology = "star"\nhosts = 2\n[reached]\na = [1]\n', "reached.a", "must be a number, true, false, or text"),
        (
            TWO.replace('name = "a"', 'name = "a"\nrank = "maybe"'),
            "nodes[0].rank",
            "must be true or false; found 'maybe'",
        ),
        (TWO.replace('["a", "b"]', '"a"'), "links[0].ends", "must be a list, in brackets; found 'a'"),
        (TWO.replace('"a", "b"', '"a", "b", "a"'), "links[0].ends", "has 3 entries; give 2"),
        ('topology = "star"\nhosts = 2\nspeed = 3\n', "speed", "unknown key; known here are name, about, bandwidth"),
        ('topology = "star"\nhosts = 2\n[server]\nkind = "eflops"\npcie = "x"\n', "server.pcie", "'x' is no rate"),
        (
            'topology = "star"\nhosts = 2\n[server]\nmemroy = 1\n',
            "server.memroy",
            "unknown key; known here are flops, float8",
        ),
        (
            'topology = "star"\nhosts = 2\n[server]\nkind = "eflops"\ndevice_memroy = 1\n',
            "server.device_memroy",
            "device_memory,",
        ),
        (TWO + "speed = 1\n", "links[0].speed", "unknown key; known here are ends, bandwidth"),
        ('topology = "bigraph"\nupper = 2\nports = 3\nserver = "eflops"\n', "", "no multiple of the 8 NICs"),
        ('topology = "dragonfly+"\ngroups = 3\nleaves = 1\nspines = 1\nports = 1\nglobals = 1\n', "", "multiple of 2"),
    ],
)
def test_faults_are_told_with_their_place_their_value_and_a_remedy(text: str, path: str, told: str) -> None:
    with pytest.raises(ClusterError) as refused:
        cluster.from_toml(text)
    assert refused.value.path == path
    assert path in str(refused.value)
    assert told in str(refused.value)


def test_every_fault_of_a_document_is_told_at_once() -> None:
    with pytest.raises(ClusterError) as refused:
        cluster.from_toml(TWO.replace("1 GB/s", "fast") + 'latency = "slow"\n')
    assert "links[0].bandwidth" in str(refused.value)
    assert "links[0].latency" in str(refused.value)


def test_a_file_s_faults_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    with pytest.raises(ClusterError, match=r"mine\.toml: the file cannot be read"):
        cluster.load(str(path))
    path.write_text("nodes = [")
    with pytest.raises(ClusterError, match=r"mine\.toml: this is no TOML"):
        cluster.load(str(path))
    path.write_text("nodes = 3")
    with pytest.raises(ClusterError, match=r"mine\.toml: nodes"):
        cluster.load(str(path))
    path.write_text(TWO)
    assert cluster.load(str(path)).world == 2


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ClusterError, match="did you mean lassen"):
        cluster.load("lasen")
    with pytest.raises(ClusterError, match="write NAME=VALUE"):
        cluster.load("star:hosts")


UNEVEN = "".join(
    f'[[nodes]]\nname = "h{host}d{device}"\nkind = "device"\nhost = "h{host}"\n{{{2 * host + device}}}'
    f'[[links]]\nends = ["h{host}d{device}", "s"]\nbandwidth = "1 GB/s"\n'
    for host, device in ((0, 0), (0, 1), (1, 0), (1, 1))
)


def test_nodes_that_say_so_have_no_rank_and_hosts_of_unlike_numbers_are_named() -> None:
    text = '[[nodes]]\nname = "s"\nkind = "switch"\n' + UNEVEN
    no = "rank = false\n"
    assert cluster.from_toml(text.format("", no, "", no)).ranks_per_host() == 1
    with pytest.raises(ClusterError, match="h1 holds 1 and h0 2; plans want as many ranks on each host"):
        cluster.from_toml(text.format("", "", "", no)).ranks_per_host()
    only = cluster.from_toml(text.format("rank = true\n", "", "", ""))
    assert [only.node_names[node] for node in only.ranks] == ["h0d0"]


def test_links_may_differ_by_direction() -> None:
    described = cluster.from_toml(TWO + 'latency = "1 us"\nback_bandwidth = "2 GB/s"\nback_latency = "3 us"\n')
    assert described.capacity_Bps.tolist() == [1e9, 2e9]
    assert described.latency_s.tolist() == pytest.approx([1e-6, 3e-6])
    assert cluster.from_toml(cluster.to_toml(described)) == described


def test_ranks_are_devices_and_hosts_without_any() -> None:
    text = """
    [[nodes]]
    name = "h0"
    [[nodes]]
    name = "gpu"
    kind = "device"
    host = "h0"
    [[nodes]]
    name = "h1"
    """
    described = cluster.from_toml(text)
    assert [described.node_names[node] for node in described.ranks] == ["gpu", "h1"]
    chosen = cluster.from_toml('ranks = ["h1", "h0"]\n' + text)
    assert [chosen.node_names[node] for node in chosen.ranks] == ["h1", "h0"]


_PAIR = '[[nodes]]\nname = "a"\n[[nodes]]\nname = "b"\n[[links]]\nends = ["a", "b"]\nbandwidth = "1 GB/s"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('ranks = ["a", "a"]\n' + _PAIR, "'a' stands twice"),
        ('name = ""\n' + _PAIR, "name"),
        (_PAIR + '[[nodes]]\nname = "c"\n', "'c' has no link"),
        (_PAIR + '[[routes]]\npath = ["a", "b", "a"]\n', "meets a node twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(cluster.ClusterError, match=message):
        cluster.from_toml(text)
    with pytest.raises(cluster.ClusterError, match="'hosts' is given twice"):
        cluster.load("star:hosts=8,hosts=9")


@pytest.mark.parametrize(
    "word", ["bandwidth=1e-300", "bandwidth=1e300", "latency=1e300s", "server.flops=1e-300", "server.memory=1e30GiB"]
)
def test_figures_that_arithmetic_fails_at_are_refused_where_they_stand(word: str) -> None:
    """They ended in a traceback of the pipeline's simulation, of a division by a throughput of 0, or of numpy."""
    with pytest.raises(ClusterError, match=rf"^{word.partition('=')[0]}: must be [^ ]+ or (less|more)"):
        cluster.load(f"star:hosts=3,{word}")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("bandwidth=25", "bandwidth: '25' has no unit, and would be 25 bytes a second"),
        ("hosts=true", "hosts: true and false are no numbers"),
        ("server.ranks=true", "server.ranks: true and false are no numbers"),
    ],
)
def test_figures_that_mean_something_else_than_they_say_are_refused(word: str, said: str) -> None:
    """A step took days on links of 25 bytes a second, and one host was planned for `true`."""
    spec = "star:" + ",".join([word] if word.startswith("hosts") else ["hosts=2", word])
    with pytest.raises(ClusterError, match=f"^{said}"):
        cluster.load(spec)
    assert cluster.load("star:hosts=2,bandwidth=25B/s").capacity_Bps[0] == 25


def test_ranks_outside_of_hosts_are_said_to_be() -> None:
    """They had been hosts with different numbers of ranks."""
    nodes = "".join(f'[[nodes]]\nname = "{name}"\nkind = "device"\n' for name in "ab")
    link = '[[links]]\nends = ["a", "b"]\nbandwidth = "1 GB/s"\n'
    with pytest.raises(ClusterError, match="2 of 2 ranks stand in no host; give the nodes a `host`"):
        cluster.from_toml(nodes + link).ranks_per_host()


def test_what_trainings_reach_is_shown() -> None:
    told = describe(load("star:hosts=2,reached.jitter=0.03"))
    assert "reached by trainings: jitter 0.03" in told.splitlines()
    assert "reached" not in describe(load("star:hosts=2"))
