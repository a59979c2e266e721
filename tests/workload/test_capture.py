"""Capture of real modules, on the CPU and on the meta device."""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from hocket.workload import Exchange, Workload, WorkloadError, capture, parse, summed


class Mixed(nn.Module):
    """A chain with a skip over two of its layers, a layer that runs twice, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.first = nn.Linear(8, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8))
        self.norm = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.1))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.first(x) * self.scale
        out: Tensor = self.last(self.norm(self.body(skipped) + skipped))
        return out


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))


@pytest.fixture(scope="module")
def captured() -> Workload:
    torch.manual_seed(0)
    return capture(chain(), torch.rand(16, 10), optimizer="adam", unit="row", degrees=(2, 3, 4, 5, 7, 10))


def test_layers_are_those_that_can_be_cut_and_hold_all_parameters(captured: Workload) -> None:
    assert [layer.kind for layer in captured.layers] == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
    assert [layer.parameters for layer in captured.layers] == [220, 0, 630, 0, 155]
    assert captured.parameter_bytes == captured.gradient_bytes == 4 * 1005
    assert captured.optimizer_bytes == 8 * 1005
    assert (captured.batch, captured.unit, captured.precision) == (16, "row", "float32")


def test_flops_outputs_and_saved_activations_are_exact(captured: Workload) -> None:
    assert [layer.flops for layer in captured.layers] == [2 * 16 * 10 * 20, 0, 2 * 16 * 20 * 30, 0, 2 * 16 * 30 * 5]
    # The cut behind a layer carries its output; tanh keeps its output, which the next layer then need not keep again.
    assert [layer.output_bytes for layer in captured.layers[:4]] == [16 * 20 * 4, 16 * 20 * 4, 16 * 30 * 4, 16 * 30 * 4]
    assert [layer.saved_bytes for layer in captured.layers] == [0, 16 * 20 * 4, 0, 16 * 30 * 4, 0]


def test_every_layer_is_timed_both_ways(captured: Workload) -> None:
    assert captured.measured
    assert all(layer.forward_s > 0 for layer in captured.layers)
    assert captured.backward_s > 0
    assert captured.optimizer_s > 0
    assert all(0 <= layer.fixed_share <= 1 for layer in captured.layers)
    assert parse(str(captured)) == captured


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_checkpointed_and_runs_again_is_timed_as_part_of_the_backward_pass(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    found = capture(Checkpointed(), torch.rand(256, 64), degrees=())
    assert all(layer.forward_s > 0 for layer in found.layers)
    assert found.backward_s > found.forward_s  # which has the forward pass of the blocks, too
    assert parse(str(found)) == found


def test_derivatives_that_the_forward_pass_takes_are_timed_as_part_of_it() -> None:
    class Force(nn.Module):
        """What a potential's gradient is made of, whose own gradient is wanted."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]

    found = capture(Force(), torch.rand(256, 64), degrees=())
    assert all(layer.forward_s > 0 and layer.backward_s >= 0 for layer in found.layers)
    assert found.backward_s > 0
    assert parse(str(found)) == found


def test_a_cut_inside_a_skip_carries_the_skipped_tensor_too() -> None:
    found = {layer.name: layer for layer in capture(Mixed(), torch.rand(4, 8), device="meta").layers}
    assert list(found) == ["first", "body.0", "body.1", "body.2", "norm.0", "norm.1", "last"]
    one = 4 * 8 * 4
    assert found["first"].output_bytes == one
    assert found["body.0"].output_bytes == one + 4 * 16 * 4
    assert found["body.2"].output_bytes == one
    assert found["first"].parameters == 72 + 8  # with the model's own


