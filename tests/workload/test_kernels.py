"""What a capture on the meta device counts of a GPU's kernels: bytes by definition, both passes, number formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hocket.workload import Layer, Operation, Workload, WorkloadError, capture, parse

ROWS, WIDTH = 64, 128


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Torch's own."""
    convolutions = torch.backends.cudnn.conv.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.conv.fp32_precision = convolutions


def captured(model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32, **more: Any) -> Workload:
    """In a dtype, of a batch of that shape. The loss's own operators are counted in a last layer that does nothing."""
    sample = torch.empty(*shape, dtype=dtype, device="meta")
    model = nn.Sequential(model, nn.Identity()).to("meta", dtype)
    return capture(model, sample, degrees=(), loss=lambda m, x: m(x).square().sum(), **more)


def operations(workload: Workload, phase: str, *, layer: int = 0) -> dict[str, Operation]:
    return {one.name: one for one in workload.layers[layer].operations if one.phase == phase}


def formats(workload: Workload) -> set[str]:
    return {one.number_format for layer in workload.layers for one in layer.operations if one.flops}


def test_products_are_in_the_format_that_torch_s_settings_say() -> None:
    linear, convolution = nn.Linear(WIDTH, WIDTH), nn.Conv2d(8, 8, 3)
    assert formats(captured(linear, ROWS, WIDTH)) == {"float32"}  # matrix products are IEEE's unless asked for
    assert formats(captured(convolution, 4, 8, 9, 9)) == {"tf32"}  # and convolutions are not
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert formats(captured(linear, ROWS, WIDTH)) == {"tf32"}
    assert formats(captured(convolution, 4, 8, 9, 9)) == {"float32"}
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found = captured(linear, ROWS, WIDTH, dtype=dtype)
        assert formats(found) == {str(dtype).removeprefix("torch.")}
        assert found.number_formats == {str(dtype).removeprefix("torch."): 1.0}


def test_products_under_autocast_are_in_its_format() -> None:
    model = nn.Linear(WIDTH, WIDTH).to("meta")

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made = model(x)
        return made.float().sum()  # type: ignore[no-any-return]

    found = capture(model, torch.empty(ROWS, WIDTH, device="meta"), degrees=(), loss=loss)
    assert formats(found) == {"bfloat16"}
    assert found.precision == "float32"


def test_products_of_numbers_that_have_no_rate_are_in_none() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.weight).abs()

    found = capture(Complex().to("meta"), torch.empty(ROWS, WIDTH, device="meta"), degrees=())
    assert formats(found) == {""}


def test_older_settings_of_torch_count_too() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # assigned, it fails beside torch's own tests
        try:
            torch.backends.cuda.matmul.allow_tf32 = True
            assert formats(captured(nn.Linear(WIDTH, WIDTH), ROWS, WIDTH)) == {"tf32"}
            assert formats(captured(nn.Conv2d(8, 8, 3), 4, 8, 9, 9)) == {"float32"}
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def test_a_linear_layer_makes_three_products_and_a_sum_for_its_bias() -> None:
    found = captured(nn.Linear(WIDTH, WIDTH), ROWS, WIDTH)
    wide, weights = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH
    ahead, behind = operations(found, "forward"), operations(found, "backward")
    (product,) = (one for one in ahead.values() if one.flops)
    assert product.moved_bytes == 2 * wide + weights + 4 * WIDTH
    assert product.fixed_bytes == weights + 4 * WIDTH
    # The batch has no gradient, so of the two products behind there is one; its gradient is as large however large the
    # batch. The bias takes a sum over rows.
    (back,) = (one for one in behind.values() if one.flops)
    assert back.flops == product.flops
    assert (back.moved_bytes, back.fixed_bytes) == (2 * wide + weights, weights)
    assert behind["others backward"].moved_bytes == wide + 4 * WIDTH
    two = captured(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), ROWS, WIDTH)
    assert sum(one.flops for one in operations(two, "backward", layer=1).values()) == 2 * product.flops


