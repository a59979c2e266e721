"""One call of an operator on tensors that may be divided: what a rule is given, and what it asks of the other ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from ._placement import PARTIAL, CannotShard, Interval, Placement, Shard, cut
from ._trees import leaves, mapped


@dataclass(eq=False, slots=True)
class Operand:
    """A tensor among the arguments.

    Attributes:
        shape: shape of the full tensor.
        shard: how the tensor is divided; None where every rank has all of it.
        grad: whether a gradient flows to the tensor.
        computed: whether the tensor is better divided where it is made, by a layer or as a weight.
        dtype: type of the elements.
        tensor: this rank's tensor, while the program runs; what stands for it, while the program is examined.
        weight: of a divided parameter, and of what is made of such alone: what becomes of the first results that other
            tensors went into: "parts" stay divided, of an "alone" one they are gathered. Empty for other tensors.
    """

    shape: tuple[int, ...]
    shard: Shard | None
    grad: bool
    computed: bool
    dtype: torch.dtype
    tensor: Any
    weight: str = ""

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class LocalShard:
    """In the place of a replicated operand: this rank's shard of it."""

    operand: Operand
    shard: Shard


@dataclass(frozen=True, slots=True)
class FetchedRows:
    """In the place of a divided operand: the interval of the divided dim that this rank wants, some of it others'.

    Attributes:
        operand: the divided operand.
        wanted: the interval that each rank wants; it may reach beyond the tensor on both sides.
        fill: the value beyond the tensor.
    """

    operand: Operand
    wanted: tuple[Interval, ...]
    fill: float = 0.0


class NeedsShard(Exception):
    """An operand should be divided where it is made.

    Args:
        operand: the replicated operand.
        shard: as which it should be divided.
    """

    def __init__(self, operand: Operand, shard: Shard) -> None:
        super().__init__()
        self.operand, self.shard = operand, shard


