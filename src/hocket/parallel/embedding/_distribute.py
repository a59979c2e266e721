"""Shards the embedding tables of a model, in place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.workload.division import CollectiveCount

from ..mesh import World
from ..state import broadcast_tensors, exclude_from_reduction
from ._exchange import RowExchange
from ._modules import SHARDED, ShardableEmbedding, become_sharded
from ._sharding import REPLICATE_BELOW_NBYTES, How, Table, TableSharding, decide


@dataclass(slots=True)
class EmbeddingParallel:
    """How a model's embedding tables are sharded."""

    decisions: list[TableSharding]  # the sharding of each table that can be sharded
    # names of the weights of tables that cannot be sharded, with the reason; they stay as they are
    refused: dict[str, str]
    # for each sharded parameter, by the model's name: its full shape, and where this rank's part begins in it. The part
    # itself is the parameter, which may be empty.
    shards: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    world: World  # the ranks
    # the sharded parameters by the model's names: no data-parallel average is to touch them
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    _exchanges: dict[str, RowExchange] = field(default_factory=dict)

    def weigh_by(self, weight: Callable[[], float]) -> None:
        """Have this rank's gradients count `weight()` times in the average over ranks, asked in each backward pass.

        Not needed where the loss is weighted itself, as `Trainer` does.
        """
        for exchange in self._exchanges.values():
            exchange.weight = weight

    def collectives(self, ids: Mapping[str, int]) -> list[CollectiveCount]:
        """Return what a forward and a backward pass communicate.

        Args:
            ids: For each sharded table that is looked up once, how many rows all ranks together look up in it; padding
                of an EmbeddingBag does not count.
        """
        total: dict[tuple[str, str], tuple[int, int]] = {}
        for name, count in ids.items():
            weight = self.parameters[name]
            width, size = weight.shape[1], weight.element_size()
            for one in self._exchanges[name].expected(count, width, size, trained=weight.requires_grad):
                before = total.get((one.phase, one.kind), (0, 0))
                total[one.phase, one.kind] = before[0] + one.count, before[1] + one.nbytes
        return [CollectiveCount(*key, *sums) for key, sums in total.items()]

    def part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's rows of a tensor (of optimizer state, say) that has those of a sharded parameter."""
        begin = self.shards[name][1][0]
        return full[begin : begin + len(self.parameters[name])]

    def whole(self, name: str) -> Tensor:
        """Return all rows of a sharded parameter, on every rank; a collective operation."""
        shape, offsets = self.shards[name]
        part = self.parameters[name].detach()
        full = part.new_zeros(shape)
        full[offsets[0] : offsets[0] + len(part)] = part
        dist.all_reduce(full, group=self.world.group)
        return full

    def __str__(self) -> str:
        kept = [f"{name}: left as it is, {reason}" for name, reason in self.refused.items()]
        return "\n".join([*map(str, self.decisions), *kept])


def distribute_embeddings(
    model: nn.Module, world: World, how: How, *, replicate_below: int = REPLICATE_BELOW_NBYTES
) -> EmbeddingParallel:
    """Shard embedding tables over data-parallel ranks, in place; a collective operation.

    Every `torch.nn.Embedding` and `EmbeddingBag` takes the same arguments and gives the same results as before. Its
    weight stays the same Parameter and gets this rank's rows for data, so that an optimizer made of it before stays
    valid; its gradient is the data-parallel average, sparse if it was. All ranks must call the model equally often,
    each with any number of rows to look up.

    A weight that the model uses otherwise than by calling its module (as `F.linear(x, self.tokens.weight)`) cannot be
    seen here: leave it out, or tie it to a module's weight, which is seen and refused. Raises ValueError: there is no
    such form.

    Args:
        model: The same model on every rank; rank 0's weights count.
        world: The ranks that share each batch.
        how: "table": each table on one rank; "row": some rows of each table on every rank; "hybrid": by size.
        replicate_below: For "hybrid": a table of fewer bytes stays on every rank, unless its gradients are sparse.
    """
    if how not in get_args(How):
        raise ValueError(f"embeddings can be divided by {', '.join(map(repr, get_args(How)))}, not {how!r}")
    if world.size == 1:
        return EmbeddingParallel([], {}, {}, world)
    found, refused = _survey(model)
    tables = [_table(name, module) for name, module in found.items()]
    decisions = decide(tables, world.size, how, replicate_below)
    result = EmbeddingParallel(decisions, refused, {}, world)
    for decision in decisions:
        if decision.form != "replicated":
            _shard(found[decision.name], decision, result)
    return result


def _survey(model: nn.Module) -> tuple[dict[str, ShardableEmbedding], dict[str, str]]:
    """Tables that can be divided, and reasons against the others, by the names of their weights."""
    users: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), []).append(f"{prefix}.{own}".lstrip("."))
    found: dict[str, ShardableEmbedding] = {}
    refused: dict[str, str] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        name = f"{prefix}.weight".lstrip(".")
        weight = module.weight
        others = [user for user in users.get(id(weight), []) if user != name]
        if type(module) in SHARDED.values():
            refused[name] = "it is divided already"
        elif type(module) not in SHARDED:
            refused[name] = f"{type(module).__name__} may look rows up in a way of its own"
        elif type(weight) is not nn.Parameter:
            refused[name] = f"its weight is no plain parameter but a {type(weight).__name__}"
        elif others:
            refused[name] = f"its weight is also that of {', '.join(others)}, which needs all rows"
        elif module.max_norm is not None:
            refused[name] = "max_norm changes rows when they are looked up, and several ranks would at once"
        elif isinstance(module, nn.EmbeddingBag) and module.scale_grad_by_freq:
            refused[name] = "scale_grad_by_freq counts otherwise in a bag than where the rows are"
        else:
            found[name] = module
    return found, refused


def _table(name: str, module: ShardableEmbedding) -> Table:
    weight = module.weight
    return Table(name, weight.shape[0], weight.numel() * weight.element_size(), module.sparse)


def _shard(module: ShardableEmbedding, decision: TableSharding, result: EmbeddingParallel) -> None:
    weight, world = module.weight, result.world
    assert isinstance(weight, nn.Parameter)
    broadcast_tensors([weight], world)
    begin, end = decision.range(world.rank)
    shape = tuple(weight.shape)
    with torch.no_grad():
        weight.data = weight.data[begin:end].clone()  # its own memory: the other rows' is freed
    weight.grad = None
    exchange = RowExchange(decision, world)
    become_sharded(module, exchange)
    exclude_from_reduction(weight, result)
    result.shards[decision.name] = (shape, (begin,) + (0,) * (len(shape) - 1))
    result.parameters[decision.name] = weight
    result._exchanges[decision.name] = exchange
