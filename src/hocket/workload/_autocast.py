"""Autocast on the meta device, which torch has none for: a forward pass there has the types that it has on a GPU."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# What computes in 16 bits, and what in 32: torch's lists for GPUs ("CUDA Ops that can autocast to" in the documentation
# of torch.amp), by the names under which programs call them.
_IN_16_BITS = """
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm addmv addr matmul
    __matmul__ __rmatmul__ einsum mm mv linear addbmm baddbmm bmm chain_matmul multi_dot lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell lstm gru rnn_tanh rnn_relu scaled_dot_product_attention multi_head_attention_forward
"""
_IN_32_BITS = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ square softplus
    layer_norm group_norm norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits ctc_loss dist pdist cdist
    renorm logsumexp prod softmax log_softmax cumprod cumsum sum cross_entropy softmin
"""
_LOWER, _WIDER = frozenset(_IN_16_BITS.split()), frozenset(_IN_32_BITS.split())
_LOW = (torch.bfloat16, torch.float16)


class _Autocast(TorchFunctionMode):
    """Casts what functions are given on the meta device, while a program's autocast is on for whatever device."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[int, tuple[Tensor, Tensor]] = {}  # of parameters, which are cast once

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        device = next((one for one in ("cuda", "cpu") if torch.is_autocast_enabled(one)), "")
        if not device or (name not in _LOWER and name not in _WIDER):
            return func(*args, **kwargs)
        low = torch.get_autocast_dtype(device)

        def cast(one: Any) -> Any:
            if not isinstance(one, Tensor) or one.device.type != "meta":
                return one
            if name in _LOWER and one.dtype == torch.float32:
                return self._low(one, low)
            return one.float() if name in _WIDER and one.dtype in _LOW else one

        args, kwargs = tree_map(cast, (args, kwargs))
        return func(*args, **kwargs)

    def _low(self, one: Tensor, dtype: torch.dtype) -> Tensor:
        if not (one.is_leaf and one.requires_grad):
            return one.to(dtype)
        if id(one) not in self.casts:
            self.casts[id(one)] = one, one.to(dtype)
        return self.casts[id(one)][1]


@contextmanager
def autocast_on_meta(model: nn.Module) -> Iterator[None]:
    """Open a block for the forward pass of a model, in which autocast holds on the meta device, too."""
    if not any(one.is_meta for one in model.parameters()):
        yield
        return
    with _on_meta():
        yield


@contextmanager
def _on_meta() -> Iterator[None]:
    mode = _Autocast()
    try:
        with mode:
            yield
    finally:
        mode.casts.clear()


@contextmanager
def autocast_of_a_gpu() -> Iterator[None]:
    """Open a block in which autocast for GPUs, or for the meta device, is on although there is no GPU.

    It is the CPU's then, with a GPU's type: checkpoints open that one anew when they run again, and none for meta.
    """
    begin: Any = torch.autocast.__init__

    def begun(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type in ("cuda", "meta"):
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        begin(self, device_type, dtype, enabled, cache_enabled)

    torch.autocast.__init__ = begun  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = begin  # type: ignore[method-assign]


@contextmanager
def autocast_behind() -> Iterator[None]:
    """Open a block for a backward pass on the meta device, in which what runs again, checkpointed, is cast again.

    A mode that is on ends where the engine begins; checkpoints open autocast's own blocks anew.
    """
    begin: Any = torch.autocast.__enter__
    end: Any = torch.autocast.__exit__
    within: list[ExitStack] = []

    def enter(self: Any) -> Any:
        within.append(ExitStack())
        within[-1].enter_context(_on_meta())
        return begin(self)

    def leave(self: Any, *error: Any) -> Any:
        within.pop().close()
        return end(self, *error)

    torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = begin, end  # type: ignore[method-assign]