class _Encoder(nn.Module):
    """As models of libraries have it: a list of blocks of one class, with what stands before and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in "123")
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class _WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = _Encoder()
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def test_the_blocks_of_an_encoder_in_a_model_with_a_head_are_layers() -> None:
    sample = torch.zeros(2, 3, 4)
    found, encoder = (capture(model, sample, device="meta") for model in (_WithHead(), _Encoder()))
    names = ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert [layer.name for layer in encoder.layers] == names
    assert [layer.name for layer in found.layers] == [*(f"encoder.{name}" for name in names), "head.0", "head.1"]
    inside = dataclasses.replace(found, layers=found.layers[: len(names)])
    assert (inside.parameter_bytes, inside.flops) == (encoder.parameter_bytes, encoder.flops)


def test_the_meta_device_gives_the_same_but_for_times() -> None:
    torch.manual_seed(0)
    real, meta = (capture(Mixed(), torch.rand(4, 8), device=device) for device in ("cpu", "meta"))
    assert not meta.measured
    for one, other in zip(real.layers, meta.layers, strict=True):
        assert (one.name, one.flops, one.saved_bytes) == (other.name, other.flops, other.saved_bytes)
        assert (one.output_bytes, one.state_bytes) == (other.output_bytes, other.state_bytes)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_are_read_once_however_large_the_batch_is_and_of_tables_the_rows(device: str) -> None:
    model = nn.Sequential(nn.Embedding(10_000, 16), nn.Flatten(), nn.Linear(64, 8))
    for batch in (2, 8):
        found = capture(model, torch.zeros(batch, 4, dtype=torch.long), device=device)
        lookup = found.layers[0].operations[0]
        product = next(one for one in found.layers[-1].operations if one.flops)
        assert lookup.moved_bytes == batch * 4 * (8 + 2 * 16 * 4)  # ids, rows, and what is made of them
        assert lookup.fixed_bytes == 0
        assert product.fixed_bytes == (64 * 8 + 8) * 4
        assert product.moved_bytes > product.fixed_bytes


@pytest.mark.parametrize(("optimizer", "tensors"), [("sgd", 0), ("momentum", 1), ("adam", 2)])
def test_an_optimizer_keeps_its_state_in_the_type_of_the_parameters(optimizer: str, tensors: int) -> None:
    found = capture(nn.Linear(10, 10).bfloat16(), torch.rand(8, 10).bfloat16(), optimizer=optimizer)
    assert found.layers[0].optimizer_bytes == tensors * 2 * 110


def test_a_model_far_too_large_is_captured_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**15, 2**15, bias=False) for _ in range(40)))
    found = capture(model, torch.empty(8, 2**15, device="meta"))
    assert found.parameters == 40 * 2**30
    assert found.flops == 40 * 2 * 8 * 2**30


class _Irreps(tuple[int, ...]):
    """A tuple that has no length, as e3nn's."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_capturing_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = Mixed().eval()
    model.irreps = _Irreps((1, 2))  # type: ignore[assignment]
    model(torch.rand(4, 8)).sum().backward()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    state = torch.get_rng_state()
    capture(model, torch.ones(4, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients, after, strict=True))
    assert not any(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_shared_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    assert capture(model, torch.rand(2, 8), device="meta").parameters == 64


def test_a_loss_of_one_s_own_takes_the_whole_batch() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    found = capture(chain(), (torch.rand(6, 10), torch.zeros(6, dtype=torch.long)), loss=loss)
    assert found.batch == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"optimizer": torch.optim.SGD([torch.ones(1)])},
            "optimizer is one of type SGD; give its class, or a function",
        ),
        ({"optimizer": "magic"}, "optimizer 'magic' is not one of sgd, momentum, adam"),
        ({"loss": lambda model, batch: torch.zeros(())}, "has no gradient; give `loss`"),
        ({"loss": lambda model, batch: model(batch), "device": "meta"}, r"has the shape \[.*give its mean or its sum"),
        ({"loss": lambda model, batch: model(batch)}, r"has the shape \[.*give its mean or its sum"),
    ],
)
def test_what_cannot_be_captured_is_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        capture(chain(), torch.rand(2, 10), **arguments)  # type: ignore[arg-type]


def test_capturing_leaves_nothing_behind_that_holds_the_graph() -> None:
    model = chain()
    held = weakref.ref(model[1])
    made: list[weakref.ref[Tensor]] = []
    handle = model[0].register_forward_hook(lambda _module, _args, out: made.append(weakref.ref(out)))
    capture(model, torch.rand(4, 10), repeats=1)
    handle.remove()
    assert made
    assert not [one for one in made if one() is not None]
    model[0].weight.data = torch.zeros(7, 10)  # as tensor parallelism does; a graph that lives remembers the old shape
    model[0].bias.data = torch.zeros(7)
    model[0](torch.rand(4, 10)).sum().backward()
    del model
    gc.collect()  # of what other tests have left behind, too
    assert held() is None


