"""A ledger of the operators that made tensors: it does them again when and where the tensors are wanted.

What an operator does to a large tensor is written down with the state of the random numbers that it began with, and
the tensor's memory is given back. (The idea is torchdistx's `deferred_init`; the states of the generator make the
order free.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from hocket.sharding import as_local

from .memory import give_back

_SMALL_NBYTES: Final = 2**16  # tensors below are made at once
_KEPT_NBYTES: Final = 2**25  # of tensors that keep their memory between operators, since the next may want them again
_RETURNED_NBYTES: Final = 2**20  # tensors whose making leaves freed memory that is worth returning at once
_OVERWRITING: Final = frozenset(
    {
        "zero_", "fill_", "normal_", "uniform_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_",
        "cauchy_",
    }
)  # fmt: skip
_EMPTY: Final = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})


@dataclass(slots=True)
class LedgerLine:
    """An operator of the ledger: how to do it again."""

    operator: Any
    args: Any
    kwargs: Any
    states: list[tuple[torch.Generator, torch.Tensor]]
    needs: list[tuple[HollowStorage, int]]  # what it reads, and how many lines that had
    output: int | None  # the number of its result that is meant; None for one that works in place
    overwrites: bool

    def leaves(self) -> list[Any]:
        return tree_leaves((self.args, self.kwargs))

    def run(self) -> Any:
        kept = [(generator, generator.get_state()) for generator, _ in self.states]
        for generator, state in self.states:
            generator.set_state(state)
        try:
            return self.operator(*self.args, **self.kwargs)
        finally:
            for generator, state in kept:
                generator.set_state(state)


@dataclass(slots=True, eq=False)
class HollowStorage:
    """A storage without memory, and what it is filled by."""

    storage: torch.UntypedStorage
    nbytes: int
    lines: list[LedgerLine] = field(default_factory=list)
    filled: int = -1  # lines that its memory has seen; -1 while it has none
    needed: int = sys.maxsize  # after how few lines it was when another was made of it


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, operators on tensors without memory work: the tensors are filled for the time of the operator."""

    def __init__(self, *, known: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.adopts = False  # whether large results of operators are taken in, too, and lose their memory
        # whether the lines say what the numbers are to be; if not, they are stand-ins until a state is loaded
        self.known = known
        # whether parameters are about to have their memory for good, and change: nothing can be made of them anew
        self.taken = False
        self._hollow: dict[int, HollowStorage] = {}  # by id of the storage, which is kept here
        self._recent: dict[int, HollowStorage] = {}  # those that have memory, the latest last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with as_local():  # divided tensors have functions of their own
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        touched = {id(one): one for t in given if (one := self.of(t)) is not None}
        if not touched and not self.adopts:
            return func(*args, **kwargs)
        if func.is_view:  # asks for memory of the right size, whatever is in it
            for one in touched.values():
                self._allocate(one)
                one.filled = max(one.filled, 0)
            view = func(*args, **kwargs)
            self._evict()
            return view
        name = func.overloadpacket.__name__
        written = {id(one): one for t in _written(func, args, kwargs) if (one := self.of(t)) is not None}
        if len(written) > 1:
            return self._one_by_one(func, args, kwargs)
        fresh = name in _OVERWRITING and bool(written) and self._covered(args[0])
        # What is copied from itself, transposed say, is not made anew.
        fresh = fresh and not any(t is not args[0] and self.of(t) is self.of(args[0]) for t in given)
        wanted = []
        for key, one in touched.items():
            if fresh and key in written:
                self._allocate(one)
            else:
                wanted.append((one, len(one.lines)))
        self._fill_all(wanted)
        generators = [
            torch.default_generator,
            *([torch.cuda.default_generators[torch.cuda.current_device()]] if torch.cuda.is_initialized() else []),  # type: ignore[no-untyped-call]
            *(g for g in tree_leaves((args, kwargs)) if isinstance(g, torch.Generator)),
        ]
        before = [(generator, generator.get_state()) for generator in generators]
        needs = [(one, len(one.lines)) for key, one in touched.items() if key not in written]
        frozen = args, kwargs
        if written or self.adopts:
            frozen = self._frozen(args, kwargs)
            for one, lines in needs:
                one.needed = min(one.needed, lines)
        result = func(*args, **kwargs)
        states = [(g, state) for g, state in before if not torch.equal(state, g.get_state())]
        for one in written.values():
            one.lines.append(LedgerLine(func, *frozen, states, needs, None, fresh))
            one.filled = len(one.lines)
        if self.adopts:
            known = {id(t.untyped_storage()) for t in given if _plain(t)}
            for number, out in enumerate(tree_leaves(result)):
                if isinstance(out, torch.Tensor) and _plain(out) and out.untyped_storage().nbytes() >= _SMALL_NBYTES:
                    if id(out.untyped_storage()) in known:
                        continue
                    line = LedgerLine(func, *frozen, states, needs, number, True)
                    self.adopt(out, [] if name in _EMPTY else [line])
        self._evict()
        return result

    def _one_by_one(self, func: Any, args: Any, kwargs: Any) -> None:
        """Do for each tensor what an operator does to a list of them; a line fills one."""
        name, count = func.overloadpacket.__name__, len(args[0]) if args and isinstance(args[0], list | tuple) else 0
        if not name.startswith("_foreach_") or not count:
            raise RuntimeError(f"{name} changes several deferred parameters at once; change one after the other")

        def one(value: Any, number: int) -> Any:
            return [value[number]] if isinstance(value, list | tuple) and len(value) == count else value

        for number in range(count):
            each = [one(value, number) for value in args], {key: one(value, number) for key, value in kwargs.items()}
            self._dispatch(func, *each)

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """Open a block in which large results of operators are taken in."""
        self.adopts = True
        try:
            yield
        finally:
            self.adopts = False

    def adopt(self, tensor: torch.Tensor, lines: list[LedgerLine]) -> None:
        """Take in a tensor; its memory is given back."""
        storage = tensor.untyped_storage()
        self._hollow[id(storage)] = HollowStorage(storage, storage.nbytes(), lines)
        storage.resize_(0)

    def of(self, tensor: torch.Tensor) -> HollowStorage | None:
        """Return what a tensor's memory is filled by; None for an ordinary one."""
        return self._hollow.get(id(tensor.untyped_storage())) if _plain(tensor) else None

    def fill(self, one: HollowStorage, lines: int | None = None) -> None:
        """Give a storage its memory, as it was after so many lines; after all if not given."""
        lines = len(one.lines) if lines is None else lines
        if one.filled == lines:
            return
        if one.filled < 0 or one.filled > lines:
            one.filled = 0
        begin = max((i for i in range(lines) if one.lines[i].overwrites), default=0)
        begin = max(begin, one.filled)
        if one.filled < begin:
            one.filled = -1  # what is overwritten is not made; an earlier line of another may ask for it
        self._allocate(one)
        with torch.no_grad():
            for number, line in enumerate(one.lines[begin:lines], begin):
                self._fill_all(line.needs if line.overwrites else [*line.needs, (one, number)])
                result = line.run()
                if line.output is not None:
                    one.storage.copy_(tree_leaves(result)[line.output].untyped_storage())
                one.filled = number + 1
        one.filled = lines

    def _fill_all(self, wanted: Sequence[tuple[HollowStorage, int]]) -> None:
        """Give storages their memory at the same time, each as it was after so many lines."""
        for one, lines in wanted:
            self.fill(one, lines)
        if all(one.filled == lines for one, lines in wanted):
            return
        contents = []  # one was made of another as that was earlier, which took its place
        for one, lines in wanted:
            self.fill(one, lines)
            contents.append(one.storage.clone())  # type: ignore[no-untyped-call]
        for (one, lines), content in zip(wanted, contents, strict=True):
            self._allocate(one)
            one.storage.copy_(content)
            one.filled = lines

    def keep(self, tensor: torch.Tensor) -> None:
        """Give a tensor its memory for good."""
        one = self.of(tensor)
        if one is not None:
            self.fill(one)
            if one.needed < len(one.lines):  # its storage will be what it was earlier once more, to make another
                tensor.data = tensor.data.clone()
            else:
                self._forget(one)
            self._evict()
            if one.nbytes >= _RETURNED_NBYTES:
                give_back()

    def operators(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """Return the operators of all lines that make tensors, with the shapes that they work on."""
        return [
            f"{line.operator} {[tuple(leaf.shape) for leaf in line.leaves() if isinstance(leaf, torch.Tensor)]}"
            for line in self._lines(tensors)
        ]

    def values(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return what the lines begin with: states of random numbers, and all of their arguments that has memory."""
        found = []
        for line in self._lines(tensors):
            own = [None if self._is_own(leaf) else leaf for leaf in line.leaves()]
            found.append(([state for _, state in line.states], own))
        return found

    def install(self, tensors: Sequence[torch.Tensor], values: list[Any]) -> None:
        """Put others in the place of `values()`, of a ledger with the same operators."""
        for line, (states, leaves) in zip(self._lines(tensors), values, strict=True):
            line.states = [(generator, state) for (generator, _), state in zip(line.states, states, strict=True)]
            old, form = tree_flatten((line.args, line.kwargs))
            new = [mine if self._is_own(mine) else theirs for mine, theirs in zip(old, leaves, strict=True)]
            line.args, line.kwargs = tree_unflatten(new, form)
        for one in self._recent.values():
            one.storage.resize_(0)
            one.filled = -1
        self._recent.clear()

    def _is_own(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Generator) or (isinstance(leaf, torch.Tensor) and self.of(leaf) is not None)

    def _lines(self, tensors: Sequence[torch.Tensor]) -> list[LedgerLine]:
        found: dict[int, HollowStorage] = {}
        waiting = [one for tensor in tensors if (one := self.of(tensor)) is not None]
        while waiting:
            if id(one := waiting.pop()) not in found:
                found[id(one)] = one
                waiting += [other for line in one.lines for other, _ in line.needs]
        return [line for one in found.values() for line in one.lines]

    def _allocate(self, one: HollowStorage) -> None:
        key = id(one.storage)
        if one.storage.nbytes() != one.nbytes:
            one.storage.resize_(one.nbytes)
        self._recent.pop(key, None)
        self._recent[key] = one

    def _forget(self, one: HollowStorage) -> None:
        self._hollow.pop(id(one.storage), None)
        self._recent.pop(id(one.storage), None)

    def _evict(self) -> None:
        total = sum(one.nbytes for one in self._recent.values())
        if total <= _KEPT_NBYTES:
            return
        for key, one in list(self._recent.items()):
            if total <= _KEPT_NBYTES:
                break
            one.storage.resize_(0)
            one.filled = -1
            total -= one.nbytes
            del self._recent[key]
        give_back()

    def _covered(self, tensor: torch.Tensor) -> bool:
        one = self.of(tensor)
        return one is not None and tensor.numel() * tensor.element_size() == one.nbytes

    def _frozen(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def frozen(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.detach().clone() if self.of(leaf) is None else leaf.data  # a version counter of its own

        return tree_map(frozen, args), tree_map(frozen, kwargs)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
