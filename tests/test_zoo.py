"""A sample of the zoo: some of its models by every plan, equal to one process or refused by a reason of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hocket.testing import deadline

ROOT = Path(__file__).parents[1]
SAMPLE = ["nanoGPT", "nn.TransformerEncoder", "siamese, dicts", "contrastive, in-batch negatives",
          "GRU over PackedSequence", "branch on self.training", "parameters used directly", "DLRM", "deberta-v2",
          "llama", "gpt2", "mixtral", "bert", "llama, padded, labels", "LoRA on llama"]  # fmt: skip

PLANS = ["data", "parameters", "tensor", "sequence", "pipeline-2", "pipeline-4", "hybrid"]


@pytest.mark.long
@pytest.mark.timeout(deadline(900))
@pytest.mark.parametrize("plan", PLANS)
def test_models_that_we_have_not_written_are_trained_as_by_one_process(plan: str, tmp_path: Path) -> None:
    """Half of the sample by each plan, the other half by the next one."""
    names = SAMPLE[PLANS.index(plan) % 2 :: 2]
    for package in ("transformers", "diffusers", "peft", "einops"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "benchmarks.zoo", "--entries", ";".join(names), "--plans", plan]
    ran = subprocess.run(
        [*command, "--keep", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=deadline(880)
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("| =") >= 4, ran.stdout
