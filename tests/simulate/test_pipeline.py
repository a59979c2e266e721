"""An order followed from event to event: against what ranks do by themselves, the general loop, and a cluster."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cluster import load
from hocket.schedule.pipeline import NAMED_ORDERS, PipelineOrder, pipeline_order
from hocket.simulate import SimulationError, StageWork, Usage, order_graph, simulate_order, simulate_step
from hocket.simulate._loop import run
from hocket.simulate._tasks import Tasks

SHAPES = [(1, 1, 3), (1, 2, 2), (2, 1, 4), (2, 2, 4), (3, 1, 6), (4, 1, 4), (4, 2, 8), (2, 3, 6)]
ORDERS = [pipeline_order(name, *shape) for name, one in NAMED_ORDERS.items() for shape in SHAPES if one.admits(*shape)]

orders = st.sampled_from(ORDERS)


def ids(order: PipelineOrder) -> str:
    return f"{order.name}-{order.world}-{order.stages}-{order.micro_batches}"


@pytest.mark.parametrize("order", ORDERS, ids=ids)
def test_equal_stages_take_what_the_order_itself_tells(order: PipelineOrder) -> None:
    timing = simulate_order(order, [StageWork(1.0, 2.0)] * order.stages)
    assert timing.seconds == pytest.approx(order.played.seconds)
    assert timing.idle_share == pytest.approx(order.idle_share())
    for rank, row in enumerate(timing.spans):
        assert [action for action, _, _ in row] == list(order.ranks[rank])
        assert [begin for _, begin, _ in row] == pytest.approx(order.played.begins[rank])


@pytest.mark.parametrize("order", ORDERS, ids=ids)
def test_messages_that_are_written_change_nothing(order: PipelineOrder) -> None:
    works = [StageWork(1.0, 2.0, hop=0.1)] * order.stages
    assert simulate_order(order.with_messages(), works).seconds == simulate_order(order, works).seconds


def by_the_general_loop(order: PipelineOrder, works: list[StageWork], at_once: float) -> float:
    """Seconds of an order whose computations are flows over one link, of the processors; messages take no time."""
    number = {action: index for index, (_, action) in enumerate(order.played.sequence)}
    before, after = [], []
    for row in order.ranks:
        for first, then in zip(row[:-1], row[1:], strict=True):
            before.append(number[first])
            after.append(number[then])
    for action, index in number.items():
        for need in order.needs(action):
            before.append(number[need] if need in number else number[need._replace(kind="B")])
            after.append(index)
    count = len(number)
    return run(
        Tasks(
            delay_s=np.zeros(count),
            nbytes=np.array([works[stage].seconds(kind)[0] for stage, kind, _ in number]),
            usage=Usage(np.arange(count + 1), np.zeros(count, dtype=np.int64), np.ones(count)),
            before=np.array(before, dtype=np.int64),
            after=np.array(after, dtype=np.int64),
            limit_Bps=np.ones(count),
        ),
        np.array([at_once]),
    ).seconds


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(orders, st.floats(0.5, 4.0), st.data())
def test_shared_processors_are_a_shared_link(order: PipelineOrder, at_once: float, data: st.DataObject) -> None:
    works = [StageWork(data.draw(st.floats(0.1, 2)), data.draw(st.floats(0.1, 2))) for _ in range(order.stages)]
    found = simulate_order(order, works, at_once).seconds
    assert found == pytest.approx(by_the_general_loop(order, works, at_once), rel=1e-9)


@pytest.mark.parametrize("order", ORDERS, ids=ids)
def test_on_a_fast_cluster_messages_are_nothing(order: PipelineOrder) -> None:
    works = [StageWork(1.0, 2.0)] * order.stages
    where = load(f"star:hosts={max(2, order.world)},bandwidth=100Gbit/s,latency=1us")
    timing = simulate_step(order_graph(order, works, 1e3), where)
    assert timing.seconds == pytest.approx(simulate_order(order, works).seconds, rel=1e-4)
    assert timing.compute_s.sum() == pytest.approx(3.0 * order.stages * order.micro_batches)


def test_ranks_that_share_one_processor_take_the_sum_of_their_work() -> None:
    assert simulate_order(pipeline_order("1f1b", 4, 1, 8), [StageWork(1.0, 2.0)] * 4, 1.0).seconds == pytest.approx(96)


def test_messages_of_one_way_go_one_after_the_other() -> None:
    # Four messages of 10 s on one link, then the last stage's two passes and the way back.
    stages = [StageWork(0.1, 0.1, hop=10.0), StageWork(0.1, 0.1)]
    assert simulate_order(pipeline_order("gpipe", 2, 1, 4), stages).seconds > 4 * 10 + 10


def test_nothing_slows_where_there_are_processors_for_all() -> None:
    order, stages = pipeline_order("1f1b", 3, 1, 5), [StageWork(1.0, 2.0, hop=0.1)] * 3
    assert simulate_order(order, stages, 3.0).seconds == simulate_order(order, stages, math.inf).seconds


def test_the_half_for_the_weights_takes_its_part_and_sends_nothing() -> None:
    order = pipeline_order("zero_bubble", 2, 1, 4)
    short, long = (
        simulate_order(order, [StageWork(1.0, 2.0, hop=0.5, weights=weights)] * 2).seconds for weights in (1.9, 0.1)
    )
    assert short < long


def test_orders_that_wait_for_each_other_are_refused() -> None:
    text = "order circle ranks=2 stages=2 micro_batches=1\nrank 0\n0B0 0F0\nrank 1\n1F0 1B0"
    with pytest.raises(SimulationError, match="wait for each other"):
        simulate_order(PipelineOrder.parse(text), [StageWork(1, 1)] * 2)
    with pytest.raises(SimulationError, match="wait for each other"):
        order_graph(PipelineOrder.parse(text), [StageWork(1, 1)] * 2, 1.0)


def test_works_are_those_of_the_stages() -> None:
    with pytest.raises(SimulationError, match="1f1b has 2 stages, and the work of 1 is given"):
        simulate_order(pipeline_order("1f1b", 2, 1, 4), [StageWork(1, 1)])


@pytest.mark.parametrize("at_once", [math.inf, 1.99])  # of both loops: a rank that computes alone is not slowed
def test_messages_pass_a_port_while_others_are_on_their_way(at_once: float) -> None:
    where = load("star:hosts=2,bandwidth=8Gbit/s,latency=5ms")  # two links, 10 ms
    order = pipeline_order("gpipe", 2, 1, 8)
    works = [StageWork(1e-4, 1e-4, hop=1e-3, latency=10e-3)] * 2
    simulated = simulate_step(order_graph(order, works, 1e6), where).seconds
    assert simulate_order(order, works, at_once).seconds == pytest.approx(simulated, rel=0.02)
    assert simulated < 0.04  # eight messages, one after the other with all that they take, would need 88 ms each way


@pytest.mark.parametrize("at_once", [math.inf, 3.99])  # of both loops
@pytest.mark.parametrize("micro_batches", [4, 8])
def test_messages_of_a_port_share_it_as_the_simulator_lets_them(at_once: float, micro_batches: int) -> None:
    where = load("star:hosts=4,bandwidth=8Gbit/s,latency=1us")
    order = pipeline_order("interleaved", 4, 2, micro_batches)
    works = [StageWork(1e-3, 2e-3, hop=5e-3, latency=2e-6)] * 8
    simulated = simulate_step(order_graph(order, works, 5e6), where).seconds
    found = simulate_order(order, works, at_once)
    assert found.seconds == pytest.approx(simulated, rel=0.01)
    assert len(found.ways_s) == 2 * 7 * micro_batches  # each way between eight stages
    assert min(found.ways_s.values()) == pytest.approx(5e-3 + 2e-6)
    assert max(found.ways_s.values()) > 10e-3


def test_messages_between_other_ranks_share_the_links_that_they_pass() -> None:
    order, own = pipeline_order("gpipe", 4, 1, 1), ((1, 1.0),)
    works = [StageWork(0.1, 0.1, hop=1.0, links=(own, own))] * 4
    assert simulate_order(order, works).seconds == pytest.approx(4 * 0.2 + 6 * 1.0)  # one message at a time
    order = pipeline_order("gpipe", 4, 1, 12)
    apart = [StageWork(0.1, 0.1, links=(((stage, 1.0),), ((-stage - 1, 1.0),))) for stage in range(4)]
    assert simulate_order(order, works).seconds > 12 * 3 * 2 * 1.0
    assert simulate_order(order, apart).seconds < 12 * 3


def test_pipelines_beside_each_other_share_links_and_the_slowest_is_told() -> None:
    order, own = pipeline_order("gpipe", 2, 1, 3), ((1, 1.0),)

    def seconds(*beside: tuple[tuple[int, float], ...]) -> float:
        works = [StageWork(0.1, 0.1, links=(own, own), beside=tuple((one, one) for one in beside))] * 2
        return simulate_order(order, works).seconds

    alone = seconds()
    assert seconds(((2, 1.0),)) == pytest.approx(alone)
    assert seconds(own) == pytest.approx(alone + 6 * 1.0)  # each of its messages takes twice as long
    assert seconds(((2, 5.0),)) == pytest.approx(alone + 6 * 4.0)
