"""Programs that ask the meta device for values, and operators that it takes in one type only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import rnn

from hocket.workload import WorkloadError, capture
from hocket.workload._meta_device import on_meta


class Packed(nn.Module):
    """Looks whether its positions are those of one sequence, as Transformers' decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mask = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        starts = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        y: Tensor = self.inner(x)
        return y if (starts[:, -1] == 0).all() else self.mask(y)


class Padded(nn.Module):
    """Computes with the tokens that its mask shows, and looks whether there are others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.all():
            return self.inner(x)  # type: ignore[no-any-return]
        return self.inner(x[mask])  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Sends each token to two of its experts, by one grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, chosen = self.router(tokens).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        ends = torch.histc(chosen.float(), bins=4, min=0, max=3).cumsum(0).to(torch.int32)
        gathered: Tensor = torch._grouped_mm(tokens[order // 2], self.weight, offs=ends)
        return gathered * share.flatten()[order, None]


def test_values_that_follow_from_positions_are_known() -> None:
    with torch.device("meta"):
        found = capture(Packed(), torch.empty(2, 6, 8), degrees=())
    assert found.flops == 2 * 6 * 8 * 8 * 2 / 2 * found.batch  # of one product, and not of two


@pytest.mark.parametrize(("shown", "tokens"), [(12, 12), (7, 7)])
def test_a_small_input_has_the_values_that_it_has_on_the_cpu(shown: int, tokens: int) -> None:
    mask = (torch.arange(12) < shown).view(2, 6)
    model = Padded().to("meta")
    assert capture(model, (torch.empty(2, 6, 8), mask), degrees=()).flops == tokens * 8 * 8 * 2
    with pytest.raises(WorkloadError, match="asks for the value of a tensor.*give the inputs that it looks at on cpu"):
        capture(model, (torch.empty(2, 6, 8), mask.to("meta")), degrees=())


def test_what_is_written_with_unknown_values_is_unknown() -> None:
    unknown = torch.empty(3, device="meta")
    with on_meta([]):
        known = torch.ones(4, device="meta")
        view = known[:3]
        assert view.tolist() == [1, 1, 1]
        known.mul_(2)
        assert view.tolist() == [2, 2, 2]
        view.copy_(unknown)
        with pytest.raises(RuntimeError, match="meta tensor"):
            known.sum().item()
        with pytest.raises(RuntimeError, match="meta tensor"):
            torch.rand(3, device="meta").sum().item()
        filled = torch.empty(3, device="meta").normal_()
        with pytest.raises(RuntimeError, match="meta tensor"):
            filled.sum().item()


def test_values_of_a_batch_stay_as_they_are() -> None:
    batch = torch.zeros(3, dtype=torch.int64)
    moved = batch.to("meta")
    with on_meta([(moved, batch)]):
        moved += 1
        assert moved.tolist() == [1, 1, 1]
    assert batch.tolist() == [0, 0, 0]


STEPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda a, b: a + b,
    "in place": lambda a, b: a.add_(b),
    "view": lambda a, b: a.view(2, 3).t().reshape(6),
    "slice in place": lambda a, b: (a[1:4].mul_(3), a)[1],
    "put": lambda a, b: a.index_put((b.remainder(6),), b),
    "index": lambda a, b: a[b.remainder(6)],
    "sum": lambda a, b: a.cumsum(0),
    "turn": lambda a, b: a.flip(0),
    "sort": lambda a, b: a.sort().values,
    "where": lambda a, b: torch.where(a > b, a, -b),
    "by a list": lambda a, b: torch.cat([a[[-1, 0, 2]], b[[True, False] * 3]]),
    "finite": lambda a, b: a + torch.isfinite(b / 1.0) if not (b / 1.0).isnan().any() else b.clone(),
    "masked": lambda a, b: a.masked_fill(b.remainder(2) == 0, 5),
    "few": lambda a, b: torch.nn.functional.pad(a[a > a.sum() // 6], (0, 6))[:6],
    "places": lambda a, b: torch.nn.functional.pad(b.remainder(2).nonzero().flatten(), (0, 6))[:6],
    "if": lambda a, b: a + 1 if bool((a > b).any()) else b.clone(),
    "number": lambda a, b: a * int(b.max()),
    "there and back": lambda a, b: torch.tensor(a.tolist(), device=a.device),
    "all kinds": lambda a, b: torch.unique(torch.cat([a, b]))[:1].expand(6).clone(),
    "repeat": lambda a, b: a.repeat_interleave(b.remainder(2) + 1)[:6],
}


@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.booleans()), max_size=8), st.integers(0, 2**20))
@settings(max_examples=150, deadline=None)
def test_known_values_are_the_cpu_s(steps: list[tuple[str, bool]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randint(-4, 9, (6,), generator=generator) for _ in range(2)]

    def program(a: Tensor, b: Tensor) -> list[Any]:
        for name, turned in steps:
            a, b = (STEPS[name](b, a), a) if turned else (STEPS[name](a, b), b)
            a = a.remainder(50)
        return [a.tolist(), b.tolist(), bool((a == b).all()), int(a.sum())]

    expected = program(*(one.clone() for one in inputs))
    moved = [one.to("meta") for one in inputs]
    with on_meta(zip(moved, inputs, strict=True)):
        assert program(*moved) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_count_each_token_s_experts(dtype: torch.dtype) -> None:
    experts = Experts().to("meta", dtype)
    found = capture(experts, torch.empty(2, 16, 8, device="meta", dtype=dtype), degrees=())
    assert found.flops == 32 * 8 * 4 * 2 + 2 * 32 * 8 * 16 * 2  # the router; two experts a token
    assert ", its backward pass" not in found.source
    back = sum(one.flops for layer in found.layers for one in layer.operations if one.phase == "backward")
    assert back == found.flops  # of the weights: the input has no gradient


class PackedSequences(nn.Module):
    """Leaves out what pads its sequences."""

    def __init__(self, *, ordered: bool) -> None:
        super().__init__()
        self.inner, self.ordered = nn.GRU(8, 16, batch_first=True), ordered

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.ordered)
        return rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize("ordered", [True, False])
def test_packed_sequences_are_as_long_as_they_say(ordered: bool) -> None:
    batch = (torch.randn(3, 6, 8), torch.tensor([6, 3, 2] if ordered else [3, 6, 2]))
    model = PackedSequences(ordered=ordered)
    found = [capture(model, batch, device=one, degrees=()).flops for one in ("cpu", "meta")]
    assert found == [11 * (8 + 16) * 3 * 16 * 2] * 2


def test_activations_are_taken_for_finite() -> None:
    unknown = torch.empty(2**12, 2**10, device="meta")
    with on_meta([]):
        assert torch.isfinite(unknown).all()
        assert not unknown.isnan().any()
        assert not torch.isinf(2 * unknown).any().item()


class Reading(nn.Module):
    """A layer between a program's own steps before and behind it."""

    def __init__(self, before: Callable[[Tensor], Tensor], behind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.before, self.behind = nn.Linear(8, 8), before, behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.inner(self.before(x)))


