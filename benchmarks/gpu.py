"""One GPU: what Hocket predicts of it, and what it does.

    python -m benchmarks.gpu --out FILE.json                          all parts, 240 s each at most
    python -m benchmarks.gpu --out FILE.json --parts rates,a --seconds 120
    python -m benchmarks.gpu --out FILE.json --device cpu --small     the same program on any machine, with tiny models

Every prediction is made, printed and written down before what it foretells is measured. The parts, each a process of
its own that is killed when its time is over and whose failure stops no other:

- rates: what large products, copies and launches reach, beside what the catalogue's cluster says of them
- a: steps of known models on one device, predicted from the catalogue alone: time, interval, MFU, peak memory
- b: `capture` on the device: do its layers sum up to the step of one process, and scale with the batch?
- c: plans on ranks that share the GPU, after `hocket.calibrate`: time and peak memory of each; the pick and the best
- d: collectives between such ranks, beside the bytes that must be read and written, and beside gloo with host staging
- e: peak memory of plans of a GPT as captured on the meta device, which is what `hocket plan` says

Times on a GPU are those between CUDA events, or of the host after synchronising. Memory is torch's allocator's.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks are started with this file's path

import hocket
from benchmarks import gpu_models as models
from benchmarks.plans import is_measured
from hocket import cluster
from hocket.planner import Plan, PlanError, admissible_plans, memory_of, predict, preferred
from hocket.testing import preload, run_ranks
from hocket.workload import Workload, capture

PARTS = ("rates", "a", "b", "c", "d", "e")
MIB, GIB = 2**20, 2**30
SPARE = 0.85  # of a part's time, after which nothing new begins


# --- the device -------------------------------------------------------------------------------------------------------


class Place:
    """The device that is measured, and the part's time and file."""

    def __init__(self, device: str, small: bool, seconds: float, file: Path, clusters: str) -> None:
        self.device, self.small, self.file = torch.device(device), small, file
        self.cuda = self.device.type == "cuda"
        self.until_s = time.perf_counter() + SPARE * seconds
        self.seconds = seconds
        self.cluster = clusters
        if not self.cuda:
            torch.set_num_threads(1)
        self.rows: list[dict[str, Any]] = []

    @property
    def left_s(self) -> float:
        """Seconds until nothing new begins."""
        return self.until_s - time.perf_counter()

    def keep(self, row: dict[str, Any]) -> dict[str, Any]:
        """Write a row down; again after it has changed, with `save`."""
        self.rows.append(row)
        self.save()
        return row

    def save(self) -> None:
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps(self.rows, indent=1))
        os.replace(draft, self.file)

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """An instant on the device: an event, which delays nothing."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, one: Any, other: Any) -> float:
        """Seconds between two marks; of events after `sync`."""
        return one.elapsed_time(other) / 1e3 if self.cuda else other - one

    def clear(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def peak_from_here(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else 0

    def held(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0


@contextmanager
def one_of(name: str, rows: Place, row: dict[str, Any]) -> Iterator[None]:
    """Open a block whose failure is printed and kept, and goes no further."""
    try:
        yield
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"
        print(f"{name} has failed: {row['failed'][:300]}", flush=True)
        traceback.print_exc()
    rows.save()
    rows.clear()


def steps_s(place: Place, step: Callable[[], Any], within_s: float, most: int = 50, warm: int = 3) -> list[float]:
    """Seconds of steps in a row, between marks that delay nothing."""
    for _ in range(warm):
        step()
    place.sync()
    begin = time.perf_counter()
    step()
    place.sync()
    each = time.perf_counter() - begin
    count = max(3, min(most, int(within_s / max(each, 1e-6))))
    marks = [place.mark()]
    for _ in range(count):
        step()
        marks.append(place.mark())
    place.sync()
    return [place.between_s(a, b) for a, b in zip(marks, marks[1:], strict=False)]


# --- models -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A model as it is trained on one device."""

    name: str
    build: Callable[[], nn.Module]  # under a `torch.device`
    sample: Callable[[torch.device, torch.dtype], Any]  # a batch
    loss: Callable[[nn.Module, Any], Tensor]
    batch: int


def _pictures(batch: int, size: int, classes: int) -> Callable[[torch.device, torch.dtype], Any]:
    def sample(device: torch.device, dtype: torch.dtype) -> Any:
        return torch.randn(batch, 3, size, size, device=device, dtype=dtype), torch.arange(
            batch, device=device
        ) % classes

    return sample


def _tokens(batch: int, length: int, vocabulary: int) -> Callable[[torch.device, torch.dtype], Any]:
    def sample(device: torch.device, _: torch.dtype) -> Any:
        number = torch.arange(batch * (length + 1), device=device).reshape(batch, length + 1)
        return (number * 7919) % vocabulary

    return sample


