"""A small Transformer learns to sort digits, under any plan. docs/tutorial.md explains it line by line.

    python examples/trainer.py                              one process
    hocket run -n 2 examples/trainer.py                     two ranks, each with half of every batch
    hocket run -n 2 --plan plan.toml examples/trainer.py    two ranks, divided as plan.toml says

The losses are the same each time. Nothing but torch is needed.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket

LENGTH, DIGITS, WIDTH = 8, 10, 64


class Block(nn.Module):
    """Attention among all positions, and an MLP at each."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before_attention(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.before_mlp(x))


class Sorter(nn.Module):
    """Maps (samples, LENGTH) digits to (samples, LENGTH, DIGITS) scores of what stands where after sorting."""

    def __init__(self) -> None:
        super().__init__()
        self.digits = nn.Embedding(DIGITS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.scores = nn.Linear(WIDTH, DIGITS)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.blocks(self.digits(x) + self.places))


def rows(count: int, seed: int) -> TensorDataset:
    """Random rows of digits, and the same rows sorted."""
    x = torch.randint(DIGITS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sort(dim=1).values)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def all_right(output: Tensor, target: Tensor) -> Tensor:
    """The share of rows in which every digit is right."""
    return (output.argmax(dim=-1) == target).all(dim=1).double().mean()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--checkpoint", type=Path, help="write a checkpoint here after every epoch, and go on from it")
    args = options.parse_args()

    torch.manual_seed(0)
    training = DataLoader(rows(6400, seed=1), batch_size=64, shuffle=True)
    testing = DataLoader(rows(1000, seed=2), batch_size=250)
    model = Sorter()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    sample = training.dataset[:64][0]

    trainer = hocket.Trainer(model, loss_fn, optimizer, sample=sample)

    # All ranks run this program; one of them speaks. Without a launcher there is no RANK, and only one process.
    say = print if os.environ.get("RANK", "0") == "0" else lambda *_: None
    say(f"plan: {trainer.report()['plan']}")

    first = 0
    if args.checkpoint and args.checkpoint.exists():
        first = trainer.load(args.checkpoint)
    for epoch in range(first, args.epochs):
        for batch in trainer.batches(training):
            loss = trainer.step(batch)
        right = trainer.evaluate(testing, all_right)
        say(f"epoch {epoch}: loss {loss:.4f}, {right:.1%} of the test rows right")
        if args.checkpoint:
            trainer.save(args.checkpoint, extra=epoch + 1)


if __name__ == "__main__":
    main()
