"""Walks through the arguments and results of tensor programs."""

from collections.abc import Callable, Iterator
from typing import Any


def mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree of tuples, lists and dicts with `fn` applied to what is none of these."""
    if isinstance(tree, tuple):
        items = [mapped(fn, item) for item in tree]
        make: Any = getattr(type(tree), "_make", tuple)  # of named tuples, whose constructors may look at the items
        return make(items)
    if isinstance(tree, list):
        return [mapped(fn, item) for item in tree]
    if isinstance(tree, dict):
        return {key: mapped(fn, item) for key, item in tree.items()}
    return fn(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield what is neither a tuple nor a list nor a dict in a tree of these."""
    if isinstance(tree, tuple | list):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    else:
        yield tree
