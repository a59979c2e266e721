"""What splits into which stages, and what is refused with which reason."""

from __future__ import annotations

import gc
import itertools
import math
import random
from math import log
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hocket.parallel.mesh import World
from hocket.parallel.pipeline import Pipeline, SplitError, Stage, split
from hocket.parallel.pipeline._numbers import OtherBranchError
from hocket.parallel.pipeline._partition import loose
from hocket.parallel.pipeline._trace import traced_in_both_modes
from hocket.parallel.pipeline._verify import chained
from hocket.testing import run_ranks
from hocket.workload.division import unchanged

from . import run_programs
from .models import MODELS

Tensor = torch.Tensor


def sample_of(name: str, n: int = 4) -> tuple[Any, ...]:
    *inputs, _ = MODELS[name].batch(n, torch.Generator().manual_seed(0))
    return tuple(inputs)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", MODELS)
def test_stages_hold_the_models_own_parameters_under_its_names(name: str) -> None:
    model = MODELS[name].make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    stages = split(model, 3, sample_of(name))
    own = dict(model.named_parameters())
    found: dict[str, Any] = {}
    for stage in stages:
        assert isinstance(stage, Stage)
        for key, parameter in stage.parameters().items():
            assert parameter is own[key]
            assert (key in stage.shared) == (key in found or any(key in s.parameters() for s in stages if s != stage))
            found[key] = parameter
        buffers = dict(stage.module.named_buffers())
        assert all(buffers[local] is model.get_buffer(key) for local, key in stage.names.items() if local in buffers)
    assert set(found) == set(own)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the model has changed"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_stage_is_the_model() -> None:
    (stage,) = split(MODELS["gpt"].make(), 1, sample_of("gpt"))
    assert stage.first
    assert stage.last
    assert not stage.takes
    assert not stage.shared


def test_points_begin_stages() -> None:
    model = MODELS["unet"].make()
    stages = split(model, 3, sample_of("unet"), points=("down2", "up2"))
    assert [stage.layers[0] for stage in stages] == ["inc.conv1", "down2.0", "up2.up"]
    assert len(stages[1].takes) == 2, "two skip connections"
    assert len(set(stages[1].takes) & set(stages[1].gives)) == 1, "one of them is passed on"
    assert "stage 1 of 3: down2.0" in str(stages[1])


def test_layers_of_torch_transformers_are_split_and_attention_is_not() -> None:
    stages = split(MODELS["seq2seq"].make(), 2, sample_of("seq2seq"), points=("transformer.decoder.layers.1",))
    assert stages[1].layers[0] == "transformer.decoder.layers.1"
    assert "transformer.encoder.layers.0" in stages[0].layers


def test_tied_weights_of_stages_far_apart_are_shared() -> None:
    stages = split(MODELS["gpt"].make(), 3, sample_of("gpt"))
    assert [stage.shared for stage in stages] == [("wte.weight",), (), ("wte.weight",)]
    assert {"wte.weight": "wte.weight"}.items() <= stages[0].names.items()
    assert stages[2].names["lm_head.weight"] == "wte.weight"


@pytest.mark.parametrize("mode", [True, False])
def test_training_and_evaluating_are_told_apart_after_the_split(mode: bool) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.dropout(self.a(x), 0.5, training=self.training))

    model = Dropping().train(mode)
    inputs = (torch.randn(4, 6),)
    stages = split(model, 2, inputs)
    for training in (True, False):
        model.train(training)
        torch.manual_seed(3)
        ours, _ = chained(stages, inputs)
        torch.manual_seed(3)
        torch.testing.assert_close(ours, model(*inputs))


def test_a_tensor_alone_is_the_model_s_only_input() -> None:
    """As `Trainer(sample=x)` has it; its rows had been taken for as many inputs."""
    model, x, target = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), torch.randn(4, 6), torch.randn(4, 6)
    pipeline = Pipeline(split(model, 2, x), World(0, 1, None), "gpipe", micro_batches=2, loss_fn=F.mse_loss)
    assert pipeline.step(x, target).item() == pytest.approx(F.mse_loss(model(x), target).item())


