"""Fine-tuning causal language models of Hugging Face with padded batches: on one device, and under plans.

hocket run -n 2 tests/parallel/fine_tuning_programs.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import hocket
from hocket.planner import Plan

PLANS = {
    2: {
        "data": Plan(),
        "accumulate": Plan(accumulate=2),
        "optimizer": Plan(shard="optimizer"),
        "gradients": Plan(shard="gradients"),
        "parameters": Plan(shard="parameters"),
        "tensor": Plan(tensor_parallel_degree=2),
        "sequence": Plan(tensor_parallel_degree=2, sequence_parallel=True),
        "pipeline": Plan(pipeline_parallel_degree=2, micro_batches=2),
        "whole pipeline": Plan(pipeline_parallel_degree=2),
    },
    4: {
        "data x pipeline": Plan(pipeline_parallel_degree=2, micro_batches=2),
        "tensor x pipeline": Plan(pipeline_parallel_degree=2, tensor_parallel_degree=2, micro_batches=2),
        "optimizer x tensor": Plan(shard="optimizer", tensor_parallel_degree=2),
        "parameters x tensor": Plan(shard="parameters", tensor_parallel_degree=2),
    },
}


def texts() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 16, (20,), generator=random).tolist()
    return [(torch.arange(n) + int(torch.randint(50, (1,), generator=random))) % 50 for n in lengths]


def padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    sizes = torch.tensor([len(one) for one in samples])
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    mask = torch.arange(ids.shape[1]) < sizes[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def model_of(name: str) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    if name == "llama":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 16}
        return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=50, **sizes, **heads))
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes))


def tune(name: str, plan: Plan | str | None) -> Any:
    """The losses of all batches of two epochs, the last of which has half of the samples; or what was raised."""
    model = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(2)
    loader: Any = DataLoader(texts(), batch_size=8, shuffle=True, collate_fn=padded)
    losses = []
    if isinstance(plan, Plan):
        try:
            trainer = hocket.Trainer(model, None, optimizer, plan, sample=padded(texts()[:8]))
            for _ in range(2):
                losses += [float(trainer.step(batch)) for batch in trainer.batches(loader)]
        except Exception:
            return traceback.format_exc()
        return losses
    if plan == "distribute":
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item() if plan is None else hocket.average(loss.item()))
    return losses


def tune_all(ranks: int) -> dict[str, Any]:
    """By model and plan."""
    plans: dict[str, Plan | str] = {"distribute": "distribute", **PLANS[ranks]}
    return {f"{name}, {key}": tune(name, plan) for name in ("gpt2", "llama") for key, plan in plans.items()}


if __name__ == "__main__":
    found = tune_all(int(os.environ["WORLD_SIZE"]))
    file = Path(sys.argv[1]) / f"{os.environ['RANK']}.json"
    file.write_text(json.dumps({"hash": hash("a word"), "found": found}))
