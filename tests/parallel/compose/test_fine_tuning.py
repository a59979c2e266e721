"""Fine-tuning causal language models of Hugging Face with padded batches loses what one process loses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.testing import deadline

from .. import fine_tuning_programs as programs


@pytest.mark.long
@pytest.mark.timeout(deadline(400))
@pytest.mark.parametrize("ranks", [2, 4])
def test_padded_batches_lose_what_one_process_loses(ranks: int, tmp_path: Path) -> None:
    """Ranks are processes, each of which orders its sets by hashes of its own, as under launchers of others."""
    pytest.importorskip("transformers")
    env = {**os.environ, "PYTHONHASHSEED": "random"}
    command = [sys.executable, "-m", "hocket", "run", "-n", str(ranks), programs.__file__, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=deadline(350), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    heard = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert len({one["hash"] for one in heard}) == ranks
    wanted = {name: programs.tune(name, None) for name in ("gpt2", "llama")}
    for name in heard[0]["found"]:
        for one in heard:
            assert one["found"][name] == pytest.approx(wanted[name.partition(",")[0]], rel=1e-6), name
