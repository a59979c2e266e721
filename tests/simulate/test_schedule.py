"""Schedules take the time of their closed forms where nothing is shared, and never less than the bounds anywhere."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import algorithms, cluster
from hocket.schedule import KINDS, Collective, Schedule, Step, Wire, lower_bounds
from hocket.simulate import Protocol, Settings, SimulationError, _schedule, simulate_schedule, simulate_sizes
from hocket.simulate._lower import lower

from ..pace import timed

ALPHA_S, BETA = 1e-6, 1 / 12.5e9  # of two links of 0.5 us, and 100 Gbit/s
WIRE = Wire(ALPHA_S, BETA)
LOCKSTEP = Settings(lockstep=True)


def all_cases(worlds: tuple[int, ...]) -> list[tuple[str, str, int]]:
    return [
        (one.name, kind, world)
        for world in worlds
        for kind in KINDS
        for one in algorithms.candidates(Collective(kind, world))
    ]


def step_by_step_s(schedule: Schedule, nbytes: float) -> float:
    """Alpha and the busiest port's bytes of every step, summed: the model that closed forms are made in."""
    vector = schedule.chunks // schedule.collective.blocks * schedule.collective.vector_blocks
    total = Fraction(0)
    for step in schedule.each_step():
        length = (step.stop - step.start).astype(np.int64)
        ports = [
            np.bincount(end, weights=length, minlength=schedule.endpoints) for end in (step.source, step.destination)
        ]
        total += Fraction(int(max(port.max() for port in ports)), vector)
    return schedule.step_count * ALPHA_S + float(total) * nbytes * BETA


@pytest.mark.parametrize("nbytes", [1000.0, 1e7])
@pytest.mark.parametrize(("name", "kind", "world"), all_cases((2, 3, 4, 5, 8, 13, 16)))
def test_on_a_star_every_algorithm_takes_its_alpha_beta_time(name: str, kind: str, world: int, nbytes: float) -> None:
    star = cluster.load(f"star:hosts={world}")
    collective, one = Collective(kind, world), algorithms.get(name)
    schedule = one(collective)
    closed = one.cost(collective, int(nbytes), WIRE)
    lockstep = simulate_schedule(schedule, star, nbytes, settings=LOCKSTEP).seconds
    assert lockstep == pytest.approx(step_by_step_s(schedule, nbytes), rel=1e-9)
    if name == "double_tree" and world % 2:  # its closed form is that of the busiest rank, and the trees differ here
        assert lockstep <= closed * (1 + 1e-9)
    else:
        assert lockstep == pytest.approx(closed, rel=1e-9)


# Algorithms in which a step needs what the step before has brought, on worlds where all ranks do the same. In others,
# as in a pairwise all-to-all, nothing keeps the steps apart but a barrier: they are concurrent, and share the links.
CHAINED = [
    (name, kind, world)
    for name, kind, world in all_cases((2, 4, 8, 16))
    if kind in ("all_reduce", "all_gather", "reduce_scatter", "barrier")
]


@pytest.mark.parametrize(("name", "kind", "world"), CHAINED)
def test_where_steps_need_each_other_no_barrier_is_needed(name: str, kind: str, world: int) -> None:
    star = cluster.load(f"star:hosts={world}")
    collective, one = Collective(kind, world), algorithms.get(name)
    timing = simulate_schedule(one(collective), star, 1e6)
    assert timing.seconds == pytest.approx(one.cost(collective, 10**6, WIRE), rel=1e-9)


@pytest.mark.parametrize(("world", "arity"), [(8, 8), (16, 4), (27, 3)])
def test_an_aggregation_tree_takes_its_depth_and_the_bytes_once(world: int, arity: int) -> None:
    spec = f"leafspine:leaves={world // arity},ports={arity},spines=1" if arity < world else f"star:hosts={world}"
    described = cluster.load(f"{spec},reduction.streaming=true,reduction.low_latency=false,reduction.efficiency=1")
    parents, switches = algorithms.cluster_tree(described)
    schedule = algorithms.get("aggregation_tree")(Collective("all_reduce", world), parents=parents, switches=switches)
    hops = schedule.step_count
    timing = simulate_schedule(schedule, described, 1e6)
    assert timing.seconds == pytest.approx(hops * ALPHA_S / 2 + 1e6 * BETA, rel=1e-9)


