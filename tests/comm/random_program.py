"""Random sequences of collective operations with a numpy reference; the same seed gives every rank the same program."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hocket import comm

SIZES = (0, 1, 2, 3, 17, 255, 1000, 4096, 16_384, 16_385, 65_536, 65_537, 131_075, 300_001, 800_003)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPERATORS: dict[str, Callable[..., Any]] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
    "AVG": np.add,
    "PREMUL_SUM": np.add,
}
KINDS = (
    "all_reduce",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "ring",
    "coalesced",
    "objects",
    "barrier",
)


@dataclass
class Step:
    """One operation of a program, drawn from its own seed."""

    seed: int
    group: int
    members: Sequence[int]
    device: str = "cpu"
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        draw = self.rng
        self.kind = draw.choice(KINDS)
        self.numel = draw.choice(SIZES if self.kind not in ("all_to_all", "gather", "scatter") else SIZES[:-2])
        self.dtype = draw.choice([*INTEGERS, *FLOATS, torch.bool, torch.complex64])
        self.root = draw.choice(list(self.members))
        self.asynchronous = draw.random() < 0.5
        self.form = draw.choice(("plain", "plain", "registered", "strided", "mixed"))
        self.operator = draw.choice(_operators(self.dtype))

    def values(self, rank: int, part: int = 0, numel: int | None = None) -> torch.Tensor:
        """What rank `rank` brings; every rank can compute it."""
        numel = self.numel if numel is None else numel
        generator = torch.Generator().manual_seed(self.seed * 1009 + rank * 31 + part)
        if self.dtype == torch.bool:
            return torch.rand(numel, generator=generator) < 0.5
        if self.dtype in FLOATS or self.dtype == torch.complex64:
            return torch.randn(numel, generator=generator).to(self.dtype)
        return torch.randint(0, 100, (numel,), generator=generator).to(self.dtype)

    def place(self, values: torch.Tensor, rank: int) -> torch.Tensor:
        """`values` in the memory that the step's form asks for."""
        form, values = self.form, values.to(self.device)
        if form == "mixed":
            form = ("plain", "registered", "strided")[(rank + self.seed) % 3]
        if form == "registered" and self.device == "cpu":
            return comm.empty(values.shape, dtype=values.dtype).copy_(values)
        if form == "strided":
            wide = torch.zeros(2 * values.numel() + 1, dtype=values.dtype, device=self.device)
            return wide[: 2 * values.numel() : 2].copy_(values)
        return values.clone()


