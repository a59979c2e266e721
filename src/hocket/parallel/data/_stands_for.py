"""A module that stands for another one: its attributes, parameter names and state are those of the model itself."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _of_the_model(name: str) -> Callable[..., Any]:
    """Return a method that is the model's, if its class has another one than torch; what returns itself gives this."""
    plain = getattr(torch.nn.Module, name)

    @functools.wraps(plain)
    def call(self: "StandsForModule", *args: Any, **kwargs: Any) -> Any:
        if getattr(type(self.module), name) is plain and name not in vars(self.module):
            return plain(self, *args, **kwargs)
        result = getattr(self.module, name)(*args, **kwargs)
        self.training = self.module.training
        return self if result is self.module else result

    return call


class StandsForModule(torch.nn.Module):
    """Stands for its attribute `module`, by whose own names everything is found; a copy or a pickle is one of it."""

    module: torch.nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is None or name in self.__dict__ or hasattr(type(self), name) or not hasattr(module, name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        module: Any = self.module
        return iter(module)

    def __bool__(self) -> bool:
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self.module,)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state, under the model's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state, under the model's own names; every rank must load the same."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return the model's parameters, under its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the model's buffers, under its own names."""
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """Return the model's modules, under its own names."""
        modules: Iterator[tuple[str, torch.nn.Module]] = self.module.named_modules(*args, **kwargs)
        return modules

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Return a module of the model by the model's own name for it."""
        return self.module.get_submodule(target)


for _name in (
    "train", "eval", "to", "to_empty", "cpu", "cuda", "type", "half", "float", "double", "bfloat16", "apply",
    "parameters", "buffers", "children", "named_children", "modules", "requires_grad_", "zero_grad",
):  # fmt: skip
    setattr(StandsForModule, _name, _of_the_model(_name))


def _itself(module: torch.nn.Module) -> torch.nn.Module:
    return module