SPECS = [
    "star:hosts=16",
    "leafspine:leaves=4,ports=4,taper=2",
    "fattree:k=4",
    "bigraph:upper=4,ports=2",
    "dragonfly+:groups=3,leaves=2,spines=2,ports=3,globals=1",
    "torus:dims=4x4",
    "rails:hosts=4,server=eflops,server.devices=4",
    "star:hosts=2,server=commodity,server.devices=8",
    "single:server=dgx1",
    "single:server=dgx-h100",
]


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(SPECS),
    st.sampled_from(KINDS),
    st.integers(2, 8),
    st.floats(0, 8),
    st.integers(0, 100),
    st.data(),
)
def test_nowhere_is_an_algorithm_faster_than_the_bounds(
    spec: str, kind: str, world: int, digits: float, seed: int, data: st.DataObject
) -> None:
    described = cluster.load(spec)
    collective = Collective(kind, world)
    fitting = [one for one in algorithms.candidates(collective) if not one.build(collective).switches]
    one = data.draw(st.sampled_from(fitting))
    ranks = data.draw(st.permutations(range(described.world)))[:world]
    nbytes = float(int(10**digits))
    timing = simulate_schedule(one.build(collective), described, nbytes, ranks=ranks, seed=seed)
    # Of the cluster's best case: the widest ways out of a rank together, and the least latency between any two.
    places = described.ranks[list(ranks)]
    width = max(described.capacity_Bps[described.link_tail == node].sum() for node in places)
    a, b = (grid.ravel() for grid in np.meshgrid(places, places))
    routes = described.routes(a[a != b], b[a != b], seed=seed)
    latency = np.add.reduceat(described.latency_s[routes.links], routes.offsets[:-1]).min()
    bounds = lower_bounds(collective)
    assert timing.seconds >= float(bounds.moved) * nbytes / width * (1 - 1e-9)
    # The bound's rounds are of one message per port; here messages are posted together, so one round may do.
    assert timing.seconds >= min(bounds.steps, 1) * latency * (1 - 1e-9)
    assert (timing.link_nbytes <= described.capacity_Bps * timing.seconds * (1 + 1e-9)).all()


def halving_doubling(world: int) -> Schedule:
    return algorithms.get("halving_doubling")(Collective("all_reduce", world))


def test_every_loaded_link_is_within_its_capacity_at_every_moment() -> None:
    described = cluster.load("leafspine:leaves=4,ports=4")
    timing = simulate_schedule(halving_doubling(16), described, 1e6, trace=True)
    assert timing.trace is not None
    assert len(timing.trace.times_s) > 8
    assert max(float((load / described.capacity_Bps).max()) for load in timing.trace.loads_Bps) <= 1.0
    assert timing.trace.loads_Bps[-1].max() == 0


def test_equal_input_gives_equal_output_to_the_last_bit() -> None:
    described = cluster.load("leafspine:leaves=4,ports=4")
    one, two = (simulate_schedule(halving_doubling(16), described, 1e6, seed=7) for _ in range(2))
    assert one.end_s.tobytes() == two.end_s.tobytes()
    assert one.link_nbytes.tobytes() == two.link_nbytes.tobytes()


def test_another_topology_gives_another_answer() -> None:
    schedule = halving_doubling(16)
    specs = ["star:hosts=16", "leafspine:leaves=4,ports=4", "leafspine:leaves=4,ports=4,taper=2", "torus:dims=4x4"]
    times = [simulate_schedule(schedule, cluster.load(spec), 1e7).seconds for spec in specs]
    assert len(set(times)) == len(times)
    assert times[0] == min(times)


def test_hdrm_on_a_bigraph_meets_no_contention_and_its_plain_form_does() -> None:
    described = cluster.load("bigraph:upper=4,ports=4")
    collective = Collective("all_reduce", 32)
    mapped = simulate_schedule(algorithms.get("hdrm")(collective, upper=4, ports=4), described, 1e8)
    plain = simulate_schedule(halving_doubling(32), described, 1e8)
    alone = float(2 * Fraction(31, 32)) * 1e8 / 12.5e9 + 10 * 3 * 500e-9  # three links on every way
    assert mapped.seconds == pytest.approx(alone, rel=1e-9)
    assert plain.seconds > 1.5 * alone


def test_nothing_takes_no_time() -> None:
    star = cluster.load("star:hosts=4")
    alone = simulate_schedule(halving_doubling(1), star, 1e6)
    assert (alone.seconds, alone.algbw_Bps, alone.busiest()) == (0.0, 0.0, [])
    assert simulate_schedule(halving_doubling(4), star, 0).seconds == pytest.approx(4 * ALPHA_S)