def test_norms_read_their_input_again_for_each_of_two_gradients() -> None:
    found = captured(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), ROWS, WIDTH)
    wide = 4 * ROWS * WIDTH
    few = 4 * (2 * WIDTH + 2 * ROWS)  # weights; mean and deviation of each row
    assert operations(found, "forward", layer=1)["others"].moved_bytes == 2 * wide + few
    back = operations(found, "backward", layer=1)["others backward"]
    assert back.moved_bytes == 5 * wide + few + 4 * 2 * WIDTH


@pytest.mark.parametrize(("dtype", "part"), [(torch.float32, 0.35), (torch.bfloat16, 1.0)])
def test_batch_norm_goes_over_its_input_twice_in_each_pass(dtype: torch.dtype, part: float) -> None:
    """What float32 moves is counted in part, as its kernels take less than those of 16 bits, number by number."""
    model = nn.Sequential(nn.Conv2d(3, 16, 1, bias=False), nn.BatchNorm2d(16))
    wide = part * 8 * 16 * 32 * 32 * dtype.itemsize
    found = captured(model, 8, 3, 32, 32, dtype=dtype)
    ahead = [one for one in operations(found, "forward", layer=1).values() if one.kind == "batch norm"]
    behind = [one for one in operations(found, "backward", layer=1).values() if one.kind == "batch norm"]
    assert sum(one.moved_bytes for one in ahead) == pytest.approx(3 * wide, rel=0.01)
    assert sum(one.moved_bytes for one in behind) == pytest.approx(5 * wide, rel=0.01)
    last = torch.empty(8, 3, 32, 32, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    placed = capture(model, last, degrees=())
    assert not any(one.kind for layer in placed.layers for one in layer.operations)


def test_a_loss_over_many_classes_reads_its_rows_three_times() -> None:
    classes = 50_000
    model, target = nn.Linear(8, classes, bias=False), torch.zeros(ROWS, dtype=torch.long, device="meta")
    sample = torch.empty(ROWS, 8, device="meta")
    found = capture(model.to("meta"), sample, degrees=(), loss=lambda m, x: cross_entropy(m(x), target))
    wide = 4 * ROWS * classes
    # Three reads and one write; its gradient is filled, and made another: a read more for the sum.
    assert operations(found, "forward")["others"].moved_bytes == pytest.approx(4 * wide, rel=0.01)
    assert operations(found, "backward")["others backward"].moved_bytes == pytest.approx(5 * wide, rel=0.01)


def test_what_is_used_twice_has_its_gradients_added() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return x + self.second(x)

    wide = 4 * ROWS * WIDTH
    found = captured(Twice(), ROWS, WIDTH)
    assert operations(found, "backward")["others backward"].moved_bytes == (3 + 3) * wide  # GELU's, and the sum of both


def test_dropout_is_one_kernel_with_a_byte_a_number() -> None:
    found = captured(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)), ROWS, WIDTH)
    count = ROWS * WIDTH
    assert operations(found, "forward", layer=1)["others"].moved_bytes == 9 * count
    assert operations(found, "backward", layer=1)["others backward"].moved_bytes == (4 + 4 + 1) * count


def test_numbers_in_different_orders_are_told_apart() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            return x + x.transpose(0, 1)

    found = captured(Turned(), WIDTH, WIDTH)
    assert operations(found, "forward")["strided"].moved_bytes == 3 * 4 * WIDTH * WIDTH
    turned = captured(nn.Conv2d(8, 16, 3, padding=1), 4, 8, 32, 32)
    given, made = 4 * 4 * 8 * 32 * 32, 4 * 4 * 16 * 32 * 32
    strided = operations(turned, "forward")["strided"]
    assert (strided.moved_bytes, strided.number_format) == (2 * (given + made), "tf32")
    assert operations(turned, "backward")["strided backward"].moved_bytes == 2 * (given + made)  # for the weights alone


