"""All parameters of a model, whose class may name fewer."""

from collections.abc import Iterator

import torch


def named_parameters_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield every parameter of a module with its name, whatever its own `named_parameters()` gives."""
    return torch.nn.Module.named_parameters(module)


def parameters_of(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield every parameter of a module, whatever its own `parameters()` gives: those to train, say."""
    return (parameter for _, parameter in named_parameters_of(module))