def test_a_straggler_delays_those_that_wait_for_it_and_no_others() -> None:
    star = cluster.load("star:hosts=4")
    schedule = Schedule(
        "pairs",
        Collective("broadcast", 4),
        1,
        (Step.of([0], [1], reduce=False), Step.of([0, 1], [2, 3], reduce=False)),
    )
    late = simulate_schedule(schedule, star, 12.5e3, ready_s=[0.0, 0.0, 5.0, 0.0])
    assert late.finish_s() == pytest.approx([5 + 2e-6, 4e-6, 5 + 2e-6, 4e-6])


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "recursive_doubling"])
def test_a_late_rank_costs_its_lateness_and_no_more(name: str) -> None:
    """Messages that pile up for it come one after the other; shared equally, none would get through for long."""
    schedule, star = algorithms.get(name)(Collective("all_reduce", 8)), cluster.load("star:hosts=8")
    on_time = simulate_schedule(schedule, star, 1e7)
    late = simulate_schedule(schedule, star, 1e7, ready_s=[0.01, *[0.0] * 7])
    assert late.ended_s <= 0.01 + on_time.ended_s * (1 + 1e-9)


def test_a_connection_carries_its_messages_one_after_the_other() -> None:
    star = cluster.load("star:hosts=2")
    steps = (Step.of([0], [1], [0], reduce=False), Step.of([0], [1], [1], reduce=False))
    timing = simulate_schedule(Schedule("two", Collective("broadcast", 2), 2, steps), star, 2e6)
    assert timing.end_s == pytest.approx([ALPHA_S + 1e6 * BETA, ALPHA_S + 2e6 * BETA], rel=1e-9)
    assert timing.moving_s == pytest.approx([ALPHA_S, ALPHA_S + 1e6 * BETA], rel=1e-9)


def test_a_sub_group_runs_where_its_ranks_are() -> None:
    described = cluster.load("leafspine:leaves=2,ports=2")
    schedule = halving_doubling(2)
    near = simulate_schedule(schedule, described, 1e6, ranks=[2, 3])
    far = simulate_schedule(schedule, described, 1e6, ranks=[0, 3])
    assert {use.name for use in near.busiest(10)} == {
        f"{a}->{b}" for a, b in (("host2", "leaf1"), ("leaf1", "host2"), ("host3", "leaf1"), ("leaf1", "host3"))
    }
    assert far.seconds == pytest.approx(near.seconds + 2 * 2 * 500e-9, rel=1e-9)


