"""All parameters of a model, whose class may name fewer."""

from collections.abc import Iterator

import torch


def parameters_of(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield every parameter of a module, whatever its own `parameters()` gives: those to train, say."""
    return torch.nn.Module.parameters(module)