def _operators(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.complex64:
        return ("SUM", "AVG")
    if dtype == torch.bool:
        return ("MIN", "MAX", "BAND", "BOR", "BXOR")
    if dtype in FLOATS:
        return ("SUM", "SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM")
    return ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")


def reduced(step: Step, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reference: numpy, in the order of ranks; torch where numpy lacks the type."""
    name, n = step.operator, len(parts)
    if name == "PREMUL_SUM":
        parts = [p * 0.5 for p in parts]
    if step.dtype == torch.bfloat16:
        kernels = {"PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
        result = parts[0].clone()
        for part in parts[1:]:
            result = kernels.get(name, torch.add)(result, part)
    else:
        arrays = [p.numpy() for p in parts]
        total = arrays[0].copy()
        with np.errstate(all="ignore"):
            for array in arrays[1:]:
                total = OPERATORS[name](total, array).astype(total.dtype)
        result = torch.from_numpy(total)
    if name == "AVG":
        if result.is_complex():
            result = torch.view_as_complex(torch.view_as_real(result) / n)
        else:
            result = result / n if result.is_floating_point() else _truncated(result, n)
    return result


def _truncated(result: torch.Tensor, n: int) -> torch.Tensor:
    return torch.from_numpy(np.trunc(result.numpy().astype(np.float64) / n).astype(result.numpy().dtype))


def _op(step: Step) -> Any:
    if step.operator == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(0.5)
    return getattr(ReduceOp, step.operator)


Check = Callable[[], None]


def _rounding(step: Step) -> float:
    """Each of n - 1 operations rounds by half a unit; numbers are normal ones, so partial sums stay below 6 n."""
    if not (step.dtype.is_floating_point or step.dtype.is_complex):
        return 0.0
    if "HOCKET_HOST" not in os.environ:  # one host adds in the order of ranks; a GPU multiplies by 1/n for averages
        return 2 * torch.finfo(step.dtype).eps if step.operator == "AVG" and step.device != "cpu" else 0.0
    n = len(step.members)
    return 6 * n * n * torch.finfo(step.dtype).eps


def _same(step: Step, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.device.type == torch.device(step.device).type
    got = got.contiguous().cpu()
    loose = _rounding(step)  # several hosts do not add in the order of ranks
    equal = torch.equal(got, expected) or torch.allclose(got, expected, rtol=loose, atol=loose, equal_nan=True)
    assert equal, (
        f"step {step.seed} {step.kind} {step.operator} {step.dtype} x {step.numel} {step.form}: {what} differs"
    )


def perform(step: Step, group: Any, me: int) -> tuple[Any, Check]:
    """Posts the operation; returns its work (None if it is over) and the check to make afterwards."""
    members, n = list(step.members), len(step.members)
    mine = step.place(step.values(me), me)
    everyones = [step.values(r) for r in members]
    wait = {"group": group, "async_op": step.asynchronous}
    index = members.index(me)
    if step.kind == "all_reduce":
        work = dist.all_reduce(mine, _op(step), **wait)
        return work, lambda: _same(step, "result", mine, reduced(step, everyones))
    if step.kind == "coalesced":
        more = [step.place(step.values(me, part=p, numel=p * 1000), me) for p in (1, 2)]
        with dist._coalescing_manager(group=group, async_ops=step.asynchronous) as manager:
            for tensor in (mine, *more):
                dist.all_reduce(tensor, _op(step), group=group)

        def check_coalesced() -> None:
            _same(step, "first", mine, reduced(step, everyones))
            for p, tensor in zip((1, 2), more, strict=True):
                _same(step, f"part {p}", tensor, reduced(step, [step.values(r, p, p * 1000) for r in members]))

        return manager if step.asynchronous else None, check_coalesced
    if step.kind == "reduce":
        work = dist.reduce(mine, step.root, _op(step), **wait)
        return work, lambda: _same(
            step, "result", mine, reduced(step, everyones) if me == step.root else step.values(me)
        )
    if step.kind == "broadcast":
        work = dist.broadcast(mine, step.root, **wait)
        return work, lambda: _same(step, "copy", mine, step.values(step.root))
    if step.kind == "all_gather":
        lists = [step.place(torch.zeros_like(mine), me) for _ in members]
        work = dist.all_gather(lists, mine, **wait)

        def check_lists() -> None:
            for got, expected in zip(lists, everyones, strict=True):
                _same(step, "part", got, expected)

        return work, check_lists
    if step.kind == "all_gather_single":
        whole = step.place(torch.zeros(n * step.numel, dtype=step.dtype), me)
        work = dist.all_gather_into_tensor(whole, mine, **wait)
        return work, lambda: _same(step, "whole", whole, torch.cat(everyones))
    if step.kind in ("reduce_scatter", "reduce_scatter_single"):
        output = step.place(torch.zeros(step.numel, dtype=step.dtype), me)
        if step.kind == "reduce_scatter":
            inputs = [step.place(step.values(me, part=p), me) for p in range(n)]
            work = dist.reduce_scatter(output, inputs, _op(step), **wait)
        else:
            joined = torch.cat([step.values(me, part=p) for p in range(n)])
            work = dist.reduce_scatter_tensor(output, step.place(joined, me), _op(step), **wait)
        return work, lambda: _same(step, "part", output, reduced(step, [step.values(r, part=index) for r in members]))
    if step.kind == "all_to_all":
        sent = [step.place(step.values(me, part=p), me) for p in range(n)]
        received = [step.place(torch.zeros_like(s), me) for s in sent]
        work = dist.all_to_all(received, sent, **wait)

        def check_received() -> None:
            for r, got in zip(members, received, strict=True):
                _same(step, f"from {r}", got, step.values(r, part=index))

        return work, check_received
    if step.kind == "all_to_all_single":
        rows = [[random.Random(step.seed + 7 * a + b).randint(0, 40) for b in range(n)] for a in range(n)]
        source = step.place(torch.cat([step.values(me, p, rows[index][p]) for p in range(n)]), me)
        target = step.place(torch.zeros(sum(rows[a][index] for a in range(n)), dtype=step.dtype), me)
        splits = [rows[a][index] for a in range(n)]
        work = dist.all_to_all_single(target, source, splits, rows[index], **wait)
        return work, lambda: _same(
            step, "whole", target, torch.cat([step.values(members[a], index, splits[a]) for a in range(n)])
        )
    if step.kind == "gather":
        outputs = [step.place(torch.zeros_like(mine), me) for _ in members] if me == step.root else None
        work = dist.gather(mine, outputs, step.root, **wait)

        def check_gathered() -> None:
            for got, expected in zip(outputs or (), everyones, strict=False):
                _same(step, "part", got, expected)

        return work, check_gathered
    if step.kind == "scatter":
        parts = [step.place(step.values(step.root, part=p), me) for p in range(n)] if me == step.root else None
        output = step.place(torch.zeros_like(mine), me)
        work = dist.scatter(output, parts, step.root, **wait)
        return work, lambda: _same(step, "part", output, step.values(step.root, part=index))
    if step.kind == "ring":
        incoming = torch.zeros(step.numel + 1, device=step.device)
        outgoing = torch.full((step.numel + 1,), float(me), device=step.device)
        left, right = members[index - 1], members[(index + 1) % n]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, outgoing, right, group), dist.P2POp(dist.irecv, incoming, left, group)]
        )
        for work in works:
            work.wait()
        return None, lambda: _same(step, "from the left", incoming, torch.full((step.numel + 1,), float(left)))
    if step.kind == "objects":
        found: list[Any] = [None] * n
        dist.all_gather_object(found, {"rank": me, "seed": step.seed}, group=group)
        assert found == [{"rank": r, "seed": step.seed} for r in members]
        return None, lambda: None
    return dist.barrier(group=group, async_op=step.asynchronous), lambda: None