def test_options_and_missing_inputs_keep_their_defaults() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, mask: Tensor | None = None, twice: bool = False, *, scale: float = 2.0) -> Tensor:
            y = self.a(x)
            if mask is not None:
                y = y * mask
            return self.b(y) * (scale if twice else 1.0)

    model = Optional()
    x, mask = torch.randn(4, 6), torch.ones(4, 6)
    for inputs in ((x,), (x, None), (x, mask), (x, mask, True), (x, None, True)):
        assert len(split(model, 2, inputs)) == 2


def test_other_batch_sizes_pass_a_traced_len_shape_and_arange() -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            n, width = x.shape
            x = self.a(x).view(len(x), width) + torch.arange(n)[:, None] + torch.zeros(n, width)
            return self.b(x.reshape(x.size(0) * 2, -1).view(n, width))

    model = Sizes()
    stages = split(model, 2, (torch.randn(8, 6),))
    for n in (1, 3, 8, 20):
        x = torch.randn(n, 6)
        torch.testing.assert_close(chained(stages, (x,))[0], model(x))


def test_a_branch_that_another_batch_takes_differently_is_an_error_and_not_a_wrong_result() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            if x.size(0) > 10:
                y = y * 2
            return self.b(y)

    stages = split(Branch(), 2, (torch.randn(4, 6),))
    chained(stages, (torch.randn(9, 6),))
    with pytest.raises(OtherBranchError, match="would take another way"):
        chained(stages, (torch.randn(11, 6),))


TABLE = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize(
    ("how", "what"),
    [
        (lambda model, n: math.log(n), "computed"),
        (lambda model, n: log(n), "computed"),
        (lambda model, n: math.sqrt(n / 2), "computed"),
        (lambda model, n: n >> 1, "computed"),
        (lambda model, n: 2 ** (n - 1).bit_length() + ~n | 8, "computed"),
        (lambda model, n: 2.0 if (n / 4).is_integer() else 3.0, "settled"),
        (lambda model, n: float(np.arange(n).sum()), "settled"),
        (lambda model, n: model.table[n], "settled"),
        (lambda model, n: TABLE[n], "settled"),
        (lambda model, n: sum(model.table[: n // 2]), "settled"),
        (lambda model, n: sum(layer.bias for layer in model.heads[:n]), "settled"),
        (lambda model, n: model.heads[n].bias, "settled"),
        (lambda model, n: model.named[str(n)].bias, "settled"),
        (lambda model, n: model.named[f"of_{n:02}"].bias, "settled"),
        (lambda model, n: model.named["of_02"].bias * len(f"a batch of {n}"), "computed"),
    ],
)
def test_what_python_makes_of_a_size_is_of_each_batch_or_an_error(how: Any, what: str, fits: bool) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.table = tuple(TABLE)
            self.heads = nn.ModuleList([nn.Linear(1, 1) for _ in range(8)])
            self.named = nn.ModuleDict({key: nn.Linear(1, 1) for i in range(8) for key in (str(i), f"of_{i:02}")})

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)) * how(self, x.shape[1]))

    model = Sized()
    stages = split(model, 2, (torch.randn(4, 4, 6),))
    assert type(model.table) is tuple
    assert type(TABLE) is list
    x = torch.randn(4, 4 if fits else 7, 6)
    if fits or what == "computed":
        torch.testing.assert_close(chained(stages, (x,))[0], model(x))
    else:
        with pytest.raises(OtherBranchError, match="would take another way"):
            chained(stages, (x,))


