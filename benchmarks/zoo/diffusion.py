"""Denoisers and autoencoders of the package diffusers, and adapters of the package peft."""

from __future__ import annotations

from typing import Any

import diffusers
import peft
import torch
from torch import nn

from .entries import add, next_token, numbers, squares, words
from .hugging_face import model


def noisy(channels: int, size: int, *more: tuple[int, ...]) -> Any:
    """Batches of noisy pictures, the time of each, conditions of these shapes, and the noise."""

    def batch(samples: int, generator: torch.Generator) -> Any:
        x = torch.randn(samples, channels, size, size, generator=generator)
        rest = [torch.randn(samples, *shape, generator=generator) for shape in more]
        return (
            x,
            torch.randint(0, 1000, (samples,), generator=generator),
            *rest,
            torch.randn(x.shape, generator=generator),
        )

    return batch


class Labelled(nn.Module):
    """A denoiser that is told a class by keyword."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> Any:
        return self.inner(x, timestep=t, class_labels=t % 10)[0].chunk(2, 1)[0]


UNET: dict[str, Any] = {"sample_size": 16, "block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}
add(
    "UNet2DModel",
    "diffusers",
    lambda: diffusers.UNet2DModel(
        **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ),
    noisy(3, 16),
    squares,
)
add(
    "UNet2DConditionModel",
    "diffusers",
    lambda: diffusers.UNet2DConditionModel(
        **UNET,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
    ),
    noisy(4, 16, (6, 16)),
    squares,
)
add(
    "DiTTransformer2DModel",
    "diffusers",
    lambda: Labelled(
        diffusers.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=8,
            num_embeds_ada_norm=10,
        )
    ),
    noisy(4, 8),
    squares,
)
add(
    "AutoencoderKL",
    "diffusers",
    lambda: diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=16,
    ),
    numbers((3, 16, 16), (3, 16, 16)),
    squares,
)
add(
    "VQModel",
    "diffusers",
    lambda: diffusers.VQModel(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        num_vq_embeddings=16,
        latent_channels=4,
    ),
    numbers((3, 16, 16), (3, 16, 16)),
    squares,
)


class Flux(nn.Module):
    """Flux, whose numbers of places are those of this size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=8,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=(2, 2, 4),
        )

    def forward(self, x: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor, t: torch.Tensor) -> Any:
        places = torch.stack(
            torch.meshgrid(torch.zeros(1), torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1
        ).reshape(-1, 3)
        return self.inner(
            x,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=t,
            img_ids=places,
            txt_ids=torch.zeros(text.shape[1], 3),
        )


add(
    "FluxTransformer2DModel",
    "diffusers",
    Flux,
    lambda n, g: (
        torch.randn(n, 16, 8, generator=g),
        torch.randn(n, 5, 16, generator=g),
        torch.randn(n, 16, generator=g),
        torch.rand(n, generator=g),
        torch.randn(n, 16, 8, generator=g),
    ),
    squares,
)


class Stable3(nn.Module):
    """Stable Diffusion 3's transformer, called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=16,
            caption_projection_dim=16,
            pooled_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=8,
        )

    def forward(self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor) -> Any:
        return self.inner(x, encoder_hidden_states=text, pooled_projections=pooled, timestep=t)


add("SD3Transformer2DModel", "diffusers", Stable3, noisy(4, 8, (5, 16), (16,)), squares)

ADAPTERS: dict[str, Any] = {
    "LoRA on llama": lambda: (
        "llama",
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False),
    ),
    "DoRA on llama": lambda: (
        "llama",
        peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, use_dora=True, init_lora_weights=False
        ),
    ),
    "LoRA on gpt2": lambda: (
        "gpt2",
        peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0, init_lora_weights=False),
    ),
    "IA3 on qwen3": lambda: (
        "qwen3",
        peft.IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
        ),
    ),
}
for title, adapter in ADAPTERS.items():

    def make(adapter: Any = adapter) -> nn.Module:
        kind, how = adapter()
        made: nn.Module = peft.get_peft_model(model("AutoModelForCausalLM", kind), how)
        return made

    add(title, "peft", make, words(), next_token)
