"""Models of the package timm, with few channels and random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
from timm import layers
from timm.models import convmixer, densenet, metaformer, mlp_mixer, vgg

from .entries import add, classes, pictures

VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
SMALL: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "deit3_small_patch16_224": VIT,
    "beit_base_patch16_224": VIT,
    "eva02_tiny_patch14_224": VIT,
    "vit_relpos_small_patch16_224": VIT,
    "cait_xxs24_224": VIT,
    "xcit_nano_12_p16_224": {**VIT, "patch_size": 16, "img_size": 64},
    "convnext_atto": {"dims": (8, 16, 16, 32), "depths": (1, 1, 1, 1)},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "embed_dim": 16,
        "depths": (1, 1),
        "num_heads": (2, 4),
        "window_size": 4,
    },
    "swinv2_tiny_window8_256": {
        "img_size": 32,
        "embed_dim": 16,
        "depths": (1, 1),
        "num_heads": (2, 4),
        "window_size": 4,
    },
    "twins_svt_small": {"img_size": 64, "embed_dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1)},
    "pit_ti_224": {"img_size": 64, "depth": (1, 1, 1), "base_dims": (8, 8, 8), "heads": (2, 4, 8)},
    "resnet18": {"channels": (8, 16, 16, 32)},
    "mobilenetv3_small_050": {},
    "lcnet_050": {},
    "regnetx_002": {},
    "ghostnet_050": {},
    "edgenext_xx_small": {},
}
"""The architecture, and what makes it small."""

for name, own in SMALL.items():

    def make(name: str = name, own: dict[str, Any] = own) -> torch.nn.Module:
        made: torch.nn.Module = timm.create_model(name, num_classes=10, drop_rate=0.0, **own)
        return made

    add(
        f"timm {name}", "timm", make, pictures(own.get("img_size", 64 if not own or "channels" in own else 32)), classes
    )

MLP: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2, "num_classes": 10}
BY_CLASS: dict[str, Callable[[], torch.nn.Module]] = {
    "mixer": lambda: mlp_mixer.MlpMixer(**MLP),
    "resmlp": lambda: mlp_mixer.MlpMixer(
        **MLP, block_layer=mlp_mixer.ResBlock, norm_layer=mlp_mixer.Affine, mlp_ratio=4
    ),
    "gmlp": lambda: mlp_mixer.MlpMixer(
        **MLP, block_layer=mlp_mixer.SpatialGatingBlock, mlp_layer=layers.GatedMlp, mlp_ratio=2
    ),
    "convmixer": lambda: convmixer.ConvMixer(32, 2, kernel_size=3, patch_size=4, num_classes=10),
    "poolformer": lambda: metaformer.MetaFormer(depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), num_classes=10),
    "densenet": lambda: densenet.DenseNet(growth_rate=8, block_config=(2, 2), num_classes=10),
    "vgg": lambda: vgg.VGG([8, "M", 16, "M"], num_classes=10, drop_rate=0.0, mlp_ratio=0.01),
}
for name, by_class in BY_CLASS.items():
    add(f"timm {name}", "timm", by_class, pictures(64 if name in ("poolformer", "vgg") else 32), classes)
