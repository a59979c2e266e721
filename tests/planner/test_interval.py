"""How sure predictions are, what they rest on, and what is refused for want of a number."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hocket import cluster
from hocket.planner import (
    Constants,
    Network,
    Plan,
    PlanError,
    admissible_plans,
    assumptions,
    predict,
    scaling_curves,
    search,
)
from hocket.workload import capture, named_transformer, transformer


def test_an_interval_holds_the_prediction_and_grows_with_what_is_not_known() -> None:
    where = Network.of(cluster.load("h100-like"))
    workload = named_transformer("gpt-7b")

    def width(workers: int, **constants: object) -> float:
        given = Constants(**constants)  # type: ignore[arg-type]
        one = predict(Plan(shard="optimizer"), workload, where, workers=workers, batch=workers, constants=given)
        low, high = one.interval_s
        assert low < one.step_s < high
        assert one.throughput_interval[0] < one.throughput < one.throughput_interval[1]
        return high / low

    assumed = width(256)
    assert width(256, basis="fitted", fitted_workers=256) < 0.9 * assumed
    assert width(256, basis="measured", fitted_workers=256) < 0.9 * assumed
    assert width(4096, basis="fitted", fitted_workers=256) > width(256, basis="fitted", fitted_workers=256)


def test_what_a_workload_does_not_know_is_one_of_the_assumptions() -> None:
    workload = capture(torch.nn.Linear(64, 64), torch.ones(8, 64), device="meta")
    where = Network.of(cluster.load("laptop"))
    said = []
    for source in (workload.source, f"{workload.source}, without the FLOPs of library::fast, which are not known"):
        known = dataclasses.replace(workload, source=source)
        one = predict(Plan(), known, where, workers=1, batch=8)
        said.append(
            [row for row in assumptions(one, where, precision="float32", workload=known) if row[0] == "workload"]
        )
    assert said == [[], [("workload", "without the FLOPs of library::fast, which are not known", "assumed")]]


def test_what_is_counted_on_processors_is_less_sure_and_says_so() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    workload = capture(model, torch.ones(8, 64), device="meta")
    said = {}
    for name in ("laptop", "star:hosts=1,server=dgx-a100"):
        where = Network.of(cluster.load(name))
        one = predict(Plan(), workload, where, workers=1, batch=8)
        rows = {row[0] for row in assumptions(one, where, precision="float32", workload=workload)}
        said[name] = one.interval_s[1] / one.step_s, "caches" in rows
    assert said["laptop"][0] > 1 / 0.29  # of small models in caches, whose steps have taken 0.29 of what is said
    assert said["laptop"][1]
    assert said["star:hosts=1,server=dgx-a100"][0] < 1.5
    assert not said["star:hosts=1,server=dgx-a100"][1]
    large = capture(torch.nn.Linear(2048, 2048, device="meta"), torch.empty(8, 2048, device="meta"), device="meta")
    one = predict(Plan(), large, Network.of(cluster.load("laptop")), workers=1, batch=8)
    assert 2.0 < one.interval_s[1] / one.step_s < 2.5  # which no cache holds


def test_a_cluster_says_what_is_reached_and_what_it_does_not_say_is_usual() -> None:
    plain = cluster.load("star:hosts=4,server=dgx-h100")
    assert Constants.of(plain.reached).jitter > 0
    told = cluster.load("star:hosts=4,server=dgx-h100,reached.jitter=0.25,reached.basis=fitted")
    assert Constants.of(told.reached).jitter == 0.25
    assert cluster.from_toml(cluster.to_toml(told)) == told
    assert cluster.from_toml(cluster.to_toml(told, explicit=True)).reached == told.reached
    for wrong in ("reached.jiter=0.1", "reached.jitter=much", "reached.basis=guessed"):
        with pytest.raises(PlanError, match="constant"):
            predict(Plan(), named_transformer("gpt-7b"), cluster.load(f"star:hosts=4,server=dgx-h100,{wrong}"),
                    workers=2, batch=2)  # fmt: skip


def test_nothing_scales_perfectly_on_a_cluster_that_says_nothing() -> None:
    where = cluster.load("star:hosts=64,server=dgx-h100,bandwidth=50GB/s")
    curve = scaling_curves(named_transformer("gpt-7b"), where, [1, 64, 512], batch_per_worker=4)[0]
    assert [point.efficiency for point in curve.points] == sorted((p.efficiency for p in curve.points), reverse=True)
    assert curve.points[-1].efficiency < 0.95
    assert all(point.interval[0] < point.throughput < point.interval[1] for point in curve.points)
    assert 0.2 < curve.points[0].mfu < 0.8
    assert curve.points[0].blame == ""
    assert "does not fit in the memory of 512 workers" in curve.verdict()  # 7B with Adam's state, whole on each


def test_what_a_prediction_rests_on_is_listed() -> None:
    where = Network.of(cluster.load("selene-like"))
    one = predict(Plan(shard="parameters"), named_transformer("gpt-7b"), where, workers=64, batch=128)
    rows = {name: (value, basis) for name, value, basis in assumptions(one, where, precision="bfloat16")}
    assert rows["batch"] == ("128 samples, 2 a worker, 2 at a time", "given")
    piped = Plan(pipeline_parallel_degree=3, micro_batches=4)
    shared = predict(piped, named_transformer("gpt-7b"), where, workers=6, batch=24)
    batch = assumptions(shared, where, precision="bfloat16")[0]
    assert batch == ("batch", "24 samples, 12 a copy of the model, 3 at a time", "given")
    assert rows["products"] == ("72% of 312 TFLOP/s in bfloat16", "fitted")
    assert {"memory", "inside hosts", "between hosts", "sharded parameters", "overlap", "jitter"} <= rows.keys()
    assert [rows[row][1] for row in ("sharded parameters", "overlap", "jitter")] == ["assumed"] * 3  # by its file


def test_constants_that_no_other_row_tells_and_fields_that_no_formula_knows_are_listed() -> None:
    where, workload = cluster.load("star:hosts=2,server=dgx-a100"), transformer(1024, 4, 16, sequence=512)
    usual = dataclasses.replace(Constants.of({}), gather_share=0.2, block_s=1e-3)
    for plan, left in ((Plan(), False), (Plan(embeddings="row", compression="fp16"), True)):
        one = predict(plan, workload, where, workers=16, batch=16, constants=usual)
        rows = {
            name: (value, basis) for name, value, basis in assumptions(one, Network.of(where), precision="bfloat16")
        }
        assert "gather_share 20.0%" in rows["other constants"][0]
        assert "block_s 1e+03 us" in rows["other constants"][0]
        assert "jitter" not in rows["other constants"][0]
        assert ("left out" in rows) is left
    assert rows["left out"][0] == "what embeddings and compression of the plan do to time and memory"


@pytest.mark.long
def test_a_server_that_does_not_say_its_memory_is_refused_and_known_ones_have_theirs() -> None:
    workload = named_transformer("gpt-7b")
    unknown = cluster.load("star:hosts=2,server=commodity,server.flops=100TFLOP/s")
    with pytest.raises(PlanError, match="does not say how much memory"):
        search(workload, unknown, workers=16, batch=16)
    known = cluster.load("rails:hosts=8,server=dgx-h100,bandwidth=400Gbit/s")
    found = search(workload, known, workers=64, batch=64, fixed={"tensor_parallel_degree": 8})
    assert found.memory_limit == 80 * 2**30
    assert found.best.memory.total <= 80 * 2**30


@pytest.mark.long
def test_degrees_that_straddle_hosts_are_priced_by_the_network_and_not_searched() -> None:
    where = Network.of(cluster.load("selene-like"))
    inside = where.collective("all_gather", 50e6, 8, 1, Constants()).seconds
    across = where.collective("all_gather", 50e6, 6, 1, Constants()).seconds
    assert across > 4 * inside  # ranks 6 to 11 of hosts of 8
    assert where.first(6).collective("all_gather", 50e6, 6, 1, Constants()).seconds < 2 * inside  # six on one host
    workload = transformer(12288, 12, 96)
    considered = {plan.tensor_parallel_degree for plan in admissible_plans(workload, where, workers=24, batch=24)}
    assert considered == {1, 2, 4, 8}  # six and twelve divide its heads too
    found = search(workload, where, workers=24, batch=24)
    assert {one.plan.tensor_parallel_degree for one in found.ranked} <= considered


def test_zero_3_of_175b_is_what_was_published_on_384_and_falls_beyond() -> None:
    """SC'21, table 2: 144 TFLOP/s on 384 A100 with batches of 4 a device; 88 and 44 on 768 and 1,536.

    Of DeepSpeed's gathers of early 2021, which reached 8.1% of the links; FSDP's reach more (`test_published.py`).
    """
    where, workload = cluster.load("selene-like"), transformer(12288, 96, 96, name="175b", gradient_nbytes=2)
    constants = Constants.of({**where.reached, "fetch_share": 0.081})
    found = {}
    for workers, published in ((384, 144), (768, 88), (1536, 44)):
        plan = Plan(shard="parameters", recompute=True)
        one = predict(plan, workload, where, workers=workers, batch=1536, constants=constants)
        found[workers] = one.flops_per_worker * 4 / 3 / 1e12 / published  # what is computed again is counted there
    assert found[384] == pytest.approx(1, abs=0.05)
    assert all(0.8 < one < 1.25 for one in found.values()), found


def test_a_mesh_of_links_serves_a_group_by_those_among_its_members() -> None:
    where = Network.of(cluster.load("mi300x-like"))
    assert where.mesh == 7
    reached = Constants(inside_share=1.0)
    whole, pair = (where.wires(size, 1, reached)[0] for size in (8, 2))
    assert whole == pytest.approx(7 * 64e9)
    assert pair == pytest.approx(64e9)
    for workers in (2, 4):  # of fewer than a host has
        assert where.first(workers).wires(workers, 1, reached)[0] == pytest.approx((workers - 1) * 64e9)
    assert where.first(4).links(1, ((0, 1),), 4, reached)[0].rate_Bps == pytest.approx(64e9)  # a message takes one link


def test_of_a_pipeline_along_the_ranks_of_hosts_the_messages_between_hosts_take_the_network() -> None:
    where = Network.of(cluster.load("h100-like"))  # says what is reached, so that no routes are followed
    around = tuple((one, (one + 1) % 16) for one in range(16))
    links = where.links(1, around, 8, Constants(inside_share=1.0, network_share=1.0))
    far = [number for number, link in enumerate(links) if link.latency_s == where.between_s]
    assert far == [7, 15]
    assert links[7].rate_Bps == where.rank_Bps < links[0].rate_Bps
