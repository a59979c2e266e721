"""Programs that train on a GPU, run by ranks; any of them runs on the CPU too, where that is given as the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import hocket
from hocket.planner import Plan

from . import programs

TENSORFLOAT = False  # where single precision is compared, it is not to be cut to 10 bits


class Block(nn.Module):
    """Attention and a small network, as users write them."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.after, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.after(x)))))


class Transformer(nn.Module):
    """A language model whose output layer has the embedding's weight; its causal mask is made in each pass."""

    def __init__(self, dropout: float = 0.0, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(29, width), nn.Embedding(24, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 29, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def over_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _transformer(dropout: float) -> Any:
    data = TensorDataset(torch.randint(0, 29, (programs.SAMPLES, 8)), torch.randint(0, 29, (programs.SAMPLES, 8)))
    return Transformer(dropout), data, over_tokens


def _normalised() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.BatchNorm2d(4),
        nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8 * 8, 2),
    )  # fmt: skip
    return model, TensorDataset(torch.randn(programs.SAMPLES, 3, 8, 8), torch.randn(programs.SAMPLES, 2)), F.mse_loss


def _deep() -> Any:
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    data = TensorDataset(torch.randn(programs.SAMPLES, 6), torch.randint(0, 3, (programs.SAMPLES,)))
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 3)), data, F.cross_entropy


MODELS: dict[str, Callable[[], Any]] = {
    "transformer": lambda: _transformer(0.0),
    "dropout": lambda: _transformer(0.2),
    "normalised": _normalised,
    "deep": _deep,
}


