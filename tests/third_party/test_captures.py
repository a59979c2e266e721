"""Models of Transformers, captured on the meta device and on the CPU."""

import pytest
import torch

from hocket.workload import capture

pytestmark = [pytest.mark.third_party, pytest.mark.timeout(600)]

COMMON = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": None,
}  # fmt: skip
KINDS = {
    "Llama": {},
    "Gemma2": {},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GptOss": {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_flops_on_meta_are_those_on_the_cpu(kind):
    """Decoders ask for values of positions, and experts take grouped products in bfloat16 only, on meta."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **KINDS[kind]})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    tokens = torch.randint(0, 100, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    here = capture(model, batch, degrees=(), repeats=1)
    there = capture(model, batch, device="meta", degrees=())
    assert there.flops == pytest.approx(here.flops, rel=0.001)
    assert there.parameters == here.parameters
