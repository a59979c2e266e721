"""What ranks run to compare tensor-parallel models with plain ones; they return plain Python values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.parallel.compose._recompute import recompute
from hocket.parallel.mesh.world import current
from hocket.parallel.partition.tensor import (
    TensorParallel,
    is_leaf,
    parallelize,
)
from hocket.parallel.partition.tensor import _functions as functions
from hocket.parallel.pipeline import measure, split
from hocket.profile import Recorder
from hocket.sharding import RULES, Shard, as_local, cut

from ...user_models import CASES, Case
from .odd_models import Deceptive, Dropping, Odd, OwnFunction
from .small_models import MODELS, FusedViT, GatedMLP, SeparateHeads

STEPS = 8


def counted(recorder: Recorder) -> dict[str, tuple[int, int]]:
    """What was communicated: by kind, how many operations and bytes."""
    found: dict[str, tuple[int, int]] = {}
    for row in recorder.histogram():
        count, nbytes = found.get(row.kind, (0, 0))
        found[row.kind] = count + row.count, nbytes + row.nbytes
    return found


def expected(result: TensorParallel) -> dict[str, tuple[int, int]]:
    """What was foretold, in the same form."""
    found: dict[str, tuple[int, int]] = {}
    for c in result.collectives:
        count, nbytes = found.get(c.kind, (0, 0))
        found[c.kind] = count + c.count, nbytes + c.nbytes
    return found


def difference(
    result: TensorParallel, model: nn.Module, plain: nn.Module, value: Callable[[Any], Any], relative: bool = True
) -> float:
    """The largest difference between parameters (or their gradients), relative to the largest number of the tensor."""
    worst = 0.0
    for (name, mine), (_, full) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        a, b = value(mine), value(full)
        assert (a is None) == (b is None), name
        if a is not None:
            b = result.part(name, b)
            assert a.shape == b.shape, name
            worst = max(worst, float((a - b).abs().max()) / max(float(b.abs().max()), 1e-2))
    return worst


def train(name: str, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """Trains a user's model plainly and tensor-parallel; what differs, and what was decided and communicated."""
    case: Case = CASES[name]
    world = current()
    torch.manual_seed(5 + world.rank)  # rank 0's weights count
    model = case.model().double()
    rank_0 = world.from_root(model.state_dict())
    plain = case.model().double()
    plain.load_state_dict(rank_0)
    generator = torch.Generator().manual_seed(1)
    batches = [as_double(case.batch(4, generator)) for _ in range(steps)]
    result = parallelize(model, world, batches[0][:-1], **options)
    found: dict[str, Any] = {"forms": {d.name: d.form for d in result.decisions}, "refused": dict(result.refused)}
    found["share"] = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in plain.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, plain)]
    losses: list[tuple[float, float]] = []
    for i, batch in enumerate(batches):
        pair = []
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            with Recorder() as recorder:
                loss = case.loss_fn(m(*batch[:-1]), batch[-1])
                loss.backward()
            if i == 0 and m is model:
                found["counted"], found["expected"] = counted(recorder), expected(result)
            pair.append(loss.item())
        losses.append((pair[0], pair[1]))
        if i == 0:
            found["gradients"] = difference(result, model, plain, lambda p: p.grad)
        for optimizer in optimizers:
            optimizer.step()
    found["losses"] = losses
    found["weights"] = difference(result, model, plain, lambda p: p.data)
    model.eval(), plain.eval()
    with torch.no_grad():
        found["evaluation"] = float((model(*batches[0][:-1]) - plain(*batches[0][:-1])).abs().max())
    return found


def as_double(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in batch)


def all_user_models() -> dict[str, dict[str, Any]]:
    return {name: train(name) for name in CASES}


def step(
    make: Callable[[], nn.Module], inputs: Callable[[], tuple[torch.Tensor, ...]], **options: Any
) -> dict[str, Any]:
    """One forward and backward pass, plain and tensor-parallel: forms, counts, and what differs."""
    torch.manual_seed(3)
    model, sample = make().double(), as_double(inputs())
    sample = tuple(t.requires_grad_(t.is_floating_point()) for t in sample)
    plain = copy.deepcopy(model)
    result = parallelize(model, current(), sample, **options)
    found: dict[str, Any] = {"forms": {d.name: d.form for d in result.decisions}, "refused": dict(result.refused)}
    found["text"] = str(result)
    found["cut"] = sum(result.part(n, p).numel() for n, p in plain.named_parameters())
    found["parameters"] = sum(p.numel() for p in plain.parameters())
    outputs = []
    torch.manual_seed(4)
    batch = as_double(inputs())  # not the sample
    for m in (model, plain):
        mine = [t.clone().requires_grad_(t.is_floating_point()) for t in batch]
        with Recorder() as recorder:
            out = m(*mine)
            out = list(out) if isinstance(out, tuple) else [out]
            torch.stack([t.sin().sum() for t in out]).sum().backward()
        if m is model:
            found["counted"], found["expected"] = counted(recorder), expected(result)
        outputs.append([*(t.detach() for t in out), *(t.grad for t in mine if t.grad is not None)])
    found["outputs"] = max(float((a - b).abs().max()) for a, b in zip(*outputs, strict=True))
    found["gradients"] = difference(result, model, plain, lambda p: p.grad)
    model.eval(), plain.eval()
    with torch.no_grad():
        evaluated = [m(*batch) for m in (model, plain)]
    a, b = (e[0] if isinstance(e, tuple) else e for e in evaluated)
    found["evaluation"] = float((a - b).abs().max())
    return found


