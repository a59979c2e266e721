"""Pipelines followed step by step: the published idle shares, and what bounds a step."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hocket.cluster import load
from hocket.planner import Constants, Network, Plan, PlanError, in_flight, plan_order, predict, step_graph
from hocket.planner.step import _pipeline, predict_within
from hocket.schedule.pipeline import NAMED_ORDERS, pipeline_order
from hocket.simulate import StageWork, simulate_order, simulate_step
from hocket.workload import Layer, Operation, Workload, named_transformer

PLAIN = Constants(inside_share=1.0, network_share=1.0, collective_s=0.0)


def chain(layers: int = 8) -> Workload:
    """Equal layers with measured times, for one sample."""
    work = (Operation("forward", 1e9, saved_bytes=1e6),)
    made = tuple(
        Layer(f"l{i}", "Linear", 10**6, 4 * 10**6, 4 * 10**6, 8 * 10**6, 1e4, work, 1e-3, 2e-3) for i in range(layers)
    )
    return Workload("chain", 1, made, "float32", "by hand")


def span(schedule: str, p: int, v: int, m: int, stages: list[StageWork], at_once: float = float("inf")) -> float:
    return simulate_order(pipeline_order(schedule, p, v, m), stages, at_once).seconds


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4), (4, 16), (3, 7)])
def test_equal_stages_take_as_long_as_published(schedule: str, p: int, m: int) -> None:
    # (m + p - 1) forward and backward passes: Huang et al. 2019, section 2.3.
    assert span(schedule, p, 1, m, [StageWork(1.0, 2.0)] * p) == pytest.approx(3 * (m + p - 1))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 2), (2, 2, 8), (4, 2, 8), (4, 3, 12), (2, 4, 6)])
def test_interleaving_divides_the_idle_time_by_the_stages_of_a_rank(p: int, v: int, m: int) -> None:
    # Narayanan et al., SC'21, section 2.2.2.
    assert span("interleaved", p, v, m, [StageWork(1.0, 2.0)] * (p * v)) == pytest.approx(3 * (m * v + p - 1))


works = st.builds(
    StageWork, *(st.floats(0.1, 2) for _ in range(2)), *(st.floats(0, 0.5) for _ in range(2)), hop=st.floats(0, 0.5)
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(works, min_size=2, max_size=4), st.integers(1, 6), st.floats(0.5, 4), st.sampled_from(["gpipe", "1f1b"])
)
@example(  # a message that takes no time at all, but for rounding
    [StageWork(1.0, 1.0), StageWork(1.0, 0.5, hop=0.5), StageWork(1.0, 2.0, hop=5e-324), StageWork(2.0, 2.0)],
    4,
    1.0,
    "1f1b",
)
def test_a_step_is_bounded_by_its_longest_way_and_by_the_processors(
    stages: list[StageWork], m: int, at_once: float, schedule: str
) -> None:
    p = len(stages)
    each = [one.forward + one.backward for one in stages]
    whole = [time + one.forward_exchange + one.backward_exchange for time, one in zip(each, stages, strict=True)]
    found = span(schedule, p, 1, m, stages, at_once)
    one_way = sum(whole) + 2 * sum(one.hop for one in stages[:-1])
    assert found >= max(one_way, m * max(whole), m * sum(each) / max(1.0, at_once)) - 1e-9
    assert found <= m * one_way * max(1.0, p / at_once) + 1e-9
    assert found >= span(schedule, p, 1, m, stages) - 1e-9


EACH = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble_v", 2)]


@pytest.mark.parametrize(("schedule", "v"), EACH)
@pytest.mark.parametrize(("stages", "micro"), [(2, 4), (4, 4), (4, 12)])
def test_every_order_takes_what_the_simulator_says(schedule: str, v: int, stages: int, micro: int) -> None:
    where = load(f"star:hosts={stages},bandwidth=100Gbit/s,latency=1us")
    plan = Plan(pipeline_parallel_degree=stages, micro_batches=micro, pipeline_schedule=schedule, stages_per_rank=v)
    graph = step_graph(plan, chain(), where, workers=stages, batch=micro, constants=PLAIN)
    simulated = simulate_step(graph, where).seconds
    found = predict(plan, chain(), where, workers=stages, batch=micro, constants=PLAIN)
    # The closed form of zero bubble is for many micro-batches.
    near = 0.01 if schedule != "zero_bubble" or micro > 2 * stages else 0.1
    assert found.step_s == pytest.approx(simulated, rel=near)


@pytest.mark.parametrize(("schedule", "v"), EACH)
def test_every_order_is_simulated_with_data_parallel_ranks(schedule: str, v: int) -> None:
    where = load("star:hosts=4,bandwidth=10Gbit/s,latency=1us")
    plan = Plan(
        data_parallel_degree=2,
        pipeline_parallel_degree=2,
        micro_batches=4,
        pipeline_schedule=schedule,
        stages_per_rank=v,
        bucket_bytes=8 * 10**6,
    )
    graph = step_graph(plan, chain(), where, workers=4, batch=8, constants=PLAIN)
    reduced = sum(group.nbytes for group in graph.collects)
    assert reduced == 8 * 4 * 10**6  # every stage's gradients once, in one group each
    update = predict(plan, chain(), where, workers=4, batch=8, constants=PLAIN).parts.optimizer
    assert simulate_step(graph, where).compute_s == pytest.approx([4 * 4 * 3e-3 + update] * 4)


@pytest.mark.parametrize("schedule", sorted(NAMED_ORDERS))
def test_memory_in_flight_is_that_of_the_order(schedule: str) -> None:
    for p, m in [(2, 4), (4, 4), (4, 12), (3, 6)]:
        v = 1 if NAMED_ORDERS[schedule].admits(p, 1, m) and schedule != "interleaved" else 2
        plan = Plan(pipeline_parallel_degree=p, micro_batches=m, pipeline_schedule=schedule, stages_per_rank=v)
        order = plan_order(plan)
        assert [in_flight(plan, rank) for rank in range(p)] == [order.in_flight(rank) for rank in range(p)]


def test_the_parts_that_one_rank_accumulates_are_forwards_and_backwards_in_turns() -> None:
    order = plan_order(Plan(accumulate=3))
    assert [str(action) for action in order.ranks[0]] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]


def test_a_number_of_micro_batches_that_an_order_does_not_admit_is_refused_with_the_nearest() -> None:
    plan = Plan(pipeline_parallel_degree=2, micro_batches=7, pipeline_schedule="zero_bubble")
    with pytest.raises(PlanError, match="'zero_bubble' on 2 ranks cannot run 7 micro-batches.*take 8"):
        plan.resolve(2)


def by_hand(tmp_path: Path) -> Path:
    path = tmp_path / "mine.txt"
    path.write_text(str(pipeline_order("1f1b", 4, 1, 8)).replace("order 1f1b", "order mine"))
    return path


def test_a_plan_takes_an_order_from_a_file_or_its_text(tmp_path: Path) -> None:
    path = by_hand(tmp_path)
    plain = Plan(pipeline_parallel_degree=4, micro_batches=8)
    for spelled in (str(path), path.read_text()):
        plan = replace(plain, pipeline_schedule=spelled)
        assert Plan.from_toml(plan.to_toml()) == plan
        assert plan.describe() == "all data x 4 pipeline (mine, 8 micro-batches)"
        assert plan_order(plan).ranks == plan_order(plain).ranks
        where = load("star:hosts=4,bandwidth=100Gbit/s,latency=1us")
        mine, named = (predict(one, chain(), where, workers=4, batch=8, constants=PLAIN) for one in (plan, plain))
        assert mine.step_s == pytest.approx(named.step_s, rel=0.01)
        assert mine.memory == named.memory
        graph = step_graph(plan, chain(), where, workers=4, batch=8, constants=PLAIN)
        assert simulate_step(graph, where).seconds == pytest.approx(mine.step_s, rel=0.01)


def test_an_order_by_hand_is_followed_where_ranks_share_processors_as_the_named_one_is(tmp_path: Path) -> None:
    network = replace(Network.of(load("star:hosts=4,bandwidth=100Gbit/s,latency=1us")), at_once=2.0)
    plain = Plan(pipeline_parallel_degree=4, micro_batches=8)
    mine = replace(plain, pipeline_schedule=str(by_hand(tmp_path)))
    first, second = (predict(one, chain(), network, workers=4, batch=8).parts for one in (plain, mine))
    assert first == second
    assert first.crowding > 0


def test_an_order_for_another_shape_or_a_broken_one_is_refused(tmp_path: Path) -> None:
    path = by_hand(tmp_path)
    plan = Plan(pipeline_parallel_degree=4, micro_batches=4, pipeline_schedule=str(path))
    with pytest.raises(PlanError, match="the order mine is for 4 ranks x 1 stages x 8 micro-batches"):
        plan.resolve(4)
    path.write_text(path.read_text().replace("0B7", ""))
    with pytest.raises(PlanError, match="cannot be carried out: rank 0: 0B7 .* is missing"):
        replace(plan, micro_batches=8).resolve(4)
    with pytest.raises(PlanError, match="there is no 'gpipe2'.*write gpipe, 1f1b, .*, or the path"):
        Plan(pipeline_schedule="gpipe2")


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_gathers_of_many_micro_batches_take_what_following_all_of_them_says(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = load("star:hosts=16,bandwidth=40Gbit/s,latency=2us,server=dgx-a100,server.devices=1")
    plan = Plan(pipeline_parallel_degree=8, micro_batches=64, pipeline_schedule=schedule, shard="parameters")
    took = []
    for actions in (_pipeline._ACTIONS, 10**9):
        monkeypatch.setattr(_pipeline, "_ACTIONS", actions)
        took.append(predict(plan, chain(16), where, workers=16, batch=128, constants=PLAIN).step_s)
    assert took[0] == pytest.approx(took[1], rel=0.01)


V = Plan(pipeline_parallel_degree=4, pipeline_schedule="zero_bubble_v", stages_per_rank=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("spec", "plan"),
    [
        # uplinks that several hops share
        ("leafspine:leaves=4,ports=3,taper=2", Plan(pipeline_parallel_degree=4, micro_batches=4)),
        ("leafspine:leaves=4,ports=3,taper=2", Plan(pipeline_parallel_degree=4, micro_batches=4, shard="parameters")),
        # the turn of a V, where both stages are on one rank, and ways up that are the ways down the other way round
        ("leafspine:leaves=4,ports=3,taper=2", replace(V, micro_batches=4)),
        ("leafspine:leaves=4,ports=3,taper=2", replace(V, micro_batches=4, shard="parameters")),
        # both directions through one port
        ("star:hosts=8", Plan(pipeline_parallel_degree=8, micro_batches=8)),
    ],
)
def test_large_messages_share_links_as_the_simulator_lets_them(spec: str, plan: Plan) -> None:
    where = load(f"{spec},bandwidth=1Gbit/s,latency=10us,server=host,server.flops=1e12")
    layers = tuple(replace(one, output_bytes=1e6, parameter_bytes=4e3, gradient_bytes=4e3) for one in chain(16).layers)
    asked = {"workers": 8, "batch": 8, "constants": PLAIN}
    found = predict(plan, replace(chain(), layers=layers), where, **asked)
    simulated = simulate_step(step_graph(plan, replace(chain(), layers=layers), where, **asked), where).seconds
    assert found.step_s == pytest.approx(simulated, rel=0.1)


def test_messages_of_a_measured_cluster_pass_the_ports_of_their_ranks() -> None:
    where = load("lassen")  # two ranks of four are at one of the two ports
    layers = tuple(replace(one, output_bytes=2e7) for one in chain(4).layers)
    plan, large = Plan(pipeline_parallel_degree=4, micro_batches=4), replace(chain(), layers=layers)
    asked = {"workers": 8, "batch": 8}
    found = predict(plan, large, where, **asked)
    assert found.parts.messages > found.parts.compute / 2
    simulated = simulate_step(step_graph(plan, large, where, **asked), where).seconds
    assert found.step_s == pytest.approx(simulated, rel=0.05)


def test_messages_of_small_models_are_as_late_as_those_of_the_slowest_replica() -> None:
    where = load(
        "rails:hosts=4,spines=1,bandwidth=3Gbit/s,latency=50us,server=commodity,server.devices=6,server.nics=2"
    )
    few = {"parameter_bytes": 40, "gradient_bytes": 40, "output_bytes": 10.0, "forward_s": 1e-5, "backward_s": 2e-5}
    small = replace(chain(), layers=tuple(replace(one, **few) for one in chain(10).layers))
    plan, asked = Plan(pipeline_parallel_degree=10, micro_batches=10), {"workers": 20, "batch": 20, "constants": PLAIN}
    found = predict(plan, small, where, **asked)
    simulated = simulate_step(step_graph(plan, small, where, **asked), where).seconds
    assert found.step_s == pytest.approx(simulated, rel=0.05)


def test_ranks_that_share_tensors_wait_for_each_others_messages() -> None:
    where = load("star:hosts=2,server=host,server.ranks=2,bandwidth=1Gbit/s")
    plan = Plan(pipeline_parallel_degree=2, tensor_parallel_degree=2, micro_batches=2)
    layers = tuple(replace(one, tensor_limit=2) for one in chain().layers)
    graph = step_graph(plan, replace(chain(), layers=layers), where, workers=4, batch=2)
    came = {int(node) for sent in graph.sends for node in range(sent.first, sent.first + 2)}
    waits = [sum(int(before) in came for before in edge[0]) for edge in graph.edges]
    assert sum(waits) == 2 * len(came)


def test_no_part_of_a_step_is_less_than_nothing() -> None:
    # a pipeline whose first rank does all of the work waits for nobody, but for rounding
    some, none = ({"forward_s": one, "backward_s": 2 * one, "output_bytes": 0.0} for one in (0.1, 0.0))
    layers = tuple(replace(one, **none if i else some) for i, one in enumerate(chain(4).layers))
    where = load("star:hosts=4,server=host,server.flops=1e12,bandwidth=100Gbit/s")
    plan = Plan(pipeline_parallel_degree=2, micro_batches=3)
    found = predict(plan, replace(chain(), layers=layers), where, workers=2, batch=3, constants=PLAIN)
    assert min(seconds for _, seconds in found.parts.rows()) >= 0


def sharded_in_pipelines() -> list[Plan]:
    """Return plans of 64 workers whose parameters are sharded, of few micro-batches and of more than are followed."""
    orders = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1))
    return [
        Plan(
            shard="parameters", tensor_parallel_degree=tensor, pipeline_schedule=order, stages_per_rank=stages,
            pipeline_parallel_degree=pipeline, micro_batches=pipeline * rounds,
        )
        for (order, stages), tensor, pipeline, rounds in itertools.product(orders, (1, 2), (2, 4), (1, 24))
    ]  # fmt: skip


@pytest.mark.parametrize("plan", sharded_in_pipelines(), ids=Plan.describe)
def test_a_pipeline_that_is_as_fast_as_asked_for_is_never_given_up_before_it_is_followed(plan: Plan) -> None:
    network, workload = Network.of(load("selene-like")), named_transformer("gpt-7b")
    more = {"workers": 64, "batch": 64 * plan.micro_batches, "constants": Constants()}
    least_s = predict(plan, workload, network, **more).step_s
    assert predict_within(least_s, plan, workload, network, **more) is not None
    assert predict_within(0.99 * least_s, plan, workload, network, **more) is None


def test_a_pipeline_whose_gathers_alone_take_longer_than_asked_for_is_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, workload = Network.of(load("selene-like")), named_transformer("gpt-7b")
    slow = replace(network, host_Bps=network.host_Bps / 100, rank_Bps=network.rank_Bps / 100)
    plan = Plan(shard="parameters", pipeline_parallel_degree=4, micro_batches=96)
    more = {"workers": 64, "batch": 64 * 96, "constants": Constants()}
    most_s = predict(replace(plan, shard="none"), workload, network, **more).step_s
    monkeypatch.setattr("hocket.planner.step._time.follow", lambda *_: pytest.fail("it was followed"))
    assert predict_within(most_s, plan, workload, slow, **more) is None
