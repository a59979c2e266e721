"""Scaling curves, their verdicts and pictures; runs checked against plans."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import pytest

from hocket import cluster
from hocket.planner import (
    WHAT_IFS,
    Constants,
    Network,
    Plan,
    PlanError,
    ScalingFit,
    assumptions,
    check_run,
    curve_of_fit,
    curves_svg,
    predict,
    scaling_curves,
    search,
    step_graph,
    with_reasons,
)
from hocket.simulate import simulate_step
from hocket.timeline import Timeline
from hocket.workload import Layer, Operation, Workload

PLAIN = Constants(network_share=1.0, inside_share=1.0, collective_s=0.0)


def chain(nbytes: int = 10_000_000) -> Workload:
    work = (Operation("forward", 1e9, moved_bytes=1e6, saved_bytes=1e6),)
    layers = tuple(
        Layer(f"l{i}", "Linear", nbytes // 4, nbytes, nbytes, nbytes, 1e5, work, 2e-3, 4e-3) for i in range(4)
    )
    return Workload("chain", 1, layers)


def test_what_ifs_help_as_much_as_they_should() -> None:
    where = cluster.load("star:hosts=64,bandwidth=1Gbit/s,latency=0s")
    curves = scaling_curves(chain(), where, [64], batch_per_worker=1, what_ifs=list(WHAT_IFS), constants=PLAIN)
    exposed = {one.name: one.points[0].parts["gradients"] for one in curves}
    transfer = 2 * 63 / 64 * 40e6 / 125e6
    hidden = transfer - exposed["as it is"]
    assert exposed["double-network"] == pytest.approx(transfer / 2 - hidden, rel=0.02)
    assert exposed["fp16"] == pytest.approx(transfer / 2 - hidden, rel=0.02)
    assert exposed["sharp"] == pytest.approx(40e6 / 125e6 / 0.95 - hidden, rel=0.02)
    assert exposed["bigraph"] == pytest.approx(exposed["as it is"])  # a host has one device and one port


TAPERED = "leafspine:leaves={},ports=4,taper=4,routing=shortest,bandwidth=1Gbit/s,server.ranks=4"


@pytest.mark.parametrize("workers", [32, 256])
def test_a_curve_says_of_a_tapered_network_what_a_prediction_does(workers: int) -> None:
    # Curves had left out what meets on links, and predictions of more than 128 workers: up to 14 times too fast.
    where = cluster.load(TAPERED.format(32))
    curves = scaling_curves(chain(), where, [workers], batch_per_worker=1, what_ifs=list(WHAT_IFS), constants=PLAIN)
    steps = {one.name: workers / one.points[0].throughput for one in curves}
    asked = {"workers": workers, "batch": workers, "constants": PLAIN}
    assert steps["as it is"] == pytest.approx(predict(Plan(), chain(), where, **asked).step_s)
    for name in ("fp16", "double-network"):  # half the bytes, or twice the rate
        gradients = {one.name: one.points[0].parts["gradients"] for one in curves}
        assert gradients[name] == pytest.approx(gradients["as it is"] / 2, rel=0.1)
    assert steps["sharp"] < steps["as it is"] > steps["bigraph"]


@pytest.mark.long
def test_no_what_if_is_slower_than_what_there_is() -> None:
    # Two devices of one socket have a better way than neighbours of two, which the least of all links knows only.
    where = cluster.load("rails:hosts=4,spines=2,server=eflops,bandwidth=100Gbit/s")
    counts = [1, 2, 3, 4, 6, 8, 12, 16]
    first, *others = scaling_curves(chain(), where, counts, batch_per_worker=1, what_ifs=list(WHAT_IFS))
    for one in others:
        for before, after in zip(first.points, one.points, strict=True):
            assert after.throughput >= before.throughput * (1 - 1e-9), (one.name, before.workers)


def test_beyond_so_many_workers_routes_are_left_out_of_a_whole_curve_and_that_is_said() -> None:
    where = cluster.load(TAPERED.format(80))
    unrouted = dataclasses.replace(Network.of(where), routed=None)
    for counts, like in (([64], where), ([64, 1280], unrouted)):
        (curve,) = scaling_curves(chain(), where, counts, batch_per_worker=1, constants=PLAIN)
        found = predict(Plan(), chain(), like, workers=64, batch=64, constants=PLAIN)
        assert curve.points[0].throughput == pytest.approx(found.throughput)
    for workers, said in ((64, False), (1280, True)):
        found = predict(Plan(), chain(), where, workers=workers, batch=workers, constants=PLAIN)
        rows = {name: value for name, value, _ in assumptions(found, Network.of(where), precision="float32")}
        assert ("routes of 1280 workers are not looked at" in rows.get("between switches", "")) == said


def test_efficiency_falls_and_the_verdict_says_where_and_why() -> None:
    where = cluster.load("star:hosts=64,bandwidth=1Gbit/s,latency=1us")
    (curve,) = scaling_curves(chain(), where, [8, 1, 2, 64], batch_per_worker=1, constants=PLAIN)
    assert [point.workers for point in curve.points] == [1, 2, 8, 64]
    assert curve.points[0].efficiency == pytest.approx(1.0)
    efficiencies = [point.efficiency for point in curve.points]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert curve.stops is not None
    assert curve.verdict().startswith(f"as it is: stops scaling at {curve.stops.workers} workers")
    assert "gradients: between hosts" in curve.verdict()


def test_cost_is_workers_by_throughput() -> None:
    (curve,) = scaling_curves(chain(), cluster.load("closet"), [4], batch_per_worker=1)
    point = curve.points[0]
    assert point.worker_seconds == pytest.approx(4 * 1000 / point.throughput)


def test_a_what_if_of_a_fit_changes_its_constant_only() -> None:
    fit = ScalingFit(4, 0.1, 0.05, 0.01, 0.04)
    network = Network.of(cluster.load("lassen"))
    plain, twice, tree, spread = (
        curve_of_fit("x", fit, network, [64], name).points[0].parts
        for name in ("", "double-network", "sharp", "bigraph")
    )
    assert twice["between hosts"] == pytest.approx(plain["between hosts"] / 2)
    assert tree["between hosts"] == pytest.approx(plain["between hosts"] / 1.9)
    assert spread["between hosts"] == pytest.approx(plain["between hosts"] / 2)  # two ports for four devices
    assert {twice[part] == plain[part] for part in ("compute", "straggle", "inside hosts")} == {True}


def test_an_unknown_what_if_is_refused() -> None:
    with pytest.raises(PlanError, match="there is no what-if 'magic'; there are sharp"):
        scaling_curves(chain(), cluster.load("closet"), [2], batch_per_worker=1, what_ifs=["magic"])
    with pytest.raises(PlanError, match="there is no what-if 'magic'"):
        curve_of_fit("x", ScalingFit(4, 1, 0, 0, 0), Network.of(cluster.load("lassen")), [2], "magic")


def test_the_picture_is_svg_with_a_line_for_every_curve() -> None:
    curves = scaling_curves(chain(), cluster.load("closet"), [1, 2, 8], batch_per_worker=1, what_ifs=["sharp"])
    drawn = ElementTree.fromstring(curves_svg(curves, title="a < b", unit="images"))
    texts = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "images per second", "as it is", "sharp", "8"} <= set(texts)
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 12  # in both panels


def test_the_picture_holds_its_legend_and_all_that_was_measured() -> None:
    """Diamonds of other numbers of workers had been drawn into the legend, which was cut off."""
    curves = scaling_curves(chain(), cluster.load("closet"), [4], batch_per_worker=1)
    measured = {curves[0].name: {1: 100.0, 2: 150.0, 8: 250.0}}
    svg = curves_svg(curves, title="a", measured=measured)
    drawn = ElementTree.fromstring(svg)
    texts = {node.text: float(node.get("x", "0")) for node in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"1", "2", "4", "8"} <= set(texts)
    for x, y in re.findall(r'd="M ([-\d.]+) ([-\d.]+) l 5 5', svg):
        assert 80 < float(x) < texts["as it is (diamonds: measured)"]
        assert 0 < float(y) < 560
    long = dataclasses.replace(curves[0], name=40 * "long")
    wide = ElementTree.fromstring(curves_svg([long], title="a")).get("viewBox", "")
    assert float(wide.split()[2]) > 1200
    assert 'stroke-width="6"' in svg  # the interval of a single point


def test_a_plan_tells_memory_in_whole_bytes() -> None:
    where = cluster.load("star:hosts=3,bandwidth=1Gbit/s")
    fixed = {"shard": "parameters", "data_parallel_degree": 3}
    found = search(chain(), where, workers=3, batch=3, constants=PLAIN, fixed=fixed, memory_limit=0)
    assert found.best.memory.total % 1
    assert with_reasons(found).predicted["memory_bytes"] == round(found.best.memory.total)


def test_a_run_is_checked_against_its_plan() -> None:
    where = cluster.load("star:hosts=4,bandwidth=1Gbit/s,latency=1us")
    fixed = {"pipeline_parallel_degree": 1, "shard": "none", "bucket_bytes": 10_000_000}
    plan = with_reasons(search(chain(), where, workers=4, batch=4, constants=PLAIN, fixed=fixed, memory_limit=0))
    graph = step_graph(plan, chain(), where, workers=4, batch=4, constants=PLAIN)
    # A simulated run stands for a measured one: both are timelines.
    checked = check_run(plan, simulate_step(graph, where).timeline)
    rows = {part: (predicted, measured) for part, predicted, measured in checked.rows}
    assert list(rows) == ["step", "computation", "exposed communication", "idle"]
    for part in ("step", "computation", "exposed communication"):
        assert rows[part][0] == pytest.approx(rows[part][1], rel=0.02)
    assert abs(checked.error) < 0.02
    assert checked.collectives[0][0].startswith("gradients")
    assert "predicted" in str(checked)
    # What collectives take of the computation beside them is no part of its own that a timeline could show.
    beside = dataclasses.replace(plan, predicted={**plan.predicted, "interference_s": 0.5})
    assert check_run(beside, simulate_step(graph, where).timeline).rows[1][1] == rows["computation"][0] + 0.5
    for other in ({"data_parallel_degree": 8}, {"data_parallel_degree": -1, "tensor_parallel_degree": 3}):
        with pytest.raises(PlanError, match="is of 4 ranks, which"):
            check_run(dataclasses.replace(plan, **other), simulate_step(graph, where).timeline)


def test_a_plan_without_prediction_and_an_empty_run_are_refused() -> None:
    with pytest.raises(PlanError, match="predicted: the plan says nothing of how long a step takes"):
        check_run(Plan(), Timeline("run"))
    with pytest.raises(PlanError, match="run holds 0 spans"):
        check_run(Plan(predicted={"step_s": 1.0}), Timeline("run"))
