"""Published figures: what the scripts of benchmarks/predictions reach is held here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "predictions"


@pytest.fixture(scope="module")
def script() -> object:
    def load(name: str) -> ModuleType:
        sys.path.insert(0, str(FOLDER))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(FOLDER))

    return load


@pytest.fixture(scope="module")
def models(script: object) -> ModuleType:
    assert callable(script)
    found: ModuleType = script("language_models")
    return found


def test_megatron_s_iterations_up_to_145_6b_are_within_10_percent(models: ModuleType) -> None:
    errors = models.errors(models.CONSTANTS)
    rows = [row.shape for row in models.MEGATRON if row.seconds]
    assert len(rows) == 7
    assert max(abs(errors[name]) for name in rows) < 0.10


def test_korthikanti_s_iterations_are_within_5_percent_with_the_same_constants(models: ModuleType) -> None:
    errors = models.errors(models.CONSTANTS)
    names = [f"{shape} {how}" for shape in ("22b", "175b") for how in ("full", "selective")]
    assert max(abs(errors[name]) for name in names) < 0.05


def test_activations_of_22b_are_within_3_percent(models: ModuleType) -> None:
    found = models.activations()
    for name, gib in models.ACTIVATIONS_GIB.items():
        assert found[name] == pytest.approx(gib, rel=0.03)
    for name, percent in models.ACTIVATION_PERCENT.items():
        assert 100 * found[name] / found["none"] == pytest.approx(percent, rel=0.03)
    assert models.state_gib() == pytest.approx(models.STATE_GIB, rel=0.001)


def test_the_default_constants_are_those_of_the_fit(models: ModuleType) -> None:
    found = models.fit()
    assert found.matmul_share == pytest.approx(models.CONSTANTS.matmul_share, abs=0.005)
    assert found.memory_share == pytest.approx(models.CONSTANTS.memory_share, abs=0.005)


def test_edsr_s_table_is_predicted_from_16_gpus_within_6_percent(script: object) -> None:
    assert callable(script)
    errors = script("edsr").errors()
    assert {n for _, n in errors} == {1, 2, 4, 8, 16, 32, 64}
    assert max(abs(error) for error in errors.values()) < 0.06


def test_nccl_s_sweep_on_8_a100_is_predicted_from_five_sizes(script: object) -> None:
    assert callable(script)
    nccl = script("nccl")
    errors = nccl.errors(nccl.A100, nccl.A100_FITTED)
    assert len(nccl.A100_FITTED) == 5
    median, worst = nccl.judged(errors, nccl.A100_FITTED)
    assert median < 0.07
    assert worst < 0.20


def test_torchgpipe_s_pipelines_of_8_devices_follow_from_those_of_2_and_4(script: object) -> None:
    assert callable(script)
    torchgpipe = script("torchgpipe")
    *constants, times = torchgpipe.fit()
    assert times < 1.2
    for row in torchgpipe.ROWS[6:]:
        assert torchgpipe.rate(row, *constants) == pytest.approx(row.rate, rel=0.07)


@pytest.mark.long
def test_torchtitan_s_llama_8b_on_h100_is_told_apart_uncompiled_compiled_and_in_float8(script: object) -> None:
    assert callable(script)
    llama = script("llama")
    ratios = llama.ratios()
    found = {(run.on, run.shape, run.workers, run.batch, run.name): ratio for run, ratio, _ in ratios}
    assert sum(run.fitted for run in llama.RUNS) == 3  # one of each kind of device
    for workers, batch in ((8, 16), (128, 256)):
        for name, most in (("FSDP", 0.03), ("compiled", 0.01), ("compiled, Float8", 0.06)):
            assert found["h100-like", "8b", workers, batch, name] == pytest.approx(1, abs=most)
    # torchtitan and Llama 3 reduce gradients of stages beside other passes, which the Trainer does not.
    deep = [ratio for run, ratio, _ in ratios if run.shape in ("70b", "405b")]
    assert deep == [pytest.approx(1, abs=0.12)] * 5
    assert 0.55 < llama.fused_share() < 0.7


def test_sharded_parameters_on_a100_take_what_mpt_s_trainings_took(script: object) -> None:
    assert callable(script)
    blind = script("blind")
    rows = [one for one in (*blind.BLIND, *blind.KNOWN) if one.tokens and one.on == "selene-like"]
    found = {(one.name, one.workers): one for one in rows}
    for name, workers, most in (("MPT-13B, 2048 tokens", 8, 0.07), ("MPT-70B, 2048 tokens", 32, 0.02)):
        one = found[name, workers]
        said = blind.predicted(one)
        assert said.throughput * one.sequence / workers == pytest.approx(one.tokens, rel=most), name
