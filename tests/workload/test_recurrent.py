"""Recurrent layers that are captured on the meta device: one operator each, as cuDNN's are on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hocket.workload import Operation, Workload, capture, parse

SAMPLES, STEPS, INPUTS, HIDDEN = 4, 5, 6, 8
KINDS = (nn.LSTM, nn.GRU, nn.RNN)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Torch's own."""
    before = torch.backends.cudnn.rnn.fp32_precision
    yield
    torch.backends.cudnn.rnn.fp32_precision = before


class Around(nn.Module):
    """A recurrent layer behind a linear one, whose outputs and last states all count."""

    def __init__(self, layer: nn.RNNBase, *, linear: bool = True, packed: bool = False, states: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, layer.input_size, dtype=layer.weight_ih_l0.dtype) if linear else nn.Identity()
        self.layer, self.packed = layer, packed
        self.states = nn.ParameterList(self._states(layer) if states else ())

    @staticmethod
    def _states(layer: Any) -> list[Tensor]:
        runs = layer.num_layers * (1 + layer.bidirectional)
        sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size][: 1 + (layer.mode == "LSTM")]
        return [torch.zeros(runs, SAMPLES, size, dtype=layer.weight_ih_l0.dtype) for size in sizes]

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        first = None if not len(self.states) else tuple(self.states) if layer.mode == "LSTM" else self.states[0]
        entering: Any = self.linear(x)
        if self.packed:
            lengths = [STEPS, STEPS - 1, 2, 1]
            entering = pack_padded_sequence(entering, lengths, batch_first=layer.batch_first)
        out, last = layer(entering, first)
        total: Tensor = (out.data if isinstance(out, PackedSequence) else out).sum()
        return sum((one.sum() for one in (last if isinstance(last, tuple) else (last,))), total)


def taken(model: nn.Module, x: Tensor, **more: Any) -> Workload:
    return capture(model, x, device="meta", loss=lambda m, batch: m(batch).sum(), **{"degrees": (), **more})


def operations(workload: Workload, phase: str = "") -> list[Operation]:
    return [one for layer in workload.layers for one in layer.operations if one.phase == phase or not phase]


def of_the_host(found: list[Operation]) -> int:
    return sum(one.calls - one.inner_calls for one in found)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "two layers": {"num_layers": 2, "dropout": 0.1}, "bidirectional": {"bidirectional": True},
    "batch first": {"batch_first": True, "bias": False}, "stack": {"num_layers": 3, "bidirectional": True},
    "projected": {"num_layers": 2, "bidirectional": True, "proj_size": 3},
}  # fmt: skip


