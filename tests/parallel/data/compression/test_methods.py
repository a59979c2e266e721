"""What the papers state of each method, on ranks of one process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.parallel.data.compression import RowCompressor, compressor
from hocket.parallel.data.compression._pack import (
    pack_bits,
    pack_pairs,
    unpack_bits,
    unpack_pairs,
)
from hocket.parallel.data.compression._topk import largest

from .local_world import LocalWorld

METHODS = ("fp16", "bf16", "int8", "int8:64", "topk:0.05", "1bit", "1bit:64", "terngrad", "terngrad:0", "powersgd:2")
UNBIASED = ("int8", "int8:64", "terngrad:0")
FEEDBACK = ("topk:0.05", "topk:0.9", "1bit", "1bit:64", "powersgd:1", "powersgd:4")
# Relative error of one average of normal numbers, at most; see docs/compression.md for what is usual.
ERRORS = {"fp16": 1e-3, "bf16": 8e-3, "int8": 0.02, "int8:64": 0.02}

quick = settings(deadline=None, max_examples=12)
shapes_st = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=4)
dtypes_st = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def make(text: str) -> RowCompressor:
    """A method, typed as most are."""
    method = compressor(text)
    assert method is not None
    return method  # type: ignore[return-value]


def normal(count: int, numel: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Vectors of numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(numel, generator=generator).mul(2).exp()
    return [(torch.randn(numel, generator=generator) * sizes).to(dtype) for _ in range(count)]


def mean(vectors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([v.double() for v in vectors]).mean(0)


@pytest.mark.parametrize("text", METHODS)
@quick
@given(
    n=st.integers(2, 5),
    shapes=shapes_st,
    dtype=dtypes_st,
    scattered=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_all_ranks_get_the_same_average_in_as_many_bytes_as_the_formula_says(
    text: str, n: int, shapes: list[tuple[int, int]], dtype: torch.dtype, scattered: bool, seed: int
) -> None:
    method = make(text)
    if not method.takes(dtype):
        return
    world = LocalWorld(method, n, shapes, dtype, scattered=scattered, seed=seed)
    gradients = normal(n, world.numel, seed, dtype)
    for _ in range(2):
        averages = world.average(gradients)
        assert all(torch.equal(each, averages[0]) for each in averages)
        assert world.announced() == method.announced(world.jobs[0])
        assert averages[0].isfinite().all()
    if text in ERRORS and dtype is not torch.bfloat16:
        wanted = mean(gradients)
        error = (averages[0].double() - wanted).norm()
        scale = mean([g.abs() for g in gradients]).norm()
        if text in ("fp16", "bf16"):
            assert error <= ERRORS[text] * scale + 1e-6 * world.numel
        else:  # by blocks: the largest value counts
            assert error <= ERRORS[text] * max(g.double().abs().max() for g in gradients) * math.sqrt(world.numel)


def levels(text: str, gradient: torch.Tensor) -> torch.Tensor:
    """The distance of the values between which an element is rounded."""
    if text == "terngrad:0":
        return torch.full_like(gradient, float(gradient.abs().max()))
    block = 64 if text == "int8:64" else 256
    padded = torch.nn.functional.pad(gradient, (0, -len(gradient) % block)).view(-1, block)
    return (padded.abs().amax(1, keepdim=True) / 127).expand_as(padded).reshape(-1)[: len(gradient)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", UNBIASED)
@pytest.mark.parametrize("n", [2, 3])
def test_the_expected_average_is_the_average(text: str, n: int) -> None:
    """By Bernstein's inequality, at a confidence of 1 - 2 exp(-16) for each of 200 elements: 1 - 5e-5 for all.

    A value between two levels at a distance of L varies by L^2 f (1 - f) <= L min(|g|, L / 4), for its place f.
    """
    method, repetitions, t = make(text), 1000, 16.0
    world = LocalWorld(method, n, [(10, 20)], torch.float64, seed=7)
    gradients = normal(n, world.numel, 3, torch.float64)
    total = torch.zeros(200, dtype=torch.float64)
    for _ in range(repetitions):
        total += world.average(gradients)[0]
    distance = [levels(text, g) for g in gradients]
    variance = mean([d * torch.minimum(g.abs(), d / 4) for d, g in zip(distance, gradients, strict=True)]) / n
    largest_step = mean(distance)
    if n > 2 and method.two_phases:  # the average is rounded once more
        variance += largest_step.square() / 4
        largest_step = 2 * largest_step
    allowed = (2 * variance * t / repetitions).sqrt() + 2 * largest_step * t / (3 * repetitions)
    allowed += 2.0**-16 * largest_step + 1e-6 * mean(gradients).abs()  # the dither has 16 bits, scales are float32
    error = (total / repetitions - mean(gradients)).abs()
    assert (error <= allowed).all()
    assert (error <= allowed / 2).float().mean() > 0.5  # the bound is not so wide that it says nothing
    assert (allowed < 0.2 * largest_step + 1e-9).all()


def test_terngrad_clips_at_some_standard_deviations_and_is_unbiased_for_what_it_clipped() -> None:
    method = make("terngrad:1.5")
    world = LocalWorld(method, 2, [(1, 2048)], torch.float64)
    gradients = normal(2, 2048, 5, torch.float64)
    total = torch.zeros(2048, dtype=torch.float64)
    for _ in range(1500):
        total += world.average(gradients)[0]
    clipped = [g.clamp(-1.5 * g.std(correction=0), 1.5 * g.std(correction=0)) for g in gradients]
    largest_value = max(float(g.abs().max()) for g in clipped)
    # The standard deviation of an element is at most half the mean of two scales.
    assert (total / 1500 - mean(clipped)).abs().max() < 5.5 * largest_value / 2 / math.sqrt(2) / math.sqrt(1500) * 1.5
    assert (mean(gradients) - mean(clipped)).abs().max() > 0.1 * largest_value


@pytest.mark.parametrize("text", FEEDBACK)
@quick
@given(n=st.integers(2, 4), shapes=shapes_st, scattered=st.booleans(), seed=st.integers(0, 10**6))
def test_what_was_sent_and_what_is_left_are_all_gradients_together(
    text: str, n: int, shapes: list[tuple[int, int]], scattered: bool, seed: int
) -> None:
    """The sum of averages over steps, and the mean of the residuals, is the sum of the gradients' means."""
    world = LocalWorld(make(text), n, shapes, torch.float64, scattered=scattered)
    sent, given_ = torch.zeros(world.numel, dtype=torch.float64), torch.zeros(world.numel, dtype=torch.float64)
    for step in range(4):
        gradients = normal(n, world.numel, seed + step, torch.float64)
        sent += world.average(gradients)[0]
        given_ += mean(gradients)
        try:
            left = mean(world.residuals())
        except AssertionError:  # too small to be compressed: nothing is kept
            left = torch.zeros_like(sent)
        assert torch.allclose(sent + left, given_, rtol=1e-6, atol=1e-6 * float(given_.abs().max()))