@pytest.mark.parametrize(("causal", "part"), [(False, 1.0), (True, (1 + 1 / 4) / 2)])
def test_attention_in_float32_is_three_products_in_tf32_without_what_is_masked(causal: bool, part: float) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.all(x).chunk(3, -1))
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    length = 200  # four blocks of 64, the last of which is not full
    counted = 4 * 2 * length**2 * WIDTH
    for dtype, name in ((torch.float32, "3xtf32"), (torch.bfloat16, "bfloat16")):
        found = captured(Attention(), 2, length, WIDTH, dtype=dtype)
        ahead, behind = operations(found, "forward")["attention"], operations(found, "backward")["attention backward"]
        assert (ahead.number_format, ahead.flops) == (name, counted)
        assert behind.flops == 2.5 * counted  # five products instead of two
        performed = counted * (256 / length) ** 2 * part if name == "3xtf32" else 0.0
        assert ahead.performed_flops == pytest.approx(performed)
    assert captured(Attention(), 2, length, WIDTH).number_formats.keys() == {"float32", "3xtf32"}


def test_a_backward_pass_that_meta_cannot_run_is_taken_for_twice_the_forward_pass_and_said_to_be() -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * float(gradient.sum())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return Odd.apply(self.linear(x))  # type: ignore[no-any-return]

    found = captured(Model(), ROWS, WIDTH)
    assert found.source.endswith("its backward pass taken for twice the forward pass")
    assert {one.phase for layer in found.layers for one in layer.operations} == {"both"}


def test_checkpointed_attention_runs_again_in_a_backward_pass_that_is_counted() -> None:
    def attend(x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x)

    class Attention(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(attend, super().forward(x), use_reentrant=False)
            return found

    found = captured(Attention(64, 64), 2, 4, ROWS, 64)
    assert found.source == "captured on the meta device"
    once = operations(found, "forward")["attention"].flops
    assert operations(found, "backward")["attention backward"].flops == (1 + 2.5) * once


def test_gradients_and_settings_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to("meta")
    model[0].weight.grad = kept = torch.empty(WIDTH, WIDTH, device="meta")
    captured(model, ROWS, WIDTH)
    assert model[0].weight.grad is kept
    assert model[0].bias.grad is None


def test_what_is_counted_is_written_and_read() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 30 * 30, 10))
    found = captured(model, 8, 3, 32, 32, dtype=torch.bfloat16, optimizer="momentum")
    assert found.update_passes == 8
    assert parse(str(found)) == found
    for words in ("number_format=float31", "phase=sideways", "kind=odd"):
        with pytest.raises(WorkloadError, match=words.partition("=")[2]):
            parse(f"workload a\nbatch 1\nlayer b kind=c\n  op flops=1 {words}")


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_backward_pass_of_a_convolution_in_groups_has_twice_the_flops(kind: type[nn.Module], groups: int) -> None:
    """PyTorch's own table counts every group for the whole: four times the forward pass with two, ten with eight."""
    layer = kind(8, 16, 3, groups=groups, padding=1, bias=False)
    found = captured(nn.Sequential(nn.Conv2d(8, 8, 1), layer), 2, 8, 10, 10)
    ahead, behind = (sum(one.flops for one in operations(found, p, layer=1).values()) for p in ("forward", "backward"))
    assert ahead == 2 * 2 * 10 * 10 * 16 * 8 * 9 / groups
    assert behind == 2 * ahead


def test_a_window_for_each_channel_reads_four_bytes_for_each_product() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8))
    alone = operations(captured(model, 2, 4, 10, 10), "forward", layer=1)["depthwise"]
    assert alone.flops == 2 * 2 * 8 * 10 * 10 * 9
    assert alone.moved_bytes == 2 * alone.flops
    last = torch.empty(2, 4, 10, 10, device="meta").to(memory_format=torch.channels_last)
    placed = capture(model.to("meta"), last, degrees=())
    assert "depthwise" not in {one.name for layer in placed.layers for one in layer.operations}  # cuDNN's


def test_a_convolution_s_bias_is_a_kernel_of_its_own() -> None:
    plain, more = (
        captured(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=bias)), 2, 4, 10, 10, dtype=torch.bfloat16)
        for bias in (False, True)
    )
    wide = 2 * 2 * 8 * 10 * 10

    def moved(found: Workload, phase: str) -> float:
        rows = [one for layer in found.layers for one in layer.operations]
        return sum(one.moved_bytes for one in rows if one.phase == phase and one.kind == "strided")

    assert moved(more, "forward") - moved(plain, "forward") == 2 * wide
    assert moved(more, "backward") - moved(plain, "backward") == wide