@pytest.mark.parametrize(
    "how",
    [
        lambda model, x: TABLE[:][x.shape[1]],
        lambda model, x: {str(i): one for i, one in enumerate(TABLE)}[str(x.shape[1])],
        lambda model, x: getattr(model, f"width{x.shape[1]}"),
        lambda model, x: sum(itertools.islice(TABLE, x.shape[1])),
        lambda model, x: x.shape[1:].numel(),
        lambda model, x: torch.LongTensor([x.shape[1]]),
    ],
)
def test_a_size_that_following_cannot_see_holds_batches_to_the_samples(how: Any) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            for i in range(9):
                setattr(self, f"width{i}", float(i))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)) * how(self, x))

    model = Sized()
    pipeline = Pipeline(split(model, 2, (torch.randn(4, 4, 6),)), World(0, 1, None))
    for n in (4, 1, 7):  # the model has more samples, or fewer, than the sample: of no matter
        x = torch.randn(n, 4, 6)
        torch.testing.assert_close(pipeline.forward((x,)), model(x))
    for other in (torch.randn(4, 7, 6), torch.randn(4)):
        with pytest.raises(ValueError, match="and has 4 in dim 1 in the sample"):
            pipeline.forward((other,))


def test_sizes_that_are_seen_may_be_others_than_the_samples() -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = self.a(x) * math.prod(x.shape[1:]) if x.is_contiguous() else x
            return self.b(x + torch.arange(x.shape[1])[:, None]) * mask[..., None]

    model = Seen()
    stages = split(model, 2, (torch.randn(4, 4, 6), torch.ones(4, 4)))
    assert stages[0].unseen == ()
    pipeline = Pipeline(stages, World(0, 1, None))
    x, mask = torch.randn(3, 9, 6), torch.rand(3, 9)
    torch.testing.assert_close(pipeline.forward((x, mask)), model(x, mask))


@pytest.mark.timeout(60)
def test_a_model_that_ends_with_no_other_size_is_split() -> None:
    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            while x.shape[1] != 4:  # of 2 it has 1, again and again
                x = x[:, ::2]
            return self.b(x)

    model, x = Halving(), torch.randn(4, 4, 6)
    torch.testing.assert_close(chained(split(model, 2, (x,)), (x,))[0], model(x))


@pytest.mark.timeout(60)
def test_a_model_whose_own_loop_ends_with_no_other_size_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.parallel.pipeline._verify._MOST_S", 0.2)

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            count = x.shape[1]
            while count != 4:  # nothing of torch is called: of 2 it is 1, and 0 for ever
                count //= 2
            return self.b(self.a(x))

    model, x = Counting(), torch.randn(4, 4, 6)
    torch.testing.assert_close(chained(split(model, 2, (x,)), (x,))[0], model(x))


def test_what_was_split_can_be_profiled() -> None:
    """Where Python 3.11 looks for an exception that does not come, a thread that is traced goes no further."""
    (calls,) = run_ranks(run_programs.split_and_profiled, 1, backend=None, timeout_s=20.0)
    assert calls > 10


def windows_of(x: Tensor) -> Tensor:
    return x.view(x.shape[0], 2, 2, 6).transpose(1, 2).reshape(-1, 2, 6)


def whole_of(windows: Tensor, count: int) -> Tensor:
    b = int(windows.shape[0] / (count / 2))
    return windows.view(b, 2, 2, 6).transpose(1, 2).reshape(b, count, -1)


def test_a_whole_number_that_only_shapes_are_given_is_of_each_batch() -> None:
    class Windowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(whole_of(torch.relu(self.a(windows_of(x))), x.shape[1]))

    model = Windowed()
    stages = split(model, 2, (torch.randn(4, 4, 6),))
    for n in (1, 3, 8):
        x = torch.randn(n, 4, 6)
        torch.testing.assert_close(chained(stages, (x,))[0], model(x))
    assert "int" not in globals()


