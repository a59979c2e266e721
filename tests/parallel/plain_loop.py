"""The loop that trains on one device, and on many once its model, optimizer and batches are distributed."""

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F

import hocket


def losses(model: Any, optimizer: Any, batches: Iterable[Any]) -> list[float]:
    """Losses of each step, as means of squares of the whole batch."""
    found = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(float(hocket.average(loss.item())))
    return found
