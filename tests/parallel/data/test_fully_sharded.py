"""Parameters that are gathered while a block is computed: for models that do not call their blocks as torch expects."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import hocket
from hocket.comm import CollectiveMismatchError
from hocket.planner import Plan, PlanError
from hocket.profile import Recorder
from hocket.testing import run_ranks


class ByForward(nn.Module):
    """Calls `forward` of its layers, past their hooks, as SqueezeBERT does; one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0].forward(x)
        for _ in range(2):
            x = x + self.layers[1].forward(x)
        return self.layers[2](x)


class ByWeight(nn.Module):
    """Reads the weights of layers that it does not call, as DeBERTa reads its table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.turn = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        return self.layers[2](self.layers[1](x) @ self.table.weight + F.linear(x, self.turn.weight, self.turn.bias))


class ByPart(nn.Module):
    """Calls a part of a block past the block, as DiT does with its first block's embedding of time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.blocks[1](self.blocks[0](x))
        return self.last(y * self.blocks[0][0](x))


class ByEarlierWeight(ByWeight):
    """Has used the weights of layers before it calls them, and what it has made of one after that; gives some, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, turned, row = self.turn.weight.norm(), self.layers[1].weight.t(), self.layers[2].weight[0].view(2, 4)
        x = torch.tanh(self.layers[1](torch.tanh(self.turn(self.layers[0](x)))))
        return self.layers[2](x @ turned) * size, self.layers[2].bias, row  # type: ignore[return-value]


def entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    if isinstance(output, tuple):
        output = output[0] * output[1] + output[2].square().sum()
    return F.cross_entropy(output, target)


def losses(plan: Plan | None, kind: type[nn.Module] = ByForward) -> list[float]:
    torch.manual_seed(1)
    model = kind().double()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batches = [(torch.randn(6, 4).double(), torch.randint(0, 3, (6,))) for _ in range(4)]
    if plan is not None:
        trainer = hocket.Trainer(model, entropy, optimizer, plan)
        return [float((trainer.step(b), trainer.evaluate([b]))[0]) for b in batches] + [trainer.evaluate(batches)]
    found = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    with torch.no_grad():
        return [*found, sum(entropy(model(x), y).item() for x, y in batches) / len(batches)]


class Sharing(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(8, 8), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.own(x) + self.shared(x))


class ByAll(nn.Module):
    """Has a layer inside two of its blocks, a block twice in a list, a block's part in another list, and None."""

    def __init__(self) -> None:
        super().__init__()
        shared, block = nn.Linear(8, 8), Sharing(nn.Linear(8, 8))
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Sharing(shared), block, nn.Linear(8, 8), Sharing(shared)])
        self.again = nn.ModuleList([self.blocks[2], None, block.shared, self.blocks[2]])  # type: ignore[list-item]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, *self.again.children(), self.again[3]):
            x = x + torch.tanh(block(x))
        return self.last(x)


KINDS = (ByForward, ByWeight, ByEarlierWeight, ByPart, ByAll)
PASSES = (1, 3)


def all_losses() -> dict[tuple[str, int], list[float]]:
    return {
        (kind.__name__, accumulate): losses(Plan(shard="parameters", accumulate=accumulate), kind)
        for kind in KINDS
        for accumulate in PASSES
    }


@pytest.fixture(scope="module")
def found() -> list[dict[tuple[str, int], list[float]]]:
    return run_ranks(all_losses, 2)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", PASSES)
def test_layers_that_are_not_called_as_modules_are_gathered_too(
    found: list[dict[tuple[str, int], list[float]]], kind: type[nn.Module], accumulate: int
) -> None:
    expected = losses(None, kind)
    for rank in found:
        assert rank[kind.__name__, accumulate] == pytest.approx(expected, rel=1e-11)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(-1, 6)


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turned() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            turned = block(x)
            turned += x  # a view of the block's output, changed in place
            x = turned
        return x.view(-1, 2, 3)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    output -= target.view(-1, 2, 3)
    return output.square().mean()


def losses_in_place(plan: Plan) -> list[float]:
    torch.manual_seed(2)
    model, x = Adding().double(), torch.randn(8, 6, dtype=torch.float64)
    trainer = hocket.Trainer(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [float(trainer.step((x, x.flip(1)))) for _ in range(4)]


def test_views_that_are_changed_in_place_lose_no_gradient_and_warn_of_nothing() -> None:
    for rank in run_ranks(losses_in_place, 2, Plan(shard="parameters"), timeout_s=60):
        assert rank == pytest.approx(losses_in_place(Plan()), rel=1e-12)


class Squared(nn.Module):
    """Gives the square of its gradient by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)[0].square().sum(1)


class Clamping(nn.Sequential):
    """Keeps its weights small by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self[0].weight.clamp_(-0.1, 0.1)
        return super().forward(x).squeeze(1)


class Masked(nn.Sequential):
    """Takes away some of its weights by itself, past torch's count of versions, as PixelCNN does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self[0].weight.data *= torch.arange(4) != 2
        return super().forward(x).squeeze(1)


class Curvature(Squared):
    """Gives a part of its second derivative by its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.jacrev(self.inner))(x).sum((1, 2))