def all_small_models() -> dict[str, dict[str, Any]]:
    return {name: step(*pair) for name, pair in MODELS.items()}


def oddities() -> dict[str, Any]:
    """Models of which something cannot be cut."""
    tokens = (torch.randn(2, 5, 8), torch.randint(0, 6, (2, 5)))
    found = {"odd": step(Odd, lambda: tokens), "function": step(OwnFunction, lambda: (torch.randn(5, 8),))}
    right, RULES["cumsum"] = RULES["cumsum"], RULES["pointwise"]
    found["deceptive"] = step(Deceptive, lambda: (torch.randn(5, 8),))
    found["trusting"] = step(Deceptive, lambda: (torch.randn(5, 8),), verify=False)
    RULES["cumsum"] = right
    return found


def dropping() -> dict[str, Any]:
    """Dropout: which elements were dropped, and what came out, with and without activation checkpointing."""
    torch.manual_seed(10 + current().rank)  # ranks are not alike before
    model = Dropping()
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    result = parallelize(model, current(), (x,))
    masks: dict[str, Any] = {}

    def lost(name: str, kept: torch.Tensor) -> None:
        with as_local():
            masks[name] = (kept == 0).tolist()

    model.before.register_forward_hook(lambda m, i, o: lost("before", o))
    model.inside.register_forward_hook(lambda m, i, o: lost("inside", o))
    found: dict[str, Any] = {"forms": {d.name: d.form for d in result.decisions}}
    for again in (False, True):
        torch.manual_seed(7)
        model.zero_grad()
        out = checkpoint(model, x, use_reentrant=False) if again else model(x)
        out.square().sum().backward()
        grads = [p.grad.tolist() for p in model.parameters() if p.grad is not None]
        found[f"recompute={again}"] = {"out": out.tolist(), "grads": grads, "next": torch.rand(3).tolist()}
    found["masks"] = dict(masks)
    model.eval()
    found["evaluation"] = float((model(x) - model(x)).detach().abs().max())
    return found


def gpt_in_sequence() -> dict[str, Any]:
    """The comparison for one model."""
    return {"gpt": train("gpt", 3, sequence=True)}


def in_sequence() -> dict[str, Any]:
    """Sequence parallelism: the same comparisons, and a sequence that cannot be cut."""
    found: dict[str, Any] = {
        name: train(name, steps, sequence=True) for name, steps in (("gpt", 4), ("seq2seq", 2), ("mixer", 1))
    }
    torch.manual_seed(0)
    model = CASES["gpt"].model().double()
    plain = copy.deepcopy(model)
    parallelize(model, current(), (torch.zeros(2, 8, dtype=torch.long),), sequence=True)
    ids = torch.arange(14).view(2, 7)
    found["odd_length"] = float((model(ids) - plain(ids)).detach().abs().max())
    return found


def pieces() -> dict[str, Any]:
    """A full model put together from the ranks' pieces; copies and pickles of a cut model."""
    torch.manual_seed(0)
    model = CASES["gpt"].model()
    plain = copy.deepcopy(model)
    names = [id(p) for p in model.parameters()]
    ids = torch.randint(0, 40, (2, 8))
    result = parallelize(model, current(), (ids,))
    mine = [
        (name, offsets, piece.tolist())
        for name, p in model.named_parameters()
        for offsets, piece in result.chunks(name, p.detach())
    ]
    boxes = [
        (name, offsets, piece.tolist())
        for name, p in model.named_parameters()
        for begin, rows in ((0, p.detach()[:7]), (7, p.detach()[7:]))  # boxes that end where no segment does
        for offsets, piece in result.chunks(name, rows, (begin, *(0,) * (p.dim() - 1)))
    ]
    twin = copy.deepcopy(model)
    same = torch.equal(twin(ids), model(ids))
    return {
        "mine": mine,
        "boxes": boxes,
        "full": {n: p.tolist() for n, p in plain.named_parameters()},
        "identity": names == [id(p) for p in model.parameters()],
        "twin": same,
        "leaves": sorted(n for n, m in model.named_modules() if is_leaf(m)),
        "keys": list(model.state_dict()) == list(plain.state_dict()),
        "kinds": all(isinstance(b, type(a)) for a, b in zip(plain.modules(), model.modules(), strict=True)),
        "shapes": {n: list(c.shape) for n, c in result.pieces.items()},
    }


