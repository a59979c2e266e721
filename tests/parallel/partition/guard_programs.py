"""Models whose code decides as it runs: generated programs, and what ranks run to compare them with one process."""

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import strategies as st
from torch import nn

from hocket.parallel.mesh.world import current
from hocket.parallel.partition.tensor import parallelize
from hocket.parallel.pipeline import SplitError, split
from hocket.parallel.pipeline._verify import chained

WIDTH, INNER = 8, 16
REFUSALS = ("ShardingError", "SplitError", "OtherBranchError")
Program = list[Any]


class Deciding(nn.Module):
    """Runs a program: a list of statements, each a tuple of a word and what belongs to it."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH) for _ in range(3))
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.BatchNorm1d(INNER)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)
        self.register_buffer("moving", torch.zeros(()))
        self.count = 0
        self.history: list[int] = []
        self.seen = {"calls": 0}
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        for statement in self.program:
            h, left = self.run(statement, h)
            if left:
                break
        return self.head(h)

    def run(self, statement: Any, h: torch.Tensor) -> tuple[torch.Tensor, bool]:
        word, *rest = statement
        if word == "mlp":
            place, inner = rest
            wide = self.up[place](h)
            for one in inner:
                wide = self.change(one, wide)
            h = h + self.down[place](wide)
        elif word == "if":
            about, yes, no = rest
            for one in yes if self.holds(about, h) else no:
                h, left = self.run(one, h)
                if left:
                    return h, True
        elif word == "loop":
            about, block = rest
            for _ in range(self.number(about, h)):
                for one in block:
                    h, left = self.run(one, h)
                    if left:
                        return h, True
        elif word == "leave":
            return h, self.holds(rest[0], h)
        elif word == "count":
            self.count += 1
            self.history.append(self.count)
            self.seen["calls"] += 1
            self.moving.mul_(0.5).add_(h.detach().mean())
        elif word == "attend":
            q, k, v = (p(h).view(h.shape[0], 2, WIDTH // 2) for p in (self.q, self.k, self.v))
            h = h + self.o((torch.softmax(q * k, 1) * v).flatten(1))
        elif word == "weigh":
            h = h * self.up[rest[0]].weight.norm() / 3
        elif word == "penalise":
            h = h + 0.01 * sum(p.square().mean() for p in self.parameters())
        elif word == "noise":
            h = h + 0.1 * torch.rand(h.shape[-1], dtype=h.dtype)
        return h, False

    def change(self, word: Any, wide: torch.Tensor) -> torch.Tensor:
        """One operator on what lies between two layers."""
        if isinstance(word, tuple):
            _, about, yes, no = word
            for one in yes if self.holds(about, wide) else no:
                wide = self.change(one, wide)
        elif word in ("relu", "tanh", "sigmoid"):
            wide = getattr(torch, word)(wide)
        elif word == "in_place":
            wide = F.relu(wide * 1.0, inplace=True)
        elif word == "unit":
            wide = wide / (1e-3 + wide.norm(dim=-1, keepdim=True))
        elif word == "centre":
            wide = wide - wide.mean(-1, keepdim=True)
        elif word == "size":
            wide = wide * (wide.shape[-1] / 10 + wide.numel() / 1000)
        elif word == "softmax":
            wide = wide.softmax(-1)
        elif word == "heads":
            wide = wide.view(-1, 4, INNER // 4).softmax(-1).flatten(1)
        elif word == "norm":
            wide = self.wide(wide)
        elif word == "sort":
            wide = wide.sort(-1).values
        elif word == "flip":
            wide = wide.flip(-1)
        elif word == "half":
            a, b = wide.chunk(2, -1)
            wide = torch.cat([a * b.sigmoid(), b], -1)
        elif word == "first":
            wide = wide + wide[:, :1]
        elif word == "assign":
            wide = wide.clone()
            wide[:, 3] = 0.5
        elif word == "view_in_place":
            wide = wide * 1.0
            wide[:, 1].mul_(2.0)
        elif word == "listed":
            wide = wide * wide.detach().abs().tolist()[0][-1]
        elif word == "numpy":
            wide = wide + float(np.abs(wide.detach().numpy()).max())
        elif word == "index":
            wide = wide[:, torch.arange(INNER).flip(0)]
        elif word == "keep":
            before, self.kept = self.kept, wide.detach()
            wide = wide if before is None or before.shape != wide.shape else wide + 0.1 * before
        return wide

    def holds(self, about: str, h: torch.Tensor) -> bool:
        answers = {
            "mean": lambda: h.mean() > 0,
            "norm": lambda: h.norm() > h.numel() ** 0.5 * 0.9,
            "first": lambda: h[0, 0].item() > 0,
            "last": lambda: bool(h[0, -1] > 0),
            "size": lambda: len(h) > 4,
            "width": lambda: h.shape[-1] > WIDTH,
            "training": lambda: self.training,
            "grad": lambda: torch.is_grad_enabled(),
            "counter": lambda: self.count % 2 == 1,
            "history": lambda: len(self.history) > 1,
            "dict": lambda: self.seen["calls"] % 3 == 0,
            "buffer": lambda: float(self.moving) > 0,
            "random": lambda: random.random() < 0.5,
            "numpy": lambda: np.random.rand() < 0.5,
            "torch": lambda: bool(torch.rand(()) < 0.5),
        }
        return bool(answers[about]())

    def number(self, about: str, h: torch.Tensor) -> int:
        answers = {
            "data": lambda: 1 + int(h.abs().sum() * 10) % 3,
            "size": lambda: 1 + h.shape[0] % 3,
            "counter": lambda: self.count % 3,
            "random": lambda: random.randrange(3),
            "training": lambda: 2 if self.training else 1,
        }
        return int(answers[about]())


ABOUT = [
    "mean", "norm", "first", "last", "size", "width", "training", "grad", "counter", "history", "dict", "buffer",
    "random", "numpy", "torch",
]  # fmt: skip
NUMBERS = ["data", "size", "counter", "random", "training"]
CHANGES = [
    "relu", "tanh", "sigmoid", "in_place", "unit", "centre", "size", "softmax", "heads", "norm", "sort", "flip", "half",
    "first", "assign", "view_in_place", "listed", "numpy", "index", "keep",
]  # fmt: skip


def programs() -> st.SearchStrategy[Program]:
    about, place = st.sampled_from(ABOUT), st.integers(0, 2)
    change = st.sampled_from(CHANGES)
    changes = st.lists(change, min_size=1, max_size=2)
    inner = st.lists(change | st.tuples(st.just("if"), about, changes, changes), min_size=1, max_size=3)
    mlp = st.tuples(st.just("mlp"), place, inner)
    plain = st.one_of(
        mlp,
        mlp,
        st.tuples(st.sampled_from(["count", "attend", "penalise", "noise"])),
        st.tuples(st.just("weigh"), place),
    )
    block = st.lists(plain, min_size=1, max_size=2)
    decision = st.one_of(
        st.tuples(st.just("if"), about, block, block),
        st.tuples(st.just("loop"), st.sampled_from(NUMBERS), block),
        st.tuples(st.just("leave"), about),
    )
    return st.tuples(mlp, st.lists(plain | decision, min_size=1, max_size=3), block).map(
        lambda three: [three[0], *three[1], *three[2]]
    )


BATCHES = (6, 6, 3, 6, 1, 6)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in BATCHES]
    return [
        (x * (1 + i % 3), torch.randn(len(x), 2, generator=generator, dtype=torch.float64)) for i, x in enumerate(made)
    ]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]


def losses(model: Any, forward: Any, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Losses of some steps of training, and of an evaluation; `forward` gives the losses of a batch with gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    found = []
    for i, (x, y) in enumerate(steps):
        seed(50 + i)
        if len(x) < 2:
            model.eval()  # batch norm wants two samples to train
        optimizer.zero_grad()
        found.append(forward(x, y))
        if len(x) > 1:
            optimizer.step()
        model.train()
    model.eval()
    seed(7)
    with torch.no_grad():
        found.append(forward(*steps[0]))
    return found


def whole(model: nn.Module) -> Any:
    def forward(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = F.mse_loss(model(x), y)
        if loss.requires_grad:
            loss.backward()
        return loss.item()

    return forward


def tensor(found: list[Program]) -> list[str]:
    """For each program "equal", "refused: ..." or what is wrong, by tensor parallelism over the ranks."""
    return [_tensor(program) for program in found]


def _tensor(program: Program) -> str:
    seed(1)
    model = Deciding(program).double()
    plain = copy.deepcopy(model)
    steps = batches()
    seed(2)
    before = states()
    parallelize(model, current(), (steps[0][0],))
    if states() != before:
        return "the build has drawn random numbers"
    if (model.count, model.history, model.seen, model.kept) != (0, [], {"calls": 0}, None):
        return "the build has left traces"
    return _outcome(program, model, plain, whole(model), steps)


def _outcome(program: Program, model: nn.Module, plain: nn.Module, forward: Any, steps: Any) -> str:
    try:
        mine = losses(model, forward, steps)
    except Exception as error:
        if type(error).__name__ in REFUSALS:
            return f"refused: {type(error).__name__}: {error}"
        try:
            losses(plain, whole(plain), steps)
        except type(error):
            return "equal"  # the program fails by itself
        return f"wrong: raised {type(error).__name__}: {error}"
    expected = losses(plain, whole(plain), steps)
    if all(abs(a - b) <= 1e-9 * (1 + abs(b)) or a != a != b != b for a, b in zip(mine, expected, strict=True)):
        return "equal"
    return f"wrong: {mine} for {expected}"


def pipeline(program: Program) -> str:
    """The same by two stages, one after the other in this process."""
    seed(1)
    model = Deciding(program).double()
    plain = copy.deepcopy(model)
    steps = batches()
    try:
        stages = split(model, 2, (steps[0][0],))
    except SplitError as error:
        return f"refused: {type(error).__name__}: {error}"

    def forward(x: torch.Tensor, y: torch.Tensor) -> float:
        output, backward = chained(stages, (x,))
        leaf = output.detach().requires_grad_()
        loss = F.mse_loss(leaf, y)
        if output.requires_grad:
            backward(list(torch.autograd.grad(loss, leaf)))
        return loss.item()

    return _outcome(program, model, plain, forward, steps)


class Packed(nn.Module):
    """A recurrent layer over sequences of several lengths, between layers that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.gru, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.GRU(WIDTH, WIDTH, batch_first=True),
            nn.Linear(8, 2),
        )

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.inward(x), lengths, batch_first=True, enforce_sorted=False)
        made, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.head(made.mean(1))


