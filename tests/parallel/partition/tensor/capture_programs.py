"""What ranks run to compare what capture says of a divided model with what the divided model does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from hocket.parallel.mesh.world import current
from hocket.parallel.partition.tensor import TensorParallel, parallelize
from hocket.profile import Recorder
from hocket.workload import Workload, capture, parse
from hocket.workload.division import storage_of

from ...user_models import CASES
from .small_models import MODELS
from .tensor_programs import counted

Exchanges = dict[str, tuple[int, float]]


def user_models_and_small_ones() -> dict[str, dict[str, Any]]:
    """Every model of the tests, in float32 as a user has it."""
    found = {}
    generator = torch.Generator().manual_seed(1)
    for name, case in CASES.items():
        batch = case.batch(4, generator)[:-1]
        found[name] = compared(case.model, batch)
    for name, (make, inputs) in MODELS.items():
        if name != "curvature":  # torch.func refuses the hooks by which `communicated` sees what is kept
            found[f"small {name}"] = compared(make, inputs())
    return found


def compared(make: Callable[[], nn.Module], inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """What capture says of one rank, and what the rank has, keeps and communicates."""
    world = current()
    torch.manual_seed(0)
    model = make()
    inputs = tuple(world.from_root(inputs))
    workload = capture(model, inputs, repeats=1, degrees=[world.size])
    assert parse(str(workload)) == workload
    shares = [layer.share(world.size) for layer in workload.layers]
    whole = sum(p.nbytes for p in model.parameters())
    result = parallelize(model, world, inputs)
    has, kept = communicated(model, inputs)
    trained = [p for p in model.parameters() if p.requires_grad]
    return {
        "said": {
            "parameters": sum(share.parameter_bytes for share in shares),
            "gradients": sum(share.gradient_bytes for share in shares),
            "optimizer": sum(share.optimizer_bytes for share in shares),
            "exchanges": exchanges(workload, world.size),
        },
        "is": {
            "parameters": sum(p.numel() * p.element_size() for p in model.parameters()),
            "gradients": sum(p.numel() * p.element_size() for p in trained),
            "optimizer": sum(8 * p.numel() for p in trained),
            "exchanges": has,
        },
        "kept": (sum(one.saved_bytes for share in shares for one in share.operations), kept),
        "divided": (asdict(workload.divided(world.size)), asdict(result.share)),
        "held": sum(p.nbytes for p in model.parameters()) / whole,
        "forms": forms(result),
    }


def in_sequence() -> dict[str, Any]:
    """The same for models in which the sequence is divided, too: state, exchanges, and what is kept."""
    world, found = current(), {}
    for name in ("gpt", "seq2seq", "mixer"):
        torch.manual_seed(0)
        model = CASES[name].model()
        inputs = CASES[name].batch(4, torch.Generator().manual_seed(1))[:-1]
        workload = capture(model, inputs, repeats=1, degrees=[world.size])
        assert parse(str(workload)) == workload
        shares = [layer.share(world.size, sequence=True) for layer in workload.layers]
        parallelize(model, world, inputs, sequence=True)
        has, kept = communicated(model, inputs)
        said = exchanges(workload, world.size, sequence=True)
        saved = sum(one.saved_bytes for share in shares for one in share.operations)
        changed = said != exchanges(workload, world.size)
        found[name] = {"said": said, "is": has, "kept": (saved, kept), "changed": changed}
    return found


def exchanges(workload: Workload, degree: int, *, sequence: bool = False) -> Exchanges:
    """By kind, how many and how many bytes."""
    found: Exchanges = {}
    for layer in workload.layers:
        for one in layer.share(degree, sequence=sequence).exchanges:
            count, nbytes = found.get(one.kind, (0, 0.0))
            found[one.kind] = count + one.count, nbytes + one.count * one.nbytes
    return found


def communicated(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Exchanges, int]:
    """A forward and backward pass: what was sent, by kind, and the bytes that autograd kept between."""
    known = {storage_of(one) for one in (*model.parameters(), *model.buffers(), *inputs)}
    kept: list[torch.Tensor] = []
    with Recorder() as recorder:
        with kept_in(kept, known):
            out = model(*inputs)
            total = torch.stack([one.float().sum() for one in (out if isinstance(out, tuple) else (out,))]).sum()
        total.backward()  # type: ignore[no-untyped-call]
    made = dict(counted(recorder))
    return {kind: (count, float(nbytes)) for kind, (count, nbytes) in made.items()}, sum(
        one.untyped_storage().nbytes() for one in kept
    )


@contextmanager
def kept_in(kept: list[torch.Tensor], known: set[int]) -> Iterator[None]:
    """In the block what autograd keeps is put on the list, each storage once, and none of those that are known."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage_of(tensor) not in known:
            known.add(storage_of(tensor))
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def forms(result: TensorParallel) -> list[str]:
    """What became of the layers."""
    return [decision.form for decision in result.decisions]
