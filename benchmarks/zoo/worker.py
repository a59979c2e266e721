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
from benchmarks.zoo.plans import PLANS, ZooPlan, lines_of
from hocket.planner import Plan

STEPS = 5
RATE = 1e-3
LEAST = 1e-6
"""By what a weight may be off in float64, relative to the largest of its tensor."""
State = dict[str, torch.Tensor]


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


def plain(entry: Entry, double: bool, clip: float | None, moved: float = 0.0) -> tuple[list[float], State]:
    """The losses of a plain loop, of an evaluation, and of two more steps, and the state at the evaluation.

    Weights are `moved` by a part of themselves before it.
    """
    model, optimizer, batches = setting(entry, double)
    if moved:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.mul_(1 + moved * (drawn * 2 - 1))
    losses = []

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = loss_of(entry, model, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip)
        optimizer.step()
        losses.append(loss.item())

    for batch in batches:
        step(batch)
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(entry, model, batches[0]).item())
    state = {name: one.detach().clone() for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}
    model.train()
    for batch in batches[1:3]:
        step(batch)
    return losses, state


def loss_of(entry: Entry, model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch."""
    if entry.loss_fn is None:
        loss: torch.Tensor = model(**batch).loss
        return loss
    *inputs, target = batch
    return entry.loss_fn(model(*inputs), target)


def by_plan(entry: Entry, double: bool, plan: ZooPlan, folder: Path) -> tuple[list[float], State, dict[str, Any]]:
    """The losses by a plan and by the one that goes on from its checkpoint, as `plain` has them, and the state.

    The last is what the first trainer says of itself.
    """
    model, optimizer, batches = setting(entry, double)
    whole = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    fields = {"sync_batch_norm": True} if norms else {}
    sample = batches[0] if entry.loss_fn is None else tuple(batches[0][:-1])
    begun_s = time.perf_counter()
    trainer = hocket.Trainer(model, entry.loss_fn, optimizer, Plan(**plan.fields, **fields), sample=sample)
    built_s = time.perf_counter() - begun_s
    losses = [float(trainer.step(batch)) for batch in batches]
    losses.append(trainer.evaluate(batches[:1]))
    state = trainer.state_dict()
    trainer.save(folder)
    report = trainer.report()
    about = {
        "build_s": round(built_s, 2),
        "share": round(trainer.memory().weights / max(whole, 1), 3),
        "divided": report.get("divided"),
        "notes": report["notes"],
    }
    trainer.close()
    model, optimizer, _ = setting(entry, double)
    later = Plan(**plan.later, **fields, clip_norm=plan.fields.get("clip_norm"))
    trainer = hocket.Trainer(model, entry.loss_fn, optimizer, later, sample=sample)
    trainer.load(folder)
    losses += [float(trainer.step(batch)) for batch in batches[1:3]]
    trainer.close()
    return losses, state, about


def outcome(entry: Entry, plan: ZooPlan, folder: Path) -> dict[str, Any]:
    """What this rank saw: the losses' and the state's largest differences from the plain ones, or the error."""
    clip = plan.fields.get("clip_norm")
    try:
        double, (reference, expected) = True, plain(entry, True, clip)
    except Exception:  # it says float32 somewhere
        double, (reference, expected) = False, plain(entry, False, clip)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            losses, state, about = by_plan(entry, double, plan, folder)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = type(error).__module__.startswith("hocket") or "hocket" in frames[-1].filename
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        return {"error": type(error).__name__, "message": str(error), "ours": ours, "place": place}
    # Rounding, as this program itself magnifies it: the same loop from weights that differ in the last place.
    moved, other = plain(entry, double, clip, 4e-16 if double else 6e-8)
    # Hocket's warnings are of the program's own line that called it: this file's.
    named = [str(one.message) for one in said if "hocket" in str(one.filename) or one.filename == __file__]
    return {
        "off": differ(losses, reference),
        "noise": differ(moved, reference),
        "double": double,
        "losses": losses,
        "plain": reference,
        "state": unlike(state, expected, other, LEAST if double else 100 * LEAST),
        "warnings": named,
        **about,
    }


def unlike(state: State, expected: State, moved: State, least: float) -> list[str]:
    """The tensors of a state that are lost, or off by more than that and by more than rounding that Adam magnifies.

    Adam divides a gradient that is nothing but rounding by its own size.
    """
    found = [f"{name} is lost" for name in expected if name not in state]
    for name in [name for name, one in expected.items() if name in state and one.numel()]:
        wanted = expected[name].double()
        size = max(1e-3, float(wanted.abs().max()))
        off, own = (float((one[name].cpu().double() - wanted).abs().max()) / size for one in (state, moved))
        if off > max(least, 20 * own):
            found.append(f"{name}: {off:.1e}, own {own:.1e}")
    return found


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
            folder = Path(directory) / f"{plan} {''.join(c if c.isalnum() else '_' for c in name)}"
            seen = outcome(ENTRIES[name], PLANS[plan], folder)
            seen["wall_s"] = round(time.perf_counter() - begun_s, 2)
            out.write(json.dumps({"entry": name, **seen}, default=str) + "\n")
            if not alike(Path(directory), plan, name):
                sys.exit(f"the ranks' outcomes of {name} differ: what comes next needs new ranks")
            if "has failed in its" in seen.get("message", ""):
                sys.exit(f"a rank has left its groups in {name}: what comes next needs new ranks")


if __name__ == "__main__":
    main(*sys.argv[1:])
