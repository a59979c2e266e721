"""A sample of the zoo: some of its models by every plan, equal to one process or refused by a reason of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.testing import deadline, run_ranks

ROOT = Path(__file__).parents[1]
SAMPLE = ["nanoGPT", "nn.TransformerEncoder", "siamese, dicts", "contrastive, in-batch negatives",
          "GRU over PackedSequence", "branch on self.training", "parameters used directly", "DLRM", "deberta-v2",
          "llama", "gpt2", "mixtral", "bert", "llama, padded, labels", "LoRA on llama"]  # fmt: skip

PLANS = ["data", "parameters", "tensor", "sequence", "pipeline-2", "pipeline-4", "hybrid"]
BY_COMMAND = "data"


def half(plan: str) -> list[str]:
    """Half of the sample by each plan, the other half by the next one."""
    return SAMPLE[PLANS.index(plan) % 2 :: 2]


def outcomes(plans: list[str]) -> dict[str, dict[str, Any]]:
    from benchmarks.zoo import load
    from benchmarks.zoo.entries import ENTRIES
    from benchmarks.zoo.plans import PLANS
    from benchmarks.zoo.worker import outcome

    load()
    torch.set_num_threads(1)
    return {plan: {name: outcome(ENTRIES[name], PLANS[plan].fields) for name in half(plan)} for plan in plans}


@pytest.fixture(autouse=True)
def installed() -> None:
    for package in ("transformers", "diffusers", "peft", "einops"):
        pytest.importorskip(package)


@pytest.mark.long
@pytest.mark.timeout(deadline(900))
@pytest.mark.parametrize("ranks", [2, 4])
def test_models_that_we_have_not_written_are_trained_as_by_one_process(ranks: int) -> None:
    from benchmarks.zoo.__main__ import verdict

    plans = [plan for plan in PLANS if plan != BY_COMMAND and (plan == "hybrid") == (ranks == 4)]
    found = run_ranks(outcomes, ranks, plans, timeout_s=880, group_timeout_s=120)
    for plan in plans:
        verdicts = []
        for name in half(plan):
            lines = [one[plan][name] for one in found]
            for line in lines:
                line["alike"] = len({one.get("error") for one in lines}) == 1
            verdicts += [verdict(line) for line in lines]
            assert {"WRONG", "RAW"}.isdisjoint(verdicts), (plan, name, lines)
        assert verdicts.count("=") >= 4 * ranks, plan


@pytest.mark.long
@pytest.mark.timeout(deadline(900))
def test_the_command_says_so_of_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.zoo", "--entries", ";".join(half(BY_COMMAND)), "--plans", BY_COMMAND]
    ran = subprocess.run(
        [*command, "--keep", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=deadline(880)
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("| =") >= 4, ran.stdout
