"""Calls of operators to try on shards: torch's own database of operators and samples, and what it lacks."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from hocket.sharding import RULES, leaves, mapped, rule_for
from hocket.sharding._operators import canonical

Function = Callable[..., Any]


class Sample(NamedTuple):
    """A function and what it is called with."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


ASKING = {name for name, one in RULES.items() if one is RULES["dim"]} | {"get_data", "pointwise"}
ASKING |= {"deepcopy", "array_wrap"}  # of full tensors always
RANDOM = {name for name, one in RULES.items() if one in (RULES["dropout"], RULES["dropout2d"])} - {"rrelu"}
# What the database does not call by these names: shapes of inputs, and calls.
EXTRA: dict[str, list[tuple[list[tuple[int, ...]], Function]]] = {
    "size": [([(4, 6)], lambda x: x * x.size(0) + x.size()[1]), ([(4, 6)], lambda x: x.size(-1) * x)],
    "shape": [([(4, 6)], lambda x: x * x.shape[0])],
    "get_shape": [([(4, 6, 2)], lambda x: x * x.shape[0] + x.shape[-1])],
    "numel": [([(4, 6)], lambda x: x / x.numel())],
    "len": [([(4, 6)], lambda x: x * len(x))],
    "get_nbytes": [([(4, 6)], lambda x: x / x.nbytes)],
    "is_same_size": [([(4, 6), (4, 6)], lambda x, y: x * (2 if x.is_same_size(y) else 3))],
    "type_as": [
        ([(4, 6), (4, 6)], lambda x, y: x.type_as(y.double()) * x),
        ([(1, 6), (4, 6)], lambda x, y: x.type_as(y.double()) + x.sum()),
    ],
    "softmin": [([(4, 6)], lambda x: F.softmin(x, -1)), ([(4, 6)], lambda x: F.softmin(x, dim=0))],
    "nanmedian": [([(4, 6)], lambda x: x.nanmedian(1)), ([(4, 6)], lambda x: x.nanmedian(0, True))],
    "norm": [([(4, 6)], lambda x: x.norm(2, 1)), ([(4, 6, 2)], lambda x: x.norm(1, (1, 2), True))],
    "linalg_vector_norm": [([(4, 6)], lambda x: torch.linalg.vector_norm(x, 2, 1))],
    "soft_margin_loss": [([(4, 6), (4, 6)], lambda x, y: F.soft_margin_loss(x, y.detach().sign()))],
    "index_select": [([(4, 6, 2)], lambda x: x.index_select(1, torch.tensor([0, 3, 3])))],
    "layer_norm": [([(4, 6, 3), (3,), (3,)], lambda x, w, b: F.layer_norm(x, (3,), w, b))],
    "get_T": [([(4, 6)], lambda x: x.T)],
    "get_mT": [([(4, 6, 2)], lambda x: x.mT)],
    "get_H": [([(4, 6)], lambda x: x.H)],
    "get_mH": [([(4, 6, 2)], lambda x: x.mH)],
    "adjoint": [([(4, 6, 2)], lambda x: x.adjoint())],
    "slice": [([(4, 6)], lambda x: torch.ops.aten.slice(x, 0, 1, 3))],
    "weight_norm": [
        ([(4, 6, 2), (4, 1, 1)], lambda v, g: torch._weight_norm(v, g, 0)),
        ([(4, 6), (1, 6)], lambda v, g: torch._weight_norm(v, g, 1)),
    ],
    "grouped_mm": [
        ([(6, 16), (2, 16, 16)], lambda x, w: F.grouped_mm(x, w, offs=torch.tensor([2, 6], dtype=torch.int32))),
    ],
    "einsum": [
        ([(4, 6, 2, 3), (5, 3)], lambda x, w: torch.einsum("b...i,oi->b...o", x, w)),
        ([(4, 6, 2), (6, 2, 3)], lambda x, w: torch.einsum("...ij, ...jk -> ...ik", x, w)),
    ],
    "matmul": [([(4, 6, 3), (3,)], torch.matmul)],
    "where": [([(4, 6), (4, 1)], lambda x, y: torch.where(x > 0, x, y))],
    "split_with_sizes": [([(4, 6)], lambda x: x.split_with_sizes([2, 4], 1)), ([(4, 6)], lambda x: x.split(2))],
    "conv_transpose1d": [([(2, 2, 7), (2, 3, 4), (3,)], lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 1))],
    "conv_transpose3d": [([(2, 2, 7, 3, 3), (2, 3, 3, 2, 2)], lambda x, w: F.conv_transpose3d(x, w, None, 2, 1, 1))],
    "adaptive_avg_pool1d": [([(4, 2, 6)], lambda x: F.adaptive_avg_pool1d(x, 1))],
    "adaptive_avg_pool2d": [([(4, 2, 6, 5)], lambda x: F.adaptive_avg_pool2d(x, 1))],
    "adaptive_avg_pool3d": [([(4, 2, 6, 5, 2)], lambda x: F.adaptive_avg_pool3d(x, (1, 1, 1)))],
    "lp_pool1d": [([(4, 2, 6)], lambda x: F.lp_pool1d(x, 2, 2))],
    "lp_pool2d": [([(4, 2, 6, 4)], lambda x: F.lp_pool2d(x, 2, 2))],
    "lp_pool3d": [([(4, 2, 6, 4, 4)], lambda x: F.lp_pool3d(x, 2, 2))],
    "group_norm": [([(2, 4, 6, 3), (4,), (4,)], lambda x, w, b: F.group_norm(x, 2, w, b))],
    "instance_norm": [([(2, 4, 6, 3)], lambda x: F.instance_norm(x))],
    "batch_norm": [
        ([(4, 3, 6, 2), (3,), (3,)], lambda x, w, b: F.batch_norm(x, None, None, w, b, True)),
        ([(4, 3, 6), (3,)], lambda x, w: F.batch_norm(x, torch.zeros(3).to(w), torch.ones(3).to(w), w, None, False)),
    ],
    "interpolate": [
        ([(2, 2, 7, 3)], lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
        ([(2, 2, 5, 4)], lambda x: F.interpolate(x, size=(9, 3), mode="nearest")),
        ([(2, 2, 5, 4, 2)], lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear", align_corners=True)),
    ],
    "pad": [
        ([(2, 3, 6, 4)], lambda x: F.pad(x, (1, 0, 2, 1))),
        ([(2, 3, 6, 4)], lambda x: F.pad(x, (1, 1, 2, 1), mode="reflect")),
        ([(2, 6, 4)], lambda x: F.pad(x, (0, 0, -1, 2), value=3.0)),
    ],
    "cross_entropy": [
        ([(4, 3, 6)], lambda x: F.cross_entropy(x, torch.arange(24).view(4, 6) % 3, label_smoothing=0.1)),
        ([(8, 3)], lambda x: F.cross_entropy(x, torch.arange(8) % 3, reduction="sum")),
        ([(4, 3, 6), (4, 3, 6)], lambda x, t: F.cross_entropy(x, t.softmax(1))),
    ],
    "nll_loss": [
        ([(8, 3)], lambda x: F.nll_loss(x, torch.arange(8) % 3, torch.tensor([1.0, 2.0, 0.5]).to(x.dtype))),
        ([(8, 3, 2)], lambda x: F.nll_loss(x, torch.arange(16).view(8, 2) % 3, ignore_index=1, reduction="none")),
    ],
    "scaled_dot_product_attention": [
        ([(4, 6, 5, 2)], lambda x: F.scaled_dot_product_attention(x, 2 * x, x - 1, is_causal=True)),
        (
            [(2, 16, 3, 2)],
            lambda x: F.scaled_dot_product_attention(x, x[:, ::2].flip(1), x[:, ::2] + 1, enable_gqa=True),
        ),
        ([(4, 6, 3, 2), (6, 3, 3)], lambda x, m: F.scaled_dot_product_attention(x, x, x, m)),
    ],
    "embedding": [([(5, 3)], lambda w: F.embedding(torch.arange(6) % 5, w))],
    "prelu": [([(4, 6, 3), (6,)], F.prelu), ([(4, 6), (1,)], F.prelu)],
    "glu": [([(4, 8)], lambda x: F.glu(x, -1)), ([(4, 8)], lambda x: F.glu(x, 0))],
    "dropout": [([(4, 6)], lambda x: F.dropout(x, 0.5, training=False))],
    "max_pool1d": [([(2, 3, 9)], lambda x: F.max_pool1d(x, 3, 2, 1))],
    "max_pool1d_with_indices": [([(4, 3, 9)], lambda x: F.max_pool1d_with_indices(x, 3, 2, 1))],
    "max_pool2d_with_indices": [([(4, 3, 9, 4)], lambda x: F.max_pool2d_with_indices(x, 3, 2, 1))],
    "max_pool3d_with_indices": [([(4, 3, 9, 4, 4)], lambda x: F.max_pool3d_with_indices(x, 3, 2, 1))],
    "adaptive_max_pool3d": [([(4, 3, 9, 4, 4)], lambda x: F.adaptive_max_pool3d(x, 2))],
    "pixel_shuffle": [([(2, 16, 3, 2)], lambda x: F.pixel_shuffle(x, 2))],
    "pixel_unshuffle": [([(2, 2, 8, 4)], lambda x: F.pixel_unshuffle(x, 2))],
    "view_as": [([(4, 6)], lambda x: x.view_as(torch.empty(4, 3, 2)))],
    "reshape_as": [([(4, 6, 2)], lambda x: x.mT.reshape_as(torch.empty(4, 12)))],
    "view_as_complex": [([(4, 6, 2)], lambda x: torch.view_as_complex(x).abs())],
    "view_as_real": [([(4, 6, 2)], lambda x: torch.view_as_real(torch.complex(x, 2 * x)))],
    "gather": [([(4, 6, 3)], lambda x: x.gather(2, torch.tensor([2, 0]).expand(4, 6, 2)))],
    "scatter": [([(4, 6, 3), (4, 6, 1)], lambda x, y: x.scatter(2, torch.ones(4, 6, 1).long(), y))],
    "scatter_add": [([(4, 6, 3), (4, 6, 3)], lambda x, y: x.scatter_add(2, torch.ones(4, 6, 3).long(), y))],
    "scatter_reduce": [
        ([(4, 6, 3), (4, 6, 3)], lambda x, y: x.scatter_reduce(2, torch.ones(4, 6, 3).long(), y, "amax")),
    ],
    "index_add": [([(4, 6), (4, 2)], lambda x, y: x.index_add(1, torch.tensor([3, 3]), y, alpha=2))],
    "index_copy": [([(4, 6), (4, 2)], lambda x, y: x.index_copy(1, torch.tensor([3, 5]), y))],
    "index_fill": [([(4, 6)], lambda x: x.index_fill(1, torch.tensor([3, 5]), 2.0))],
    "local_response_norm": [([(4, 6, 3, 2)], lambda x: F.local_response_norm(x, 3))],
    "fft_c2c": [([(4, 6)], lambda x: torch.fft.ifft(torch.fft.fft(x)).real)],
    "fft_r2c": [([(4, 6, 2)], lambda x: torch.view_as_real(torch.fft.rfft2(x, dim=(0, 1))))],
    "fft_c2r": [([(4, 6, 2)], lambda x: torch.fft.irfft(torch.complex(x, x), dim=1))],
    "bmm": [],
    "mm": [],
    "rrelu": [([(4, 6)], lambda x: F.rrelu(x, training=False))],
}


@functools.cache
def database() -> dict[str, list[Any]]:
    """Entries of torch's database by the operator's canonical name."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, list[Any]] = {}
    for entry in op_db:
        name = entry.name.removeprefix("nn.functional.").replace("special.", "special_").replace("linalg.", "linalg_")
        if entry.name.startswith(("_refs", "masked.", "torch.ops")) or entry.variant_test_name.startswith("partial"):
            continue
        found.setdefault(canonical(name), []).append(entry)
    return found


def no_test() -> None:
    """What the database is told of the test that it serves: none of torch's."""


@functools.cache
def samples(name: str, dtype: torch.dtype) -> list[Sample]:
    """Calls of the operator of that name."""
    found: list[Sample] = []
    for shapes, function in EXTRA.get(name, []):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        found.append(Sample(function, tuple(t.requires_grad_(dtype.is_floating_point) for t in tensors), {}))
    for entry in database().get(name, []) if name != "rrelu" else ():
        if dtype not in entry.supported_dtypes("cpu"):
            continue
        # The database seeds once a sample, and asks twice which test of torch's it serves. Torch's own ways note the
        # whole stack each time; under pytest that took nine tenths of a test.
        with (
            warnings.catch_warnings(),
            mock.patch("torch.manual_seed", torch.default_generator.manual_seed),
            mock.patch("torch.testing._internal.common_utils.extract_test_fn", no_test),
            mock.patch("torch.testing._internal.opinfo.core.extract_test_fn", no_test),
        ):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            try:
                needs_grad = dtype.is_floating_point and entry.supports_autograd
                given = list(itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=needs_grad), 60))
            except Exception:  # a sample that needs what is not installed
                continue
        for one in given:
            args = (one.input, *one.args)
            tensors = [leaf for leaf in leaves((args, one.kwargs)) if isinstance(leaf, torch.Tensor)]
            if one.kwargs.get("dropout_p") or one.kwargs.get("max_norm"):  # random, and a call that changes its table
                continue
            if any(t.dim() and t.numel() for t in tensors) and all(t.numel() < 20_000 for t in tensors):
                found.append(Sample(entry.op, args, dict(one.kwargs)))
    return found


def operators() -> list[str]:
    """Names with a rule, of their own or the element-wise one, that can be compared with whole execution."""
    own = set(RULES) - ASKING - RANDOM
    others = {name for name in database() if rule_for(name) is RULES["pointwise"]}
    return sorted(own | others)


__all__ = ["ASKING", "EXTRA", "RANDOM", "Sample", "leaves", "mapped", "operators", "samples"]
