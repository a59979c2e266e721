"""What simulated work takes on links that reach a part of their rate, beside the planner's closed forms."""

import pytest

from hocket import cluster
from hocket.algorithms import get
from hocket.planner import Constants, Network, expected_collective, expected_order, expected_step, reached_links
from hocket.schedule import Collective
from hocket.simulate import StepGraph, simulate_schedule


def test_links_carry_what_is_reached_of_them_inside_and_between_hosts() -> None:
    where = cluster.load("star:hosts=4,server=dgx-h100")
    links = reached_links(where, Constants(inside_share=0.5, network_share=0.8, congestion=0.1))
    ratios = dict(zip(where.link_names, (links.capacity_Bps / where.capacity_Bps).tolist(), strict=True))
    assert ratios["host0.gpu0->host0.nvswitch"] == 0.5
    assert {round(ratio, 6) for name, ratio in ratios.items() if "switch0" in name} == {round(0.8 / 1.2, 6)}


@pytest.mark.parametrize("name", ["ring", "halving_doubling"])
@pytest.mark.parametrize("nbytes", [2.0**10, 2.0**26])
def test_what_is_expected_is_what_the_closed_form_says(name: str, nbytes: float) -> None:
    where = cluster.load("star:hosts=8,bandwidth=10Gbit/s")
    constants = Constants.of({})
    wires = Network.of(where)
    wanted = wires.collective("all_reduce", nbytes, 8, 1, constants, only=(name, ())).seconds
    (found,) = expected_collective(get(name)(Collective("all_reduce", 8)), where, [nbytes])
    assert found.seconds == pytest.approx(wanted, rel=0.02)
    assert found.interval_s[0] < found.seconds < found.interval_s[1]


def test_what_was_fitted_is_surer_than_what_is_assumed() -> None:
    where = cluster.load("star:hosts=8,bandwidth=10Gbit/s")
    ring = get("ring")(Collective("all_reduce", 8))

    def width(constants: Constants) -> float:
        (found,) = expected_collective(ring, where, [1e8], constants=constants)
        return found.interval_s[1] / found.interval_s[0]

    swept = width(Constants(swept=8))
    assert swept < 0.8 * width(Constants())
    assert swept < width(Constants(swept=4)) < width(Constants())


def test_a_step_waits_longer_on_links_that_reach_less() -> None:
    where = cluster.load("star:hosts=4,bandwidth=1Gbit/s")
    graph = StepGraph(4)
    ring = get("ring")(Collective("all_reduce", 4))
    graph.collective(ring, 1e7, after=[graph.compute(None, 0.030)])
    found = expected_step(graph, where, constants=Constants(network_share=0.5))
    wire_s = simulate_schedule(ring, where, 1e7).seconds
    assert found.seconds == pytest.approx(0.030 + 2 * wire_s, rel=0.01)
    assert found.interval_s[0] < found.seconds < found.interval_s[1]
    order = expected_order(0.330, 0.27)
    assert order.seconds == pytest.approx(0.330)
    assert order.interval_s[1] / order.interval_s[0] < found.interval_s[1] / found.interval_s[0]
