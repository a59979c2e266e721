"""Gradients as bfloat16."""

from __future__ import annotations

import torch

from ._cast import Cast


class Bf16(Cast):
    """The upper half of a float32: its range, with 8 bits of precision (Kalamkar et al. 2019)."""

    name = "bf16"
    dtype = torch.bfloat16
