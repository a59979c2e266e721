"""What transformers has besides: every other model type of which a small configuration can be made by rule.

No entry was written for its model: a configuration gets the small numbers that it has fields for, and a batch is one of
words, pictures or sentences. Left out are types that are no models of their own then (parts of others, those that want
other packages), or take ten seconds for a step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers
from torch import nn

from .entries import add, classes, next_token, pictures, sentences, words
from .hugging_face import NO_DROPOUT, SMALL, Seq2Seq, translations

FAMILY = "further"

KINDS = {
    "AutoModelForCausalLM": """
        afmoe apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid beam bert-generation big_bird bigbird_pegasus
        bitnet blenderbot-small camembert cohere2 cohere2_moe cpmant ctrl cwm data2vec-text deepseek_v2 deepseek_v32
        deepseek_v4 doge dory dots1 emu3 ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint fuyu
        gemma3 gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm glm4_moe glm4_moe_lite
        glm_moe_dsa got_ocr2 gpt-sw3 gpt_neox_japanese granite_swa granitemoe_swa granitemoehybrid granitemoeshared
        helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling_text internlm3 iquestcoder jais2
        kolibri1 laguna lara_mini lfm3 llama4 llama4_text longcat_flash megatron-bert mellum mimo_v2_flash minicpm3
        minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mllama modernbert-decoder moshi
        moss_transcribe_diarize mvp nanochat nemotron_h olmo3 olmo_hybrid openai-gpt persimmon phimoe plbart prophetnet
        qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next rembert roberta-prelayernorm sarvam_mla sarvam_moe
        seed_oss solar_open trocr vaultgemma xlm xlm-roberta-xl xlnet xlstm youtu
    """,
    "AutoModelForMaskedLM": """
        big_bird deberta eurobert flaubert gte ibert jina_embeddings_v3 layoutlm longformer mobilebert modernvbert mra
        nomic_bert tapas ultrabert ultravbert yoso
    """,
    "AutoModelForSequenceClassification": "canine markuplm t5gemma",
    "AutoModelForImageClassification": """
        data2vec-vision dinov2_with_registers ijepa metaclip_2 mobilenet_v1 mobilenet_v2 pvt_v2 siglip swiftformer
        vit_msn
    """,
    "AutoModelForSeq2SeqLM": """
        bigbird_pegasus blenderbot-small encoder-decoder fsmt led mvp nllb-moe pegasus_x plbart prophetnet seamless_m4t
        seamless_m4t_v2 switch_transformers t5gemma umt5
    """,
}

WIDTHS = (
    "n_embed emb_dim true_hidden_size intra_bottleneck_size bottleneck_size projection_size dim_model "
    "moe_shared_expert_intermediate_size moe_ffn_hidden_size expert_ffn_hidden_size moe_inter_dim "
    "shared_intermediate_size expert_intermediate_size"
)
INNER = (
    "ffn_hidden_size encoder_ffn_embed_dim decoder_ffn_embed_dim decoder_ffn_size dense_intermediate_size mamba_d_ssm "
    "dim_ff d_inner n_ctx max_seq_len max_source_positions max_target_positions"
)
EIGHT = (
    "qk_nope_head_dim qk_rope_head_dim v_head_dim mamba_n_heads mamba_d_head mamba_d_state mamba_num_heads "
    "mamba_head_dim ssm_state_size state_size mamba_chunk_size chunk_size linear_key_head_dim linear_value_head_dim "
    "sliding_window local_attention hidden_size_per_layer_input laurel_rank index_head_dim index_topk "
    "attention_head_size dim_head lightning_nope_head_dim block_size lora_rank d_head lora_rank_decay lora_rank_iclr "
    "lora_rank_gate"
)
FEW = (
    "num_experts_per_token moe_k moe_topk num_attention_groups n_kv_heads multi_query_group_num n_mamba_heads "
    "mamba_expand linear_num_key_heads altup_num_inputs index_n_heads num_encoder_layers encoder_num_hidden_layers "
    "decoder_num_hidden_layers"
)
ONE = (
    "n_shared_experts num_shared_experts n_group topk_group num_expert_group first_k_dense_replace num_dense_layers "
    "mamba_n_groups num_memory_blocks num_ngram_layers num_random_blocks num_hidden_groups"
)
OTHERS: dict[str, Any] = {
    **dict.fromkeys(WIDTHS.split(), 32),
    **dict.fromkeys(INNER.split(), 64),
    **dict.fromkeys(EIGHT.split(), 8),
    **dict.fromkeys(FEW.split(), 2),
    **dict.fromkeys(ONE.split(), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("moe_num_experts", "linear_num_value_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers"), 0),
    **dict.fromkeys(("residual_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0),
    "vocab_size_per_layer_input": 96,
    "conv_L_cache": 3,
    "num_encoder_attention_heads": 4,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "mask_token_id": 3,
    "unk_token_id": 3,
    "image_token_id": 90,
    "video_token_id": 91,
    "audio_token_id": 92,
    "boi_token_id": 93,
    "eoi_token_id": 94,
    "image_token_index": 90,
    "video_token_index": 91,
    "audio_token_index": 92,
}
"""What a configuration has of these is set so, too."""


def fields_of(plain: Any) -> dict[str, Any]:
    """The small numbers that a configuration of this type has fields for."""
    found = {name: value for name, value in {**SMALL, **OTHERS}.items() if settable(plain, name)}
    for name in NO_DROPOUT:
        if isinstance(before := read(plain, name), int | float):
            found[name] = type(before)(0)
    if {"kv_lora_rank", "num_key_value_heads"} <= found.keys():  # every head has its own keys there
        found["num_key_value_heads"] = 4
    kinds = read(plain, "layer_types")
    if isinstance(kinds, list | tuple) and kinds:  # one layer of each kind, in their order
        each = sorted(set(kinds), key=list(kinds).index)
        found["layer_types"] = (each * 2)[: max(2, len(each))]
        found |= {name: len(found["layer_types"]) for name in ("num_hidden_layers", "num_layers") if name in found}
    kinds = read(plain, "mlp_layer_types")
    if isinstance(kinds, list | tuple) and kinds:
        each, count = sorted(set(kinds), key=list(kinds).index), len(found.get("layer_types", (0, 0)))
        found["mlp_layer_types"] = (each * count)[:count]
    return found


def read(plain: Any, name: str) -> Any:
    """A field; None where there is none, or where it differs from layer to layer."""
    try:
        return getattr(plain, name, None)
    except Exception:
        return None


def settable(plain: Any, name: str) -> bool:
    """Whether a configuration has a field of this name with a plain value."""
    try:
        there = hasattr(plain, name) and not isinstance(getattr(type(plain), name, None), property)
    except Exception:  # it differs from layer to layer: it may be set for all
        return True
    return there and not isinstance(read(plain, name), list | tuple | dict)


def configuration(kind: str, **own: Any) -> Any:
    """A small configuration of a model type, and of the types that it consists of."""
    of = transformers.CONFIG_MAPPING[kind]
    plain = of()
    parts = {name: one for name, one in vars(plain).items() if isinstance(one, transformers.PretrainedConfig)}
    inner = {name: type(one)(**fields_of(one)) for name, one in parts.items()}
    return of(**{**fields_of(plain), **inner, **own})


def model(auto: str, kind: str) -> nn.Module:
    """A model for a task."""
    own = {"num_labels": 10} if auto.endswith("Classification") else {}
    made: nn.Module = getattr(transformers, auto).from_config(configuration(kind, **own))
    return Seq2Seq(made) if auto == "AutoModelForSeq2SeqLM" else made


BATCHES: dict[str, Any] = {
    "AutoModelForCausalLM": (words(), next_token),
    "AutoModelForMaskedLM": (words(), next_token),
    "AutoModelForSequenceClassification": (sentences(10), classes),
    "AutoModelForImageClassification": (pictures(), classes),
    "AutoModelForSeq2SeqLM": (translations, next_token),
}
for auto, kinds in KINDS.items():
    for kind in kinds.split():
        add(f"{auto.removeprefix('AutoModelFor')} {kind}", FAMILY, partial(model, auto, kind), *BATCHES[auto])