def test_a_layer_says_what_each_of_some_workers_does_of_it(captured: Workload) -> None:
    assert captured.degrees() == (2, 3, 4, 5, 10)
    first, middle, last = (captured.layers[index] for index in (0, 2, 4))
    assert (first.share(2).parameter_bytes, middle.share(2).parameter_bytes) == (4 * 110, 4 * (300 + 30))
    assert first.share(2).exchanges == ()  # its input needs no gradient, and its output is used in parts
    assert middle.share(2).exchanges == (Exchange("forward", "all_reduce", 4 * 16 * 30),)
    assert last.share(5).parameter_bytes == 4 * 31
    assert last.share(5).exchanges[-1] == Exchange("forward", "all_gather", 4 * 16 * 5)
    assert captured.layers[1].share(2).operations[0].saved_bytes == 16 * 20 * 4 / 2
    whole = first.share(3)
    assert (whole.degree, whole.parameter_bytes, whole.operations) == (1, 880, first.operations)


def test_a_loss_that_goes_around_the_model_says_nothing_of_dividing_it() -> None:
    found = capture(chain(), torch.rand(6, 10), loss=lambda model, batch: model[2](model[0](batch)).sum())
    assert found.degrees() == ()
    assert found.flops == 2 * 6 * (10 * 20 + 20 * 30)


class _Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.view(*x.shape[:2], 4, 8).transpose(1, 2) for one in self.inner(x).chunk(3, -1))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(1)


def test_attention_on_meta_is_one_operator_that_keeps_no_scores() -> None:
    found = {
        device: capture(_Attention(), torch.zeros(2, 512, 32), device=device, degrees=()) for device in ("cpu", "meta")
    }
    scores = 2 * 4 * 512 * 512
    assert found["meta"].saved_bytes == found["cpu"].saved_bytes < 4 * scores
    assert found["meta"].flops == found["cpu"].flops == 2 * 1024 * 32 * 96 + 4 * scores * 8
    out = torch.nn.functional.scaled_dot_product_attention(*(torch.zeros(1, 1, 4, 4, device="meta"),) * 3)
    assert out.shape == (1, 1, 4, 4)  # outside of a capture all is as it was


class _Biased(nn.Module):
    """Attention with a bias that is trained, as T5's relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.bias = nn.Linear(32, 96), nn.Parameter(torch.zeros(1, 4, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend with four heads."""
        query, key, value = self.inputs(x).view(len(x), 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=self.bias)


def test_attention_with_a_trained_bias_is_captured_on_meta() -> None:
    found = capture(_Biased(), torch.zeros(2, 16, 32), device="meta", degrees=())
    assert found.parameters == 32 * 96 + 96 + 4 * 16 * 16
    assert found.flops == 2 * 2 * 16 * 32 * 96 + 4 * (2 * 4 * 16 * 16) * 8


class _Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look at a value, as sparse layers do."""
        y: torch.Tensor = self.inner(x)
        return y if (y == 0).all() else 2 * y


def test_a_model_that_asks_for_values_is_refused_on_meta_with_the_line() -> None:
    with pytest.raises(WorkloadError, match=r"asks for the value of a tensor.*test_capture.py:\d+\); give the inputs"):
        capture(_Asking(), torch.zeros(2, 8), device="meta", degrees=())
    assert capture(_Asking(), torch.zeros(2, 8), degrees=()).parameters == 72


@pytest.mark.parametrize(("frozen", "shares"), [((), (1, 1, 1, 1)), ((1, 2), (1, 0.5, 0.5, 1)), ((0, 1), (0, 0, 1, 1))])
def test_frozen_layers_have_half_a_backward_pass_and_none_before_what_is_trained(
    frozen: tuple[int, ...], shares: tuple[float, ...]
) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    for number in frozen:
        model[number].requires_grad_(False)
    workload = capture(model, torch.randn(8, 16), device="meta")
    assert tuple(layer.backward_share for layer in workload.layers) == shares
    assert parse(str(workload)) == workload
    assert workload.step_flops == workload.flops * (1 + 2 * sum(shares) / 4)


class WithLoss(nn.Module):
    """Returns its loss, and what it is of besides."""

    def __init__(self, kind: type = dict) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(8, 8), nn.Linear(8, 512), kind

    def forward(self, x: Tensor) -> Any:
        logits = self.last(self.first(x))
        targets = torch.zeros(len(x), dtype=torch.long, device=x.device)
        return self.kind(loss=nn.functional.cross_entropy(logits, targets), logits=logits)


def logits_first(loss: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pair that nanoGPT does."""
    return logits, loss


