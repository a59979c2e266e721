"""A model whose weights alone no rank may allocate: built, trained, saved, exported, and loaded by transformers."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import hocket
from hocket.planner import Plan
from hocket.testing import deadline, run_ranks

MIB = 2**20
M_MMAP_THRESHOLD = -3  # of malloc.h: freed blocks go back to the system, and do not stay between others by chance


def config() -> Any:
    """Weights of 330 MiB, in 30 blocks of 11 MiB; what is on its way to a file besides is 32 MiB or less."""
    import transformers

    sizes = {"hidden_size": 416, "intermediate_size": 1664, "num_hidden_layers": 31, "num_attention_heads": 8}
    return transformers.LlamaConfig(vocab_size=512, max_position_embeddings=16, use_cache=False, **sizes)


def model_of(settings: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(settings)


def batch() -> dict[str, torch.Tensor]:
    """Few tokens: activations, which grow with them and with the layers, are not what this test is about."""
    ids = torch.randint(512, (4, 3), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def status_nbytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def limit(spare_nbytes: int) -> None:
    """From here on this process can allocate no more than this beyond what it has."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 4)
    resource.setrlimit(resource.RLIMIT_DATA, (status_nbytes("VmData:") + spare_nbytes,) * 2)


def alone(spare_nbytes: int) -> str:
    limit(spare_nbytes)
    try:
        return f"{sum(p.nbytes for p in model_of(config()).parameters())} bytes were allocated"
    except (RuntimeError, MemoryError) as error:
        return str(error)


def together(spare_nbytes: int, folder: str) -> tuple[list[float], int]:
    """The losses of three steps, the last two after a save and a load; by how much the resident peak rises."""
    warm(folder)
    limit(spare_nbytes)
    before = status_nbytes("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    made = hocket.deferred(model_of, config())
    trainer = hocket.Trainer(made, None, lambda p: torch.optim.SGD(p, lr=0.1), Plan(shard="parameters"))
    losses = [float(trainer.step(batch()))]
    trainer.save(f"{folder}/checkpoint")
    trainer.step(batch())
    trainer.load(f"{folder}/checkpoint")
    losses += [float(trainer.step(batch())) for _ in range(2)]
    trainer.save_model(f"{folder}/exported")
    return losses, status_nbytes("VmHWM:") - before


def warm(folder: str) -> None:
    """Import and map what any training, saving and exporting needs: libraries are no part of a model."""
    settings = config()
    settings.num_hidden_layers = 1
    trainer = hocket.Trainer(model_of(settings), None, lambda p: torch.optim.SGD(p, lr=0.1), Plan(shard="parameters"))
    trainer.step(batch())
    trainer.save(f"{folder}/warm")
    trainer.load(f"{folder}/warm")
    trainer.save_model(f"{folder}/warm-exported")


@pytest.mark.long
@pytest.mark.timeout(deadline(180))
def test_a_model_that_no_rank_may_allocate_is_built_trained_saved_exported_and_loaded(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    plain = model_of(config())
    nbytes = sum(p.nbytes for p in plain.parameters())
    spare = int(0.8 * nbytes)
    assert "allocate" in run_ranks(alone, 1, spare, backend=None, timeout_s=100)[0]
    ranks = run_ranks(together, 4, spare, str(tmp_path), timeout_s=150)
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(**batch()).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    for found, peak in ranks:
        assert peak < nbytes, (peak / MIB, nbytes / MIB)  # shared memory, which the limit does not count, included
        assert found == pytest.approx(losses, rel=1e-5)  # sums in float32 in another order
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    read = hocket.read_state_dict(tmp_path / "exported")
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
        assert torch.equal(loaded.state_dict()[name], read[name])