class Twice(torch.autograd.Function):
    """A function whose backward is the user's: it needs all features."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2 - gradients[0].mean(-1, keepdim=True)


class Reaching(nn.Module):
    """Does what is rare with what lies between two layers, by a word that the sample does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Dropout(0.0)
        self.word, self.kept = "", []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.word == "function":
            h = Twice.apply(h)
        elif self.word == "stale":
            view = h.view(-1)[3:]
            h.mul_(2)
            h = h + view.sum()
        elif self.word == "address":
            h = h * (h.data_ptr() % 2 + 1)
        elif self.word == "hook":
            h.register_hook(lambda gradient: gradient / gradient.norm())
        elif self.word == "strided":
            h = h.as_strided((len(h), INNER), (INNER, 1))
        elif self.word == "narrow":
            h = h[:, :5]
        elif self.word == "gradient":
            (slope,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
            h = h + slope.norm()
        elif self.word == "returned":
            return h
        elif self.word == "checkpoint":
            h = torch.utils.checkpoint.checkpoint(lambda t: t / t.norm(dim=-1, keepdim=True), h, use_reentrant=False)
        elif self.word == "reentrant":
            h = torch.utils.checkpoint.checkpoint(lambda t: t / t.norm(dim=-1, keepdim=True), h, use_reentrant=True)
        elif self.word == "copied":
            h = copy.copy(h) + h.new_zeros(h.shape) + torch.zeros_like(h) + h.T.contiguous().T
        elif self.word == "outside":
            return F.linear(F.linear(x, self.up.weight, self.up.bias), self.down.weight)
        elif self.word == "masked":
            h = h.masked_fill(h > h.median(), 0.0) + h[h > 0].sum() + torch.where(h > 0)[1].sum()
        elif self.word == "out":
            made = torch.empty(len(x), INNER, dtype=x.dtype)
            h = h + torch.add(h.detach(), 1, out=made)
        elif self.word == "both":
            h = h + self.up(h[:, :WIDTH])
        return self.down(self.drop(h))


WORDS = {
    "stale": "", "address": "data_ptr", "hook": "register_hook", "strided": "as_strided",
    "narrow": "given 5 features or channels where it has 16", "function": "", "gradient": "", "returned": "",
    "checkpoint": "", "reentrant": "", "copied": "", "outside": "", "masked": "", "out": "", "both": "",
}  # fmt: skip


def reaching() -> dict[str, str]:
    """For each word what `_outcome` says; the model, and its parts, are those of `WORDS`."""
    found = {}
    x = torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([2, 5, 3])
    for word in [*WORDS, "packed"]:
        seed(1)
        model: Any = (Packed() if word == "packed" else Reaching()).double()
        inputs = (x.repeat(3, 5, 1)[:3, :5], lengths) if word == "packed" else (x,)
        plain = copy.deepcopy(model)
        form = parallelize(model, current(), inputs)
        model.word = plain.word = word
        try:
            results = []
            for one in (model, plain):
                mine = inputs[0].clone().requires_grad_()
                out = one(mine, *inputs[1:])
                out.sin().sum().backward()
                results.append([out.detach(), mine.grad, *(p.grad for p in one.parameters())])
            names = ["", "", *(name for name, _ in plain.named_parameters())]
            wanted = [b if b is None else form.part(name, b) for name, b in zip(names, results[1], strict=True)]
            equal = all(
                a is b is None or (a is not None and b is not None and torch.allclose(a, b, rtol=1e-9, atol=1e-11))
                for a, b in zip(results[0], wanted, strict=True)
            )
            found[word] = "equal" if equal else "wrong"
        except Exception as error:
            found[word] = f"{type(error).__name__}: {error}"
    return found


class Settings(nn.Module):
    """A model whose code reads a list, tensors, an object's field, a function, and a list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.factors, self.scale, self.config = [1.0, 2.0], torch.tensor(1.0), SimpleNamespace(power=2)
        self.both = [self.a.weight, self.b.weight]
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.act(self.a(x)) * self.factors[1]) * self.scale - self.mean
        return y**self.config.power + self.both[0].sum()


class Scaled(nn.Module):
    """A model with a factor in an attribute, which its user sets between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.factor, self.title = 1.0, "first"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) * self.factor)