@pytest.mark.parametrize("around", [{}, {"linear": False}, {"packed": True}, {"states": True}], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_single_steps(kind: type[nn.RNNBase], variant: str, around: dict[str, Any]) -> None:
    """In float64 the CPU does one step after the other, with operators whose FLOPs torch itself counts."""
    if variant == "projected" and kind is not nn.LSTM:
        return
    inputs = INPUTS if "linear" in around else 7
    model = Around(kind(inputs, HIDDEN, dtype=torch.float64, **VARIANTS[variant]), **around)
    x = torch.randn(*((SAMPLES, STEPS) if "batch_first" in VARIANTS[variant] else (STEPS, SAMPLES)), INPUTS).double()
    with FlopCounterMode(display=False) as forward:
        loss = model(x)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    found = taken(model, x)
    assert sum(one.flops for one in operations(found, "forward")) == forward.get_total_flops()
    assert sum(one.flops for one in operations(found, "backward")) == backward.get_total_flops()


@pytest.mark.parametrize(("kind", "nbytes"), [(nn.LSTM, 736_000_000), (nn.GRU, 864_000_000)])
def test_cudnn_keeps_what_it_has_said_to_keep(kind: type[nn.RNNBase], nbytes: int) -> None:
    """pytorch/pytorch#2895: four layers of 320 units, by their parameters; 25,000 rows, by the ratio of the sizes."""
    layer = kind(123, 320, 4).to("meta")
    found = taken(nn.Sequential(layer, First()), torch.empty(500, 50, 123, device="meta"))
    states = (1 + (kind is nn.LSTM)) * 4 * 50 * 320 * 4
    assert found.layers[0].saved_bytes - states - 25_000 * 320 * 4 == nbytes  # beside what the operator has given


class First(nn.Module):
    def forward(self, both: Any) -> Tensor:
        out: Tensor = both[0]
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_more_steps_are_more_kernels_and_no_more_operators(kind: type[nn.RNNBase]) -> None:
    short, long = (
        taken(Around(kind(INPUTS, HIDDEN, 2, bidirectional=True)), torch.empty(steps, SAMPLES, INPUTS))
        for steps in (STEPS, 3 * STEPS)
    )
    for phase in ("forward", "backward"):
        few, many = operations(short, phase), operations(long, phase)
        assert of_the_host(few) == of_the_host(many) < 20
        # A product and a kernel for the rest, of two layers in two directions.
        steps = [sum(one.calls for one in found if one.kind == "recurrent") for found in (few, many)]
        assert steps == [2 * 4 * STEPS, 2 * 4 * 3 * STEPS]


def test_each_step_reads_the_recurrent_weights_again() -> None:
    layer = nn.LSTM(INPUTS, HIDDEN)
    found = taken(Around(layer, linear=False), torch.empty(STEPS, SAMPLES, INPUTS))
    for phase in ("forward", "backward"):
        (product,) = [one for one in operations(found, phase) if one.kind == "recurrent" and one.flops]
        assert product.fixed_bytes == STEPS * layer.weight_hh_l0.nbytes
    (product,) = [one for one in operations(found, "forward") if one.flops and not one.kind]
    assert product.fixed_bytes == layer.weight_ih_l0.nbytes


def test_a_projection_is_one_more_product_a_step() -> None:
    found = taken(Around(nn.LSTM(INPUTS, HIDDEN, proj_size=3)), torch.empty(STEPS, SAMPLES, INPUTS))
    for phase in ("forward", "backward"):
        assert sum(one.calls for one in operations(found, phase) if one.kind == "recurrent") == 3 * STEPS


def test_products_of_recurrent_layers_run_in_the_format_of_their_setting() -> None:
    model, x = Around(nn.GRU(INPUTS, HIDDEN), linear=False), torch.empty(STEPS, SAMPLES, INPUTS)
    assert {one.number_format for one in operations(taken(model, x)) if one.flops} == {"tf32"}
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    assert {one.number_format for one in operations(taken(model, x)) if one.flops} == {"float32"}


def test_under_autocast_a_layer_keeps_half_as_much() -> None:
    model, x = Around(nn.LSTM(INPUTS, HIDDEN, 2), linear=False), torch.empty(STEPS, SAMPLES, INPUTS)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            found: Tensor = model(x)
        return found.float()

    whole = taken(model, x)
    half = capture(model, x, device="meta", degrees=(), loss=loss)
    assert {one.number_format for one in operations(half) if one.flops} == {"float16"}
    cast = sum(one.saved_fixed_bytes for one in operations(half))
    assert cast == sum(one.nbytes for one in model.parameters()) / 2
    assert half.saved_bytes - cast - x.nbytes / 2 == whole.saved_bytes / 2  # the input is cast, too, and kept
    assert half.flops == whole.flops


class Dropped(nn.Module):
    """An LSTM whose recurrent weights are dropped (Merity et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(INPUTS, HIDDEN)
        self.raw = nn.Parameter(self.layer.weight_hh_l0.detach())
        del self.layer._parameters["weight_hh_l0"]

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight_hh_l0 = dropout(self.raw, 0.5)  # type: ignore[assignment]
        out: Tensor = self.layer(x)[0]
        return out


def test_weights_that_are_no_parameters_are_copied_together_and_trained() -> None:
    x = torch.empty(STEPS, SAMPLES, INPUTS)
    plain, dropped = taken(Around(nn.LSTM(INPUTS, HIDDEN), linear=False), x), taken(Dropped(), x)
    kept = 2 * HIDDEN * 4 * HIDDEN * 4  # the mask, and what is left
    assert dropped.saved_bytes - plain.saved_bytes == plain.parameter_bytes + kept
    forward, backward = (
        [sum(one.flops for one in operations(each, phase)) for each in (plain, dropped)]
        for phase in ("forward", "backward")
    )
    nobody_needs = 2 * 4 * HIDDEN * (STEPS * SAMPLES * INPUTS + SAMPLES * HIDDEN)  # gradients of the batch, of zeros
    assert forward == 2 * [plain.flops]
    assert backward == 2 * [2 * plain.flops - nobody_needs]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.layer = nn.Linear(INPUTS, INPUTS), nn.LSTM(INPUTS, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda one: self.layer(one)[0], self.linear(x), use_reentrant=False)
        return out


def test_a_checkpointed_layer_keeps_its_input_and_runs_again() -> None:
    x = torch.empty(STEPS, SAMPLES, INPUTS)
    found = taken(Checkpointed(), x)
    assert found.saved_bytes == x.nbytes
    forward, backward = (
        sum(one.calls for one in operations(found, phase) if one.kind == "recurrent")
        for phase in ("forward", "backward")
    )
    assert backward == 2 * forward == 4 * STEPS


class Encoder(nn.Module):
    """A frozen encoder in evaluation mode, and what is trained on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(INPUTS, HIDDEN), nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = self.layer(x)[0]
        found: Tensor = self.head(out)
        return found


def test_a_layer_without_gradients_keeps_nothing() -> None:
    found = taken(Encoder(), torch.empty(STEPS, SAMPLES, INPUTS))
    assert found.saved_bytes == STEPS * SAMPLES * HIDDEN * 4  # the head's input
    assert sum(one.calls for one in operations(found) if one.kind == "recurrent") == 2 * STEPS


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(INPUTS, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], HIDDEN)
        for one in x:
            h, c = self.cell(one, (h, c))
        return h