@pytest.mark.parametrize(
    "behind",
    [
        lambda y: y[y > 0],
        lambda y: y[torch.where(y[:, 0] > 0)],
        lambda y: y * float(y.detach().numpy().mean()),
        lambda y: y * y.mean().item(),
    ],
)
def test_a_model_that_asks_for_the_value_of_an_activation_is_refused_with_its_line(
    behind: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(WorkloadError, match=r"Reading asks for the value of a tensor.*test_meta_device.py:\d+\); give"):
        capture(Reading(lambda x: x, behind), torch.ones(4, 8), device="meta")


def test_flex_attention_is_refused_with_a_remedy() -> None:
    def attend(x: Tensor) -> Tensor:
        heads = x.view(1, 2, -1, 4)
        return flex_attention(heads, heads, heads)  # type: ignore[return-value]

    with pytest.raises(WorkloadError, match="calls flex_attention.*have it call scaled_dot_product_attention"):
        capture(Reading(lambda x: x, attend), torch.ones(4, 8), device="meta")


@pytest.mark.parametrize(
    "before",
    [
        lambda x: x.cuda(),
        lambda x: x.to("cuda:0", non_blocking=True),
        lambda x: x.to(torch.device("cuda"), torch.float32),
        lambda x: x + torch.ones(8, device="cuda"),
        lambda x: x * torch.ones(8).cuda(),
        lambda x: x * float(x.numpy().mean()),
    ],
)
def test_meta_stands_for_the_gpu_that_a_program_names_and_small_inputs_have_numbers(
    before: Callable[[Tensor], Tensor],
) -> None:
    found = capture(Reading(before, lambda y: y), torch.ones(4, 8), device="meta", degrees=())
    assert (found.flops, found.source) == (2 * 4 * 8 * 8, "captured on the meta device")


class Latent(nn.Module):
    """Attention whose queries and keys have more numbers than its values, as that of DeepSeek-V3."""

    def __init__(self, grouped: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 4 * 12), nn.Linear(8, grouped * 12)
        self.value, self.out = nn.Linear(8, grouped * 8), nn.Linear(4 * 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (one(x).unflatten(-1, (-1, 12)).transpose(1, 2) for one in (self.query, self.key))
        value = self.value(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=len(key[0]) < 4)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize("grouped", [4, 2])
def test_values_in_attention_may_have_fewer_numbers_than_keys(grouped: int) -> None:
    batch = torch.zeros(2, 16, 8)
    found = capture(Latent(grouped), batch, device="meta", degrees=(), optimizer="sgd")
    assert found.source == "captured on the meta device"  # with its backward pass
    assert found.flops == capture(Latent(grouped), batch, degrees=(), optimizer="sgd", repeats=1).flops
    kept = 2 * 16 * (4 * 12 + grouped * 12 + grouped * 8 + 4 * 8 + 4)  # queries, keys, values, output, sums of rows
    assert found.saved_bytes == 4 * kept


def test_ctc_s_loss_is_captured_on_meta_as_on_the_cpu() -> None:
    batch = (torch.randn(4, 20, 8), torch.randint(1, 6, (4, 5)), torch.full((4,), 20), torch.tensor([3, 3, 2, 4]))

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        scores = model(batch[0]).log_softmax(-1).transpose(0, 1)
        labels, steps, lengths = batch[1:]
        padded = nn.functional.ctc_loss(scores, labels, steps, lengths)
        shown = torch.arange(5, device=labels.device) < lengths[:, None]
        return padded + nn.functional.ctc_loss(scores, labels[shown], steps, lengths)

    found = [capture(nn.Linear(8, 6), batch, device=one, degrees=(), loss=loss) for one in ("cpu", "meta")]
    assert found[0].flops == found[1].flops
    assert found[0].saved_bytes == pytest.approx(found[1].saved_bytes, rel=0.05)
    assert found[1].source == "captured on the meta device"


def test_an_operator_that_meta_lacks_is_named() -> None:
    with torch.library._scoped_library("hocket_test", "FRAGMENT") as library:
        library.define("lacking(Tensor x) -> Tensor")
        library.impl("lacking", torch.clone, "CPU")

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return torch.ops.hocket_test.lacking(model(x)).sum()  # type: ignore[no-any-return]

        with pytest.raises(
            WorkloadError, match="calls hocket_test::lacking, which torch cannot run on the meta device"
        ):
            capture(nn.Linear(8, 6), torch.randn(4, 8), device="meta", degrees=(), loss=loss)


def test_what_operators_of_other_libraries_compute_is_said_to_be_unknown() -> None:
    @torch.library.custom_op("hocket_test::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    cube.register_fake(torch.empty_like)
    cube.register_autograd(lambda context, gradient: gradient)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return cube(self.inner(x))  # type: ignore[no-any-return]

    for device in ("cpu", "meta"):
        found = capture(Model().to(device), torch.zeros(4, 8, device=device), degrees=())
        assert "without the FLOPs of hocket_test::cube, which are not known" in found.source


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_transforms_and_decompositions_are_said_to_be_unknown(device: str) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        whole = y.T @ y + torch.eye(8, device=y.device)
        return torch.fft.rfft(y).abs().sum() + nn.functional.normalize(y).sum() + torch.linalg.cholesky(whole).sum()

    found = capture(nn.Linear(8, 8), torch.randn(16, 8), device=device, degrees=(), loss=loss)
    assert "aten::_fft_r2c, " in found.source
    assert "aten::linalg_cholesky_ex" in found.source
    assert "norm" not in found.source
    assert found.flops == 2 * 16 * 8 * 8 * 2
