"""Fine-tuning a causal language model of Hugging Face with padded batches loses what one process loses."""

from __future__ import annotations

import pytest

from hocket.testing import deadline, run_ranks

from .. import fine_tuning_programs as programs


@pytest.mark.long
@pytest.mark.timeout(deadline(240))
@pytest.mark.parametrize("ranks", [2, 4])
def test_padded_batches_lose_what_one_process_loses(ranks: int) -> None:
    pytest.importorskip("transformers")
    found = run_ranks(programs.tune_all, ranks, ranks, timeout_s=200)
    wanted = programs.tune(None)
    for name in found[0]:
        for rank in found:
            assert rank[name] == pytest.approx(wanted, rel=1e-6), name