@pytest.mark.parametrize(
    ("world", "ranks", "told"),
    [
        (8, None, r"needs rank 7 and star has ranks 0\.\.3; take a larger cluster"),
        (2, [0, 9], "needs rank 9"),
        (2, [1, 1], "names a rank twice"),
        (2, [0, 1, 2], "is for 2 ranks and the group has 3"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(world: int, ranks: list[int] | None, told: str) -> None:
    with pytest.raises(SimulationError, match=told):
        simulate_schedule(halving_doubling(world), cluster.load("star:hosts=4"), 1e6, ranks=ranks)


def test_overhead_is_added_to_every_message() -> None:
    star, schedule = cluster.load("star:hosts=4"), halving_doubling(4)
    plain = simulate_schedule(schedule, star, 1e6).seconds
    slow = simulate_schedule(schedule, star, 1e6, settings=Settings(overhead_s=3e-6)).seconds
    assert slow == pytest.approx(plain + 4 * 3e-6, rel=1e-12)


def test_pieces_are_sent_on_while_others_come() -> None:
    star, chain = cluster.load("star:hosts=4"), algorithms.get("chain")(Collective("broadcast", 4))
    for pieces in (1, 2, 8):
        timing = simulate_schedule(chain, star, 8e6, settings=Settings(pieces=pieces))
        assert timing.seconds == pytest.approx(3 * ALPHA_S + 8e6 * (1 + 2 / pieces) * BETA, rel=1e-9)


def test_pieces_of_one_step_get_into_the_way_of_the_next_where_all_links_are_busy() -> None:
    star = cluster.load("star:hosts=8")
    whole, cut = (
        simulate_schedule(halving_doubling(8), star, 8e6, settings=Settings(pieces=pieces)) for pieces in (1, 4)
    )
    assert cut.seconds > 1.2 * whole.seconds
    assert cut.link_nbytes == pytest.approx(whole.link_nbytes)


def test_protocols_go_by_size() -> None:
    star, schedule = cluster.load("star:hosts=2"), algorithms.get("recursive_doubling")(Collective("all_reduce", 2))
    protocols = Settings(protocols=(Protocol(1000, 1e-6, 0.5), Protocol(1e6, 5e-6)))
    small, middle, large = (
        simulate_schedule(schedule, star, size, settings=protocols).seconds for size in (1e3, 1e6, 1e7)
    )
    assert small == pytest.approx(ALPHA_S + 1e-6 + 2 * 1e3 * BETA, rel=1e-12)
    assert middle == pytest.approx(ALPHA_S + 5e-6 + 1e6 * BETA, rel=1e-12)
    assert large == pytest.approx(ALPHA_S + 1e7 * BETA, rel=1e-12)


def test_congestion_takes_capacity_by_the_number_of_flows() -> None:
    star = cluster.load("star:hosts=5")
    schedule = Schedule(
        "incast", Collective("gather", 5), 5, (Step.of([1, 2, 3, 4], [0] * 4, [1, 2, 3, 4], reduce=False),)
    )
    fair = simulate_schedule(schedule, star, 5e6).seconds - ALPHA_S
    worse = simulate_schedule(schedule, star, 5e6, settings=Settings(congestion=0.1)).seconds - ALPHA_S
    assert fair == pytest.approx(4e6 * BETA, rel=1e-9)
    assert worse == pytest.approx(fair * 1.3, rel=1e-9)


def test_reduction_takes_its_time_at_the_rank_one_message_after_the_other() -> None:
    gamma = 1e-10
    for name, world in (("halving_doubling", 8), ("ring", 5), ("direct", 6), ("recursive_doubling", 4)):
        one, collective = algorithms.get(name), Collective("all_reduce", world)
        timing = simulate_schedule(
            one(collective), cluster.load(f"star:hosts={world}"), 1e6, settings=Settings(reduce_s_per_byte=gamma)
        )
        assert timing.seconds == pytest.approx(one.cost(collective, 10**6, Wire(ALPHA_S, BETA, gamma)), rel=1e-9)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    timing = simulate_schedule(halving_doubling(8), cluster.load("star:hosts=8,latency=0s"), 1e8)
    assert timing.busbw_Bps == pytest.approx(12.5e9, rel=1e-9)
    assert timing.algbw_Bps == pytest.approx(12.5e9 * 8 / 14, rel=1e-9)


def test_a_timeline_has_every_message_at_both_ends() -> None:
    timing = simulate_schedule(halving_doubling(4), cluster.load("star:hosts=4"), 1e6, trace=True)
    timeline = timing.timeline()
    assert len(timeline.spans) == 2 * 16
    assert len(timeline.arrows) == 16
    assert timeline.seconds == pytest.approx(timing.seconds)
    assert len(timeline.counters) == 8


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "double_tree", "scatter_gather", "circulant"])
def test_vectors_cut_where_transfers_begin_take_the_times_of_cells_of_one_width(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    one = algorithms.get(name)
    served = [kind for kind in ("all_reduce", "broadcast", "all_gather") if not one.serves(Collective(kind, 24))]
    assert served
    where = cluster.load("leafspine:leaves=4,ports=6")
    for kind in served:
        schedule = one(Collective(kind, 24))
        cells = simulate_schedule(schedule, where, 1e7)
        with monkeypatch.context() as patch:
            patch.setattr("hocket.simulate._touch._FEW", 0)
            patch.setattr("hocket.simulate._touch._FINE", 0)
            cut = simulate_schedule(schedule, where, 1e7)
        assert cut.end_s.tolist() == pytest.approx(cells.end_s.tolist(), rel=1e-12)


@pytest.mark.long
def test_halving_doubling_of_65536_ranks_is_simulated_in_seconds() -> None:
    schedule, where = (
        algorithms.get("halving_doubling")(Collective("all_reduce", 65536)),
        cluster.load("star:hosts=65536"),
    )
    found, took_s = timed(lambda: simulate_schedule(schedule, where, 2**26))
    assert took_s < 60  # 5 s
    assert found.seconds == pytest.approx(32 * ALPHA_S + 2 * 65535 / 65536 * 2**26 * BETA, rel=1e-6)


def test_several_sizes_of_one_schedule_take_what_each_takes_alone() -> None:
    described = cluster.load("star:hosts=3,server=eflops,server.devices=4")
    sizes = [0.0, 1000.0, 1e6 + 1]
    for kind in ("all_reduce", "all_to_all", "broadcast"):
        wanted = Collective(kind, described.world)
        for one in algorithms.candidates(wanted):
            schedule = one(wanted)
            alone = [simulate_schedule(schedule, described, nbytes, seed=3) for nbytes in sizes]
            for single, found in zip(alone, simulate_sizes(schedule, described, sizes, seed=3), strict=True):
                assert found.end_s.tolist() == single.end_s.tolist()
                assert found.message_nbytes.tolist() == single.message_nbytes.tolist()
                assert found.link_nbytes.tolist() == single.link_nbytes.tolist()


def test_several_sizes_bring_a_schedule_down_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[float] = []

    def counted(*given: Any, **named: Any) -> Any:
        lowered.append(given[2])
        return lower(*given, **named)

    monkeypatch.setattr(_schedule, "lower", counted)
    ring = algorithms.get("ring")(Collective("all_reduce", 4))
    assert len(list(simulate_sizes(ring, cluster.load("star:hosts=4"), [1.0, 2.0, 3.0]))) == 3
    assert len(lowered) == 1