class ShardPeers(Protocol):
    """The ranks that share divided tensors, as one of them sees them.

    Attributes:
        rank: this rank's number among them.
        size: number of ranks.
        exchanges: whether ranks fetch rows of each other and add up partial results, and own unequal shares. Otherwise
            only operators are accepted that need nothing of other ranks, and shares are equal.
        gathers: whether what has no rule is done on gathered tensors; otherwise it is refused.
        heard: hears of what was divided and gathered; None for nobody.
    """

    rank: int
    size: int
    exchanges: bool
    gathers: bool
    heard: Callable[[str, Any, str, str], None] | None

    def fetch(self, tensor: torch.Tensor, shard: Shard, wanted: Sequence[Interval], fill: float) -> torch.Tensor:
        """Return this rank's wanted interval of the divided dim."""

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a replicated tensor for use with divided ones."""

    def own_random_numbers(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a block in which random numbers are this rank's own."""

    def batch_norm(
        self, input: torch.Tensor, divided: bool, weight: Any, bias: Any, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return the normalised input, mean, variance and count of values over all ranks; None for this rank's."""


NO_ANSWER = object()


@dataclass(slots=True)
class OperatorCall:
    """One call of an operator.

    A rule changes the arguments into what this rank is to call, or sets `run`, and returns how the results lie.

    Attributes:
        name: the operator's name, see `operator_name`.
        args, kwargs: the arguments, with an `Operand` for each tensor.
        ranks: number of ranks that share what is divided.
        rank: this rank; 0 while a program is examined.
        exchanges: see `ShardPeers`.
        func: the function that was called.
        in_place: whether the call changes its first argument.
        changed: whether the call must be changed at all, or would come out right by itself.
        random: whether the call draws random numbers, for this rank's shard alone.
        answer: what the call returns, where the operator need not be applied.
        gathered: why the call gathers the full tensor though its results are divided; empty where it does not.
        run: makes the results on this rank, where changed arguments would not do.
        summed: whether results are sums over ranks.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ranks: int
    rank: int = 0
    exchanges: bool = False
    func: Any = None
    in_place: bool = False
    changed: bool = False
    random: bool = False
    answer: Any = NO_ANSWER
    gathered: str = ""
    run: "Callable[[Local], Any] | None" = None
    summed: bool = False

    @property
    def weight(self) -> str:
        """What results are as weights, see `Operand.weight`: made of divided weights alone, they are such."""
        numbers = [one for one in self.operands() if one.dtype.is_floating_point or one.dtype.is_complex]
        divided = [one for one in numbers if one.shard is not None]
        whole = any(one.shard is None and math.prod(one.shape) != 1 for one in numbers)
        if whole or not divided or not all(one.weight for one in divided) or self.name == "embedding":
            return ""
        return "alone" if self.alone_weight else "parts"

    @property
    def alone_weight(self) -> bool:
        """Whether a weight takes part whose results are gathered."""
        return any(one.weight == "alone" for one in self.operands())

    def operands(self) -> Iterator[Operand]:
        """Yield all tensors among the arguments."""
        for leaf in leaves((self.args, self.kwargs)):
            if isinstance(leaf, Operand):
                yield leaf
            elif isinstance(leaf, LocalShard | FetchedRows):
                yield leaf.operand

    def shard(self, operand: Any) -> Shard:
        """Return how the tensor that the operator is about is divided.

        Raises:
            CannotShard: the tensor is replicated, or no tensor.
        """
        if not isinstance(operand, Operand) or operand.shard is None:
            self.refuse("uses shards in another place than its first argument")
        return operand.shard

    def share(self, operand: Operand, shard: Shard) -> Operand | LocalShard | FetchedRows:
        """Return an operand as `shard` divides it, whether it is replicated or divided in another way.

        Raises:
            CannotShard: it is divided in another way, and ranks do not exchange rows.
            NeedsShard: a layer made the operand, and may be able to make the shard alone.
        """
        if operand.shard == shard:
            return operand
        if operand.shard is None:
            if operand.shape[shard.dim] != shard.size:
                self.refuse(f"meets a tensor of {operand.shape[shard.dim]} where {shard.size} are divided")
            if operand.computed:
                raise NeedsShard(operand, shard)
            self.changed = True
            return LocalShard(operand, shard)
        if not self.exchanges or operand.shard.dim != shard.dim or operand.shard.size != shard.size:
            self.refuse("meets tensors that are divided differently")
        self.changed = True
        return FetchedRows(operand, tuple(shard.intervals()))

    def replicated(self, *operands: Any) -> None:
        """Demand that operands which go with every shard are not divided themselves.

        Raises:
            CannotShard: one is.
        """
        if any(isinstance(one, Operand) and one.shard is not None for one in operands):
            self.refuse("is given parameters that are divided")

    def alone(self, operand: Any) -> Shard:
        """Return how an operand is divided on whose shards the operator works as it is, if none is empty.

        Raises:
            CannotShard: a shard is empty, of which torch itself refuses to make anything.
        """
        shard = self.shard(operand)
        if any(shard.length(rank) == 0 for rank in range(shard.ranks)):
            self.refuse("is given an empty shard")
        return shard

    def becomes(self, *args: Any, **kwargs: Any) -> None:
        """Change the arguments of this rank's call."""
        self.args, self.kwargs, self.changed = args, kwargs, True

    def mine(self, shard: Shard) -> int:
        """Return how many indices this rank owns."""
        return shard.length(self.rank)

    def exchange(self, why: str) -> None:
        """Demand that ranks exchange rows or partial results.

        Raises:
            CannotShard: they do not.
        """
        if not self.exchanges:
            self.refuse(why)

    def refuse(self, why: str, segments: Sequence[tuple[int, ...]] = ()) -> NoReturn:
        """Raise the error for a call that cannot be made on shards."""
        raise CannotShard(f"{self.name} {why}", segments)


Outcome = Placement | Sequence[Placement]
"""How all results lie, or each of them."""
Rule = Callable[..., Outcome]
"""A rule is called with the `OperatorCall`, and then with its arguments as the program gave them."""


@dataclass(frozen=True, slots=True)
class Local:
    """What this rank does of a call."""

    peers: ShardPeers  # the ranks
    func: Any  # the function that was called

    def tensors(self, tree: Any) -> Any:
        """Return arguments with this rank's tensors in the places of operands."""
        return mapped(self._tensor, tree)

    def _tensor(self, leaf: Any) -> Any:
        if isinstance(leaf, LocalShard):
            return cut(self.peers.enter(leaf.operand.tensor), leaf.shard, self.peers.rank)
        if isinstance(leaf, FetchedRows):
            return self.rows(leaf.operand, leaf.wanted, leaf.fill)
        if isinstance(leaf, Operand):
            return self.peers.enter(leaf.tensor) if leaf.shard is None and leaf.grad else leaf.tensor
        return leaf

    @staticmethod
    def given(tree: Any) -> Any:
        """Return arguments as the program gave them."""
        return mapped(lambda leaf: leaf.tensor if isinstance(leaf, Operand) else leaf, tree)

    def rows(self, operand: Operand, wanted: Sequence[Interval], fill: float = 0.0) -> torch.Tensor:
        """Return the interval of a divided operand's dim that this rank wants."""
        assert operand.shard is not None
        return self.peers.fetch(operand.tensor, operand.shard, wanted, fill)

    def result(self, call: OperatorCall, placements: Outcome) -> Any:
        """Return what the call makes on this rank; partial results are added up."""
        if call.run is not None:
            made = call.run(self)
        elif call.changed or any(o.shard is None and o.grad for o in call.operands()):
            made = self.func(*self.tensors(call.args), **self.tensors(call.kwargs))
        else:  # the very objects, which may be of types that cannot be built anew
            made = self.func(*self.given(call.args), **self.given(call.kwargs))
        return self.peers.total(made) if placements is PARTIAL else made


def placements_of(outcome: Outcome, count: int) -> list[Shard | None]:
    """Return how each of `count` results is divided, by what a rule returned."""
    each = [outcome] * count if isinstance(outcome, Placement) else list(outcome)
    assert len(each) == count
    return [one if isinstance(one, Shard) else None for one in each]