def _of_classes(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return cross_entropy(getattr(out, "logits", out).float(), batch[1])


def _next_token(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[:, :-1].contiguous())
    logits = getattr(out, "logits", out)
    return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


class _Clicks(nn.Module):
    """Tables of embeddings and a perceptron, after DLRM."""

    def __init__(self, tables: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.top = nn.Sequential(
            nn.Linear(tables * width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        found = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        return self.top(torch.cat(found, -1))


class _Norm(nn.Module):
    """RMS norm in single precision, as Llama has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class _LlamaBlock(nn.Module):
    """Grouped attention with rotary positions, and SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        linear = partial(nn.Linear, bias=False)
        self.first, self.second = _Norm(width), _Norm(width)
        self.q, self.o = linear(width, width), linear(width, width)
        self.k, self.v = linear(width, groups * self.each), linear(width, groups * self.each)
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        length = x.shape[1]
        q, k, v = (one(h).unflatten(-1, (-1, self.each)).transpose(1, 2) for one in (self.q, self.k, self.v))
        place = torch.arange(length, device=x.device)[:, None]
        turn = place * 10_000 ** (-torch.arange(0, self.each, 2, device=x.device) / self.each)
        cos, sin = (torch.cat((one, one), -1).to(x.dtype) for one in (turn.cos(), turn.sin()))

        def turned(y: Tensor) -> Tensor:
            low, high = y.chunk(2, -1)
            return y * cos + torch.cat((-high, low), -1) * sin

        k, v = (one.repeat_interleave(self.heads // self.groups, 1) for one in (turned(k), v))
        mixed = nn.functional.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        h = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class _Llama(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, groups: int, inner: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_LlamaBlock(width, heads, groups, inner) for _ in range(layers))
        self.norm, self.head = _Norm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Block(nn.Module):
    """GPT-2's and ViT's: attention and a perceptron, each after a norm."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.inner(x)


class _Gpt(nn.Module):
    """GPT-2, without dropout; its head is its embedding."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads, True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Vit(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, size: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(_Block(width, heads, False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class _Encoder(nn.Module):
    """An encoder of torch's own layers, dropout and all."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _wide() -> nn.Module:
    hidden = [one for _ in range(4) for one in (nn.Linear(8192, 8192), nn.ReLU())]
    return nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), *hidden, nn.Linear(8192, 1000))


def _rows(batch: int, width: int, classes: int) -> Callable[[torch.device, torch.dtype], Any]:
    def sample(device: torch.device, dtype: torch.dtype) -> Any:
        numbers = torch.randn(batch, width, device=device, dtype=dtype)
        return numbers, torch.arange(batch, device=device) % classes

    return sample


def cases(small: bool) -> list[Case]:
    """Return what parts a and b train; tiny ones that run anywhere if `small`."""
    from hocket.workloads.edsr.model import EDSR
    from hocket.workloads.resnet50.model import ResNet50

    gpt2 = partial(_Gpt, 64, 2, 4, 512, 64) if small else partial(_Gpt, 768, 12, 12, 50_304, 1024)
    llama = partial(_Llama, 64, 2, 4, 2, 128, 512) if small else partial(_Llama, 2048, 16, 32, 8, 8192, 32_000)
    vit = partial(_Vit, 64, 2, 4, 32, 8, 10) if small else partial(_Vit, 1024, 24, 16, 224, 16, 1000)

    def pairs(batch: int, size: int, scale: int) -> Callable[[torch.device, torch.dtype], Any]:
        def sample(device: torch.device, dtype: torch.dtype) -> Any:
            make = partial(torch.rand, device=device, dtype=dtype)
            return make(batch, 3, size, size), make(batch, 3, scale * size, scale * size)

        return sample

    def near(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).float().abs().mean()

    if small:
        return [
            Case("gpt2", gpt2, _tokens(2, 32, 512), _next_token, 2),
            Case("llama", llama, _tokens(2, 32, 512), _next_token, 2),
            Case("vit", vit, _pictures(2, 32, 10), _of_classes, 2),
            Case("edsr", lambda: EDSR("tiny", 2), pairs(2, 8, 2), near, 2),
            Case("clicks", lambda: _Clicks(4, 100, 8, 32), _some_clicks(16, 4, 100), _of_classes, 16),
        ]
    return [
        Case("gpt2-124m", gpt2, _tokens(16, 1024, 50_304), _next_token, 16),
        Case("llama-1b", llama, _tokens(4, 2048, 32_000), _next_token, 4),
        Case("resnet50", ResNet50, _pictures(128, 224, 1000), _of_classes, 128),
        Case("vit-l", vit, _pictures(64, 224, 1000), _of_classes, 64),
        Case("edsr", lambda: EDSR("full", 4), pairs(16, 48, 4), near, 16),
        Case("clicks", lambda: _Clicks(26, 100_000, 64, 1024), _some_clicks(8192, 26, 100_000), _of_classes, 8192),
        # Not looked at before they were predicted.
        Case("encoder", partial(_Encoder, 1024, 12, 16, 30_000, 512), _tokens(16, 512, 30_000), _next_token, 16),
        Case("wide", _wide, _rows(8192, 4096, 1000), _of_classes, 8192),
    ]


def later_cases(small: bool) -> list[Case]:
    """Return models of other kinds, for part a; tiny ones that run anywhere if `small`."""
    from hocket.workloads.climate.model import UNet
    from hocket.workloads.cosmoflow.model import CosmoFlow

    def at(tiny: Any, whole: Any) -> Any:
        return tiny if small else whole

    def words(name: str, build: Callable[[], nn.Module], batch: int, length: int, vocabulary: int) -> Case:
        batch, length, vocabulary = at((2, 16, 64), (batch, length, vocabulary))
        return Case(name, build, _tokens(batch, length, vocabulary), _next_token, batch)

    def seen(name: str, build: Callable[[], nn.Module], batch: int) -> Case:
        batch, size = at((2, 32), (batch, 224))
        return Case(name, build, _pictures(batch, size, 10), _of_classes, batch)

    def gpt(length: int) -> nn.Module:
        return _Gpt(*at((32, 2, 2, 64, 16), (1024, 24, 16, 50_304, length)))

    stages = at(((16, 1, 1), (24, 1, 2)), ((16, 1, 1), (24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2)))
    maps, volumes, noise = at((2, 2, 2), (16, 16, 64))
    sizes = at("tiny", "full")
    return [
        words("lstm", lambda: models.Recurrent(nn.LSTM, *at((16, 2, 64), (1024, 3, 10_000))), 64, 256, 10_000),
        words("gru", lambda: models.Recurrent(nn.GRU, *at((16, 2, 64), (512, 2, 10_000))), 32, 64, 10_000),
        words("translator", lambda: models.Translator(*at((16, 1, 2, 64), (512, 6, 8, 32_000))), 64, 128, 32_000),
        words("experts", lambda: models.Experts(*at((16, 1, 2, 4, 64), (1024, 6, 16, 16, 32_000))), 8, 1024, 32_000),
        words("gpt-350m", partial(gpt, 1024), 8, 1024, 50_304),
        words("gpt-350m-long", partial(gpt, 16_384), 1, 16_384, 50_304),
        words("gpt-350m-recomputed", lambda: models.Recomputed(gpt(1024)), 8, 1024, 50_304),
        seen(
            "convnext", lambda: models.ConvNext(*at(((8, 16), (1, 1), 10), ((96, 192, 384, 768), (3, 3, 9, 3), 10))), 64
        ),
        seen("mobile", lambda: models.mobile(stages, 10), 128),
        Case("climate", lambda: UNet(size=sizes), models.maps_of(maps, 16, at(16, 256), 3), models.of_pixels, maps),
        Case(
            "cosmoflow",
            lambda: CosmoFlow(parameters=4, size=sizes),
            models.volumes_of(volumes, 1, at(8, 128)),
            models.squared,
            volumes,
        ),
        Case(
            "denoiser",
            lambda: models.Denoiser(*at((8, 2), (128, 4))),
            models.noise_of(noise, at(16, 64)),
            models.tell_noise,
            noise,
        ),
        Case("small-steps", lambda: models.steps(*at((16, 2), (256, 48))), _rows(64, at(16, 256), 10), _of_classes, 64),
    ]


def latest_cases(small: bool) -> list[Case]:
    """Return models that were written when what was seen of the others had been put into formulas, for part a."""
    from hocket.workloads.resnet50.model import ResNet50

    def at(tiny: Any, whole: Any) -> Any:
        return tiny if small else whole

    def seen(name: str, build: Callable[[], nn.Module], batch: int, last: bool = False) -> Case:
        batch, size = at((2, 32), (batch, 224))
        plain = _pictures(batch, size, 10)

        def sample(device: torch.device, dtype: torch.dtype) -> Any:
            x, y = plain(device, dtype)
            return x.to(memory_format=torch.channels_last), y

        return Case(name, build, sample if last else plain, _of_classes, batch)

    def waves(device: torch.device, dtype: torch.dtype) -> Any:
        n, length = at((2, 200), (16, 64_000))
        return torch.randn(n, 1, length, device=device, dtype=dtype), torch.arange(n, device=device) % 10

    bert = at((32, 2, 2, 64, 16), (768, 12, 12, 30_000, 128))
    swin = at((16, 2, 2, 4, 4, 10), (192, 12, 6, 7, 4, 10))
    nodes = at(16, 100_000)
    return [
        seen("grouped", lambda: models.Grouped(*at((4, (1, 1), 2, 10), (64, (3, 4, 6, 3), 32, 10))), 64),
        seen("dense", lambda: models.Dense(*at((4, (2, 2), 10), (32, (6, 12, 24, 16), 10))), 64),
        seen("windows", lambda: models.Windows(*swin), 32),
        seen("mixed", lambda: models.Mixed(*at((16, 2, 32, 8, 10), (768, 12, 224, 16, 10))), 64),
        seen("resnet50-last", lambda: ResNet50().to(memory_format=torch.channels_last), 128, last=True),
        Case("waves", lambda: models.Waves(*at((8, 2, 2, 1, 10), (512, 7, 8, 6, 10))), waves, _of_classes, at(2, 16)),
        Case(
            "volumes",
            lambda: models.Volumes(*at((4, 2), (32, 4))),
            models.volumes_of(2, 1, at(8, 96)),
            models.squared,
            2,
        ),
        Case(
            "messages",
            lambda: models.Messages(*at((16, 2, 3, 10), (128, 4, 8, 10))),
            _rows(nodes, at(16, 128), 10),
            _of_classes,
            nodes,
        ),
        Case("bert-short", lambda: _Encoder(*bert), _tokens(at(2, 16), bert[-1], bert[-2]), _next_token, at(2, 16)),
        Case(
            "gpt2-single",
            lambda: _Gpt(*at((32, 2, 2, 64, 16), (768, 12, 12, 50_304, 256))),
            _tokens(1, at(16, 256), at(64, 50_304)),
            _next_token,
            1,
        ),
        Case(
            "clicks-few",
            lambda: _Clicks(*at((4, 100, 8, 32), (26, 10_000, 32, 512))),
            _some_clicks(at(16, 1024), at(4, 26), at(100, 10_000)),
            _of_classes,
            at(16, 1024),
        ),
    ]


def _some_clicks(batch: int, tables: int, rows: int) -> Callable[[torch.device, torch.dtype], Any]:
    def sample(device: torch.device, _: torch.dtype) -> Any:
        ids = (torch.arange(batch * tables, device=device).reshape(batch, tables) * 7919) % rows
        return ids, ids[:, 0] % 2

    return sample


MODES = ("float32", "tf32", "autocast", "bfloat16")


def dtype_of(mode: str) -> torch.dtype:
    """Of the parameters."""
    return torch.bfloat16 if mode == "bfloat16" else torch.float32


@contextmanager
def in_mode(mode: str) -> Iterator[None]:
    """Open a block with torch's own setting for products in float32, or with TF32 in them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def loss_in(case: Case, mode: str, device: torch.device) -> Callable[[nn.Module, Any], Tensor]:
    """The case's loss, of a forward pass under autocast if the mode says so."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        cast = torch.autocast(device.type, torch.bfloat16) if mode == "autocast" else nullcontext()
        with cast:
            return case.loss(model, batch)

    return loss


def foreseen(case: Case, mode: str) -> Workload:
    """The workload from the meta device: nothing is run."""
    meta, dtype = torch.device("meta"), dtype_of(mode)
    with meta:
        model = case.build().to(dtype)
    # On the meta device autocast has the rules of GPUs, whatever it is for; for "cuda" torch would want one.
    found = capture(
        model, case.sample(meta, dtype), loss=loss_in(case, mode, torch.device("cpu")), name=case.name, degrees=()
    )
    return dataclasses.replace(found, precision="bfloat16") if mode == "autocast" else found


def trained(case: Case, mode: str, place: Place) -> tuple[nn.Module, Any, Callable[[], Any], Callable[[], Any], Any]:
    """The model on the device with its batch, passes, the update, and the loss."""
    dtype = dtype_of(mode)
    torch.manual_seed(0)
    with place.device:
        model = case.build()
    model = model.to(device=place.device, dtype=dtype).train()
    batch, loss = case.sample(place.device, dtype), loss_in(case, mode, place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def passes() -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()

    return model, batch, passes, optimizer.step, loss


def error_of(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else "-"


# --- rates ------------------------------------------------------------------------------------------------------------


def rates(place: Place) -> None:
    """What products, copies and launches reach."""
    network = hocket.planner.Network.of(cluster.load(place.cluster))
    told = {**network.reached}
    print(
        f"{place.cluster}: {network.flops / 1e12:.4g} TFLOP/s, {network.memory_Bps / 1e9:.4g} GB/s, {told}", flush=True
    )
    size = 512 if place.small else 8192
    if place.cuda:
        about = torch.cuda.get_device_properties(0)
        said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
        place.keep({"what": "device", "name": about.name, "memory": about.total_memory, "nvidia-smi": said})
        print(f"{about.name}, {about.total_memory / GIB:.1f} GiB, torch {torch.__version__}", flush=True)

    def say(what: str, value: float, unit: str, foretold: float) -> None:
        place.keep({"what": what, "value": value, "unit": unit, "predicted": foretold})
        print(f"{what:32} {value:12.5g} {unit:8} predicted {foretold:.5g}", flush=True)

    share = float(told.get("matmul_share", 1.0))
    for name, dtype, mode in (
        ("bfloat16", torch.bfloat16, "bfloat16"),
        ("tf32", torch.float32, "tf32"),
        ("float32", torch.float32, "float32"),
    ):
        for n in (size // 4, size):
            with in_mode(mode):
                a, b = (torch.randn(n, n, device=place.device, dtype=dtype) for _ in range(2))
                out = torch.empty_like(a)
                took = statistics.median(steps_s(place, partial(torch.mm, a, b, out=out), 1.0))
            say(f"product {name} {n}", 2 * n**3 / took / 1e12, "TFLOP/s", share * network.flops / 1e12)
    count = (MIB if place.small else GIB) // 4
    a = torch.zeros(count, device=place.device)
    b = torch.empty_like(a)
    took = statistics.median(steps_s(place, partial(b.copy_, a), 0.5))
    say("copy: read and written", 2 * a.nbytes / took / 1e9, "GB/s", network.memory_Bps * 0.79 / 1e9)
    took = statistics.median(steps_s(place, partial(torch.nn.functional.gelu, a), 0.5))
    say("gelu: read and written", 2 * a.nbytes / took / 1e9, "GB/s", network.memory_Bps * 0.79 / 1e9)
    for kind in ("pageable", "pinned"):
        host = torch.zeros(count // 4, pin_memory=kind == "pinned" and place.cuda)
        took = statistics.median(steps_s(place, partial(b[: count // 4].copy_, host), 0.5))
        say(f"host to device, {kind}", host.nbytes / took / 1e9, "GB/s", 0.0)
        took = statistics.median(steps_s(place, partial(host.copy_, b[: count // 4]), 0.5))
        say(f"device to host, {kind}", host.nbytes / took / 1e9, "GB/s", 0.0)
    tiny = torch.zeros(16, device=place.device)

    def many() -> None:
        for _ in range(1000):
            tiny.add_(1.0)

    say("a launch", statistics.median(steps_s(place, many, 0.5)) * 1e3, "us", 4.0)

    def waits() -> None:
        for _ in range(200):
            tiny.add_(1.0)
            place.sync()

    say("a launch and synchronising", statistics.median(steps_s(place, waits, 0.5)) / 200 * 1e6, "us", 0.0)


# --- a: uncalibrated --------------------------------------------------------------------------------------------------


def part_a(place: Place, wanted: str) -> None:
    """Predicted from the catalogue, then measured."""
    where = cluster.load(place.cluster)
    head = ("model", "mode", "predicted ms", "80% within", "MFU", "GiB")
    print("| " + " | ".join(head) + " |", flush=True)
    todo = []
    for case in (*cases(place.small), *later_cases(place.small), *latest_cases(place.small)):
        if wanted and case.name not in wanted.split(","):
            continue
        for mode in MODES if not place.small else ("float32", "autocast"):
            row = place.keep({"model": case.name, "mode": mode, "batch": case.batch})
            with one_of(f"{case.name} {mode}: prediction", place, row), in_mode(mode):
                workload = foreseen(case, mode)
                one = predict(Plan(), workload, where, workers=1, batch=case.batch)
                row |= {
                    "predicted_s": one.step_s,
                    "interval_s": list(one.interval_s),
                    "mfu": one.mfu,
                    "flops": one.flops * case.batch,
                    "device_flops": one.device_flops,
                    "memory": dict(one.memory.rows()),
                    "parts": dict(one.parts.rows()),
                    "parameters": workload.parameters,
                    "calls": sum(op.calls for layer in workload.layers for op in layer.operations),
                    "moved": sum(op.moved_bytes for layer in workload.layers for op in layer.operations),
                    "at": time.strftime("%H:%M:%S"),
                }
                low, high = one.interval_s
                cells = [case.name, mode, f"{one.step_s * 1e3:.1f}", f"{low * 1e3:.1f} to {high * 1e3:.1f}"]
                print(" | ".join(cells), f"| {one.mfu:.1%} | {one.memory.total / GIB:.2f}", flush=True)
                todo.append((case, mode, row))
    each_s = max(2.0, place.left_s / max(1, len(todo)))
    print("\n| model | mode | ms | predicted | error | inside | passes | update | MFU | GiB |", end="")
    print(" predicted | error |", flush=True)
    for case, mode, row in todo:
        if place.left_s < 2:
            print(f"no time left for {case.name} {mode}")
            break
        with one_of(f"{case.name} {mode}", place, row), in_mode(mode):
            base = place.held()
            _, _, passes, update, _ = trained(case, mode, place)

            def step(passes: Any = passes, update: Any = update) -> None:
                passes()
                update()

            step()
            place.sync()
            place.peak_from_here()
            took = steps_s(place, step, 0.3 * each_s)
            row["peak"] = place.peak() - base
            row["steps_s"], row["measured_s"] = took, statistics.median(took)
            row["passes_s"] = statistics.median(steps_s(place, passes, 0.1 * each_s, warm=1))
            row["update_s"] = statistics.median(steps_s(place, update, 0.05 * each_s, warm=1))
            row["reached"] = row["flops"] / row["measured_s"]
            told_s, low, high = row["predicted_s"], *row["interval_s"]
            mine = row["measured_s"]
            cells = [case.name, mode, f"{mine * 1e3:.2f}", f"{told_s * 1e3:.2f}", error_of(told_s, mine)]
            cells += ["yes" if low <= mine <= high else "no", f"{row['passes_s'] * 1e3:.2f}"]
            cells += [f"{row['update_s'] * 1e3:.2f}", f"{row['reached'] / (row['device_flops'] or 1):.1%}"]
            cells += [f"{row['peak'] / GIB:.2f}"]
            cells += [f"{row['memory']['total'] / GIB:.2f}", error_of(row["memory"]["total"], row["peak"])]
            print("| " + " | ".join(cells) + " |", flush=True)
            del passes, update, step
    if not place.cuda:
        return
    print("\nmodel, mode: ms of kernels, their number, ms of each kind")  # last, as CUPTI slows what comes after it
    for case, mode, row in todo:
        if place.left_s > 4 and "measured_s" in row and mode in ("bfloat16", "autocast", "float32"):
            with one_of(f"{case.name} {mode}: kernels", place, row), in_mode(mode):
                _, _, passes, update, _ = trained(case, mode, place)
                passes()
                update()
                row |= _kernels(place, lambda p=passes, u=update: (p(), u()))
                if "kernels" in row:
                    kinds = {kind: round(seconds * 1e3, 2) for kind, seconds in row["kinds"].items()}
                    print(f"{case.name}, {mode}: {row['kernel_s'] * 1e3:.2f}, {row['kernels']}, {kinds}", flush=True)
                else:
                    print(f"{case.name}, {mode}: {row}"[:200])
                del passes, update


def _kernels(place: Place, step: Callable[[], Any]) -> dict[str, Any]:
    """What the kernels of a step take, by kind, as CUPTI tells."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        longest: dict[str, float] = {}
        count = 0
        products = ("gemm", "cutlass", "conv", "xmma", "nvjet", "cudnn", "wgrad", "dgrad", "fprop")
        for one in seen.events():
            if one.device_type != torch.autograd.DeviceType.CUDA:
                continue
            name, seconds = one.name, one.time_range.elapsed_us() / 1e6
            attention = any(word in name.lower() for word in ("flash", "fmha", "attention", "sdpa"))
            kind = "attention" if attention else "products" if any(w in name.lower() for w in products) else "others"
            found[kind] = found.get(kind, 0.0) + seconds
            longest[name] = longest.get(name, 0.0) + seconds
            count += 1
    except Exception as error:
        return {"no kernels": f"{type(error).__name__}: {error}"}
    most = sorted(longest.items(), key=lambda pair: -pair[1])[:12]
    return {
        "kernels": count,
        "kernel_s": sum(found.values()),
        "kinds": found,
        "longest": [(name[:120], seconds) for name, seconds in most],
    }


# --- b: capture on the device -----------------------------------------------------------------------------------------


def part_b(place: Place) -> None:
    """Does what `capture` times sum up to a step, and scale?"""
    print("| model | mode | layers | captured ms | passes ms | error | update captured | measured | error |", end="")
    print(" part of the batch | told ms | measured | error |", flush=True)
    modes = ("float32", "bfloat16") if not place.small else ("float32",)
    todo = [(case, mode) for case in cases(place.small) for mode in modes]
    each_s = place.left_s / len(todo)
    for case, mode in todo:
        if place.left_s < 2:
            print(f"no time left for {case.name} {mode}")
            break
        row = place.keep({"model": case.name, "mode": mode, "batch": case.batch})
        with one_of(f"{case.name} {mode}", place, row), in_mode(mode):
            model, batch, passes, update, loss = trained(case, mode, place)
            begin = time.perf_counter()
            found = capture(model, batch, loss=loss, name=case.name, degrees=())
            row |= {"took_s": time.perf_counter() - begin, "layers": len(found.layers)}
            row["captured_s"] = sum(layer.forward_s + layer.backward_s for layer in found.layers)
            row["captured_update_s"] = found.optimizer_s
            row["fixed"] = sum(_both(one) * one.fixed_share for one in found.layers) / row["captured_s"]
            row["launch_s"] = sum(one.launch_s for one in found.layers)
            row["by layer"] = [(one.name, one.forward_s, one.backward_s, one.fixed_share) for one in found.layers]
            told = []
            for part in (2, 4):
                if case.batch // part >= 1 and case.batch % part == 0:
                    whole = 1 / part
                    seconds = sum(
                        _both(one) * (whole * (1 - one.fixed_share) + one.fixed_share) for one in found.layers
                    )
                    told.append({"part": part, "told_s": max(seconds, row["launch_s"])})
            row["parts"] = told
            place.save()
            row["passes_s"] = statistics.median(steps_s(place, passes, 0.15 * each_s))
            row["update_s"] = statistics.median(steps_s(place, update, 0.05 * each_s))
            row["step_s"] = statistics.median(steps_s(place, lambda p=passes, u=update: (p(), u()), 0.1 * each_s))
            for one in told:
                less = _part_of(batch, case.batch, case.batch // one["part"])

                def fewer(less: Any = less, model: Any = model, loss: Any = loss) -> None:
                    model.zero_grad()
                    loss(model, less).backward()

                one["measured_s"] = statistics.median(steps_s(place, fewer, 0.1 * each_s))
            cells = [case.name, mode, str(row["layers"]), f"{row['captured_s'] * 1e3:.2f}"]
            cells += [f"{row['passes_s'] * 1e3:.2f}", error_of(row["captured_s"], row["passes_s"])]
            cells += [f"{row['captured_update_s'] * 1e3:.2f}", f"{row['update_s'] * 1e3:.2f}"]
            cells += [error_of(row["captured_update_s"], row["update_s"])]
            for one in told:
                cells += [f"1/{one['part']}", f"{one['told_s'] * 1e3:.2f}", f"{one['measured_s'] * 1e3:.2f}"]
                cells += [error_of(one["told_s"], one["measured_s"])]
            print("| " + " | ".join(cells) + " |", flush=True)
            del model, batch, passes, update, loss


def _both(layer: Any) -> float:
    return float(layer.forward_s + layer.backward_s)


def _part_of(batch: Any, size: int, count: int) -> Any:
    return tuple(one[:count] for one in batch) if isinstance(batch, tuple) else batch[:count]


# --- c: plans on ranks that share the device --------------------------------------------------------------------------


def shared_models(small: bool) -> dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]]:
    """By name what part c trains, and a global batch of its inputs; made on the CPU, the same on all ranks."""
    from benchmarks.own_models import _Attention, _convolutions, _ids, _mixer, _mlp, _Words

    if small:
        return {
            "perceptron": (lambda: _mlp(256, 256, 3), lambda: torch.randn(64, 256)),
            "convolutions": (lambda: _convolutions(8, 3), lambda: torch.randn(8, 3, 16, 16)),
        }
    return {
        "attention": (
            lambda: nn.Sequential(*(_Attention(1024, 16) for _ in range(8)), nn.Linear(1024, 32)),
            lambda: torch.randn(32, 512, 1024),
        ),
        "perceptron": (lambda: _mlp(4096, 4096, 6), lambda: torch.randn(4096, 4096)),
        "convolutions": (lambda: _convolutions(128, 8), lambda: torch.randn(64, 3, 64, 64)),
        "words": (lambda: _Words(32_000, 512, 6), lambda: _ids(32_000, 32, 256)),
        "mixer": (lambda: _mixer(1024, 12), lambda: torch.randn(64, 128, 1024)),
    }


def square(output: Tensor, _: Tensor) -> Tensor:
    """A loss of any output."""
    return output.square().mean()


def rank_of_plans(name: str, device: str, small: bool, seconds: float, file: str) -> Any:
    """Calibrate, predict every plan, measure every plan: time and peak memory. Rank 0 writes it down."""
    from hocket.calibrate import calibrate

    begin = time.perf_counter()
    place = Place(device, small, seconds, Path(file), "")
    if place.cuda:
        torch.cuda.set_device(0)
        torch.cuda.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    build, sample = shared_models(small)[name]
    model, inputs = build().to(place.device), sample().to(place.device)
    size = len(inputs)
    found = calibrate(model, torch.optim.Adam(model.parameters()), (inputs,), seconds=0.35 * seconds)
    text: dict[str, Any] = {"model": name, "world": world, "calibrated_s": time.perf_counter() - begin}
    given: list[Any] = [None]
    if rank == 0:
        plans = admissible_plans(found.workload, found.network, workers=world, batch=size, fixed={"recompute": False})
        foretold = partial(predict, workload=found.workload, cluster=found.network, workers=world, batch=size)
        each = [foretold(plan, constants=found.constants) for plan in plans if is_measured(plan)]
        each.sort(key=lambda one: one.step_s)
        given = [
            [
                {
                    "plan": p.plan.to_json(),
                    "plan_as_text": p.plan.describe()
                    + (f", {p.plan.accumulate} parts" if p.plan.accumulate > 1 else ""),
                    "predicted_s": p.step_s,
                    "interval_s": list(p.interval_s),
                    "parts": dict(p.parts.rows()),
                    "memory": dict(p.memory.rows()),
                }
                for p in each
            ]
        ]
        text |= {"network": dataclasses.asdict(dataclasses.replace(found.network, routed=None))}
        text |= {"constants": dataclasses.asdict(found.constants), "captured": str(found.workload)}
        text |= {"runs": [(run.plan.describe(), run.step_s) for run in found.runs], "rows": given[0]}
        text["predicted_at"] = time.strftime("%H:%M:%S")
        place.keep(text)
        net = found.network
        print(
            f"\n{name}, {world} ranks: calibrated in {text['calibrated_s']:.0f} s; at once {net.at_once:.2f},", end=" "
        )
        print(
            f"{net.inside_Bps / 1e9:.2f} GB/s and {net.inside_s * 1e6:.0f} us, {len(found.runs)} references", flush=True
        )
        for row in given[0]:
            print(f"   predicted {row['predicted_s'] * 1e3:8.2f} ms  {row['plan_as_text']}", flush=True)
    dist.broadcast_object_list(given)
    rows, steps = given[0], {}
    batch = (inputs, torch.zeros(size, device=place.device))
    for number, row in enumerate(rows):
        late = [time.perf_counter() - begin > 0.75 * seconds]
        dist.broadcast_object_list(late)
        if late[0]:
            row["refused"] = "no time left"
            continue
        gc.collect()
        place.sync()
        base = place.held()
        own = copy.deepcopy(model)
        optimizer = torch.optim.Adam(own.parameters(), lr=1e-4)
        try:
            plan = Plan.from_json(row["plan"])
            trainer = hocket.Trainer(own, square, optimizer, plan=plan, sample=(inputs,))
            trainer.step(batch)
            place.sync()
            place.peak_from_here()
            trainer.step(batch)
            place.sync()
        except Exception as error:
            row["refused"] = f"{type(error).__name__}: {error}"
            if not isinstance(error, (PlanError, NotImplementedError, ValueError)):
                print(f"rank {rank}: {plan.describe()}: {row['refused'][:300]}", flush=True)
                traceback.print_exc()
        peaks = [0] * world
        dist.all_gather_object(peaks, (place.peak() - base, row.get("refused", "")))
        if why := next((one[1] for one in peaks if one[1]), ""):
            row["refused"] = why
            continue
        row["peaks"] = [one[0] for one in peaks]
        row["steps_s"] = []
        steps[number] = partial(trainer.step, batch)
    gc.collect()
    gc.freeze()
    turn = 0
    while steps:
        for number, step in steps.items():
            rows[number]["steps_s"] += _timed(place, step)
        turn += 1
        late = [time.perf_counter() - begin > 0.95 * seconds or turn >= 12]
        dist.broadcast_object_list(late)
        if late[0]:
            break
    for number in steps:
        # The lower quartile: whatever disturbs a step makes it longer.
        each = rows[number]["steps_s"]
        rows[number]["measured_s"] = (
            statistics.quantiles(each, n=4, method="inclusive")[0] if len(each) > 1 else each[0]
        )
    if rank == 0:
        text |= {"rows": rows, "turns": turn}
        place.save()
    return text if rank == 0 else None


def _timed(place: Place, step: Callable[[], object], number: int = 3) -> list[float]:
    """Some steps without the first one, on the slowest rank."""
    each = []
    for _ in range(number):
        dist.barrier()
        begin = time.perf_counter()
        step()
        place.sync()
        seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        each.append(seconds.item())
    return each[1:]


def part_c(place: Place, ranks: list[int], wanted: str) -> None:
    """All plans of some models, calibrated."""
    names = wanted.split(",") if wanted else list(shared_models(place.small))
    todo = [(world, name) for name in names for world in ranks]
    for number, (world, name) in enumerate(todo):
        each_s = place.left_s / (len(todo) - number) - 6
        row = place.keep({"model": name, "world": world})
        if each_s < 5:
            row["failed"] = "no time left"
            continue
        with one_of(f"{name} on {world}", place, row):
            file = place.file.with_suffix(f".{name}-{world}.json")
            # Twice the time: a plan may be slow to begin with.
            env = {"HOCKET_CALIBRATION": "off", "HOCKET_RECORD": "off"}
            limits = {"timeout_s": each_s + 25, "group_timeout_s": each_s}
            row |= run_ranks(
                rank_of_plans, world, name, str(place.device), place.small, each_s, str(file), env=env, **limits
            )[0]
            show_plans(row)
        if "rows" not in row and place.file.with_suffix(f".{name}-{world}.json").exists():
            row |= json.loads(place.file.with_suffix(f".{name}-{world}.json").read_text())[0]
            place.save()


def show_plans(row: dict[str, Any]) -> None:
    """Print every plan, and the pick beside the best."""
    done = [one for one in row["rows"] if "measured_s" in one]
    print(f"\n{row['model']}, {row['world']} ranks, {row['turns']} turns")
    print("| plan | predicted ms | measured | error | inside | MiB predicted | measured | error |")
    for one in sorted(done, key=lambda one: one["measured_s"]):
        low, high = one["interval_s"]
        peak = max(one["peaks"])
        cells = [one["plan_as_text"], f"{one['predicted_s'] * 1e3:.2f}", f"{one['measured_s'] * 1e3:.2f}"]
        cells += [error_of(one["predicted_s"], one["measured_s"]), "yes" if low <= one["measured_s"] <= high else "no"]
        cells += [f"{one['memory']['total'] / MIB:.0f}", f"{peak / MIB:.0f}", error_of(one["memory"]["total"], peak)]
        print("| " + " | ".join(cells) + " |")
    for one in row["rows"]:
        if "refused" in one:
            print(f"not run: {one['plan_as_text']}: {one['refused'][:160]}")
    if not done:
        return
    pick = done[preferred([(Plan.from_json(one["plan"]), one["predicted_s"]) for one in done])]
    best = min(done, key=lambda one: one["measured_s"])
    errors = [one["predicted_s"] / one["measured_s"] - 1 for one in done]
    inside = sum(one["interval_s"][0] <= one["measured_s"] <= one["interval_s"][1] for one in done)
    row["behind"] = pick["measured_s"] / best["measured_s"] - 1
    print(f"the pick, {pick['plan_as_text']}, is {row['behind']:.1%} behind the best, {best['plan_as_text']};", end=" ")
    print(f"errors: median {statistics.median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%};", end=" ")
    print(f"inside {inside} of {len(done)}", flush=True)


# --- d: collectives ---------------------------------------------------------------------------------------------------

# By name, for n ranks and S bytes: what nccl-tests call bus bytes, and what must be read and written on the one device.
COLLECTIVES: dict[str, tuple[Callable[[int], float], Callable[[int], float]]] = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, lambda n: 2.0 * n),
    "all_gather": (lambda n: (n - 1) / n, lambda n: 1.0 + n),
    "reduce_scatter": (lambda n: (n - 1) / n, lambda n: 1.0 + n),
    "broadcast": (lambda n: 1.0, lambda n: 1.0 + (n - 1)),
    "all_to_all": (lambda n: (n - 1) / n, lambda n: 2.0 * n),
    "send_recv": (lambda n: 1.0, lambda n: 2.0),
}


def collective(kind: str, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], None], Any]:
    """What does one, and what looks whether the first call of it was right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = max(1, numel // world)
    numel = part * world
    # Small whole numbers, exact in 16 bits.
    whole = (torch.arange(numel, device=device) % 7 + rank).to(dtype)
    if kind == "all_reduce":
        kept = whole.clone()
        want = sum(torch.arange(numel, device=device) % 7 + r for r in range(world)).to(dtype)

        def first() -> bool:
            kept.copy_(whole)
            dist.all_reduce(kept)
            return torch.equal(kept, want)

        return (lambda: dist.all_reduce(kept)), first
    if kind == "broadcast":

        def look() -> bool:
            dist.broadcast(whole, 0)
            return torch.equal(whole, (torch.arange(numel, device=device) % 7).to(dtype))

        return (lambda: dist.broadcast(whole, 0)), look
    out: Tensor
    if kind == "all_gather":
        out = torch.empty(numel, dtype=dtype, device=device)
        mine = whole[:part].clone()
        work = partial(dist.all_gather_into_tensor, out, mine)
        want = torch.cat([(torch.arange(part, device=device) % 7 + r).to(dtype) for r in range(world)])
    elif kind == "reduce_scatter":
        out = torch.empty(part, dtype=dtype, device=device)
        work = partial(dist.reduce_scatter_tensor, out, whole)
        span = torch.arange(rank * part, (rank + 1) * part, device=device) % 7
        want = sum(span + r for r in range(world)).to(dtype)
    elif kind == "all_to_all":
        out = torch.empty(numel, dtype=dtype, device=device)
        work = partial(dist.all_to_all_single, out, whole)
        span = torch.arange(rank * part, (rank + 1) * part, device=device) % 7
        want = torch.cat([(span + r).to(dtype) for r in range(world)])
    else:  # rank 0 to rank 1
        out = torch.empty(numel, dtype=dtype, device=device) if rank == 1 else whole
        want = (torch.arange(numel, device=device) % 7).to(dtype) if rank == 1 else whole

        def work() -> None:
            if rank == 0:
                dist.send(whole, 1)
            elif rank == 1:
                dist.recv(out, 0)

    def right() -> bool:
        work()
        return torch.equal(out, want)

    return work, right


def staged(kind: str, numel: int, group: Any, device: torch.device) -> Callable[[], None]:
    """The same with gloo and copies on the host; of all_reduce, all_gather, broadcast and send_recv."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = max(1, numel // world)
    whole = torch.ones(part * world, device=device)

    def work() -> None:
        if kind == "all_reduce":
            host = whole.cpu()
            dist.all_reduce(host, group=group)
            whole.copy_(host)
        elif kind == "all_gather":
            host = torch.empty(part * world)
            dist.all_gather(list(host.chunk(world)), whole[:part].cpu(), group=group)
            whole.copy_(host)
        elif kind == "broadcast":
            host = whole.cpu() if rank == 0 else torch.empty(part * world)
            dist.broadcast(host, 0, group=group)
            if rank:
                whole.copy_(host)
        elif rank == 0:
            dist.send(whole.cpu(), 1, group=group)
        elif rank == 1:
            host = torch.empty(part * world)
            dist.recv(host, 0, group=group)
            whole.copy_(host)

    return work


STAGED = ("all_reduce", "all_gather", "broadcast", "send_recv")


def rank_of_collectives(device: str, small: bool, seconds: float, copied_Bps: float, file: str) -> Any:
    """Every collective, type and size, in turn with gloo's; rank 0 prints and writes."""
    place = Place(device, small, seconds / SPARE, Path(file), "")
    if place.cuda:
        torch.cuda.set_device(0)
        torch.cuda.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    warnings.simplefilter("ignore", FutureWarning)  # newer names of the same functions
    gloo = dist.new_group(backend="gloo")
    sizes = [4**k * 4096 for k in range(4 if small else 9)]
    todo = [(nbytes, kind, name) for nbytes in sizes for kind in COLLECTIVES for name in ("float32", "bfloat16")]
    if rank == 0:
        print(
            f"\n{world} ranks\n| collective | type | bytes | us | GB/s | bus GB/s | floor us | of it | right |", end=""
        )
        print(" gloo, staged us |", flush=True)
    for nbytes, kind, name in todo:
        late = [place.left_s < 0]
        dist.broadcast_object_list(late)
        if late[0]:
            break
        dtype = getattr(torch, name)
        row: dict[str, Any] = {"world": world, "kind": kind, "dtype": name, "nbytes": nbytes}
        found: list[Any] = [None] * world
        try:
            work, right = collective(kind, nbytes // dtype.itemsize, dtype, place.device)
            mine = right()
            dist.all_gather_object(found, mine)
            row["right"] = all(found)
            row["times_s"] = _collective_s(place, work, nbytes)
            row["seconds"] = statistics.median(row["times_s"])
            del work, right
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"
            if rank == 0:
                print(f"{kind} {name} {nbytes}: {row['failed'][:400]}", flush=True)
                traceback.print_exc()
            place.keep(row) if rank == 0 else None
            raise  # the group may be out of step
        if name == "float32" and kind in STAGED and nbytes <= 64 * MIB:
            other = staged(kind, nbytes // 4, gloo, place.device)
            row["staged_s"] = statistics.median(_collective_s(place, other, 64 * nbytes))
        if rank == 0:
            bus, moved = (of(world) * nbytes for of in COLLECTIVES[kind])
            floor_s = moved / copied_Bps
            row |= {"algbw": nbytes / row["seconds"], "busbw": bus / row["seconds"], "floor_s": floor_s}
            place.keep(row)
            cells = [kind, name, str(nbytes), f"{row['seconds'] * 1e6:.0f}", f"{row['algbw'] / 1e9:.3f}"]
            cells += [f"{row['busbw'] / 1e9:.3f}", f"{floor_s * 1e6:.1f}", f"{floor_s / row['seconds']:.1%}"]
            cells += ["yes" if row["right"] else "NO", f"{row['staged_s'] * 1e6:.0f}" if "staged_s" in row else ""]
            print("| " + " | ".join(cells) + " |", flush=True)
    return place.rows if rank == 0 else None


def _collective_s(place: Place, work: Callable[[], None], nbytes: int) -> list[float]:
    """Seconds on the slowest rank, each begun together, after the device is idle."""
    repeats = 20 if nbytes <= MIB else 10 if nbytes <= 64 * MIB else 5
    each = []
    for _ in range(repeats + 1):
        place.sync()
        dist.barrier()
        begin = time.perf_counter()
        work()
        place.sync()
        each.append(time.perf_counter() - begin)
    took = torch.tensor(each[1:], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.tolist()


def part_d(place: Place, ranks: list[int]) -> None:
    """Collectives of ranks that share the device."""
    copied = place.file.with_suffix(".copy")
    script = (
        "import statistics, sys, torch; from functools import partial; from pathlib import Path;"
        "from benchmarks.gpu import Place, steps_s;"
        f"p = Place({str(place.device)!r}, {place.small}, 60.0, Path({str(copied)!r}), '');"
        f"a = torch.zeros({MIB if place.small else 256 * MIB} // 4, device=p.device); b = torch.empty_like(a);"
        "print(2 * a.nbytes / statistics.median(steps_s(p, partial(b.copy_, a), 1.0)))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    copied_Bps = float(said.split()[-1])
    place.keep({"copied_Bps": copied_Bps})
    print(f"a copy on the device reads and writes {copied_Bps / 1e9:.0f} GB/s", flush=True)
    for number, world in enumerate(ranks):
        each_s = place.left_s / (len(ranks) - number) - 5
        row = place.keep({"world": world})
        if each_s < 3:
            row["failed"] = "no time left"
            continue
        with one_of(f"{world} ranks", place, row):
            file = str(place.file.with_suffix(f".{world}.json"))
            limits = {"timeout_s": each_s + 20, "group_timeout_s": 30.0}
            env = {"HOCKET_RECORD": "off"}
            row["rows"] = run_ranks(
                rank_of_collectives, world, str(place.device), place.small, each_s, copied_Bps, file, env=env, **limits
            )[0]


# --- e: memory --------------------------------------------------------------------------------------------------------


def rank_of_memory(plan: dict[str, Any] | None, device: str, small: bool, batch: int, tokens: int) -> dict[str, Any]:
    """Peak of torch's allocator in the steps of a plan, of a GPT; in plain torch if there is no plan."""
    from benchmarks import memory

    place = Place(device, small, 1e6, Path(os.devnull), "")
    if place.cuda:
        torch.cuda.set_device(0)
        torch.cuda.init()
    if small:
        memory.LAYERS, memory.WIDTH, memory.HEADS, memory.VOCABULARY = 2, 64, 4, 512
    free = torch.cuda.mem_get_info()[0] if place.cuda else 0
    inputs, targets = (one.to(place.device) for one in memory.batch_of(batch, tokens))
    base = place.held()
    with place.device:
        model = memory.GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    if plan is None:

        def step() -> None:
            optimizer.zero_grad()
            memory.loss_fn(model(inputs), targets).backward()
            optimizer.step()
    else:
        trainer = hocket.Trainer(model, memory.loss_fn, optimizer, Plan.from_json(plan), sample=(inputs,))
        step = partial(trainer.step, (inputs, targets))
    built = place.peak() - base
    step()
    place.sync()
    place.peak_from_here()
    step()
    place.sync()
    found = {"built": built, "peak": place.peak() - base, "held": place.held() - base}
    if place.cuda:
        found |= {"reserved": torch.cuda.max_memory_reserved(), "taken": free - torch.cuda.mem_get_info()[0]}
        stats = torch.cuda.memory_stats()
        found["requested"] = stats.get("requested_bytes.all.peak", 0)
    return found


def part_e(place: Place, ranks: list[int]) -> None:
    """Peak memory of plans of `benchmarks.memory`'s GPT."""
    from benchmarks import memory

    if place.small:
        memory.LAYERS, memory.WIDTH, memory.HEADS, memory.VOCABULARY = 2, 64, 4, 512
    batch, tokens = (8, 16) if place.small else (16, 512)
    inputs, targets = memory.batch_of(batch, tokens)
    with torch.device("meta"):
        model = memory.GPT()

    def loss(model: nn.Module, given: Any) -> Tensor:
        return memory.loss_fn(model(**given), targets.to(next(iter(given.values())).device))

    workload = capture(model, {"tokens": inputs}, device="meta", loss=loss, degrees=(2,))
    todo = [
        (world, name, plan)
        for world in (1, *ranks)
        if world in memory.PLANS
        for name, plan in memory.PLANS[world].items()
    ]
    print(
        "| ranks | plan | predicted MiB | peak | error | requested | built | held | reserved | taken by all |", end=""
    )
    print(" state | activations, working | buffers |", flush=True)
    for world, name, plan in todo:
        said = memory_of((plan or Plan()).resolve(world), workload, batch=batch)
        row = place.keep({"world": world, "plan": name, "memory": dict(said.rows())})
        if place.left_s < 3:
            row["failed"] = "no time left"
            continue
        with one_of(f"{name} on {world}", place, row):
            given = plan.to_json() if plan else None
            limits: dict[str, Any] = {"timeout_s": min(60.0, place.left_s + 10), "group_timeout_s": 30.0}
            limits["env"] = {"HOCKET_RECORD": "off"}
            each = run_ranks(rank_of_memory, world, given, str(place.device), place.small, batch, tokens, **limits)
            row["ranks"] = each
            most = max(each, key=lambda one: one["peak"])
            cells = [str(world), name, f"{said.total / MIB:.0f}", f"{most['peak'] / MIB:.0f}"]
            cells += [error_of(said.total, most["peak"])]
            cells += [f"{most.get(key, 0) / MIB:.0f}" for key in ("requested", "built", "held", "reserved", "taken")]
            cells += [f"{nbytes / MIB:.0f}" for nbytes in (said.state, said.activations + said.working, said.buffers)]
            print("| " + " | ".join(cells) + " |", flush=True)


# --- all parts --------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run the parts, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="all of it, as JSON; beside it a file for each part")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=240.0, help="of each part, at most")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cluster", default="", help="of the catalogue; h100-like, or laptop on the CPU")
    parser.add_argument("--ranks", default="", help="that share the device: 2,4, and of part d 2,4,8")
    parser.add_argument("--models", default="", help="of parts a and c: all, or some by name")
    parser.add_argument("--small", action="store_true", help="tiny models, for any machine")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        return _part(given)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"at": time.strftime("%Y-%m-%d %H:%M:%S"), "torch": torch.__version__, "parts": {}}
    failed = 0
    for part in given.parts.split(","):
        file = given.out.with_suffix(f".{part}.json")
        file.unlink(missing_ok=True)
        words = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--out", str(file)]
        words += ["--seconds", str(given.seconds), "--device", given.device, "--cluster", given.cluster]
        words += ["--ranks", given.ranks, "--models", given.models, *(["--small"] if given.small else [])]
        print(f"\n=== {part}, at most {given.seconds:.0f} s", flush=True)
        begin = time.perf_counter()
        # Ranks are forked: nothing may initialise CUDA before, which to ask for GPUs would else do.
        env = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        process = subprocess.Popen(words, start_new_session=True, cwd=Path(__file__).parents[1], env=env)
        try:
            ended = process.wait(given.seconds)
        except subprocess.TimeoutExpired:
            ended = -1
            print(f"=== {part} did not end in {given.seconds:.0f} s, and is killed", flush=True)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too, and what it left behind
            process.wait()
        took = time.perf_counter() - begin
        rows = json.loads(file.read_text()) if file.exists() else []
        document["parts"][part] = {"seconds": took, "ended": ended, "rows": rows}
        given.out.write_text(json.dumps(document, indent=1))
        failed += bool(ended) or any("failed" in row for row in rows)
        print(f"=== {part} took {took:.0f} s", flush=True)
    return 1 if failed else 0


def _part(given: argparse.Namespace) -> int:
    """One part, in this process."""
    small_cluster = "laptop" if given.device == "cpu" else "h100-like"
    place = Place(given.device, given.small, given.seconds, given.out, given.cluster or small_cluster)
    ranks = [int(one) for one in given.ranks.split(",") if one]
    place.save()
    if given.part in "cde":
        preload("hocket.parallel", "hocket.calibrate", "torch.distributed.tensor", "torch.distributed.fsdp")
    {
        "rates": rates,
        "a": partial(part_a, wanted=given.models),
        "b": part_b,
        "c": partial(part_c, ranks=ranks or [2, 4], wanted=given.models),
        "d": partial(part_d, ranks=ranks or [2, 4, 8]),
        "e": partial(part_e, ranks=ranks or [2, 4]),
    }[given.part](place)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