def contraction(text: str, x: torch.Tensor, shape: tuple[int, int]) -> float:
    """||C(x) - x||^2 / ||x||^2 of one rank's vector, on its own."""
    world = LocalWorld(make(text), 1, [shape], x.dtype)
    sent = world.average([x])[0]
    return float((sent - x).square().sum() / x.square().sum())


numbers_st = st.lists(st.floats(-1e3, 1e3, width=32), min_size=8, max_size=200).filter(
    lambda values: sum(v * v for v in values) > 1e-6
)


@settings(deadline=None, max_examples=50)
@given(values=numbers_st, density=st.floats(0.01, 0.4))
def test_topk_contracts_by_1_less_k_of_d(values: list[float], density: float) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    method: RowCompressor = make(f"topk:{density!r}")
    rows, message = x[None].clone(), torch.zeros(1, method.message_nbytes(len(x), x.dtype), dtype=torch.uint8)
    job = LocalWorld(method, 1, [(1, len(x))], torch.float64).jobs[0]
    method.encode(rows, message, job, keep=True)
    k = math.ceil(density * len(x))
    assert float(rows.square().sum()) <= (1 - k / len(x)) * float(x.square().sum()) * (1 + 1e-9)


@settings(deadline=None, max_examples=50)
@given(values=numbers_st)
def test_one_bit_contracts_by_1_less_the_square_of_the_1_norm_of_d_times_that_of_the_2_norm(
    values: list[float],
) -> None:
    x = torch.tensor(values + [0.0] * (-len(values) % 64), dtype=torch.float64)
    for block in x.view(-1, 64):
        if float(block.square().sum()) < 1e-6:
            continue
        delta = float(block.abs().sum() ** 2 / (64 * block.square().sum()))
        assert delta >= 1 / 64
        assert contraction("1bit:64", block, (1, 64)) <= 1 - delta + 1e-6


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(12, 40), columns=st.integers(12, 40), seed=st.integers(0, 10**6))
def test_power_sgd_is_a_projection_and_exact_for_matrices_of_its_rank(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows * columns, generator=generator, dtype=torch.float64)
    world = LocalWorld(make("powersgd:2"), 1, [(rows, columns)], torch.float64)
    sent = world.average([x])[0]
    error, size = float((x - sent).square().sum()), float(x.square().sum())
    assert error < size  # delta > 0
    assert error == pytest.approx(size - float(sent.square().sum()), rel=1e-6)  # Pythagoras: a projection
    low = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    low = low @ torch.randn(2, columns, generator=generator, dtype=torch.float64)
    # torch adds 1e-8 to the norm of a column, which is small by chance where two columns are nearly one.
    assert contraction("powersgd:2", low.reshape(-1), (rows, columns)) < 1e-6


def test_power_sgd_finds_a_matrix_of_a_higher_rank_by_and_by() -> None:
    """With warm start and feedback, what is left of a gradient that stays the same remains bounded."""
    world = LocalWorld(make("powersgd:2"), 2, [(30, 40)], torch.float64)
    gradient = normal(1, 1200, 0, torch.float64)[0]
    for _ in range(40):
        world.average([gradient, gradient])
    assert float(world.residuals()[0].norm()) < 12 * float(gradient.norm())


