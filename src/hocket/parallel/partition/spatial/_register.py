"""The rules by name of the function that they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]

RULES: dict[str, Rule] = {}
"""A rule is called with the site and then with what the function was called with; it makes the call, on slabs."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for functions of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register
