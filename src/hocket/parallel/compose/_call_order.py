"""Sees that ranks whose layers exchange values call them in one order, in the first step."""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ..mesh import Mesh


@contextmanager
def called_alike(model: torch.nn.Module, mesh: Mesh, *, sharded: bool) -> Iterator[None]:
    """Open a block after which ranks compare the order in which they have called the model's layers in it.

    Exchanges of layers are matched by their order, so that another order, as of a set of strings, which each process
    goes through in its own way, would give a layer what belongs to another of the same shape. Compared are all layers
    among ranks that divide tensors, and the sharded blocks among ranks that share these; a collective operation.

    Args:
        model: what this rank computes of it is called.
        mesh: the ranks.
        sharded: whether the plan shards parameters; a stage of a pipeline may have none.

    Raises:
        RuntimeError: the order differs; on every rank alike.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # what is not loaded has sharded nothing
    names = {id(module): name for name, module in model.named_modules()}
    blocks = {id(one) for one in model.modules() if fsdp is not None and isinstance(one, fsdp.FSDPModule)}
    groups = [(mesh["tensor"], set(names))] if mesh["tensor"].size > 1 else []
    groups += [(mesh.replicas, blocks)] if sharded and mesh.replicas.size > 1 else []
    if not groups:
        yield
        return
    called: list[int] = []

    def note(module: torch.nn.Module, _: Any) -> None:
        if id(module) in names:
            called.append(id(module))

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
    differ = False
    for group, counted in groups:
        order = [names[one] for one in called if one in counted]
        digests = group.from_all(hashlib.sha256(repr(order).encode()).hexdigest())
        differ |= len(set(digests)) > 1
    if any(mesh.whole.from_all(differ)):
        raise RuntimeError(
            "ranks have called the model's layers in different orders, so that layers got values of others: where "
            "forward goes through a set of strings, go through sorted(...), or set PYTHONHASHSEED to one number for "
            "all ranks (hocket run does). No weight has been updated"
        )
