"""The blocks of a model: modules, one inside a list or beside others, that are computed as a whole."""

from __future__ import annotations

from collections import Counter

import torch


def blocks(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The modules to hold, or to compute again, one at a time, in the order in which the model has them.

    The elements of the model's lists and sequences (layers of a Transformer, stages of a ResNet), however deep they
    stand, but none inside another; where a module has no lists, its children that have parameters. Left out are those
    whose parameters other modules use too, those that are not called (as a list is not), and those without parameters.
    """
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    found: list[torch.nn.Module] = []
    _descend(model, found)
    return [(names[id(module)], module) for module in found if _is_apart(module, uses)]


def _descend(module: torch.nn.Module, found: list[torch.nn.Module]) -> None:
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.Sequential):
            for item in child:
                if _uncalled(item):
                    _descend(item, found)
                elif _has_parameters(item):
                    found.append(item)
        elif _holds_list(child) or _uncalled(child):
            _descend(child, found)
        elif _has_parameters(child):
            found.append(child)
    if not found and _has_parameters(module) and isinstance(module, torch.nn.Sequential):
        found.extend(child for child in module.children() if _has_parameters(child))


def _uncalled(module: torch.nn.Module) -> bool:
    """Whether calling the module is impossible: a mere container."""
    return type(module).forward is torch.nn.Module.forward


def _holds_list(module: torch.nn.Module) -> bool:
    return any(isinstance(inner, torch.nn.ModuleList | torch.nn.Sequential) for inner in module.modules())


def _has_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_apart(module: torch.nn.Module, uses: Counter[int]) -> bool:
    inside = Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)
    return all(uses[key] == count for key, count in inside.items())
