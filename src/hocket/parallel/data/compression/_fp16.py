"""Gradients as float16."""

from __future__ import annotations

import torch

from ._cast import Cast


class Fp16(Cast):
    """IEEE half precision: 11 bits of precision, values of the average from 6e-8 to 65504 in size.

    Horovod's `Compression.fp16` (Sergeev and Del Balso 2018). What is larger becomes infinite on every rank.
    """

    name = "fp16"
    dtype = torch.float16