def setting(name: str, dtype: torch.dtype, device: str) -> tuple[nn.Module, TensorDataset, Any]:
    """The model on the device, the data on the CPU, and the loss."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = TENSORFLOAT
    torch.manual_seed(7)
    if name not in MODELS:
        model, data, loss_fn = programs.setting(name, dtype)
        return model.to(device), data, loss_fn
    model, data, loss_fn = MODELS[name]()
    data = TensorDataset(*(t.to(dtype) if t.is_floating_point() else t for t in data.tensors))
    return model.to(device, dtype), data, loss_fn


def moved(batch: Any, device: str) -> Any:
    return tuple(part.to(device, non_blocking=True) for part in batch)


def on_device(data: TensorDataset, device: str, batch: int = 5) -> DataLoader[Any]:
    """A loader whose batches lie on the device."""
    return DataLoader(data, batch, collate_fn=lambda items: moved(default_collate(items), device))


def numbers(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: value.detach().double().cpu().numpy().copy() for key, value in state.items()}


def plain(
    name: str, optimizer_name: str, device: str, dtype: torch.dtype = torch.float64, clip_norm: float | None = None,
    autocast: bool = False,
) -> Any:  # fmt: skip
    """The losses and the state of a program that knows nothing of hocket."""
    model, data, loss_fn = setting(name, dtype, device)
    optimizer = programs.optimizer_of(optimizer_name, model.parameters())
    losses = []
    for _ in range(programs.EPOCHS):
        for batch in DataLoader(data, batch_size=programs.BATCH, shuffle=True):
            x, y = moved(batch, device)
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = loss_fn(model(x), y)
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        x, y = moved(data.tensors, device)
        metric = loss_fn(model(x), y).item()
    return losses, numbers(model.state_dict()), metric


def train(
    name: str, optimizer_name: str, device: str, plan: Plan | str, dtype: torch.dtype = torch.float64, load: str = "",
    save: str = "", until: int = 6,
) -> dict[str, Any]:  # fmt: skip
    """Train by a plan until so many steps are made, from a checkpoint and to one if they are named."""
    model, data, loss_fn = setting(name, dtype, device)
    optimizer = programs.optimizer_of(optimizer_name, model.parameters())
    loader = DataLoader(data, batch_size=programs.BATCH, shuffle=True)
    sample = data.tensors[0][: programs.BATCH].to(device)
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan, sample=sample)
    losses = losses_of(trainer, loader, device, load, save, until)
    held = {str(p.device) for p in trainer.model.parameters() if p.untyped_storage().nbytes()}
    return {
        "losses": losses,
        "metric": trainer.evaluate(on_device(data, device)),
        "state": numbers(trainer.state_dict()),
        "devices": sorted(held),
        "plan": trainer.plan.describe(),
        "report": trainer.report(),
    }


def whole_batches(name: str, device: str, plan: Plan) -> dict[str, Any]:
    """Steps with global batches that every rank has on its GPU, and predictions."""
    model, data, loss_fn = setting(name, torch.float64, device)
    optimizer = programs.optimizer_of("sgd", model.parameters())
    x, y = moved(data.tensors, device)
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan, sample=x[: programs.BATCH])
    losses = [float(trainer.step((x[i : i + 7], y[i : i + 7]))) for i in (0, 7, 14, 0)]
    output = trainer.predict((x, y))
    return {"losses": losses, "output": output.double().cpu().numpy(), "device": output.device.type}


def by_measurement(device: str) -> dict[str, Any]:
    import functools

    hocket.calibrate.auto_plan = functools.partial(hocket.calibrate.auto_plan, seconds=3)
    return train("mlp", "adam", device, "auto")


def relaxed(device: str, word: str) -> Any:
    """Losses over all samples after each of some epochs."""
    model, data, loss_fn = setting("mlp", torch.float64, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=programs.BATCH, shuffle=True)
    trainer = hocket.Trainer(model, loss_fn, optimizer, Plan(synchronisation=word))
    losses = []
    for _ in range(4):
        for batch in trainer.batches(loader):
            trainer.step(moved(batch, device))
        losses.append(trainer.evaluate(on_device(data, device)))
    trainer.close()
    return losses


# --- loops of the program's own ---------------------------------------------------------------------------------------


def own_loop(name: str, device: str, where: str, distributed: bool, autocast: str = "") -> Any:
    """A loop of the program's own: `where` says who moves batches, `autocast` names the type of the forward pass."""
    dtype = torch.float32 if autocast else torch.float64
    model, data, loss_fn = setting(name, dtype, device)
    optimizer: Any = programs.optimizer_of("sgd", model.parameters())
    if where == "data set":
        data = TensorDataset(*moved(data.tensors, device))
    loader: Any = DataLoader(
        data, batch_size=programs.BATCH, shuffle=True, pin_memory=where == "pinned" and device != "cpu"
    )
    scaler = torch.amp.GradScaler(device, enabled=autocast == "float16", init_scale=1024.0)
    wrapped: Any = model
    if distributed:
        wrapped, optimizer, loader = hocket.distribute(model, optimizer, loader, sync_batch_norm=True)
    losses = []
    for _ in range(programs.EPOCHS):
        for batch in loader:
            x, y = batch if where in ("nobody", "data set") else moved(batch, device)
            optimizer.zero_grad()
            with torch.autocast(device, getattr(torch, autocast or "bfloat16"), enabled=bool(autocast)):
                loss = loss_fn(wrapped(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            losses.append(hocket.average(loss).item() if distributed else loss.item())
    return losses, numbers(model.state_dict())


# --- models that are larger than what a rank holds --------------------------------------------------------------------


def _large() -> nn.Module:
    return Transformer(width=96).double()


def built_on_device(device: str, plan: Plan, deferred: bool) -> Any:
    """Losses of a model that is built on the device, and whether its weights were on the meta device before."""
    torch.manual_seed(1)
    with torch.device(device):
        model = hocket.deferred(_large) if deferred else _large()
    meta = any(p.is_meta for p in model.parameters())
    ids = torch.randint(0, 29, (8, 9), generator=torch.Generator().manual_seed(3)).to(device)
    trainer = hocket.Trainer(model, over_tokens, torch.optim.AdamW(model.parameters(), lr=1e-3), plan, sample=ids)
    losses = [float(trainer.step((ids, ids))) for _ in range(3)]
    parts: list[Any] = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.model.parameters()]
    held = sum(part.numel() for part in parts if part.untyped_storage().nbytes())
    return {"losses": losses, "meta": meta, "held": held, "state": numbers(trainer.state_dict())}


def deferred_and_moved(device: str, plan: Plan) -> Any:
    """The same for a model that is deferred on the CPU and then moved; or what is said to that."""
    torch.manual_seed(1)
    try:
        model = hocket.deferred(_large).to(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    ids = torch.randint(0, 29, (8, 9), generator=torch.Generator().manual_seed(3)).to(device)
    trainer = hocket.Trainer(model, over_tokens, torch.optim.AdamW(model.parameters(), lr=1e-3), plan, sample=ids)
    return [float(trainer.step((ids, ids))) for _ in range(3)]


# --- what cannot work -------------------------------------------------------------------------------------------------


class Halves(nn.Module):
    """Its first half on the device, its second on the CPU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16).to(device), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).cpu())  # type: ignore[no-any-return]


def halves(device: str, plan: Plan) -> list[float]:
    torch.manual_seed(7)
    model = Halves(device).double()
    data = TensorDataset(torch.randn(16, 6, dtype=torch.float64), torch.randint(0, 3, (16,)))
    trainer = hocket.Trainer(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    loader = DataLoader(data, 8)
    return [float(trainer.step((x.to(device), y))) for x, y in trainer.batches(loader)]


def failing(device: str, how: str, plan: Plan) -> tuple[str, float]:
    """What this rank is told, and after how many seconds."""
    model, data, loss_fn = setting("deep", torch.float64, device)
    optimizer = programs.optimizer_of("sgd", model.parameters())
    sample = data.tensors[0][: programs.BATCH].to(device)

    def hungry(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if how == "out of memory" and trainer.steps and dist.get_rank() == dist.get_world_size() - 1:
            torch.empty(1 << 50, dtype=torch.uint8, device=device)
        return loss_fn(output, target)  # type: ignore[no-any-return]

    trainer = hocket.Trainer(model, hungry, optimizer, plan, sample=sample)
    begin_s = time.perf_counter()
    try:
        for batch in trainer.batches(DataLoader(data, programs.BATCH)):
            trainer.step(batch if how == "batch on the CPU" else moved(batch, device))
            begin_s = time.perf_counter()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - begin_s
    return "", 0.0


# --- optimizers whose counts of steps lie on the device ---------------------------------------------------------------


def losses_of(
    trainer: hocket.Trainer, loader: DataLoader[Any], device: str, load: str, save: str, until: int
) -> list[float]:
    """Losses until so many steps are made, from a checkpoint and to one if they are named."""
    if load:
        trainer.load(load)
    losses = []
    while trainer.steps < until:
        for batch in trainer.batches(loader):
            losses.append(float(trainer.step(moved(batch, device))))
            if trainer.steps == until:
                break
    if save:
        trainer.save(save)
    return losses


def fused(device: str, plan: Plan, load: str = "", save: str = "", until: int = 6, kind: str = "fused") -> list[float]:
    """Losses of Adam with all of its state on the device."""
    model, data, loss_fn = setting("deep", torch.float64, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, **({kind: True} if device != "cpu" else {}))
    loader = DataLoader(data, programs.BATCH, shuffle=True)
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan, sample=data.tensors[0][: programs.BATCH].to(device))
    return losses_of(trainer, loader, device, load, save, until)
