"""What PyTorch's operators do on a GPU, by their definition: what is read again, what is not read, in which format.

An operator is told by its name and the tensors that it takes and makes. Kernels by kernels, as PyTorch 2.13 launches
them without torch.compile; what was looked up is said where it is used.
"""

import math
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hocket.sharding import strided_parts

from ._kernel import Float32Formats, Kernel, format_of, often
from ._recurrent import RECURRENT, RECURRENT_BACKWARD, recurrent_flops, recurrent_kernels

_aten = torch.ops.aten
FUSED = _aten._scaled_dot_product_flash_attention_for_cpu
"""The operator that stands for fused attention on the meta device."""
_FUSED_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_BLOCK = 64  # rows and columns of scores that a kernel of memory-efficient attention has at a time
_LONG = 48 * 2**10  # bytes of a row that softmax keeps in shared memory


def _named(*names: str) -> frozenset[Any]:
    return frozenset(getattr(_aten, name) for name in names if hasattr(_aten, name))


LOOKUPS = _named("embedding", "_embedding_bag", "_embedding_bag_forward_only", "index", "index_select", "gather")
"""Operators that read rows of their first tensor, and not the whole."""
_ADDED = _named("index_put_", "_index_put_impl_", "index_add_", "scatter_add_")  # to rows, likewise
_LOOKUPS_BACK = _named("embedding_dense_backward")
_FEW, _SORTING = 3072, 22  # as many numbers of rows, or more, are sorted first, by so many kernels
_NOTHING = _named("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh")
# Which do not read their first tensor, but write it, or take a number from each of its rows.
_NOT_THE_FIRST = _ADDED | _named(
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "nll_loss_forward", "nll_loss2d_forward"
)
_CONTIGUOUS = _named(  # copy what is not
    "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
    "native_group_norm", "native_group_norm_backward", "_softmax", "_softmax_backward_data", "_log_softmax",
    "_log_softmax_backward_data",
)  # fmt: skip
_NORMS_BACK = _named("native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward")
_BATCH_NORMS = _named("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_with_update")
_BATCH_NORMS_BACK = _named("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")
# Batch norm where channels are not last goes number by number: cuDNN's in float32 takes 0.7 of what PyTorch's takes in
# 16 bits (ResNet-50's and MobileNetV2's on one H200), though it moves twice the bytes.
_BATCH_NORM_AS = {torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 0.35}
_GROUPED = _named("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
# What Transformers calls in their place where the device or the type has none, and its backward: two products of all.
_GROUPED_ELSEWHERE = {"transformers::grouped_mm_fallback": 1, "transformers::grouped_mm_fallback_backward": 2}
_NOT_COUNTED = ("fft_", "linalg_", "cholesky", "triangular_solve", "lu_", "geqrf", "ormqr", "stft", "cdist")
_OF_NO_PRODUCTS = {"linalg_vector_norm", "linalg_check_errors", "linalg_cross", "linalg_diagonal"}
_CONVOLUTIONS = _named("convolution", "_convolution", "cudnn_convolution", "convolution_backward")


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the floating-point operations of an operator."""
    packet = func.overloadpacket
    if packet is _aten.convolution_backward and args[9] > 1:  # of groups torch's table takes each for the whole
        one = 2 * args[1 if args[7] else 0].numel() * math.prod(args[2].shape[1:])  # transposed: of its input
        return float(one * sum(map(bool, args[-1][:2])))
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet in _GROUPED:
        return _grouped_flops(*(one.shape for one in args[:2]))
    if products := _GROUPED_ELSEWHERE.get(func.name(), 0):
        return products * _grouped_flops(*(one.shape for one in args[:2]))
    if packet is _aten.mkldnn_rnn_layer:  # torch's own table lacks it
        x, inputs, hidden = args[:3]
        return float(2 * x.shape[0] * x.shape[1] * (inputs.numel() + hidden.numel()))
    if packet is RECURRENT or packet is RECURRENT_BACKWARD:
        return recurrent_flops(packet, args)
    if packet is FUSED:  # which torch 2.13's table lacks: two products of queries, keys and values
        query, key, value = (one.shape for one in args[:3])
        return float(2 * query[:-1].numel() * key[-2] * (query[-1] + value[-1]))
    if packet is _FUSED_BACKWARD:  # and five of them: scores again, and of each of the two products two
        query, key, value = (one.shape for one in args[1:4])
        return float(2 * query[:-1].numel() * key[-2] * (3 * query[-1] + 2 * value[-1]))
    if packet is _aten._trilinear:  # x A y for each output, as of `nn.Bilinear`
        return float(2 * math.prod(map(max, *map(_expanded, args[:3], args[3:6]))))
    return 0.0


def _expanded(one: Tensor, at: Sequence[int]) -> list[int]:
    shape = list(one.shape)
    for dim in sorted(at):
        shape.insert(dim, 1)
    return shape


def _grouped_flops(first: torch.Size, second: torch.Size) -> float:
    """Return the operations of products of matrices of which one has its rows or columns in groups, as experts' are.

    Either has three dimensions, of which the first counts groups, or the groups lie behind each other in one of two.
    """
    if len(first) == 2:  # its rows are in groups, or, with a second that has two dimensions, what is summed over
        return float(2 * first.numel() * second[-1])
    return float(2 * (second.numel() * first[-2] if len(second) == 2 else first.numel() * second[-1]))


def is_uncounted(func: Any, flops: float) -> bool:
    """Return whether an operator computes what no table counts: another library's, a transform, a decomposition."""
    name, _, _ = func.name().partition("::")[2].partition(".")
    name = name.lstrip("_")
    unknown = name.startswith(_NOT_COUNTED) and name not in _OF_NO_PRODUCTS
    known = func.namespace in {"aten", "prims", "prim", "profiler"} and not unknown
    return not flops and not known


def kernels_of(
    func: Any,
    args: Any,
    given: Sequence[tuple[Tensor, int]],
    made: Sequence[tuple[Tensor, int]],
    flops: float,
    formats: Float32Formats,
    weights: Set[int],
    noise: set[int],
    shapes: Set[torch.Size] = frozenset(),
) -> list[Kernel]:
    """Return what an operator launches that makes a tensor or writes into one.

    Args:
        func: The operator.
        args: That it was called with.
        given: Tensors in these, with the storages of all.
        made: Tensors that it returned, likewise.
        flops: Of it.
        formats: Of products in float32.
        weights: Storages of parameters and buffers.
        noise: Storages of dropout's masks, of which more may be found here. A GPU makes a mask and multiplies with it
            in one kernel and keeps one byte a number; elsewhere three operators do, and the mask is of numbers.
        shapes: What is made in these is a weight's gradient, which does not grow with the batch.
    """
    packet = func.overloadpacket
    if packet in _NOTHING:
        return []
    if packet is RECURRENT or packet is RECURRENT_BACKWARD:
        return recurrent_kernels(packet, args, formats)
    if packet is _aten.bernoulli_ or (packet is _aten.div_ and given[0][1] in noise):
        noise.update(key for _, key in made)
        return []
    read = list(given)
    if packet in LOOKUPS:
        read = [*read[1:], *made]
    elif packet in _NOT_THE_FIRST:
        read = read[1:]
    elif packet is _aten.nll_loss_backward or packet is _aten.nll_loss2d_backward:
        read = [one for one in read if one[0].dtype == torch.int64]
    written = [read[0]] if packet in _ADDED and read else list(made)
    sizes = [(bytes_of(one) if key not in noise else one.numel(), key) for one, key in read]
    moved = sum(size for size, _ in sizes) + sum(bytes_of(one) for one, _ in written)
    fixed = sum(size for size, key in sizes if key in weights)
    fixed += sum(bytes_of(one) for one, _ in written if one.shape in shapes)
    if flops:
        if packet in _CONVOLUTIONS and _depthwise(packet, args):
            return [Kernel("depthwise", "depthwise", "float32", flops, moved=2 * flops), *_bias(packet, args, made)]
        product = _product(packet, args, given, flops, formats, moved, fixed)
        turned = 2 * _turned(packet, args, made) if product.number_format != "float32" else 0
        return [
            product,
            *(
                [Kernel("strided", "strided", product.number_format, moved=turned, calls=2, inner_calls=2)]
                if turned
                else []
            ),
            *_bias(packet, args, made),
        ]
    again = _again(packet, [one for one, _ in given])
    kind, launches, inner = "", 1, 0
    found: list[Kernel] = []
    if packet in _BATCH_NORMS or packet in _BATCH_NORMS_BACK:
        given_to = given[packet in _BATCH_NORMS_BACK][0]  # behind the gradient
        if given_to.is_contiguous() and given_to.dtype in _BATCH_NORM_AS:
            return [Kernel("batch norm", "batch norm", moved=_BATCH_NORM_AS[given_to.dtype] * (moved + again), calls=2)]
        launches = 2
    elif packet in _NORMS_BACK:
        launches = 2
    elif packet in _LOOKUPS_BACK and args[1].numel() > _FEW:
        launches, inner = 1 + _SORTING, _SORTING
    elif packet is _aten.roll or (
        packet not in _CONTIGUOUS and packet not in LOOKUPS and _crosses([one for one, _ in (*read, *made)])
    ):
        kind, moved = "strided", moved * _one_by_one(read or made)
    if packet in _CONTIGUOUS:
        across = [(one, key) for one, key in given if one.dim() > 1 and not one.is_contiguous()]
        if across:
            copied = sum(bytes_of(one) for one, _ in across) * _one_by_one(across)
            found.append(Kernel("strided", "strided", moved=2 * copied))
    return [*found, Kernel(kind or "others", kind, moved=moved + again, fixed=fixed, calls=launches, inner_calls=inner)]


def as_on_a_gpu(func: Any, args: Any, out: Any) -> Any:
    """Return what an operator on the meta device makes with its numbers in the order that it has on a GPU.

    There a convolution whose input or weights have channels last makes such, which the meta device does not tell.
    """
    if func.overloadpacket not in _CONVOLUTIONS:
        return out
    backward = func.overloadpacket is _aten.convolution_backward
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(args[0].dim())
    if last is None or not any(_channels_last(one, last) for one in (args[1:3] if backward else args[:2])):
        return out

    def placed(one: Any) -> Any:
        turn = isinstance(one, Tensor) and one.is_meta and one.dim() == args[0].dim()
        return torch.empty_like(one, memory_format=last) if turn else one

    return tuple(placed(one) for one in out) if backward else placed(out)


def _channels_last(one: Tensor, last: torch.memory_format) -> bool:
    return one.is_contiguous(memory_format=last) and not one.is_contiguous()


def bytes_of(one: Tensor) -> int:
    """Return the bytes of a tensor that there are: what was expanded is there once."""
    if one.layout is not torch.strided or is_made_of_others(one):
        return sum(map(bytes_of, strided_parts(one)))
    sizes = (size for size, stride in zip(one.shape, one.stride(), strict=True) if stride)
    return math.prod(sizes) * one.element_size()


def is_made_of_others(one: Tensor) -> bool:
    """Return whether a tensor consists of others, as those in 8 bits do, and not of the parts of ranks."""
    return hasattr(one, "__tensor_flatten__") and not hasattr(one, "device_mesh")


def _product_format(given: Sequence[tuple[Tensor, int]]) -> str:
    """Return the format of a product; tensors in 8 bits that pass for others (torchao's) are multiplied as they are."""
    inner = [strided_parts(one)[0] if is_made_of_others(one) else one for one, _ in given[:2]]
    if all(format_of(one.dtype) == "float8" for one in inner):
        return "float8"
    return format_of(given[0][0].dtype)


def _again(packet: Any, given: Sequence[Tensor]) -> float:
    """Return the bytes that an operator reads once more, or twice."""
    if packet in _BATCH_NORMS:  # for the mean, and to change it
        return bytes_of(given[0])
    if packet in _BATCH_NORMS_BACK or packet in _NORMS_BACK:  # for the weights' gradients, and for the input's
        return bytes_of(given[0]) + bytes_of(given[1])
    long = bool(given) and given[0].dim() > 0 and given[0].shape[-1] * given[0].element_size() > _LONG
    if not long:
        return 0.0
    if packet is _aten._softmax or packet is _aten._log_softmax:  # for the largest, for the sum, and to change it
        return 2.0 * bytes_of(given[0])
    if packet is _aten._log_softmax_backward_data:  # the gradient for its sum
        return bytes_of(given[0])
    if packet is _aten._softmax_backward_data:
        return bytes_of(given[0]) + bytes_of(given[1])
    return 0.0


def _product(
    packet: Any, args: Any, given: Sequence[tuple[Tensor, int]], flops: float, formats: Float32Formats,
    moved: float, fixed: float,
) -> Kernel:  # fmt: skip
    number_format = _product_format(given)
    if packet is FUSED or packet is _FUSED_BACKWARD:
        query, key = args[1:3] if packet is _FUSED_BACKWARD else args[:2]
        causal = args[7 if packet is _FUSED_BACKWARD else 4] if len(args) > 4 else False
        if number_format != "float32":
            return Kernel("attention", "", number_format, flops, 0.0, moved, fixed)
        # Memory-efficient attention: three products in TF32 for each, blocks of 64, and what is masked is left out.
        rows, columns = (math.ceil(one.shape[-2] / _BLOCK) for one in (query, key))
        part = (1 + 1 / columns) / 2 if causal else 1.0
        filled = rows * columns * _BLOCK**2 / (query.shape[-2] * key.shape[-2])
        return Kernel("attention", "", "3xtf32", flops, flops * filled * part, moved, fixed)
    if number_format == "float32":
        number_format = formats.convolutions if packet in _CONVOLUTIONS else formats.products
    return Kernel(f"products{often(flops, moved)}", "", number_format, flops, 0.0, moved, fixed)


def _turned(packet: Any, args: Any, made: Sequence[tuple[Tensor, int]]) -> int:
    """Return the bytes that cuDNN puts into another order for a convolution on matrix units, whose channels are last.

    Of one that is a matrix product anyway, with a window of one number, it does so with nothing.
    """
    if packet not in _CONVOLUTIONS:
        return 0
    backward = packet is _aten.convolution_backward
    given, weight = args[1:3] if backward else args[:2]
    if math.prod(weight.shape[2:]) == 1 or not given.is_contiguous():
        return 0
    if not backward:
        return bytes_of(given) + sum(bytes_of(one) for one, _ in made)
    asked = sum(map(bool, args[-1][:2]))  # for the gradients of its input and of its weights
    return asked * (bytes_of(args[0]) + bytes_of(given))


def _depthwise(packet: Any, args: Any) -> bool:
    """Return whether a convolution has a window for each channel, and channels are not last: PyTorch's own kernel."""
    given, weight = args[1:3] if packet is _aten.convolution_backward else args[:2]
    return bool(weight.shape[1] == 1 < given.shape[1] and given.is_contiguous() and math.prod(weight.shape[2:]) > 1)


def _bias(packet: Any, args: Any, made: Sequence[tuple[Tensor, int]]) -> list[Kernel]:
    """Return what adds a convolution's bias, or its gradient up, apart from the product: in 16 bits one by one."""
    if packet not in _CONVOLUTIONS:
        return []
    if packet is _aten.convolution_backward:
        moved = bytes_of(args[0]) if args[-1][2] else 0
    else:
        moved = 2 * sum(bytes_of(one) for one, _ in made) if args[2] is not None else 0
    kind = "strided" if args[0].element_size() < 4 and args[0].is_contiguous() else ""
    return [Kernel(kind or "others", kind, moved=moved, inner_calls=1)] if moved else []


def _one_by_one(tensors: Sequence[tuple[Tensor, int]]) -> int:
    """Return how often bytes count where kernels go number by number: those of 16 bits take as long as those of 32."""
    return 2 if max(one.element_size() for one, _ in tensors) == 2 else 1


def _crosses(tensors: Sequence[Tensor]) -> bool:
    """Return whether a kernel goes through tensors whose numbers lie in different orders."""
    most = max((one.numel() for one in tensors), default=0)
    inner = set()
    for one in tensors:
        if one.layout is not torch.strided or one.dim() < 2 or 4 * one.numel() < most or 0 in one.stride():
            continue
        wide = [
            (stride, dim - one.dim())
            for dim, (size, stride) in enumerate(zip(one.shape, one.stride(), strict=True))
            if size > 1
        ]
        if wide:
            inner.add(min(wide)[1])
    return len(inner) > 1