@pytest.mark.parametrize("kind", [dict, SimpleNamespace, logits_first])
def test_of_what_a_model_returns_its_loss_alone_is_passed_back(kind: type) -> None:
    """The gradient of a sum with the logits would be one more tensor of their size, in time and in memory."""
    model = WithLoss(kind)
    found = capture(model, torch.ones(64, 8), device="meta", degrees=())
    given = capture(WithLoss(), torch.ones(64, 8), device="meta", degrees=(), loss=lambda model, x: model(x)["loss"])
    assert found.layers == given.layers


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_list_is_one_argument_and_says_so(device: str) -> None:
    """As what a DataLoader gives for pairs."""
    with pytest.raises(WorkloadError, match="the list that is its sample as one argument.*is given as a tuple"):
        capture(nn.Linear(8, 8), [torch.ones(4, 8), torch.ones(4)], device=device, degrees=())


def test_a_number_that_is_not_of_the_other_outputs_is_no_loss() -> None:
    """As the loss of a router beside the logits."""
    first, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    logits, balance = first * 2, (other * 5).sum()
    assert summed((logits, balance)).item() == 21.0
    assert summed((logits, balance + logits.sum())).item() == 21.0
    assert summed((logits, balance, logits.sum())).item() == 27.0
    assert summed((logits.detach(), balance)).item() == 21.0
    assert summed((balance.detach(), None, logits)).item() == 21.0


@dataclasses.dataclass(frozen=True)
class Pairs:
    x: Tensor
    scale: Tensor


class OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, pairs: Pairs | None = None, **more: Tensor) -> Tensor:
        pairs = Pairs(**more) if pairs is None else pairs
        out: Tensor = self.inner(pairs.x) * pairs.scale
        return out


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", [dict, UserDict, Pairs])
def test_a_batch_may_be_a_mapping_or_a_dataclass(kind: type, device: str) -> None:
    """A tokenizer's `BatchEncoding` is a `UserDict`."""
    kept = {"x": torch.ones(16, 8), "scale": torch.ones(16, 1)}
    batch = kind(**kept)
    found = capture(OfPairs(), batch, device=device, degrees=(), repeats=1)
    assert (found.batch, found.flops) == (16, 2 * 2 * 16 * 8 * 8)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert type(batch) is kind
        x: Tensor = model(Pairs(**batch) if isinstance(batch, Mapping) else batch)
        return x.sum()

    assert capture(OfPairs(), batch, device=device, degrees=(), repeats=1, loss=loss).flops == found.flops
    assert kept["x"] is (batch.x if isinstance(batch, Pairs) else batch["x"])


def test_a_sample_without_a_tensor_is_refused_by_its_type() -> None:
    with pytest.raises(WorkloadError, match="the sample, of type DataLoader, holds no tensor.*give a batch: a tensor"):
        capture(nn.Linear(8, 8), DataLoader(TensorDataset(torch.ones(16, 8))), device="meta")


class Compiled(nn.Module):
    """Asks for whole graphs, of which none is compiled where operators are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = nn.Linear(8, 8), torch.compile(nn.functional.gelu, fullgraph=True, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.inner(x))
        return out


class CompiledMomentum(torch.optim.Optimizer):
    """Compiles what it does to each parameter, as torchao's optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.update = torch.compile(
            lambda one, kept, gradient: one.sub_(kept.add_(gradient)), fullgraph=True, backend="eager"
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.param_groups[0]["params"]:
            if not self.state[one]:
                self.state[one]["kept"] = torch.zeros_like(one)
            self.update(one, self.state[one]["kept"], one.grad)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_compiled_is_counted_as_it_is_written(device: str) -> None:
    model = Compiled().to(device)
    found = capture(model, torch.ones(32, 8, device=device), repeats=1, degrees=(2,), optimizer=CompiledMomentum)
    assert found.flops == 2 * 32 * 8 * 8
    assert sum(layer.optimizer_bytes for layer in found.layers) == 4 * found.parameters
    assert sum(layer.saved_bytes for layer in found.layers) == 4 * 32 * 8


class InBytes(Tensor):
    """Bytes with a scale, which pass for numbers of 32 bits, as the weights of torchao's 8-bit layers do."""

    kept: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, kept: Tensor, scale: Tensor) -> InBytes:
        made = Tensor._make_wrapper_subclass(cls, kept.shape, dtype=scale.dtype, device=kept.device)  # type: ignore[attr-defined]
        made.kept, made.scale = kept, scale
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["kept", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].kept, args[0].scale)
        args = tree_map(lambda one: one.kept * one.scale if isinstance(one, cls) else one, args)
        return func(*args, **(kwargs or {}))


