"""Programs that ask a trained model for its outputs, run by ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import hocket
from hocket.planner import Plan

from . import programs


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """Gives its logits in a dict, with what depends on the whole batch beside them if that is asked for."""

    def __init__(self, mean: bool = False, width: int = 16) -> None:
        super().__init__()
        self.mean = mean
        self.words, self.places = nn.Embedding(29, width), nn.Embedding(24, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 29, bias=False)

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"logits": logits, "about": (logits.mean() if self.mean else logits[:, 0], "plain")}


def gpt(mean: bool = False) -> Gpt:
    torch.manual_seed(5)
    return Gpt(mean).double()


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def words(samples: int, length: int) -> torch.Tensor:
    return torch.randint(0, 29, (samples, length), generator=torch.Generator().manual_seed(samples))


def continued(model: Any, ids: torch.Tensor, tokens: int) -> list[list[int]]:
    """Greedy generation as every tutorial has it."""
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(ids)["logits"][:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids.tolist()  # type: ignore[no-any-return]


def outputs(trainer: Any, mean: bool) -> list[Any]:
    """Of batches of several sizes, of a loader, and of loops that generate."""
    found: list[Any] = []
    for samples, length in ((7, 9), (2, 9), (1, 4), (5, 13)):
        ids = words(samples, length)
        found += [trainer.predict(ids), trainer.predict((ids, ids)), trainer.predict([ids, ids])]
    if not mean:
        found.append(trainer.predict(DataLoader([(row, row) for row in words(9, 6)], batch_size=4, shuffle=False)))
        shuffled = DataLoader([(row, row) for row in words(9, 6)], batch_size=4, shuffle=True)
        found.append(trainer.predict(shuffled)["logits"].sum((0, 2)))
    return [(one["logits"].numpy(), one["about"][0].numpy(), one["about"][1], type(one["about"]))
            if isinstance(one, dict) else one.numpy() for one in found]  # fmt: skip


def predict(plans: list[Plan], mean: bool = False) -> list[Any]:
    found = []
    for plan in plans:
        model = gpt(mean)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = hocket.Trainer(model, loss_of, optimizer, plan, sample=(words(8, 9),))
        loss = float(trainer.step((words(8, 9), words(8, 9))))
        model.train()
        generated = [continued(trainer.predict, words(1, 3), 6), continued(trainer.predict, words(3, 2), 4)]
        trainer.model.eval()
        generated.append(continued(trainer.model, words(2, 3), 5))
        trainer.model.train()
        inside = []
        for batch in trainer.batches(DataLoader([(row, row) for row in words(8, 9)], batch_size=8)):
            inside.append(trainer.predict(batch)["logits"].numpy())  # a rank's part: the output is the whole batch's
            inside.append(trainer.predict(words(4, 9))["logits"].numpy())  # of the length of a part, and none
        found.append((loss, outputs(trainer, mean), generated, inside, trainer.model.training))
    return found


def plain(mean: bool = False) -> Any:
    return predict([Plan()], mean)[0]


def too_long(plan: Plan) -> list[str]:
    """What is said of a batch that the model has no places for, and of a gradient; the trainer goes on."""
    model = gpt()
    trainer = hocket.Trainer(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), plan, sample=(words(8, 9),))
    said = []
    for attempt in (lambda: trainer.predict(words(4, 25)), lambda: trainer.model(words(4, 9)),
                    lambda: trainer.predict((words(4, 9), words(4, 9)), targets=False)):  # fmt: skip
        try:
            attempt()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    said.append(str(trainer.predict(words(4, 9))["logits"].shape))
    return said


def other_models(cases: list[tuple[str, Plan]]) -> list[Any]:
    found = []
    for name, plan in cases:
        model, data, loss_fn = programs.setting(name, torch.float64)
        optimizer = programs.optimizer_of("sgd", model.parameters())
        inputs = data.tensors[0]
        trainer = hocket.Trainer(model, loss_fn, optimizer, plan, sample=inputs[:4])
        found.append([trainer.predict(inputs).numpy(), trainer.predict(DataLoader(data, batch_size=5)).numpy()])
    return found


def all_of_two(plans: list[Plan], mean: list[Plan], others: list[tuple[str, Plan]]) -> Any:
    return predict(plans), predict(mean, mean=True), too_long(plans[-1]), other_models(others)
