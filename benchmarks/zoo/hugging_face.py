"""Models of the package transformers, from small configurations with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from .entries import add, classes, next_token, numbers, pictures, sentences, squares, words

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "encoder_hidden_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "head_dim": 8,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_ff": 64,
    "d_kv": 8,
    "hidden_dim": 64,
    "embedding_size": 32,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_inner": 64,
    "image_size": 32,
    "patch_size": 8,
    "use_cache": False,
}
"""What a configuration has of these is set so."""

NO_DROPOUT = (
    "attention_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "activation_dropout",
    "dropout_rate",
    "classifier_dropout",
    "summary_first_dropout",
    "attn_dropout",
    "resid_dropout",
    "embedding_dropout",
    "drop_path_rate",
    "layerdrop",
    "encoder_layerdrop",
    "decoder_layerdrop",
    "feat_proj_dropout",
    "final_dropout",
    "classifier_dropout_prob",
    "pooler_dropout",
    "seq_classif_dropout",
)


def configuration(kind: str, **own: Any) -> Any:
    """A small configuration of a model type."""
    of = transformers.CONFIG_MAPPING[kind]
    plain = of()
    fields = {name: value for name, value in SMALL.items() if settable(plain, name)}
    fields |= {
        name: type(getattr(plain, name))(0)
        for name in NO_DROPOUT
        if isinstance(getattr(plain, name, None), int | float)
    }
    if "depths" in own:  # stages of unequal widths: most of the small numbers mean something else there
        fields = {name: value for name, value in fields.items() if name == "image_size" or name in NO_DROPOUT}
    return of(**{**fields, **own})


def settable(plain: Any, name: str) -> bool:
    """Whether a configuration has a field of this name, and not a property that follows from others."""
    return hasattr(plain, name) and not isinstance(getattr(type(plain), name, None), property)


def model(auto: str, kind: str, **own: Any) -> nn.Module:
    """A model for a task, with plain attention unless it has none."""
    if auto.endswith("Classification"):
        own = {"num_labels": 10, **own}
    made: nn.Module = getattr(transformers, auto).from_config(configuration(kind, **own))
    return made


CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "granite": {},
    "stablelm": {},
    "starcoder2": {},
    "cohere": {},
    "glm4": {},
    "nemotron": {},
    "smollm3": {},
    "apertus": {},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "gpt2": {},
    "opt": {},
    "bloom": {},
    "falcon": {},
    "mpt": {},
    "codegen": {"rotary_dim": 4},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "xglm": {},
    "biogpt": {},
    "diffllama": {},
    "lfm2": {},
    "mamba": {},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "falcon_mamba": {},
    "recurrent_gemma": {},
    "rwkv": {},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "olmoe": {},
    "granitemoe": {},
    "gpt_oss": {},
    "jetmoe": {},
    "deepseek_v3": {
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
    },
}
for kind, own in CAUSAL.items():
    add(kind, "transformers", lambda k=kind, o=own: model("AutoModelForCausalLM", k, **o), words(), next_token)  # type: ignore[misc]

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "distilbert": {},
    "albert": {},
    "electra": {},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "mpnet": {},
    "squeezebert": {
        "q_groups": 1,
        "k_groups": 1,
        "v_groups": 1,
        "post_attention_groups": 1,
        "intermediate_groups": 1,
        "output_groups": 1,
    },
    "roformer": {},
    "modernbert": {},
    "xlm-roberta": {},
    "esm": {"position_embedding_type": "rotary"},
    "convbert": {},
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 12},
    "fnet": {},
    "funnel": {"block_sizes": [1, 1]},
}
for kind, own in ENCODERS.items():
    add(
        kind,
        "transformers",
        lambda k=kind, o=own: model("AutoModelForSequenceClassification", k, **o),
        sentences(10),
        classes,
    )  # type: ignore[misc]


def translations(samples: int, generator: torch.Generator) -> Any:
    """Two sentences of word numbers each: what is read, what is written; and the latter, one further."""
    read = torch.randint(3, 96, (samples, 10), generator=generator)
    write = torch.randint(3, 96, (samples, 9), generator=generator)
    return read, write[:, :-1].contiguous(), write[:, 1:].contiguous()


class Seq2Seq(nn.Module):
    """A model that reads one sentence and writes another, called by position."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, read: torch.Tensor, write: torch.Tensor) -> Any:
        return self.inner(input_ids=read, decoder_input_ids=write)