def test_a_frozen_weight_in_bytes_takes_its_bytes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        weight = InBytes(torch.zeros(16, 8, dtype=torch.int8), torch.ones(16, 1))
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    first, last = capture(model, torch.zeros(32, 8), device="meta", degrees=()).layers
    assert (first.parameters, last.parameters) == (16 * 8 + 16, 4 * 16 + 4)
    assert first.parameter_bytes == 16 * 8 + 4 * 16 + 4 * 16  # bytes, scales, biases
    assert (first.gradient_bytes, last.parameter_bytes) == (4 * 16, 4 * (4 * 16 + 4))


class MakesItsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(8, device=x.device))
        out: Tensor = self.inner(x) * self.scale
        return out


class OfFixedSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).view(32, 2, 4)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "device", "said"),
    [
        (MakesItsParameter, "cpu", "makes its parameter scale when it is called; call the model once before"),
        (MakesItsParameter, "meta", "makes its parameter scale when it is called; call the model once before"),
        (OfFixedSize, "cpu", r"runs on 32 samples, and not on the first 4 of them \(RuntimeError.*; capture on meta"),
        (lambda: torch.jit.script(nn.Linear(8, 8)), "cpu", "is compiled by torch.jit; give the module"),
    ],
)
def test_models_of_which_a_part_cannot_be_captured_are_refused(
    model: Callable[[], nn.Module], device: str, said: str
) -> None:
    with pytest.raises(WorkloadError, match=said):
        capture(model(), torch.ones(32, 8), device=device, repeats=1, degrees=())


def test_weights_that_a_hook_computes_anew_are_captured_on_another_device() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    before = model[0].weight
    found = capture(model, torch.ones(32, 8), device="meta", degrees=())
    assert (found.flops, found.parameters) == (2 * 2 * 32 * 8 * 8, 2 * (8 * 8 + 8) + 8)
    assert model[0].weight is before


class Functional(nn.Module):
    """Computes with parameters of parts that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more = nn.Linear(8, 8), nn.ParameterDict({"scale": torch.ones(8), "out": torch.ones(4, 8)})

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first.forward(x) * self.more["scale"], self.more["out"])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_calls_none_of_its_parts_is_captured(device: str) -> None:
    found = capture(Functional(), torch.ones(16, 8), device=device, degrees=(2,), repeats=1)
    assert (found.flops, found.parameters) == (2 * 16 * (8 * 8 + 8 * 4), 8 * 8 + 8 + 8 + 4 * 8)
    assert found.measured == (device == "cpu")


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_gpu_s_autocast_holds_on_the_meta_device_where_there_is_no_gpu(device: str, again: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)))

    def loss(model: nn.Module, batch: Tensor, device: str = device) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            for block in model.children():
                batch = checkpoint(block, batch, use_reentrant=False) if again else block(batch)
            with torch.autocast(device, enabled=False):
                return batch.float().sum()

    captured = capture(model, torch.zeros(8, 16), device="meta", loss=loss, degrees=())
    expected = capture(model, torch.zeros(8, 16), device="meta", loss=partial(loss, device="cpu"), degrees=())
    assert captured == expected
    assert {one.number_format for layer in captured.layers for one in layer.operations if one.flops} == {"bfloat16"}
    assert captured.source == "captured on the meta device"
    assert torch.autocast("cpu", torch.bfloat16).device == "cpu"


def test_autocast_holds_on_the_meta_device_as_on_a_gpu() -> None:
    """There norms and losses compute in 32 bits, products in 16; weights are cast once, and kept."""
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4, bias=False))
    found: list[torch.dtype] = []
    for layer in model:
        layer.register_forward_hook(lambda _m, _a, out: found.append(out.dtype))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long, device="meta"))

    captured = capture(model, torch.zeros(32, 8), device="meta", loss=loss, degrees=())
    assert set(found[1::3]) == {torch.float32}
    assert set(found[::3]) == set(found[2::3]) == {torch.bfloat16}
    linear, norm, last = (layer.saved_bytes for layer in captured.layers)
    assert linear == 2 * 32 * 8  # its input in 16 bits
    assert norm == 4 * 32 * 16 + 2 * 4 * 32  # its input in 32, means and deviations
    # Its input and its weight in 16 bits; the loss's logarithms in 32, targets, and the sum of weights.
    assert last == 2 * 32 * 16 + 2 * 16 * 4 + 4 * 32 * 4 + 8 * 32 + 4
    plain = capture(model, torch.zeros(32, 8), device="meta", degrees=())
    assert plain.layers[0].saved_bytes == 0
