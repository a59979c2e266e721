"""On a GPU that ranks share, every plan loses what one process loses there; HOCKET_TEST_DEVICE=cpu tries the tests."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hocket.planner import Plan
from hocket.testing import RankError, deadline, run_ranks
from hocket.workloads import names

from .. import gpu_programs

DEVICE = os.environ.get("HOCKET_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch finds no GPU here"),
    pytest.mark.timeout(200),
]
TIMEOUT_S = 90.0
LOSSES, WEIGHTS = 1e-9, 1e-7
"""Relative, in float64: products of other shapes are added up in another order, and Adam magnifies small gradients."""

T: dict[str, Any] = {"tensor_parallel_degree": 2}
P: dict[str, Any] = {"pipeline_parallel_degree": 2, "micro_batches": 2}
BN: dict[str, Any] = {"sync_batch_norm": True}


def case(name: str, model: str, optimizer: str, ranks: int, **fields: Any) -> Any:
    return pytest.param(model, optimizer, ranks, Plan(**fields), id=f"{name}-{model}-{ranks}")


DATA = [
    *(case("data", model, "adam", ranks) for model in ("mlp", "conv", "words") for ranks in (2, 3)),
    case("data", "transformer", "adam", 4),
    case("data", "tables", "sgd", 2),
    case("data", "normalised", "sgd", 2, **BN),
    case("data", "normalised", "adam", 4, **BN),
    case("groups of batch norm", "normalised", "sgd", 2, **BN, batch_norm_group=2),
    case("small buckets", "deep", "adam", 2, bucket_bytes=300),
    case("middling buckets", "transformer", "sgd", 2, bucket_bytes=4000),
    case("one bucket", "transformer", "sgd", 3, bucket_bytes=1 << 26),
    case("clipped", "transformer", "adam", 2, clip_norm=0.5),
    case("accumulated", "mlp", "adam", 2, accumulate=3, bucket_bytes=300),
    case("accumulated", "transformer", "sgd", 3, accumulate=2, clip_norm=0.5),
    case("recomputed", "transformer", "adam", 2, recompute=True),
    case("lamb", "transformer", "lamb", 2),
    case("lars", "conv", "lars", 2),
]
SHARDED = [
    *(
        case(shard, model, "adam", ranks, shard=shard, clip_norm=0.5)
        for shard in ("optimizer", "gradients", "parameters")
        for model, ranks in (("mlp", 2), ("words", 3), ("transformer", 4), ("conv", 2))
    ),
    case("parameters in copies", "transformer", "adam", 4, shard="parameters", shard_degree=2),
    case("parameters recomputed", "transformer", "sgd", 2, shard="parameters", recompute=True, accumulate=2),
    case("lamb on gradients", "transformer", "lamb", 2, shard="gradients"),
    case("lamb on parameters", "mlp", "lamb", 2, shard="parameters"),
    case("batch norm", "normalised", "sgd", 2, shard="parameters", **BN),
]
DIVIDED = [
    *(case("tensor", model, "adam", 2, **T) for model in ("mlp", "words", "transformer", "conv")),
    case("tensor", "transformer", "sgd", 4, tensor_parallel_degree=4),
    case("sequence", "transformer", "adam", 2, **T, sequence_parallel=True),
    case("tensor recomputed", "transformer", "adam", 2, **T, recompute=True, clip_norm=0.5),
    case("spatial", "normalised", "sgd", 2, spatial_parallel_degree=2, **BN),
    case("spatial and data", "normalised", "adam", 4, spatial_parallel_degree=2, **BN, clip_norm=0.5),
    *(
        case(f"embeddings by {how}", "tables", optimizer, ranks, embeddings=how)
        for how, optimizer, ranks in (("row", "sgd", 2), ("table", "adam", 2), ("hybrid", "adam", 3))
    ),
    case("embeddings sharded", "tables", "adam", 4, embeddings="row", shard="optimizer"),
]
STAGED = [
    case("gpipe", "deep", "adam", 2, **P, pipeline_schedule="gpipe"),
    case("1f1b", "deep", "adam", 2, **P, pipeline_schedule="1f1b"),
    case("1f1b", "deep", "adam", 3, pipeline_parallel_degree=3, micro_batches=4, pipeline_schedule="1f1b"),
    case("1f1b", "deep", "sgd", 4, pipeline_parallel_degree=4, micro_batches=4, pipeline_schedule="1f1b"),
    case("interleaved", "deep", "adam", 2, **P, pipeline_schedule="interleaved", stages_per_rank=2),
    case("zero bubble", "deep", "adam", 2, **P, pipeline_schedule="zero_bubble"),
    case("zero bubble", "transformer", "sgd", 2, **P, pipeline_schedule="zero_bubble"),
    case("tied", "words", "sgd", 2, **P, clip_norm=0.5),
    case("tied", "transformer", "adam", 2, **P),
    case("recomputed", "transformer", "adam", 2, **P, recompute=True),
    case("split by hand", "deep", "sgd", 3, pipeline_parallel_degree=3, micro_batches=2, split=("4", "8")),
]
COMBINED = [
    case("tensor, parameters", "words", "adam", 4, **T, shard="parameters", clip_norm=0.5),
    case("tensor, gradients", "conv", "sgd", 4, **T, shard="gradients", clip_norm=0.5),
    case("tensor, optimizer", "transformer", "adam", 4, **T, shard="optimizer", sequence_parallel=True),
    case("pipeline, parameters", "deep", "sgd", 4, **P, shard="parameters", clip_norm=0.5),
    case("pipeline, optimizer", "words", "sgd", 4, **P, shard="optimizer", clip_norm=0.5),
    case("pipeline, tensor", "transformer", "adam", 4, **P, **T, clip_norm=0.5),
    case("zero bubble, gradients", "deep", "adam", 4, **P, pipeline_schedule="zero_bubble", shard="gradients"),
    case("interleaved, gradients", "deep", "adam", 4, **P, pipeline_schedule="interleaved", stages_per_rank=2,
         shard="gradients"),
]  # fmt: skip


@functools.cache
def one_process(
    model: str, optimizer: str, clip_norm: float | None = None, dtype: torch.dtype = torch.float64,
    autocast: bool = False,
) -> Any:  # fmt: skip
    """What a program without hocket gives on the same device, in a process that the tests share with no other."""
    return run_ranks(
        gpu_programs.plain, 1, model, optimizer, DEVICE, dtype, clip_norm, autocast, backend=None, timeout_s=TIMEOUT_S
    )[0]


def check(found: list[dict[str, Any]], expected: Any, losses: float = LOSSES, weights: float = WEIGHTS) -> None:
    wanted, state, metric = expected
    for rank in found:
        assert rank["losses"] == pytest.approx(wanted, rel=losses)
        assert rank["metric"] == pytest.approx(metric, rel=weights)
        assert all(device.startswith(DEVICE) for device in rank["devices"])
        assert rank["state"].keys() == state.keys()
        for key, value in state.items():
            np.testing.assert_allclose(rank["state"][key], value, rtol=weights, atol=weights, err_msg=key)


@pytest.mark.parametrize(("model", "optimizer", "ranks", "plan"), [*DATA, *SHARDED, *DIVIDED, *STAGED, *COMBINED])
def test_a_plan_loses_what_one_process_loses(model: str, optimizer: str, ranks: int, plan: Plan) -> None:
    found = run_ranks(gpu_programs.train, ranks, model, optimizer, DEVICE, plan, timeout_s=TIMEOUT_S)
    check(found, one_process(model, optimizer, plan.clip_norm))


def test_one_process_with_a_trainer_is_one_without() -> None:
    found = run_ranks(gpu_programs.train, 1, "transformer", "adam", DEVICE, Plan(), timeout_s=TIMEOUT_S)
    check(found, one_process("transformer", "adam"))


@pytest.mark.parametrize("model", ["mlp", "conv", "words", "transformer", "normalised", "tables"])
def test_the_gpu_loses_what_the_cpu_loses(model: str) -> None:
    losses, state, _ = one_process(model, "sgd")
    expected, weights, _ = run_ranks(gpu_programs.plain, 1, model, "sgd", "cpu", backend=None, timeout_s=TIMEOUT_S)[0]
    assert losses == pytest.approx(expected, rel=1e-9)
    for key, value in weights.items():
        np.testing.assert_allclose(state[key], value, rtol=1e-7, atol=1e-8, err_msg=key)


SINGLE = [
    pytest.param(Plan(), id="data"),
    pytest.param(Plan(shard="parameters"), id="parameters"),
    pytest.param(Plan(**T), id="tensor"),
    pytest.param(Plan(**P), id="pipeline"),
]


@pytest.mark.parametrize("plan", SINGLE)
def test_single_precision_loses_nearly_what_one_process_loses(plan: Plan) -> None:
    found = run_ranks(gpu_programs.train, 2, "transformer", "sgd", DEVICE, plan, torch.float32, timeout_s=TIMEOUT_S)
    check(found, one_process("transformer", "sgd", None, torch.float32), 1e-4, 1e-3)


@pytest.mark.parametrize("fields", [{}, {"shard": "gradients"}, {"shard": "parameters", "recompute": True}, P, T])
def test_bfloat16_loses_nearly_what_one_process_loses_in_bfloat16(fields: dict[str, Any]) -> None:
    plan = Plan(precision="bfloat16", **fields)
    wanted, _, _ = one_process("mlp", "adam", None, torch.float32, True)
    assert wanted != one_process("mlp", "adam", None, torch.float32)[0]
    for rank in run_ranks(gpu_programs.train, 2, "mlp", "adam", DEVICE, plan, torch.float32, timeout_s=TIMEOUT_S):
        assert rank["losses"] == pytest.approx(wanted, rel=2e-2)


@pytest.mark.parametrize("word", ["fp16", "bf16", "int8", "topk:0.5", "1bit", "terngrad", "powersgd:2"])
def test_compressed_gradients_train_nearly_as_well_and_alike_on_all_ranks(word: str) -> None:
    wanted = one_process("deep", "sgd")[0]
    found = run_ranks(gpu_programs.train, 2, "deep", "sgd", DEVICE, Plan(compression=word), timeout_s=TIMEOUT_S)
    for rank in found:
        assert rank["losses"] == found[0]["losses"]
        assert rank["losses"] == pytest.approx(wanted, rel=1e-3 if word in ("fp16", "bf16", "int8") else 0.2)
        for key, value in found[0]["state"].items():
            np.testing.assert_array_equal(rank["state"][key], value)


def test_compressed_gradients_of_two_shards_train_nearly_as_well() -> None:
    plan = Plan(compression="int8", shard="gradients")
    wanted = one_process("deep", "sgd")[0]
    for rank in run_ranks(gpu_programs.train, 2, "deep", "sgd", DEVICE, plan, timeout_s=TIMEOUT_S):
        assert rank["losses"] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("word", ["local:2", "stale:2", "ssp:4"])
def test_relaxed_synchronisation_trains(word: str) -> None:
    found = run_ranks(gpu_programs.relaxed, 2, DEVICE, word, timeout_s=TIMEOUT_S)
    for losses in found:
        assert losses == pytest.approx(found[0], rel=1e-9)
        assert losses[-1] < losses[0]


def test_a_plan_found_by_measurement_loses_what_one_process_loses(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    found = run_ranks(gpu_programs.by_measurement, 2, DEVICE, timeout_s=TIMEOUT_S, env=env)
    check(found, one_process("mlp", "adam"))
    assert found[0]["plan"] == found[1]["plan"]


@pytest.mark.skipif(DEVICE == "cpu", reason="it is refused on GPUs alone")
def test_parameters_in_the_memory_of_a_host_are_refused() -> None:
    with pytest.raises(RankError, match="keep the model on the CPU"):
        run_ranks(gpu_programs.relaxed, 2, DEVICE, "hogwild", timeout_s=TIMEOUT_S)


@pytest.mark.skipif(DEVICE == "cpu", reason="it is refused on GPUs alone")
def test_sending_by_priority_is_refused() -> None:
    with pytest.raises(RankError, match="from the CPU's memory only, and the model is on cuda:0"):
        run_ranks(gpu_programs.train, 2, "mlp", "sgd", DEVICE, Plan(priority=True), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("fields", [{}, T, P, {"shard": "parameters"}], ids=["data", "tensor", "pipeline", "sharded"])
def test_global_batches_on_the_gpu_are_cut_and_outputs_are_whole(fields: dict[str, Any]) -> None:
    (alone,) = run_ranks(gpu_programs.whole_batches, 1, "transformer", DEVICE, Plan(), timeout_s=TIMEOUT_S)
    for rank in run_ranks(gpu_programs.whole_batches, 2, "transformer", DEVICE, Plan(**fields), timeout_s=TIMEOUT_S):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=LOSSES)
        np.testing.assert_allclose(rank["output"], alone["output"], rtol=1e-7, atol=1e-8)
        assert rank["device"] == alone["device"] == DEVICE


# --- loops of the program's own ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("where", ["program", "pinned", "data set"])
@pytest.mark.parametrize("model", ["transformer", "normalised"])
def test_a_loop_of_one_s_own_loses_what_one_process_loses(model: str, where: str, ranks: int) -> None:
    ((losses, state),) = run_ranks(
        gpu_programs.own_loop, 1, model, DEVICE, where, False, backend=None, timeout_s=TIMEOUT_S
    )
    for found, weights in run_ranks(gpu_programs.own_loop, ranks, model, DEVICE, where, True, timeout_s=TIMEOUT_S):
        assert found == pytest.approx(losses, rel=LOSSES)
        for key, value in state.items():
            np.testing.assert_allclose(weights[key], value, rtol=WEIGHTS, atol=WEIGHTS, err_msg=key)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_loop_with_autocast_and_a_scaler_loses_nearly_what_one_process_loses(kind: str) -> None:
    args = "transformer", DEVICE, "program"
    ((losses, _),) = run_ranks(gpu_programs.own_loop, 1, *args, False, kind, backend=None, timeout_s=TIMEOUT_S)
    found = run_ranks(gpu_programs.own_loop, 2, *args, True, kind, timeout_s=TIMEOUT_S)
    for mine, weights in found:
        assert mine == pytest.approx(losses, rel=2e-2)
        for key, value in found[0][1].items():
            np.testing.assert_array_equal(weights[key], value)


# --- checkpoints ------------------------------------------------------------------------------------------------------

PLANS: dict[str, dict[str, Any]] = {
    "data": {},
    "optimizer": {"shard": "optimizer"},
    "parameters": {"shard": "parameters"},
    "tensor": T,
    "pipeline": P,
}


@pytest.mark.parametrize(("first", "second"), list(zip(PLANS, [*list(PLANS)[1:], "data"], strict=True)))
def test_a_checkpoint_goes_on_under_another_plan_and_in_one_process_on_the_cpu(
    tmp_path: Path, first: str, second: str
) -> None:
    model, path = "transformer", str(tmp_path / "checkpoint")
    losses, state, _ = one_process(model, "adam")
    one, other = Plan(**PLANS[first]), Plan(**PLANS[second])
    args = model, "adam", DEVICE
    for rank in run_ranks(gpu_programs.train, 2, *args, one, torch.float64, "", path, 4, timeout_s=TIMEOUT_S):
        assert rank["losses"] == pytest.approx(losses[:4], rel=LOSSES)
    ranks = 4 if second == "tensor" else 2
    again = run_ranks(gpu_programs.train, ranks, *args, other, torch.float64, path, timeout_s=TIMEOUT_S)
    cpu = run_ranks(gpu_programs.train, 1, model, "adam", "cpu", Plan(), torch.float64, path, timeout_s=TIMEOUT_S)
    for rank in (*again, *cpu):
        assert rank["losses"] == pytest.approx(losses[4:], rel=LOSSES)
        for key, value in state.items():
            np.testing.assert_allclose(rank["state"][key], value, rtol=WEIGHTS, atol=WEIGHTS, err_msg=key)


def test_a_checkpoint_of_the_cpu_goes_on_on_the_gpu(tmp_path: Path) -> None:
    losses, _, _ = one_process("transformer", "adam")
    args, path = ("transformer", "adam"), str(tmp_path / "checkpoint")
    run_ranks(gpu_programs.train, 2, *args, "cpu", Plan(shard="gradients"), torch.float64, "", path, 4)
    for rank in run_ranks(gpu_programs.train, 2, *args, DEVICE, Plan(**T), torch.float64, path, timeout_s=TIMEOUT_S):
        assert rank["losses"] == pytest.approx(losses[4:], rel=LOSSES)


@pytest.mark.parametrize("kind", ["fused", "capturable"])
@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
def test_state_that_lies_on_the_gpu_goes_on_there_and_on_the_cpu(tmp_path: Path, kind: str, shard: str) -> None:
    plan, path = Plan(shard=shard), str(tmp_path / "checkpoint")
    wanted = run_ranks(gpu_programs.fused, 1, DEVICE, Plan(), "", "", 6, kind, timeout_s=TIMEOUT_S)[0]
    for losses in run_ranks(gpu_programs.fused, 2, DEVICE, plan, "", path, 4, kind, timeout_s=TIMEOUT_S):
        assert losses == pytest.approx(wanted[:4], rel=LOSSES)
    again = run_ranks(gpu_programs.fused, 2, DEVICE, plan, path, "", 6, kind, timeout_s=TIMEOUT_S)
    if kind == "fused":  # what is capturable runs on no CPU
        again += run_ranks(gpu_programs.fused, 1, "cpu", Plan(), path, timeout_s=TIMEOUT_S)
    for losses in again:
        assert losses == pytest.approx(wanted[4:], rel=LOSSES)


@pytest.mark.parametrize("name", list(PLANS))
def test_dropout_goes_on_as_in_a_run_that_was_not_interrupted(tmp_path: Path, name: str) -> None:
    # Where a model is cut by times that were measured, a rank may have other layers in each run.
    cut = {"split": ("blocks.2",)} if name == "pipeline" else {}
    plan, path = Plan(**PLANS[name], **cut), str(tmp_path / "checkpoint")
    args = "dropout", "sgd", DEVICE, plan, torch.float64
    whole = run_ranks(gpu_programs.train, 2, *args, timeout_s=TIMEOUT_S)
    run_ranks(gpu_programs.train, 2, *args, "", path, 4, timeout_s=TIMEOUT_S)
    again = run_ranks(gpu_programs.train, 2, *args, path, timeout_s=TIMEOUT_S)
    for resumed, uninterrupted in zip(again, whole, strict=True):
        assert resumed["losses"] == pytest.approx(uninterrupted["losses"][4:], rel=1e-9)
    assert whole[0]["losses"] == whole[1]["losses"]


# --- models that are larger than what a rank holds --------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan(shard="parameters"), Plan(**T), Plan(**P)], ids=["shards", "tensor", "pipeline"])
def test_a_model_that_is_built_on_the_gpu_without_memory_loses_what_it_would_lose(plan: Plan) -> None:
    # The numbers are those of the device on which the model is built.
    (alone,) = run_ranks(gpu_programs.built_on_device, 1, DEVICE, Plan(), False, timeout_s=TIMEOUT_S)
    for rank in run_ranks(gpu_programs.built_on_device, 2, DEVICE, plan, True, timeout_s=TIMEOUT_S):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=LOSSES)
        assert rank["meta"]
        assert rank["held"] < 0.7 * alone["held"]
        for key, value in alone["state"].items():
            np.testing.assert_allclose(rank["state"][key], value, rtol=WEIGHTS, atol=WEIGHTS, err_msg=key)


def test_a_model_without_memory_that_is_moved_trains_or_is_refused_in_words() -> None:
    (alone,) = run_ranks(gpu_programs.deferred_and_moved, 1, "cpu", Plan(), timeout_s=TIMEOUT_S)
    for rank in run_ranks(gpu_programs.deferred_and_moved, 2, DEVICE, Plan(shard="parameters"), timeout_s=TIMEOUT_S):
        if isinstance(rank, str):
            assert "deferred" in rank
        else:
            assert rank == pytest.approx(alone, rel=LOSSES)


# --- what cannot work -------------------------------------------------------------------------------------------------

ALL_PLANS = [pytest.param(Plan(**fields), id=name) for name, fields in PLANS.items()]


@pytest.mark.skipif(DEVICE == "cpu", reason="on the CPU it is right")
@pytest.mark.parametrize("plan", ALL_PLANS)
def test_a_batch_on_the_cpu_gives_every_rank_an_error_in_words(plan: Plan) -> None:
    for said, after_s in run_ranks(gpu_programs.failing, 2, DEVICE, "batch on the CPU", plan, timeout_s=TIMEOUT_S):
        assert "cpu" in said
        assert "cuda" in said
        assert after_s < deadline(25)


@pytest.mark.parametrize("plan", ALL_PLANS)
def test_a_rank_that_runs_out_of_memory_gives_every_rank_an_error_in_words(plan: Plan) -> None:
    for said, after_s in run_ranks(gpu_programs.failing, 2, DEVICE, "out of memory", plan, timeout_s=TIMEOUT_S):
        assert "allocate" in said
        assert after_s < deadline(25)


def test_a_model_half_on_the_gpu_and_half_on_the_cpu_loses_what_one_process_loses() -> None:
    (alone,) = run_ranks(gpu_programs.halves, 1, DEVICE, Plan(), timeout_s=TIMEOUT_S)
    for losses in run_ranks(gpu_programs.halves, 2, DEVICE, Plan(bucket_bytes=300), timeout_s=TIMEOUT_S):
        assert losses == pytest.approx(alone, rel=LOSSES)


def hocket(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hocket", *arguments], cwd=tmp_path, capture_output=True, text=True,
        timeout=deadline(150), check=False, env={**os.environ, **variables},
    )  # fmt: skip


STRANGE = """
import torch
import hocket
model = torch.nn.Linear(3, 2).to("cuda:7")
hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