class Doubled(torch.autograd.Function):
    """Passes on twice the gradient that flows back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def test_a_users_own_backward_is_kept() -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Doubled.apply(self.a(x)))

    model, inputs = Custom(), (torch.randn(4, 6),)
    output, backward = chained(split(model, 2, inputs), inputs)
    backward([torch.ones_like(output)])
    ours = model.a.weight.grad
    model.zero_grad()
    model(*inputs).sum().backward()
    torch.testing.assert_close(ours, model.a.weight.grad)
    assert "apply" in torch.autograd.Function.__dict__


def test_items_are_set_in_place() -> None:
    class Setting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(len(x), 6)
            out[:, ::2] = self.a(x)[:, ::2]
            out[x[:, 0] > 0] += 1
            return self.b(out)

    model, inputs = Setting(), (torch.randn(5, 6),)
    for point in ("b", ""):
        stages = split(model, 2, inputs, points=(point,) if point else ())
        torch.testing.assert_close(chained(stages, inputs)[0], model(*inputs))


class Looping(nn.Module):
    """Branches on the numbers in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        while y.norm() > 1:
            y = y / 2
        return self.b(y)


def test_data_dependent_code_stays_whole_in_one_stage() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Looping(), nn.Linear(6, 6))
    stages = split(model, 3, (torch.randn(4, 6),))
    assert [stage.layers for stage in stages] == [("0",), ("1",), ("2",)]


def test_data_dependent_code_in_the_model_itself_is_refused_with_the_reason() -> None:
    with pytest.raises(SplitError, match=r"Looping into stages: DataDependentError .* bool\(\) of a tensor.*submodule"):
        split(Looping(), 2, (torch.randn(4, 6),))


def test_a_branch_on_the_type_of_a_value_is_followed_as_it_is_taken() -> None:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Any) -> Tensor:
            y = self.a(x)
            return self.b(y if type(y) is Tensor else y + 1)

    model, inputs = Typed(), (torch.zeros(4, 6),)
    torch.testing.assert_close(chained(split(model, 2, inputs, points=("b",)), inputs)[0], model(*inputs))


def test_a_loss_may_change_outputs_in_place_that_an_earlier_stage_made() -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> list[Tensor]:
            first = self.a(x)
            return [first, self.b(torch.tanh(first))]

    model, inputs = Stacked(), (torch.randn(4, 6),)

    def loss(outputs: list[Tensor]) -> Tensor:
        return sum((one.sigmoid_().log() for one in outputs), torch.zeros(())).sum()

    output, backward = chained(split(model, 2, inputs, points=("b",)), inputs)
    backward(list(torch.autograd.grad(loss(output), output)))
    found = [p.grad for p in model.parameters()]
    expected = torch.autograd.grad(loss(model(*inputs)), list(model.parameters()))
    torch.testing.assert_close(found, list(expected))


@pytest.mark.parametrize("kind", ["counter", "random", "generator", "numpy", "tensor"])
def test_state_that_each_forward_changes_outside_of_buffers_is_refused(kind: str) -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.calls, self.kept = 0, None
            self.generator, self.drawing = torch.Generator(), np.random.default_rng(0)

        def forward(self, x: Any) -> Tensor:
            y = self.a(x)
            if kind == "counter":
                self.calls += 1
                y = y * 2 if self.calls > 100 else y
            elif kind == "random":
                y = y * 2 if random.random() < 0.5 else y
            elif kind == "generator":
                y = y * torch.rand(y.shape, generator=self.generator)
            elif kind == "numpy":
                y = y * float(self.drawing.random())
            else:
                before, self.kept = self.kept, y.detach()
                y = y if before is None else y + before
            return self.b(y)

    model = Stateful()
    said = {"counter": "changes calls", "random": "changes Python's random", "generator": "changes generator"}
    said["numpy"] = "changes drawing"
    with pytest.raises(SplitError, match=said.get(kind, "computed before this forward|differs by")):
        split(model, 2, (torch.zeros(4, 6),), points=("b",))
    assert (model.calls, model.kept) == (0, None)


