"""What an entry of the zoo is: a model of random weights, batches for it, and its loss, as its users write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

SAMPLES = 8
"""Of a global batch."""

ENTRIES: dict[str, Entry] = {}
"""By name, in the order of the table."""


@dataclass(frozen=True)
class Entry:
    """One architecture.

    Attributes:
        name: in the table.
        family: the package it comes from, or "by hand".
        make: the model, from the seed that the caller has set.
        batch: a global batch of some samples, by a generator: inputs, and the target last; or a dict of keywords.
        loss_fn: a scalar of the model's output and the target; None where the model's output holds it.
    """

    name: str
    family: str
    make: Callable[[], torch.nn.Module]
    batch: Callable[[int, torch.Generator], Any]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None


def add(
    name: str,
    family: str,
    make: Callable[[], torch.nn.Module],
    batch: Callable[[int, torch.Generator], Any],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
) -> None:
    """Put an entry into the zoo."""
    assert name not in ENTRIES, name
    ENTRIES[name] = Entry(name, family, make, batch, loss_fn)


# --- losses and batches that many share -----------------------------------------------------------------------------


def next_token(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits `[samples, positions, words]`, which a Hugging Face model gives by name."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def classes(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits `[samples, classes]`."""
    return F.cross_entropy(output if isinstance(output, torch.Tensor) else output.logits, target)


def squares(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error against the target; a Hugging Face or diffusers output is read by its first entry."""
    return F.mse_loss(output if isinstance(output, torch.Tensor) else output[0], target)


def words(positions: int = 12, vocabulary: int = 96) -> Callable[[int, torch.Generator], Any]:
    """Batches of word numbers and of those that are to be predicted."""

    def batch(samples: int, generator: torch.Generator) -> Any:
        ids = torch.randint(3, vocabulary, (samples, positions + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return batch


def sentences(labels: int = 2, positions: int = 12, vocabulary: int = 96) -> Callable[[int, torch.Generator], Any]:
    """Batches of word numbers and of a class each."""

    def batch(samples: int, generator: torch.Generator) -> Any:
        ids = torch.randint(3, vocabulary, (samples, positions), generator=generator)
        return ids, torch.randint(0, labels, (samples,), generator=generator)

    return batch


def pictures(size: int = 32, labels: int = 10, channels: int = 3) -> Callable[[int, torch.Generator], Any]:
    """Batches of pictures and of a class each."""

    def batch(samples: int, generator: torch.Generator) -> Any:
        return (
            torch.randn(samples, channels, size, size, generator=generator),
            torch.randint(0, labels, (samples,), generator=generator),
        )

    return batch


def numbers(*shapes: tuple[int, ...], labels: int = 0) -> Callable[[int, torch.Generator], Any]:
    """Batches of normal numbers of these shapes, the last of which is the target, or a class among `labels`."""

    def batch(samples: int, generator: torch.Generator) -> Any:
        drawn = [torch.randn(samples, *shape, generator=generator) for shape in shapes]
        return (*drawn, torch.randint(0, labels, (samples,), generator=generator)) if labels else tuple(drawn)

    return batch
