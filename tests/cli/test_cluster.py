"""`hocket cluster` and `hocket simulate`: what they print, and how they refuse."""

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hocket import cli
from hocket.cli._probe.rank import pairs_of
from hocket.cli._probe.report import document, to_cluster, unlike_hosts
from hocket.cluster import from_toml, load
from hocket.testing import deadline


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    out, err = capsys.readouterr()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return code or 0, out, err


def test_list_names_the_catalogue_the_topologies_and_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "cluster", "list")
    assert code == 0
    for word in ("lassen", "sharp-1500", "bigraph", "dragonfly+", "dgx-h100", "taper"):
        assert word in out
    document = json.loads(run(capsys, "cluster", "list", "--json")[1])
    assert document["topologies"]["star"]["parameters"] == [
        "bandwidth",
        "latency",
        "routing",
        "reduction",
        "reached",
        "hosts",
    ]


def test_show_draws_as_text_as_svg_as_toml_and_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "drawn.svg"
    code, out, err = run(capsys, "cluster", "show", "bigraph:upper=4,ports=2", "--svg", str(path))
    assert code == 0, err
    assert out.startswith("bigraph: 16 ranks; 16 hosts, 8 switches; 64 directed links\n")
    assert "switch -> switch  32      12.5 GB/s  500 ns" in out
    assert "upper0: lower0..lower3, host0..host1" in out
    drawn = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(drawn.findall(f"{space}path")) == 32
    assert len(drawn.findall(f"{space}rect")) == 1 + 24
    assert 'topology = "bigraph"' in run(capsys, "cluster", "show", "bigraph:upper=4,ports=2", "--toml")[1]
    document = json.loads(run(capsys, "cluster", "show", "bigraph:upper=4,ports=2", "--json")[1])
    assert len(document["links"]) == 64


def test_a_cluster_s_toml_is_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(run(capsys, "cluster", "show", "star:hosts=3", "--explicit")[1])
    assert run(capsys, "cluster", "show", str(path))[1].startswith("star: 3 ranks")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("cluster", "show", "lasen"), "did you mean lassen?"),
        (("cluster", "show", "star:hosts=two"), "hosts: "),
        (("cluster", "probe", "--sizes", "8B,1e9GiB"), "--sizes: 976,562 TiB is too much"),
        (("cluster", "probe", "--sizes", "8B,8"), "--sizes 8B,8: latency and bandwidth make a line"),
        (("simulate", "step", "--cluster", "closet", "-n", "9" * 20), "closet has 8 ranks"),
        (("simulate", "collective", "--cluster", "closet", "-n", "9" * 20), "closet has 8 ranks"),
        (("simulate", "step", "--cluster", "closet", "--gradients", "much"), "'much' is no number of bytes"),
        (("simulate", "collective", "--cluster", "closet", "--collective", "all"), "collective 'all' is unknown"),
        (("simulate", "pipeline", "--cluster", "closet", "--stages", "9"), "the step has 9 ranks"),
    ],
)
def test_bad_input_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert told in err
    assert "Traceback" not in err


def test_a_simulation_that_memory_cannot_hold_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("hocket.simulate.simulate_sizes", too_large)
    code, _, err = run(capsys, "simulate", "collective", "--cluster", "closet")
    assert code == 2
    assert "there is not enough memory for it; ask for less" in err


@pytest.mark.long
def test_collectives_of_hosts_with_several_devices_are_simulated_in_two_levels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = "rails:hosts=3,server=dgx-h100,bandwidth=400Gbit/s"
    for ranks, local in (("24", 8), ("12", 4)):  # of 12 ranks a host of eight has two groups of four
        code, out, _ = run(
            capsys, "simulate", "collective", "--cluster", where, "--bytes", "1GiB", "-n", ranks, "--json"
        )
        assert code == 0
        found = json.loads(out)["expected"][0]["algorithm"]
        assert found.startswith("rails:")
        assert f"local={local}" in found


def test_simulate_compares_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "simulate", "collective", "--cluster", "star:hosts=4", "--bytes", "64B,64MiB")
    assert code == 0
    assert out.count("*") >= 3  # one explains it
    arguments = ("simulate", "collective", "--cluster", "star:hosts=4,reduction=true", "--bytes", "64B", "--json")
    inside = ("simulate", "collective", "--cluster", "star:hosts=2,server=dgx-h100", "--bytes", "1MiB", "--json")
    code, out, _ = run(capsys, *inside)  # whose only switches that reduce are those of each host
    assert code == 0
    assert "ring" in json.loads(out)["seconds"]
    seconds = json.loads(run(capsys, *arguments)[1])["seconds"]
    assert {"ring", "aggregation_tree"} <= set(seconds)
    assert all(value[0] > 0 for value in seconds.values())