class Replaced(Squared):
    """Computes with a parameter that it has made of another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.inner, {"0.bias": torch.ones(8) * 2}, (x,)).squeeze(1)


class Decaying(Squared):
    """Sums over its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(one.square().sum() for one in self.parameters())  # type: ignore[return-value]


class Flattened(nn.Module):
    """Has all parameters of a block in one tensor, as an adjoint method of differential equations has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), nn.Linear(3, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.cat([one.flatten() for one in self.layers[0].parameters()])
        return self.layers[1](self.layers[0](x))[..., 0] + flat.sum()  # type: ignore[no-any-return]


class Early(nn.Module):
    """Calls a part of a block before the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: Any = self.layers[0]
        return self.layers[1](inner(inner[0](x)))[..., 0]  # type: ignore[no-any-return]


REFUSED = {
    Squared: "create_graph=True.*say shard = 'gradients'",
    Clamping: "forward writes to parameter '0.weight'",
    Masked: "forward writes to parameter '0.weight'",
    Curvature: "inside a transform of torch.func.*say shard = 'gradients'",
    Replaced: "stands in the place of parameter 'inner.0.bias'.*say shard = 'gradients'",
    Early: "gradient of parameter 'layers.0.0.weight' came after.*say shard = 'gradients'",
    Decaying: "outside of the block that they belong to.*say shard = 'gradients'",
    Flattened: "outside of the block that they belong to.*say shard = 'gradients'",
}


def refusals() -> list[str]:
    said = []
    for kind in REFUSED:
        model = kind(nn.Linear(4, 8), nn.Linear(8, 1)) if issubclass(kind, nn.Sequential) else kind()
        trainer = hocket.Trainer(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), Plan(shard="parameters"))
        with pytest.raises(RuntimeError) as error:
            trainer.step((torch.randn(8, 4), torch.randn(8)))
        said.append(str(error.value))
    return said


def test_what_would_lose_gradients_or_numbers_is_refused() -> None:
    for rank in run_ranks(refusals, 2):
        for expected, said in zip(REFUSED.values(), rank, strict=True):
            assert re.search(expected, said), said


def called_first() -> str:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer, batch = hocket.Trainer(model, F.mse_loss, optimizer, Plan(shard="parameters")), torch.randn(8, 4)
    with torch.no_grad():
        model[0](batch)
    with pytest.raises(RuntimeError) as error, warnings.catch_warnings(action="ignore"):
        trainer.step((batch, torch.randn(8, 1)))
    return str(error.value)


def test_a_part_that_is_called_before_the_first_step_is_refused() -> None:
    """It ended in an AttributeError of torch's."""
    assert all("the program has called '0', a part of the model" in one for one in run_ranks(called_first, 2))


def pruned() -> str:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(model, F.mse_loss, optimizer, Plan(shard="parameters"))
    trainer.step((torch.randn(8, 4), torch.randn(8, 1)))
    with pytest.raises(RuntimeError) as error, warnings.catch_warnings(action="ignore"):
        prune.random_unstructured(model[0], "weight", 0.3)
    model[0].register_parameter("scale", nn.Parameter(torch.ones(1)))
    return str(error.value)


def test_pruning_after_the_trainer_was_made_is_refused() -> None:
    """It ended in a RuntimeError of DTensor's."""
    for said in run_ranks(pruned, 2):
        assert "parameter 'weight' of Linear is to be 'weight_orig'" in said
        assert "change the model before the Trainer is made" in said


class Widening(nn.Linear):
    """Has weights of another type than what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


def of_two_types(plan: Plan) -> list[float]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), Widening(8, 3).double())
    trainer = hocket.Trainer(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), plan)
    batch = torch.randn(8, 4), torch.randn(8, 3).double()
    return [float(trainer.step(batch)) for _ in range(3)]


def types() -> tuple[list[float], str]:
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 8), Widening(8, 1).double())))
    with pytest.raises(PlanError) as error:
        hocket.Trainer(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), Plan(shard="parameters"))
    return of_two_types(Plan(shard="parameters")), str(error.value)


def test_blocks_may_differ_in_type_and_a_block_that_has_two_is_refused() -> None:
    for each, said in run_ranks(types, 2):
        assert each == pytest.approx(of_two_types(Plan()), rel=1e-6)
        assert "0.0.0.weight is of torch.float32, 0.0.1.weight of torch.float64" in said
        assert "give them one type" in said


class Experts(nn.Module):
    """Samples go to one of two experts by the sign of their last number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        for some, expert in zip((first, ~first), self.experts, strict=True):
            if some.any():
                x = x.index_add(0, torch.where(some)[0], expert(x[some]))
        return x