def test_power_sgd_draws_columns_anew_that_no_gradient_has_kept_alive() -> None:
    world = LocalWorld(make("powersgd:2"), 2, [(20, 30)], torch.float64)
    nothing = torch.zeros(600, dtype=torch.float64)
    assert not world.average([nothing, nothing])[0].any()
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    low = (low @ torch.randn(2, 30, generator=generator, dtype=torch.float64)).view(-1)
    assert torch.allclose(world.average([low, low])[0], low)


def test_topk_sends_dense_and_whole_where_that_is_less() -> None:
    gradients = normal(4, 1000, 0)
    for density, dense in ((0.2, False), (0.24, False), (0.26, True), (1.0, True)):  # values and places: k/d = 1/n
        world = LocalWorld(make(f"topk:{density}"), 4, [(1, 1000)])
        average = world.average(gradients)[0]
        assert (world.announced() == [("all_reduce", 4000)]) is dense
        assert torch.allclose(average.double(), mean(gradients), rtol=1e-5, atol=1e-5) is dense
    for density, dense in ((0.45, False), (0.55, True)):  # to its place only, a value needs twice as many bytes
        world = LocalWorld(make(f"topk:{density}"), 4, [(1, 1000)], scattered=True)
        world.average(gradients)
        assert (world.announced() == [("reduce_scatter", 4000)]) is dense


@pytest.mark.parametrize("text", METHODS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scattered", [False, True])
def test_a_gradient_that_is_not_finite_reaches_all_ranks_and_is_forgotten(
    text: str, bad: float, scattered: bool
) -> None:
    world = LocalWorld(make(text), 3, [(40, 51), (3, 1)], scattered=scattered)
    gradients = normal(3, world.numel, 1)
    world.average(gradients)
    broken = [g.clone() for g in gradients]
    broken[1][77] = bad
    for average in world.average(broken):
        assert not average[77].isfinite()
    for average in world.average(gradients):
        assert average.isfinite().all()


@pytest.mark.parametrize("text", METHODS)
def test_zeros_stay_zeros(text: str) -> None:
    world = LocalWorld(make(text), 3, [(40, 51), (7, 1)])
    for _ in range(2):
        for average in world.average([torch.zeros(world.numel)] * 3):
            assert not average.any()


@pytest.mark.parametrize("text", ["1bit", "topk:0.05", "powersgd:2"])
def test_gaps_between_gradients_never_come_back_as_gradients(text: str) -> None:
    world = LocalWorld(make(text), 4, [(41, 53)], scattered=True)
    for seed in range(5):
        world.average(normal(4, world.numel, seed))
    for job in world.jobs:
        residual = make(text).residual(job)
        assert residual is not None
        assert not residual[world.numel :].any()


@pytest.mark.parametrize("text", FEEDBACK)
def test_a_residual_can_be_taken_out_and_put_back(text: str) -> None:
    method = make(text)
    first, second = (LocalWorld(method, 2, [(40, 50)], torch.float64) for _ in range(2))
    first.average(normal(2, 2000, 0, torch.float64))
    kept = [method.residual(job) for job in first.jobs]
    if any(residual is None for residual in kept):
        assert text == "topk:0.9"  # sent dense
        return
    for job, residual in zip(second.jobs, kept, strict=True):
        assert residual is not None
        method.restore(job, residual)
    for mine, wanted in zip(second.residuals(), first.residuals(), strict=True):
        assert torch.equal(mine, wanted)
        assert mine.any()


@quick
@given(seed=st.integers(0, 10**6), k=st.integers(1, 30_000))
def test_the_largest_elements_of_many_are_the_largest(seed: int, k: int) -> None:
    (x,) = normal(1, 2**17 + 5, seed)
    if seed % 3 == 0:
        x = x.round()  # many are equal
    places = largest(x, k)
    assert len(set(places.tolist())) == k
    assert torch.equal(x[places].abs().sort().values, x.abs().topk(k).values.flip(0))


@quick
@given(values=st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_packing_keeps_all_values(values: list[int]) -> None:
    pairs = torch.tensor(values * 4, dtype=torch.uint8)
    assert torch.equal(unpack_pairs(pack_pairs(pairs), torch.float32).view(-1), pairs.float())
    bits = torch.tensor(values * 8) > 1
    assert torch.equal(unpack_bits(pack_bits(bits), torch.float32).view(-1), bits.float())
    assert len(pack_pairs(pairs)) == len(pairs) / 4
    assert len(pack_bits(bits)) == len(bits) / 8


@pytest.mark.parametrize(
    ("text", "numel", "nbytes"),
    [
        ("int8", 2560, 40 + 2560),  # 10 scales of 4 bytes
        ("1bit", 5120, 320 + 640),  # 40 pairs of values, 8 elements a byte
        ("terngrad", 20480, 80 + 5120),  # 10 blocks, 4 elements a byte
        ("topk:0.01", 10_000, 400 + 400),  # 100 values and places
    ],
)
def test_messages_are_as_small_as_they_should_be(text: str, numel: int, nbytes: int) -> None:
    assert make(text).message_nbytes(numel, torch.float32) == nbytes
