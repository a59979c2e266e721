"""Losses that are no means over samples, and models whose forward changes state, run by ranks."""

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather, all_reduce
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.planner import Plan, PlanError

WORDS, LENGTH, SAMPLES, BATCH = 11, 6, 20, 7


class Words(nn.Module):
    """Scores of the next word at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(WORDS, 8), nn.Linear(8, 16)
        self.drop, self.scores = nn.Dropout(0.0), nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.drop(torch.tanh(self.inner(self.table(x)))))


class WithLoss(nn.Module):
    """The same, but it computes the loss of the words that come next itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.words(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def data() -> tuple[Tensor, Tensor]:
    """Words, and labels of which more and more are left out."""
    random = torch.Generator().manual_seed(3)
    x, y = (torch.randint(WORDS, (SAMPLES, LENGTH), generator=random) for _ in range(2))
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=random)
    return x, torch.where(torch.arange(LENGTH) < lengths, y, -100)


def flat(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return output.flatten(0, 1), target.flatten()


def weights(output: Tensor) -> Tensor:
    return torch.linspace(0.1, 1.0, WORDS, dtype=output.dtype)


def masked(output: Tensor, target: Tensor) -> Tensor:
    """A mean over places by hand, of which the graph does not tell the count."""
    mask = target >= 0
    return (torch.logsumexp(output, -1) * mask).sum() * (1.0 / mask.sum().double())


def guarded(output: Tensor, target: Tensor) -> Tensor:
    """A mean over some samples, of which a part of a batch may have none."""
    kept = (target[:, :1] % 5 == 1) & (target >= 0)
    each = F.cross_entropy(*flat(output, target), reduction="none").view_as(target)
    return (each * kept).sum() / kept.sum().clamp(min=1)


def skipped(output: Tensor, target: Tensor) -> Tensor:
    """The same by a branch."""
    kept = (target[:, :1] % 5 == 1) & (target >= 0)
    return F.cross_entropy(output[kept], target[kept]) if kept.any() else (output * 0).sum()


def contrastive(output: Tensor, _: Tensor) -> Tensor:
    rows = output.mean(1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def numbered(output: Tensor, _: Tensor) -> Tensor:
    """Targets that number at least five rows, as a data set would hold them: no part of a batch has so many."""
    rows = output.mean(1)
    return F.cross_entropy(rows @ rows.T, torch.arange(SAMPLES)[: max(len(rows), 5)])


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda o, t: (o**2).mean(),
    "samples": lambda o, t: torch.stack([(row**2).mean() for row in o]).mean(),
    "tokens": lambda o, t: F.cross_entropy(*flat(o, t)),
    "weighted": lambda o, t: F.cross_entropy(*flat(o, t), weight=weights(o), label_smoothing=0.1),
    "divided": lambda o, t: F.cross_entropy(*flat(o, t), reduction="sum") / (t != -100).sum(),
    "masked": masked,
    "guarded": guarded,
    "skipped": skipped,
    "pair": lambda o, t: (F.cross_entropy(*flat(o, t), reduction="sum"), (t != -100).sum()),
    "told": lambda o, t: torch.exp(torch.log(F.cross_entropy(*flat(o, t)))),
    "sum": lambda o, t: F.cross_entropy(*flat(o, t), reduction="sum"),
    "inside": lambda o, t: o,
    "tasks": lambda o, t: torch.stack([F.cross_entropy(*flat(o, t)), F.cross_entropy(*flat(o**2, t))]).mean(),
    # not a combination of what parts lose
    "contrastive": contrastive,
    "numbered": numbered,
    "root": lambda o, t: (o**2).mean().sqrt(),
    "mixed": lambda o, t: F.cross_entropy(*flat(o, t)) + (o**2).mean(),
    "unsaid sum": lambda o, t: F.cross_entropy(*flat(o, t), reduction="sum"),
    "wrong pair": lambda o, t: ((o**2).mean(), 1),
}
REFUSED = ("contrastive", "numbered", "root", "mixed", "unsaid sum", "wrong pair")
SETTINGS: dict[str, dict[str, Any]] = {
    "told": {"loss_weight": lambda batch: (batch[-1] != -100).sum()},
    "sum": {"loss_reduction": "sum"},
}
PLANS = {
    "data": Plan(),
    "accumulate": Plan(accumulate=3),
    "optimizer": Plan(shard="optimizer"),
    "gradients": Plan(shard="gradients", accumulate=2),
    "parameters": Plan(shard="parameters", accumulate=2),
    "pipeline": Plan(pipeline_parallel_degree=2, micro_batches=3),
    "tensor": Plan(tensor_parallel_degree=2),
    "priority": Plan(priority=True, accumulate=2),
    "whole pipeline": Plan(pipeline_parallel_degree=2),
}


def made(name: str) -> tuple[nn.Module, Any, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = (WithLoss if name == "inside" else Words)().double()
    x, y = data()
    return model, torch.optim.Adam(model.parameters(), lr=0.02), (x, y, y) if name == "inside" else (x, y)


def rows(tensors: tuple[Tensor, ...], begin: int, count: int) -> tuple[Tensor, ...]:
    return tuple(tensor[begin : begin + count] for tensor in tensors)


def plain(name: str, steps: int = 4) -> tuple[list[float], float]:
    """The losses of one process without hocket, and that of all samples at the end."""
    model, optimizer, tensors = made(name)

    def loss_of(batch: tuple[Tensor, ...]) -> Tensor:
        found = LOSSES[name](model(*batch[:-1]), batch[-1])
        return found[0] / found[1] if isinstance(found, tuple) else found

    losses = []
    for step in range(steps):
        loss = loss_of(rows(tensors, step * BATCH % SAMPLES, BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, loss_of(tensors).item()


def train(name: str, plan: Plan, steps: int = 4) -> Any:
    """The losses of a run and its evaluation, or the refusal."""
    model, optimizer, tensors = made(name)
    sample = tuple(tensor[:4] for tensor in tensors[:-1])
    settings = SETTINGS.get(name, {})
    try:
        trainer = hocket.Trainer(model, LOSSES[name], optimizer, plan, sample=sample, **settings)
        before = torch.random.get_rng_state()
        losses = [float(trainer.step(rows(tensors, step * BATCH % SAMPLES, BATCH))) for step in range(steps)]
        drawn = not torch.equal(before, torch.random.get_rng_state())
        assert not drawn or plan.tensor_parallel_degree > 1, "a check has drawn random numbers"  # divided dropout draws
        return losses, trainer.evaluate([rows(tensors, begin, 5) for begin in range(0, SAMPLES, 5)])
    except PlanError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()


def train_all(cases: list[tuple[str, str]], steps: int = 4) -> list[Any]:
    return [train(name, PLANS[plan], steps) for name, plan in cases]


def gathered(output: Tensor, target: Tensor) -> Tensor:
    """In-batch negatives of all ranks."""
    return contrastive(torch.cat(all_gather(output)) if dist.is_initialized() else output, target)


def own_rows(output: Tensor, _: Tensor) -> Tensor:
    """This rank's rows beside all columns."""
    rows = output.mean(1)
    first = len(rows) * dist.get_rank() if dist.is_initialized() else 0
    columns = torch.cat(all_gather(rows)) if dist.is_initialized() else rows
    return F.cross_entropy(rows @ columns.T, first + torch.arange(len(rows)))


def reduced(output: Tensor, _: Tensor) -> Tensor:
    """The root of what ranks have summed."""
    sums = torch.stack([output.square().sum(), torch.tensor(output.numel())])
    total = all_reduce(sums) if dist.is_initialized() else sums
    return (total[0] / total[1]).sqrt()


GATHERED = {"gathered": (gathered, 6), "own rows": (own_rows, 6), "reduced": (reduced, 6), "uneven": (reduced, BATCH)}
"""Losses of loops that talk to other ranks, and sizes of batches; two and three ranks divide 6."""


def own_loop(name: str, *, distributed: bool = True) -> Any:
    """The losses of a loop of the program's own, with uneven last batches but where it gathers."""
    model, optimizer, tensors = made(name)
    order = torch.Generator().manual_seed(5)
    loss_of, size = GATHERED.get(name) or (LOSSES[name], BATCH)
    settings: dict[str, Any] = {"batch_size": size, "drop_last": name in GATHERED}
    loader: Any = DataLoader(TensorDataset(*tensors), shuffle=True, generator=order, **settings)
    if distributed:
        model, optimizer, loader = hocket.distribute(model, optimizer, loader, **SETTINGS.get(name, {}))
    losses = []
    for _ in range(2):
        for *inputs, target in loader:
            optimizer.zero_grad()
            loss = loss_of(model(*inputs), target)
            if name == "tasks":  # with a penalty of weights
                loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
            try:
                loss.backward()
            except RuntimeError as error:
                return str(error)
            optimizer.step()
            average = hocket.average
            if distributed and name == "sum":
                with pytest.raises(RuntimeError, match=r"this loss is a sum .* hocket\.total\(loss\) is that"):
                    hocket.average(loss.item())
                average = hocket.total
            losses.append(float(average(loss.detach()) if distributed else loss))
    return losses


def own_loops(names: list[str]) -> list[Any]:
    return [own_loop(name) for name in names]


# --- a causal language model of Hugging Face, with padded batches -----------------------------------------------------


class Causal(nn.Module):
    """A model of transformers that computes its loss itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        if kind == "gpt2":
            sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0}
            config = transformers.GPT2Config(vocab_size=WORDS, attn_pdrop=0, bos_token_id=0, eos_token_id=0, **sizes)
        else:
            sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
            config = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=16, **sizes)
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss


def tune(kind: str, plan: Plan | str) -> Any:
    """The losses of three steps: plainly, by a plan, or in a loop of the program's own."""
    model = Causal(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, y = data()
    tensors = (x, (y >= 0).long(), y)
    loader: Any = DataLoader(TensorDataset(*tensors), batch_size=BATCH)
    losses = []
    if isinstance(plan, Plan):
        try:
            settings = {"sample": tuple(one[:4] for one in tensors)}
            trainer = hocket.Trainer(model, lambda loss, _: loss, optimizer, plan, **settings)
            return [float(trainer.step((*batch, batch[-1]))) for batch in loader]
        except Exception:
            return traceback.format_exc()
    if plan == "distribute":
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(hocket.average(loss.detach()) if plan == "distribute" else loss))
    return losses


def tune_all(cases: list[tuple[str, str]]) -> list[Any]:
    return [tune(kind, PLANS.get(plan, plan)) for kind, plan in cases]


# --- models whose forward changes state -------------------------------------------------------------------------------


class Averaging(nn.Module):
    """Counts its passes, and keeps a moving average of what it sees, by which it divides."""

    count: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = x + 0.1 * self.average.clone() + 0.01 * self.count
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return out


class Largest(Averaging):
    """Keeps what is no mean over samples."""

    def forward(self, x: Tensor) -> Tensor:
        out = x + 0.1 * self.average.clone()
        if self.training:
            with torch.no_grad():
                self.average.copy_(x.detach().amax(0))
        return out


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "old spectral": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "averaging": Averaging,
    "largest": Largest,
    "batch norm": lambda: nn.BatchNorm1d(8),
}
STATE_PLANS = {
    "data": Plan(),
    "accumulate": Plan(accumulate=2),
    "parameters": Plan(shard="parameters"),
    "pipeline": Plan(pipeline_parallel_degree=2, micro_batches=4),
}


def train_stateful(name: str, plan: Plan | None, steps: int = 4) -> Any:
    """The losses, the buffers of this rank at the end, and what was warned of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), STATEFUL[name](), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8 * steps, 6, dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    losses = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if plan is None:
            for a in range(0, len(x), 8):
                loss = F.mse_loss(model(x[a : a + 8]), y[a : a + 8])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            trainer = None
        else:
            trainer = hocket.Trainer(model, F.mse_loss, optimizer, plan, sample=x[:8])
            losses = [float(trainer.step((x[a : a + 8], y[a : a + 8]))) for a in range(0, len(x), 8)]
    held = {name: buffer.double() for name, buffer in model.named_buffers() if buffer.untyped_storage().nbytes()}
    return losses, held, [str(one.message) for one in heard if issubclass(one.category, UserWarning)]


def train_all_stateful(cases: list[tuple[str, str]]) -> list[Any]:
    return [train_stateful(name, STATE_PLANS[plan]) for name, plan in cases]