class MixtureOfBlocks(nn.Module):
    """Has experts in a list of lists, so that each is a block."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.scale = nn.ModuleList([Experts().experts]), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x[:, -1] > 0
        for some, expert in zip((first, ~first), self.experts[0], strict=True):  # type: ignore[arg-type]
            if some.any():
                x = x.index_add(0, torch.where(some)[0], expert(x[some]))
        return x * self.scale


class Mixture(nn.Module):
    """Layers of experts, one of which may be left out, and parameters that cannot be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.scale, self.none = nn.Parameter(torch.tensor(1.1)), nn.Parameter(torch.zeros(0, 4))
        self.left_out = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x[:, -1] > 0
        for number, layer in enumerate(self.layers):
            x = x if number == self.left_out else layer(x, first)
        return self.scale * x


def of_experts(plan: Plan | None) -> list[float]:
    """Samples of each rank go to another expert, and all to one in the third batch; then losses of an evaluation."""
    torch.manual_seed(0)
    model = Mixture().double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    inputs = torch.randn(4, 4, 4, dtype=torch.float64)
    inputs[:, :, -1] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    inputs[2, :, -1] = 1.0
    batches = [(x, x.flip(0)) for x in inputs]
    if plan is None:
        found = []
        for x, target in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            found.append(loss.item())
        return [*found, F.mse_loss(model(inputs[0]), batches[0][1]).item()]
    trainer = hocket.Trainer(model, F.mse_loss, optimizer, plan, sample=inputs[0])
    with Recorder() as recorder:
        found = [float(trainer.step(batch)) for batch in batches]
    reductions = sum(event.get("kind") == "reduce_scatter" for event in recorder.events())
    assert reductions == len(batches) * 3 * plan.accumulate  # a block a pass, and none for the look at the loss
    return [*found, trainer.evaluate(batches[:1])]


def of_experts_by_plan() -> list[list[float]]:
    return [of_experts(Plan(shard="parameters", clip_norm=0.5, accumulate=passes)) for passes in (1, 2)]


def of_other_blocks() -> list[str]:
    """What ends it where ranks leave out other layers, and as many or not, or where experts are blocks themselves."""
    torch.manual_seed(0)
    x = torch.randn(4, 4).abs()
    mixture, of_blocks = Mixture(), MixtureOfBlocks()
    trainer, experts = (
        hocket.Trainer(model, F.mse_loss, torch.optim.AdamW(model.parameters()), Plan(shard="parameters"), sample=x)
        for model in (mixture, of_blocks)
    )
    said = []
    loss, same = trainer.evaluate([(x, x)]), x.clone()
    x[2:, -1] *= -1
    for operation, left_out in (
        (trainer.step, 1 + dist.get_rank()),
        (trainer.evaluate, 1 + dist.get_rank()),
        (trainer.evaluate, 2 if dist.get_rank() else -1),
        (experts.step, -1),
        (experts.evaluate, -1),
    ):
        mixture.left_out = left_out
        with pytest.raises(CollectiveMismatchError) as caught:
            operation((x, x) if operation.__name__ == "step" else [(x, x)])
        said.append(str(caught.value))
    mixture.left_out = -1
    assert trainer.evaluate([(same, same)]) == pytest.approx(loss)
    experts.evaluate([(same, same)])
    with torch.no_grad():
        of_blocks.scale.zero_()  # what is held, and not what a pass has gathered
    assert experts.evaluate([(same, same)]) == pytest.approx(float(same.square().mean()))
    return said


@pytest.mark.long
def test_experts_that_some_ranks_do_not_use_are_trained_as_by_one_process() -> None:
    expected = of_experts(None)
    for rank in run_ranks(of_experts_by_plan, 2):
        for losses in rank:
            assert losses == pytest.approx(expected, rel=1e-12)


def test_blocks_that_some_ranks_do_not_use_are_refused() -> None:
    for rank in run_ranks(of_other_blocks, 2):
        for said in rank:
            assert "ranks go through blocks of the model in different orders, or through different blocks" in said


def numbers_read(plan: Plan | None) -> list[float]:
    """Norms of gradients, and numbers of weights, as a program logs them after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.Linear(3, 1)).double()
    x, y = torch.randn(8, 4).double(), torch.randn(8, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if plan is None:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    else:
        hocket.Trainer(model, F.mse_loss, optimizer, plan).step((x, y))
    found = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
    found += [p.mean().item() for p in model.parameters()]
    first = model[0].weight
    return [*found, first.std().item(), first.abs().max().item(), model[3].bias.item()]


def test_numbers_that_are_read_of_weights_and_gradients_are_the_wholes() -> None:
    expected = numbers_read(None)
    for rank in run_ranks(numbers_read, 2, Plan(shard="parameters")):
        assert rank == pytest.approx(expected, rel=1e-12)


def number_of_one_rank() -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    trainer = hocket.Trainer(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), Plan(shard="parameters"))
    if dist.get_rank():
        with pytest.raises(CollectiveMismatchError):
            trainer.step((torch.ones(2, 4), torch.ones(2, 2)))
        return []
    with pytest.raises(CollectiveMismatchError) as failed:
        float(model.weight.sum())  # torch 2.14 adds up a norm as it is computed
    return failed.value.__notes__


def test_a_number_that_one_rank_reads_alone_is_told_with_the_remedy() -> None:
    (said,) = run_ranks(number_of_one_rank, 2)[0]
    assert "is read by every rank, or by none" in said