def test_cells_in_a_loop_stay_a_loop() -> None:
    short, long = (taken(Cells(), torch.empty(steps, SAMPLES, INPUTS)) for steps in (STEPS, 2 * STEPS))
    assert not any(one.kind == "recurrent" or one.inner_calls for one in operations(long))
    assert of_the_host(operations(long)) > 1.8 * of_the_host(operations(short))


def test_without_cudnn_steps_are_single() -> None:
    model, x = Around(nn.LSTM(INPUTS, HIDDEN)), torch.empty(STEPS, SAMPLES, INPUTS)
    with torch.backends.cudnn.flags(enabled=False):
        found = taken(model, x)
    assert not any(one.kind == "recurrent" for one in operations(found))
    assert found.flops == taken(model, x).flops


def test_ranks_that_divide_hidden_units_go_step_by_step() -> None:
    model, x = Around(nn.LSTM(INPUTS, HIDDEN, 2)), torch.empty(STEPS, SAMPLES, INPUTS)
    with torch.backends.cudnn.flags(enabled=False):
        single = taken(model, x, degrees=(2,))
    found = taken(model, x, degrees=(2,))
    assert found.degrees() == (2,)
    for mine, before in zip(found.layers, single.layers, strict=True):
        assert [one.operations for one in mine.shares] == [one.operations for one in before.shares]
        assert [one.exchanges for one in mine.shares] == [one.exchanges for one in before.shares]
    assert found.divided(2).flops == 1.0
    assert of_the_host(list(found.layers[1].share(2).operations)) > 10 * of_the_host(operations(found, "forward"))


def test_kernels_inside_of_an_operator_are_written_and_read_and_old_texts_have_none() -> None:
    found = taken(Around(nn.LSTM(INPUTS, HIDDEN)), torch.empty(STEPS, SAMPLES, INPUTS))
    assert parse(str(found)).layers == found.layers
    assert any(one.inner_calls for one in operations(found))
    old = parse("workload old\nbatch 1\nlayer one kind=LSTM\n  others moved_bytes=8.0 calls=3 phase=forward\n")
    assert operations(old) == [Operation("others", 0.0, 8.0, calls=3, phase="forward")]


def test_a_capture_on_the_cpu_is_what_the_cpu_does() -> None:
    found = capture(Around(nn.LSTM(INPUTS, HIDDEN)), torch.randn(STEPS, SAMPLES, INPUTS), degrees=(), repeats=1)
    assert found.measured
    assert not any(one.kind or one.inner_calls for one in operations(found))


def test_operators_are_torch_s_own_after_a_capture() -> None:
    layer, x = nn.LSTM(INPUTS, HIDDEN).to("meta"), torch.empty(STEPS, SAMPLES, INPUTS, device="meta")
    taken(Around(nn.LSTM(INPUTS, HIDDEN)), x)
    assert "Cudnn" not in type(layer(x)[0].grad_fn).__name__
