"""One rank of the zoo: trains each entry by one plan, and by a plain loop, and writes down what came out.

    hocket run -n 2 -m benchmarks.zoo.worker DIRECTORY PLAN ENTRY...

A line of JSON for each entry goes to `DIRECTORY/PLAN.RANK.jsonl`, one when it begins and one when it has ended: if
the run ends in between, the entry has ended it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_map_only

import hocket
from benchmarks.zoo import load
from benchmarks.zoo.entries import ENTRIES, SAMPLES, Entry
from benchmarks.zoo.plans import PLANS, lines_of
from hocket.planner import Plan

STEPS = 5
RATE = 1e-3


def setting(entry: Entry, double: bool) -> tuple[nn.Module, Any, list[Any]]:
    """The model without dropout, its optimizer, and batches."""
    torch.manual_seed(0)
    model = entry.make()
    generator = torch.Generator().manual_seed(1)
    batches = [entry.batch(SAMPLES, generator) for _ in range(STEPS)]
    if double:
        model, batches = model.double(), tree_map_only(torch.Tensor, in_double, batches)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if getattr(module, "drop_prob", None):  # of whole paths
            module.drop_prob = 0.0  # type: ignore[assignment]
        if isinstance(getattr(module, "dropout_prob", None), float):  # of labels
            module.dropout_prob = 0.0  # type: ignore[assignment]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, RATE), batches


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, if it holds fractions."""
    return tensor.double() if tensor.is_floating_point() else tensor


def plain(entry: Entry, double: bool, moved: float = 0.0) -> list[float]:
    """The losses of a plain loop, the last one of evaluation; with weights that are `moved` by a part of themselves."""
    model, optimizer, batches = setting(entry, double)
    if moved:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.mul_(1 + moved * (drawn * 2 - 1))
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(entry, model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(entry, model, batches[0]).item())
    return losses


def loss_of(entry: Entry, model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch."""
    if entry.loss_fn is None:
        loss: torch.Tensor = model(**batch).loss
        return loss
    *inputs, target = batch
    return entry.loss_fn(model(*inputs), target)


def by_plan(entry: Entry, double: bool, plan: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """The losses by a plan, and what the trainer says of itself."""
    model, optimizer, batches = setting(entry, double)
    whole = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        plan = {**plan, "sync_batch_norm": True}
    sample = batches[0] if entry.loss_fn is None else tuple(batches[0][:-1])
    begun_s = time.perf_counter()
    trainer = hocket.Trainer(model, entry.loss_fn, optimizer, Plan(**plan), sample=sample)
    built_s = time.perf_counter() - begun_s
    losses = [float(trainer.step(batch)) for batch in batches]
    losses.append(trainer.evaluate(batches[:1]))
    report = trainer.report()
    about = {
        "build_s": round(built_s, 2),
        "share": round(trainer.memory().weights / max(whole, 1), 3),
        "divided": report.get("divided"),
        "notes": report["notes"],
    }
    return losses, about


def outcome(entry: Entry, plan: dict[str, Any]) -> dict[str, Any]:
    """What this rank saw: the losses' largest difference from the plain ones, or the error."""
    try:
        double, reference = True, plain(entry, True)
    except Exception:  # it says float32 somewhere
        double, reference = False, plain(entry, False)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            losses, about = by_plan(entry, double, plan)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = type(error).__module__.startswith("hocket") or "hocket" in frames[-1].filename
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        return {"error": type(error).__name__, "message": str(error), "ours": ours, "place": place}
    # Rounding, as this program itself magnifies it: the same loop from weights that differ in the last place.
    noise = differ(plain(entry, double, 4e-16 if double else 6e-8), reference)
    off = differ(losses, reference)
    # Hocket's warnings are of the program's own line that called it: this file's.
    named = [str(one.message) for one in said if "hocket" in str(one.filename) or one.filename == __file__]
    return {
        "off": off,
        "noise": noise,
        "double": double,
        "losses": losses,
        "plain": reference,
        "warnings": named,
        **about,
    }


def differ(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference."""
    pairs = zip(losses, reference, strict=True)
    return max(float("inf") if a != a else abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


def alike(directory: Path, plan: str, name: str) -> bool:
    """Whether every rank has ended this entry, and in the same way."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        logs = [lines_of(file) for file in directory.glob(f"{plan}.*.jsonl")]
        ended = [line for log in logs for line in log if line["entry"] == name and "begun" not in line]
        if len(ended) == PLANS[plan].ranks:
            return len({line.get("error") for line in ended}) == 1
        time.sleep(0.02)
    return False


def main(directory: str, plan: str, *names: str) -> None:
    """Try the entries, in turn."""
    load()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rank = os.environ.get("RANK", "0")
    with open(Path(directory) / f"{plan}.{rank}.jsonl", "a", buffering=1) as out:
        for name in names:
            out.write(json.dumps({"entry": name, "begun": True}) + "\n")
            begun_s = time.perf_counter()
            seen = outcome(ENTRIES[name], PLANS[plan].fields)
            seen["wall_s"] = round(time.perf_counter() - begun_s, 2)
            out.write(json.dumps({"entry": name, **seen}, default=str) + "\n")
            if not alike(Path(directory), plan, name):
                sys.exit(f"the ranks' outcomes of {name} differ: what comes next needs new ranks")
            if "has failed in its" in seen.get("message", ""):
                sys.exit(f"a rank has left its groups in {name}: what comes next needs new ranks")


if __name__ == "__main__":
    main(*sys.argv[1:])