def borders() -> dict[str, Any]:
    """Each operation at a border, with its gradient, and what it communicates forward and backward."""
    world = current()
    split = Shard.even(1, (6, 2), world.size)
    full = torch.arange(24.0).view(3, 8)
    part = cut(full, split, world.rank)
    found: dict[str, Any] = {}
    for name, given, operation in [
        ("copy_to", full, lambda x: functions.copy_to(world, x)[0]),
        ("reduce_from", full, lambda x: functions.reduce_from(world, x)),
        ("gather", part, lambda x: functions.gather(world, x, split)),
        ("gather_partial", part, lambda x: functions.gather_partial(world, x, split)),
        ("scatter", full, lambda x: functions.scatter(world, x, split)),
        ("reduce_scatter", full, lambda x: functions.reduce_scatter(world, x, split)),
    ]:
        x = given.clone().requires_grad_()
        with Recorder() as forward:
            y = operation(x)
        with Recorder() as backward:
            (y * (world.rank + 1)).sum().backward()
        assert x.grad is not None
        found[name] = {
            "counted": (counted(forward), counted(backward)),
            "out": y.tolist(),
            "grad": x.grad.tolist(),
        }
    found["full"], found["part"] = full.tolist(), part.tolist()
    return found


def staged(sequence: bool) -> dict[str, Any]:
    """A tensor-parallel model that is split into stages for a pipeline, against the plain one."""
    found = {}
    for name in ("gpt", "cnn"):
        case = CASES[name]
        torch.manual_seed(0)
        model = case.model().double()
        plain = copy.deepcopy(model)
        *inputs, _ = as_double(case.batch(2, torch.Generator().manual_seed(0)))
        parallelize(model, current(), tuple(inputs), sequence=sequence)
        times = current().from_root(measure(model, inputs).total_s)  # ranks cut in the same places
        stages = split(model, 2, inputs, times=times)
        values: Any = tuple(inputs)
        for stage in stages:
            values = stage.module(*values)
            values = values if isinstance(values, tuple) else (values,)
        found[name] = float((values[0] - plain(*inputs)).detach().abs().max())
    return found


def recomputed() -> dict[str, float]:
    """Blocks that are cut, and whose forward is interpreted, computed again in back-propagation."""
    torch.manual_seed(0)
    model = nn.Sequential(SeparateHeads(), GatedMLP(), FusedViT()).double()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    result = parallelize(model, current(), (x,))
    blocks = recompute(model)
    for m in (model, plain):
        m(x).square().sum().backward()
    return {"blocks": len(blocks), "gradients": difference(result, model, plain, lambda p: p.grad)}


class KeysAsValues(nn.Module):
    """Two attentions of the same shapes, in the first of which the keys are the values, too."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        never = 1e-12 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, k, dropout_p=never)
        z = F.scaled_dot_product_attention(q, k, v, dropout_p=never)
        return self.out((y + z).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def keys_as_values() -> tuple[float, bool]:
    """How far the output is from the plain model's, and whether the values got a gradient."""
    torch.manual_seed(0)
    model, x = KeysAsValues().double(), torch.randn(2, 5, 8, dtype=torch.float64)
    expected = model(x)
    parallelize(model, current(), (x,))
    for _ in range(2):
        output = model(x)
    output.square().sum().backward()
    return float((output - expected).abs().max()), bool(model.v.weight.grad.abs().sum() > 0)


class Tied(nn.Module):
    """An embedding whose matrix is the last layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(6, 8), nn.Linear(8, 6, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids))  # type: ignore[no-any-return]


def unknown_words() -> list[str]:
    """What is said of ids that no rank has."""
    torch.manual_seed(0)
    model, said = Tied(), []
    parallelize(model, current(), (torch.arange(6).view(2, 3),))
    for wrong in (6, -1):
        try:
            model(torch.tensor([[0, wrong]]))
        except IndexError as error:
            said.append(str(error))
    return said


class Forces(nn.Module):
    """Forces as derivatives of an energy: the forward runs with gradients only."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def forces(degree: int) -> list[float]:
    torch.manual_seed(0)
    model, x, y = Forces().double(), torch.randn(8, 6).double(), torch.randn(8, 6).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = hocket.Plan(tensor_parallel_degree=degree)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=x)
    return [float(trainer.step((x, y))) for _ in range(3)]