def test_simulate_step_prints_its_table_and_writes_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    code, out, err = run(capsys, "simulate", "step", "--cluster", "closet", "--trace", str(path), "--slowest", "1.5")
    assert code == 0, err
    for label in ("step time", "exposed communication", "idle share", "busy link"):
        assert label in out
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(range(8))
    assert any(event["ph"] == "C" for event in events)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("step", "--buckets", "1" + "0" * 400), "--buckets"),
        (("step", "--slowest", "inf"), "--slowest"),
        (("pipeline", "--micro", "99999999"), "4 stages with 99999999 micro-batches are 399,999,996 forwards"),
        (("step", "--trace", "/absent/trace.json"), "cannot be written: No such file or directory\n"),
    ],
)
def test_simulate_refuses_what_would_never_end(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, _, err = run(capsys, "simulate", *words, "--cluster", "closet")
    assert code == 2
    assert said in err


def test_simulate_pipeline_has_the_published_idle_share(capsys: pytest.CaptureFixture[str]) -> None:
    spec = "star:hosts=4,bandwidth=1TB/s,latency=0s"
    code, out, _ = run(
        capsys, "simulate", "pipeline", "--cluster", spec, "--micro", "4", "--activations", "0B", "--json"
    )
    assert code == 0
    assert json.loads(out)["idle_share"] == pytest.approx(3 / 7, rel=1e-6)


def test_a_probe_says_which_hosts_are_slow() -> None:
    def seconds(slow: bool) -> dict[str, float]:
        return {str(nbytes): 30e-6 + nbytes / (1e8 if slow else 1e9) for nbytes in (8, 10**6, 10**7)}

    figures = {"memory_Bps": 1e10, "memory_nbytes": 2**30, "flops": 1e11}
    result = {
        "ranks": [{"host": f"h{rank}", **figures} for rank in range(4)],
        "pairs": [{"ranks": [*pair], "seconds": seconds(2 in pair)} for pair in itertools.combinations(range(4), 2)],
    }
    found, pings = to_cluster("mine", result)
    said = "hosts differ in how fast messages to others go: 100 MB/s for h2; 1 GB/s for h0, h1, h3"
    assert unlike_hosts(found) == [said]
    text = document(found, pings, result)
    assert f"# {said}\n" in text
    assert from_toml(text).world == 4


@pytest.mark.long
@pytest.mark.timeout(300)
def test_probe_measures_this_machine_and_describes_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, forked_world: None
) -> None:
    path = tmp_path / "here.toml"
    options = ("--sizes", "8B,64KiB,1MiB", "--rounds", "7", "--timeout", str(deadline(100)), "--out", str(path))
    for _ in range(10):
        code, out, err = run(capsys, "cluster", "probe", "-n", "2", *options)
        if code == 0:
            break
        # Beside others' work a small message may wait as long as a large one takes, and then there is no line.
        assert "took no longer than" in err
        assert "measure again" in err
    assert code == 0, err
    assert "rank 1 on" in out
    assert "ranks 0 and 1: " in out
    found = load(str(path))
    assert found.world == 2
    assert (found.capacity_Bps > 1e6).all()
    assert (found.flops[found.ranks] > 1e6).all()
    assert path.read_text().startswith("# Measured by `hocket cluster probe`")


def test_pairs_of_a_large_world_are_a_ring_and_its_diagonals() -> None:
    assert len(pairs_of(5)) == 10
    many = pairs_of(64)
    assert len(many) == 64 + 32
    assert {rank for pair in many for rank in pair} == set(range(64))


def test_what_a_cluster_says_is_reached_is_checked_where_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for said, rule in (("jiter=0.03", "jiter = '0.03' is no constant"), ("jitter=-1", "constant jitter: -1.0 must be")):
        code, _, err = run(capsys, "cluster", "show", f"star:hosts=2,reached.{said}")
        assert code == 2
        assert rule in err
    assert run(capsys, "cluster", "show", "star:hosts=2,reached.jitter=0.03")[0] == 0