def test_looking_up_many_rows_sorts_them_in_the_backward_pass() -> None:
    few, many = (
        capture(nn.Embedding(10, 4).to("meta"), torch.zeros(rows, dtype=torch.long, device="meta"), degrees=())
        for rows in (64, 4096)
    )
    launched = [sum(one.inner_calls for layer in found.layers for one in layer.operations) for found in (few, many)]
    assert launched[0] == 0 < launched[1]


def test_what_is_checkpointed_under_autocast_is_cast_when_it_runs_again() -> None:
    class Again(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.again, self.first = again, nn.Linear(8, 8)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    sample = torch.empty(4, 8, device="meta")
    plain, again = (capture(Again(one).to("meta"), sample, loss=loss, degrees=()) for one in (False, True))
    formats = [
        sum(one.flops for layer in found.layers for one in layer.operations if one.number_format == "bfloat16")
        for found in (plain, again)
    ]
    assert formats[1] > formats[0]
    assert {one.phase for layer in again.layers for one in layer.operations} == {"forward", "backward"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_bilinear_layer_has_the_flops_of_its_products(device: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Bilinear(6, 8, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.inner(x, y)  # type: ignore[no-any-return]

    given = torch.ones(16, 6), torch.ones(16, 8)
    assert capture(Model(), given, device=device, repeats=1, degrees=()).flops == 2 * 16 * 6 * 8 * 4


def test_flops_of_nested_tensors_are_said_to_be_unknown() -> None:
    """They are not seen below them; a program's marks for the profiler compute nothing."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.profiler.record_function("mark"):
                rows = [one[: 2 + index] for index, one in enumerate(x)]
                nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            return self.inner(nested).values()  # type: ignore[no-any-return]

    found = capture(Model(), torch.ones(4, 6, 8), device="meta", degrees=())
    assert found.source.endswith("without the FLOPs of operators of nested tensors, which are not known")


def test_a_reentrant_checkpoint_runs_again_in_the_backward_pass_of_its_own_layers() -> None:
    class Block(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, size), nn.Linear(size, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x)).tanh()  # type: ignore[no-any-return]

    class Model(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.reentrant, self.first = reentrant, nn.Linear(8, 16)
            self.blocks = nn.ModuleList(Block(size) for size in (16, 64))
            self.last = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            out: Tensor = self.last(x)
            return out

    found, other = (capture(Model(one), torch.ones(32, 8), device="meta", degrees=()) for one in (True, False))
    assert found.source == "captured on the meta device"
    # Of both products of a block one more, as two gradients each.
    assert [_back(one) for one in found.layers] == [
        2 * 32 * size for size in (8 * 16, 6 * 16 * 16, 6 * 16 * 64, 2 * 16 * 4)
    ]
    assert [_back(one) for one in found.layers] == [_back(one) for one in other.layers]


def _back(layer: Layer) -> float:
    return sum(one.flops for one in layer.operations if one.phase == "backward")


class Scaled(Tensor):
    """A matrix in 8 bits with a scale that passes for one of bfloat16, as torchao's for training."""

    data_: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16, device=data.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [one.data_.to(torch.bfloat16) * one.scale if isinstance(one, Scaled) else one for one in args]
        return func(*plain, **(kwargs or {}))


class Cast(torch.autograd.Function):
    """To 8 bits; gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Scaled(x.to(torch.float8_e4m3fn), torch.ones((), dtype=x.dtype, device=x.device))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def test_products_of_scaled_matrices_in_8_bits_are_in_float8() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(Cast.apply(x), Cast.apply(self.weight))  # type: ignore[no-untyped-call]

    found = operations(captured(Model(), ROWS, WIDTH, dtype=torch.bfloat16), "forward")
    (product,) = [one for one in found.values() if one.flops]
    assert product.number_format == "float8"
    assert product.moved_bytes == ROWS * WIDTH + WIDTH * WIDTH + 2 * 2 + 2 * ROWS * WIDTH