for kind in ("t5", "mt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "longt5"):
    add(kind, "transformers", lambda k=kind: Seq2Seq(model("AutoModelForSeq2SeqLM", k)), translations, next_token)  # type: ignore[misc]

VISION: dict[str, dict[str, Any]] = {
    "vit": {},
    "beit": {},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "convnext": {"num_stages": 4, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "convnextv2": {"num_stages": 4, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "dinov2": {},
    "segformer": {
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 32,
    },
    "poolformer": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "pvt": {
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4],
        "patch_sizes": [4, 2, 2, 2],
    },
}
for kind, own in VISION.items():
    add(
        kind,
        "transformers",
        lambda k=kind, o=own: model("AutoModelForImageClassification", k, **o),
        pictures(),
        classes,
    )  # type: ignore[misc]
for kind, own in {
    "resnet": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "embedding_size": 16, "layer_type": "basic"},
    "regnet": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "embedding_size": 16, "groups_width": 8},
    "mobilevit": {
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
        "patch_size": 2,
        "last_hidden_size": 32,
    },
}.items():
    add(
        kind,
        "transformers",
        lambda k=kind, o=own: model("AutoModelForImageClassification", k, **o),
        pictures(),
        classes,
    )  # type: ignore[misc]

add(
    "deit",
    "transformers",
    lambda: transformers.DeiTForImageClassification(configuration("deit", num_labels=10)),
    pictures(),
    classes,
)
add(
    "levit",
    "transformers",
    lambda: transformers.LevitForImageClassification(
        configuration(
            "levit",
            hidden_sizes=[32, 32, 48],
            num_attention_heads=[2, 2, 4],
            depths=[1, 1, 1],
            key_dim=[8, 8, 8],
            patch_size=16,
            image_size=64,
            num_labels=10,
        )
    ),
    pictures(64),
    classes,
)


class Speech(nn.Module):
    """Whisper: features of sound, and words written so far."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = transformers.WhisperForConditionalGeneration(
            configuration("whisper", num_mel_bins=8, max_source_positions=20, max_target_positions=16)
        )

    def forward(self, sound: torch.Tensor, write: torch.Tensor) -> Any:
        return self.inner(input_features=sound, decoder_input_ids=write)


def speech(samples: int, generator: torch.Generator) -> Any:
    """Features of sound, the words written so far and those one further."""
    write = torch.randint(3, 96, (samples, 9), generator=generator)
    return torch.randn(samples, 8, 40, generator=generator), write[:, :-1].contiguous(), write[:, 1:].contiguous()


add("whisper", "transformers", Speech, speech, next_token)
SOUND: dict[str, Any] = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "apply_spec_augment": False,
    "classifier_proj_size": 16,
}
for kind in ("wav2vec2", "hubert", "wavlm"):
    add(
        kind,
        "transformers",
        lambda k=kind: model("AutoModelForAudioClassification", k, **SOUND),
        numbers((400,), labels=10),
        classes,
    )  # type: ignore[misc]
add(
    "audio_spectrogram_transformer",
    "transformers",
    lambda: model("AutoModelForAudioClassification", "audio-spectrogram-transformer", max_length=32, num_mel_bins=16),
    numbers((32, 16), labels=10),
    classes,
)
add(
    "videomae",
    "transformers",
    lambda: model("AutoModelForVideoClassification", "videomae", num_frames=4),
    numbers((4, 3, 32, 32), labels=10),
    classes,
)
add(
    "timesformer",
    "transformers",
    lambda: model("AutoModelForVideoClassification", "timesformer", num_frames=2, drop_path_rate=0),
    numbers((2, 3, 32, 32), labels=10),
    classes,
)
add(
    "swin2sr",
    "transformers",
    lambda: transformers.Swin2SRForImageSuperResolution(
        configuration("swin2sr", embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, patch_size=1, upscale=2)
    ),
    numbers((3, 16, 16), (3, 32, 32)),
    lambda output, target: squares(output.reconstruction, target),
)


def padded(samples: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Sentences of unequal lengths, as a data collator of transformers makes them: -100 where nothing is asked."""
    ids = torch.randint(3, 96, (samples, 12), generator=generator)
    lengths = torch.randint(4, 13, (samples, 1), generator=generator)
    mask = (torch.arange(12) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


for kind in ("llama", "gpt2"):
    add(f"{kind}, padded, labels", "transformers", lambda k=kind: model("AutoModelForCausalLM", k), padded, None)  # type: ignore[misc]


class Clip(nn.Module):
    """CLIP with its loss, which holds every sample against all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        text, vision = configuration("clip_text_model"), configuration("clip_vision_model")
        self.inner = transformers.CLIPModel(
            transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
        )

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> Any:
        return self.inner(input_ids=ids, pixel_values=pixels)


def captions(samples: int, generator: torch.Generator) -> Any:
    """Captions, pictures, and which belong together."""
    ids = torch.randint(3, 96, (samples, 8), generator=generator)
    return ids, torch.randn(samples, 3, 32, 32, generator=generator), torch.arange(samples)


add(
    "clip",
    "transformers",
    Clip,
    captions,
    lambda output, target: nn.functional.cross_entropy(output.logits_per_text, target),
)
