"""Code that models have between their layers is followed as it runs, and gives the same in stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.parallel.pipeline import SplitError, split
from hocket.parallel.pipeline._verify import chained
from hocket.planner import Plan
from hocket.testing import run_ranks

Tensor = torch.Tensor
WIDTH = 8


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Output:
    logits: Tensor
    pair: Pair | None = None
    loss: Tensor | None = None


class Memory:
    """Keys and values, as a cache of Hugging Face's keeps them: an object that layers hand on."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def add(self, x: Tensor) -> Tensor:
        self.layers.append(x)
        return torch.stack(self.layers).mean(0)


class Parts(nn.Module):
    """Four layers, and what stands between them."""

    def __init__(self, between: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("moving", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros(()))
        self.angles = torch.linspace(0.0, 1.0, WIDTH)  # no buffer, as Llama's rotations are none
        self.between = between

    def forward(self, x: Tensor) -> Any:
        y = self.layers[1](torch.relu(self.layers[0](x)))
        return self.between(self, x, y)

    def last(self, y: Tensor) -> Tensor:
        rest: Tensor = self.layers[3](torch.relu(self.layers[2](y)))
        return rest


def shapes(model: Any, x: Tensor, y: Tensor) -> Any:
    mask = torch.zeros(1, 1)
    if x.shape[0] != mask.shape[0]:  # so is every sample but a single one
        mask = mask.expand(x.shape[0], -1)
    rows, columns = torch.triu_indices(WIDTH, WIDTH, offset=1)
    products = (y[:, :, None] * y[:, None])[:, rows, columns]
    ramp = torch.linspace(0, 1, y.size(1)) + torch.tensor([float(WIDTH)] * WIDTH) / torch.arange(1, y.size(1) + 1)
    return model.last(y * ramp + products.mean(1, keepdim=True) + mask)


def containers(model: Any, x: Tensor, y: Tensor) -> Any:
    pair = Pair(y, y.cumsum(1))
    return Output(model.last(pair.left + pair.right), pair._replace(right=x * 2))


def caches(model: Any, x: Tensor, y: Tensor) -> Any:
    memory = Memory()
    for layer in model.layers[2:]:
        y = layer(torch.tanh(memory.add(y)))
    return y


def buffers(model: Any, x: Tensor, y: Tensor) -> Any:
    model.steps += 1
    model.moving = 0.9 * model.moving + 0.1 * y.detach().mean(0)
    return model.last(y - model.moving / model.steps)


def modes(model: Any, x: Tensor, y: Tensor) -> Any:
    return model.last(y * 2 if model.training else F.normalize(y, dim=-1))


def regions(model: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        centre = (y * model.scale).mean(0)
    return model.last(y - centre)


def packed(model: Any, x: Tensor, y: Tensor) -> Any:
    lengths = torch.full((len(y),), 4)
    sequence = nn.utils.rnn.pack_padded_sequence(y.view(len(y), 4, 2), lengths, batch_first=True)
    back, _ = nn.utils.rnn.pad_packed_sequence(sequence, batch_first=True)
    return model.last(back.flatten(1))


def loops(model: Any, x: Tensor, y: Tensor) -> Any:
    for column in y.unbind(1)[:3]:
        y = y + column[:, None]
    for place in range(len(y.shape)):
        y = y * (1 + place)
    return model.last(y)


def tables(model: Any, x: Tensor, y: Tensor) -> Any:
    model.angles = model.angles.to(x.device)  # it is there, so the same tensor
    return model.last(y * model.angles.to(x.dtype))


@pytest.mark.parametrize("between", [shapes, containers, caches, buffers, modes, regions, packed, loops, tables])
def test_code_between_layers_gives_the_same_in_stages(between: Any) -> None:
    torch.manual_seed(0)
    model = Parts(between)
    stages = split(model, 2, (torch.randn(6, WIDTH),), points=("layers.2",))
    assert stages[0].parameters().keys() >= {"layers.0.weight", "layers.1.weight"}
    assert stages[1].parameters().keys() >= {"layers.2.weight", "layers.3.weight"}
    for training, samples in ((True, 6), (False, 4), (True, 3), (False, 1)):
        model.train(training)
        x = torch.randn(samples, WIDTH)
        kept = [buffer.clone() for buffer in model.buffers()]
        expected = model(x)
        after = [buffer.clone() for buffer in model.buffers()]
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.detach().copy_(value)
        for stage in stages:  # which keep the buffers that they have
            for name, buffer in stage.module.named_buffers():
                buffer.detach().copy_(
                    dict(zip(dict(model.named_buffers()), kept, strict=True))[stage.names.get(name, name)]
                )
        found, _ = chained(stages, (x,))
        assert type(found) is type(expected)
        if isinstance(found, Output):
            assert type(found.pair) is Pair
            torch.testing.assert_close((found.logits, *found.pair), (expected.logits, *expected.pair))
        else:
            torch.testing.assert_close(found, expected)
        if between is buffers:
            held = {stage.names.get(n, n): b for stage in stages for n, b in stage.module.named_buffers()}
            torch.testing.assert_close([held["moving"], held["steps"]], after)


class Encoder(nn.Module):
    """torch's own Transformer, that looks whether its mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
        self.table, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.encoder = nn.TransformerEncoder(layer, 4)

    def forward(self, words: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        made: Tensor = self.head(self.encoder(self.table(words), mask=mask, src_key_padding_mask=padding))
        return made


def test_a_transformer_of_torch_s_is_cut_inside() -> None:
    words = torch.randint(1, 11, (4, 5))
    for inputs in ((words,), (words, words == 3)):
        stages = split(Encoder(), 2, inputs)
        assert all(any("encoder.layers" in layer for layer in stage.layers) for stage in stages)


class Graph(nn.Module):
    """A batch is one graph, whose nodes are no samples; hooks come with the first forward, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.hooked = False

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        if not self.hooked:
            self.layers[0].register_forward_hook(lambda *_: None)
            self.hooked = True
        for layer in self.layers:
            x = x + torch.zeros_like(x).index_add(0, edges[1], layer(x)[edges[0]])
        return x


class Deciding(nn.Module):
    """Cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x)) if x.sum() > 0 else self.a(x)
        return y


def edges() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(10, WIDTH, generator=g), torch.cat(
        [torch.randint(0, 10, (2, 30), generator=g), torch.tensor([[9], [9]])], 1
    )


class Ragged(nn.Module):
    """What crosses a cut is as long as the numbers in a batch say; and a buffer counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        y = x[x[:, 0] > 0]
        for layer in self.layers:
            y = torch.relu(layer(y))
        return torch.zeros_like(x).masked_scatter(x[:, :1] > 0, y)


class OneByOne(nn.Module):
    """Goes through the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.stack([self.first(one) for one in x]))  # type: ignore[no-any-return]


def test_code_that_goes_through_the_samples_is_refused_by_its_line() -> None:
    said = r"fewer samples take another way through OneByOne: `return .*\(unbind\) gave 4 .* micro_batches = 1"
    with pytest.raises(SplitError, match=said):
        split(OneByOne(), 2, torch.randn(4, WIDTH))


class Windows(nn.Module):
    """Counts its samples by a number that is rounded, and goes on by it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples = int(x.shape[0] / (WIDTH / 8))
        y = self.first(x)
        return self.last(y.view(samples, -1) * (1.0, 2.0)[samples % 2])  # type: ignore[no-any-return]


def test_a_branch_on_a_number_is_refused_by_the_line_of_the_model() -> None:
    with pytest.raises(SplitError, match=r"through Windows: `samples = int\(x.shape.*test_ordinary_code.py.* gave 4 "):
        split(Windows(), 2, torch.randn(4, WIDTH))


def asks_for_gradients(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Goes on as diffusers' transformers do, which a model that is trained as it evaluates does both ways."""
    if torch.is_grad_enabled() and model.training:
        y = torch.zeros_like(y)
    return model.layers[3](model.layers[2](y))  # type: ignore[no-any-return]


def otherwise_without_gradients(model: Any, x: Tensor, y: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        y = y * 2
    return model.layers[3](model.layers[2](y))  # type: ignore[no-any-return]


def test_a_model_that_is_trained_as_it_evaluates_may_ask_whether_there_are_gradients() -> None:
    torch.manual_seed(0)
    model, x = Parts(asks_for_gradients).eval(), torch.randn(4, WIDTH)
    stages = split(model, 2, x)
    expected = model(x)
    expected.sum().backward()
    wanted = model.layers[0].weight.grad.clone()
    model.zero_grad()
    output, backward = chained(stages, (x,))
    backward([torch.ones_like(expected)])
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(model.layers[0].weight.grad, wanted)
    with torch.no_grad():
        torch.testing.assert_close(chained(stages, (x,))[0], model(x))
    with pytest.raises(
        SplitError, match=r"evaluation takes another way through Parts: `if torch.is_grad_enabled\(\):`"
    ):
        split(Parts(otherwise_without_gradients).eval(), 2, x)


def ragged(step: Callable[[Tensor, Tensor], Any]) -> list[float]:
    g = torch.Generator().manual_seed(4)
    return [float(step(torch.randn(8, WIDTH, generator=g), torch.ones(8, WIDTH))) for _ in range(3)]


def alone() -> list[float]:
    torch.manual_seed(0)
    model = Ragged()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return ragged(step)


def piped() -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    model = Ragged()
    plan = Plan(pipeline_parallel_degree=2, micro_batches=2, split=("layers.2",))
    sample = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(4))
    trainer = hocket.Trainer(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), plan, sample=sample)
    losses = ragged(lambda x, target: trainer.step((x, target)))
    return losses, [note for note in trainer.report()["notes"] if "changes buffers" in note]


def refused_and_tried_again() -> tuple[list[str], list[float], list[str], Any]:
    """The errors of plans that cannot be, and then what a plan loses that can, on the same ranks."""
    said = []
    made = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))
    for model, sample in ((Deciding(), (made,)), (Graph(), edges())):
        try:
            hocket.Trainer(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1),
                           Plan(pipeline_parallel_degree=2, micro_batches=2), sample=sample)  # fmt: skip
        except SplitError as error:
            said.append(str(error))
    torch.manual_seed(0)
    model = Graph()
    plan = Plan(pipeline_parallel_degree=2, micro_batches=1)
    trainer = hocket.Trainer(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), plan, sample=edges())
    losses = [float(trainer.step((*edges(), torch.ones(10, WIDTH)))) for _ in range(3)]
    wide = nn.Sequential(nn.Linear(WIDTH, 600), nn.Linear(600, 2))
    lopsided = hocket.Trainer(wide, F.mse_loss, torch.optim.SGD(wide.parameters(), lr=0.1), plan, sample=(made,))
    notes = [note for note in lopsided.report()["notes"] if "% of the parameters' bytes" in note]
    return said, losses, notes, piped()


def test_refusals_come_on_every_rank_alike_and_another_plan_can_be_tried() -> None:
    torch.manual_seed(0)
    model = Graph()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = []
    for _ in range(3):
        loss = F.mse_loss(model(*edges()), torch.ones(10, WIDTH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plain.append(float(loss.detach()))
    found = run_ranks(refused_and_tried_again, 2, timeout_s=110)
    assert found[0][0] == found[1][0]
    assert "Deciding into stages: DataDependentError" in found[0][0][0]
    assert "micro_batches = 1" in found[0][0][1]
    for _, losses, notes, (ragged_losses, changing) in found:
        assert ragged_losses == pytest.approx(alone(), rel=1e-5)
        assert not changing  # each step leaves in it what one pass leaves
        assert losses == pytest.approx(plain, rel=1e-5)  # float32
        assert notes
        assert "the largest step, 0, has 8" in notes[0]