@pytest.mark.parametrize(
    ("n", "points", "message"),
    [
        (2, ("nowhere",), r"names 'nowhere', which the model does not use.*It uses, in this order: 0.0, 0.1"),
        (3, ("2",), r"names 1 modules that begin a stage; 3 stages need 2"),
        (3, ("3", "2"), r"'2' does not come after the point before it"),
        (2, ("0",), r"'0' does not come after the point before it, or begins the model"),
        (0, (), r"into 0 stages"),
        (99, (), r"has 15 steps, too few for 99 stages"),
    ],
)
def test_impossible_splits_are_refused_with_the_remedy(n: int, points: tuple[str, ...], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        split(MODELS["mlp"].make(), n, sample_of("mlp"), points=points)


def test_stages_keep_nothing_of_the_sample() -> None:
    class Layered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x)) * len(x)
            return x[1:]

    stages = split(Layered(), 2, (torch.ones(13, 7),))
    gc.collect()
    kept = [o for o in gc.get_objects() if type(o) is torch.Tensor and tuple(o.shape) == (13, 7)]
    assert len(stages) == 2
    assert not kept


class Counting(nn.Module):
    """Counts its passes in a buffer where it begins, and uses the number where it ends, or the other way round."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.unused, self.last = nn.Linear(2, 2), last
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("idle", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last:
            x = x * (1 + self.passes)
        elif self.training:
            self.passes.add_(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if not self.last:
            return x / (1 + self.passes)
        if self.training:
            self.passes += 1
        return x


@pytest.mark.parametrize("last", [False, True])
def test_a_buffer_that_one_stage_changes_and_another_uses_is_refused(last: bool) -> None:
    with pytest.raises(SplitError, match="passes is changed in the forward pass, and stages 0 and 1 use it"):
        split(Counting(last), 2, torch.randn(4, 4), points=["layers.1"])


class Noting(Counting):
    """Uses what it counts at once; the cut is behind it, wherever the stages would be equal."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes.add_(1)
        x = self.layers[0](x)
        x = self.layers[1](x) / (1 + self.passes)
        return self.layers[2](x)


def test_a_cut_goes_where_no_stage_changes_what_another_uses() -> None:
    model = Noting(False)
    stages = split(model, 2, torch.randn(4, 4), times=[1.0] * 6)
    assert [name for name in stages[1].names.values() if name.startswith("layers")] == [
        "layers.2.weight",
        "layers.2.bias",
    ]


class Routed(nn.Module):
    """Each of three experts computes the tokens that are sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(torch.randn(4, 4) for _ in range(3))
        self.after = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, y = (x * 9).long().sum(-1) % 3, torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            y.index_add_(0, rows, x[rows] @ expert)
        return self.after(x + y)


def test_a_cut_goes_where_no_shape_depends_on_numbers() -> None:
    with unchanged(model := Routed()):
        traced = traced_in_both_modes(model, (torch.randn(8, 4),))
        depends = loose(traced)
        inside = [i for i, one in enumerate(depends) if one]
        assert inside
        assert not depends[-1], "what experts make has the shape of all tokens again"
    middle = inside[len(inside) // 2]
    for last, fixed in ((1.5, True), (0.1, False)):  # without the last step's time there is no other pipeline
        times = [0.0] * len(depends)
        times[0], times[middle - 1], times[middle], times[-1] = last - 0.1, 0.75, 0.75, last
        assert split(model, 2, torch.randn(8, 4), times=times)[0].fixed_shapes == fixed


def test_what_no_step_uses_is_the_first_stage_s() -> None:
    stages = split(Noting(False), 2, torch.randn(4, 4))
    assert {"unused.weight", "unused.bias", "idle"} <= set(stages[0].names.values())
    assert not {"unused.weight", "unused.bias", "idle"} & set(stages[1].names.values())