@pytest.mark.skipif(DEVICE == "cpu", reason="it is about GPUs")
def test_a_gpu_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "strange.py").write_text(STRANGE)
    done = hocket(tmp_path, "run", "-n", "2", "strange.py")
    assert done.returncode != 0
    assert "invalid device ordinal" in done.stdout + done.stderr


# --- what a run says of itself ----------------------------------------------------------------------------------------

RECORDED = """
import torch
import hocket
device = "DEVICE"
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to(device)
data = torch.utils.data.TensorDataset(torch.randn(640, 512))
trainer = hocket.Trainer(model, lambda out, _: out.square().mean(), torch.optim.SGD(model.parameters(), lr=0.01))
loader = torch.utils.data.DataLoader(data, 16)
for batch in trainer.batches(loader):
    x = batch[0].to(device)
    loss = trainer.step((x, x))
print("loss", float(loss))
"""


def test_a_run_is_explained_with_computation_and_communication_apart(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RECORDED.replace("DEVICE", DEVICE))
    record = str(tmp_path / "record")
    done = hocket(tmp_path, "run", "-n", "2", "train.py", HOCKET_RECORD=record)
    assert done.returncode == 0, done.stdout + done.stderr
    told = hocket(tmp_path, "explain", record, "--json")
    assert told.returncode == 0, told.stdout + told.stderr
    found = json.loads(told.stdout)
    assert found, told.stdout
    from hocket.explain import explain

    parts = explain(Path(record)).parts
    assert parts is not None
    seconds = dict(parts.means())
    print(seconds)
    assert all(value >= 0 for value in seconds.values())
    assert sum(seconds.values()) == pytest.approx(parts.step_s, rel=1e-6)
    assert seconds["computation"] > 0
    assert any(value > 0 for name, value in seconds.items() if "reduc" in name or "communication" in name)


OPTIONS: dict[str, list[str]] = {"resnet50": ["--synthetic"], "recommender": ["--synthetic"]}


def bundled(tmp_path: Path, name: str, ranks: int) -> None:
    arguments = ["train", name, "-n", str(ranks), "--device", DEVICE, "--size", "tiny", "--steps", "4", "--json"]
    done = hocket(tmp_path, *arguments, "--out", str(tmp_path / "run"), *OPTIONS.get(name, []))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "finished"
    assert result["training"]["steps"] == 4
    assert result["placement"]["gpus"] == (0 if DEVICE == "cpu" else torch.cuda.device_count())


def test_edsr_trains_from_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("skimage", reason="edsr needs the extra `workloads`")
    bundled(tmp_path, "edsr", 2)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", names())
def test_every_bundled_workload_trains_from_the_command_line(tmp_path: Path, name: str, ranks: int) -> None:
    bundled(tmp_path, name, ranks)
