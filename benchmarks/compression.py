"""Compression of gradients: step times on an emulated slow link, and loss curves of the language model.

    python benchmarks/compression.py link star:hosts=2,bandwidth=100Mbit/s,latency=0us --model mlp
    python benchmarks/compression.py curves --steps 150 --svg docs/compression.svg

On the link every host has one rank; the same processes train the same model by `hocket.distribute` with each method in
turn, and by torch's DistributedDataParallel over Gloo, as it is and with torch's own hooks. A step's time is that of
the slowest rank. The first steps of each method are left out: in them buckets are laid out, the link and the errors are
measured. Bytes are what left rank 0's network device in a timed step, headers included.

The curves are those of the bundled language model, "tiny" on two ranks, whose Trainer has a plan with each method.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METHODS = ("none", "fp16", "bf16", "int8", "topk:0.01", "1bit", "terngrad", "powersgd:2")
PEERS = ("DDP", "DDP fp16 hook", "DDP PowerSGD hook")
COLOURS = ("#333333", "#2a9d8f", "#e76f51", "#457b9d", "#e9c46a", "#8d5a97", "#d62828", "#6a994e")
WARM = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    link = actions.add_parser("link")
    link.add_argument("cluster")
    link.add_argument("--model", choices=("mlp", "gpt", "edsr", "edsr4"), default="mlp")
    link.add_argument("--steps", type=int, default=5, help="timed ones")
    link.add_argument("--methods", default=",".join((*METHODS, *PEERS)))
    curves = actions.add_parser("curves")
    curves.add_argument("--steps", type=int, default=150)
    curves.add_argument("--methods", default=",".join(METHODS))
    curves.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    curves.add_argument("--lr", type=float, help="the highest; by default 0.009 for Adam and 0.05 for SGD")
    curves.add_argument("--svg")
    asked = parser.parse_args()
    if asked.action == "link":
        measure_link(asked)
    else:
        draw_curves(asked)


# --- the link -------------------------------------------------------------------------------------------------------


def measure_link(asked: argparse.Namespace) -> None:
    """Times all methods on the fabric and prints a table."""
    from hocket.cluster import load
    from hocket.fabric import Fabric, check

    with Fabric(load(asked.cluster)) as fabric, tempfile.TemporaryDirectory() as directory:
        print(check(fabric).describe(), flush=True)
        methods = asked.methods.split(",")
        spec = json.dumps({"model": asked.model, "steps": asked.steps, "methods": methods, "directory": directory})
        command = ["-m", "hocket", "run", "--fabric", fabric.name, "-n", str(len(fabric.hosts))]
        subprocess.run([sys.executable, *command, __file__, "--rank", spec], check=True)
        told = json.loads(Path(directory, "told.json").read_text())
    print(
        f"\n{asked.model} on {asked.cluster}: {told['parameters']} parameters; a step without communication takes ",
        end="",
    )
    print(f"{told['alone_s'] * 1e3:.0f} ms")
    head = (
        "method",
        "step ms",
        "lowest to highest",
        "speed-up",
        "MB sent",
        "of that by the formula",
        "encoding, decoding ms",
        "predicted to save ms",
    )
    print(f"| {' | '.join(head)} |\n|---{'|---:' * (len(head) - 1)}|")
    plain_s = statistics.median(told["methods"][methods[0]]["step_s"])
    for method, row in told["methods"].items():
        step_s = statistics.median(row["step_s"])
        report = row["report"] or {}
        busy = f"{report['encode_decode_s_per_step'] * 1e3:.1f}" if report else ""
        saved = f"{report['link']['saved_s_per_step'] * 1e3:.0f}" if report else ""
        formula = f"{report['sent_nbytes_per_step'] / 1e6:.3f}" if report else ""
        print(
            f"| {method} | {step_s * 1e3:.0f} | {min(row['step_s']) * 1e3:.0f} to {max(row['step_s']) * 1e3:.0f} "
            f"| {plain_s / step_s:.2f} | {row['nbytes'] / 1e6:.3f} | {formula} | {busy} | {saved} |"
        )
    for row in told["methods"].values():
        if row["report"]:
            print(f"\n{row['report']['verdict']}")


def work(spec: dict[str, Any]) -> None:
    """Everything that one rank does."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("hocket")
    gloo = dist.new_group(backend="gloo")
    told: dict[str, Any] = {"methods": {}}
    for method in spec["methods"]:
        with stopped_if_slow():
            row = train(spec, method, gloo)
        told["parameters"], told["alone_s"] = row.pop("parameters"), row.pop("alone_s")
        told["methods"][method] = row
        if dist.get_rank() == 0:
            print(f"{method}: {statistics.median(row['step_s']) * 1e3:.0f} ms", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        Path(spec["directory"], "told.json").write_text(json.dumps(told))
    dist.barrier(group=gloo)
    dist.destroy_process_group()


@contextlib.contextmanager
def stopped_if_slow(limit_s: float = 240.0) -> Iterator[None]:
    """Ends the process if a method hangs."""
    import faulthandler

    faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def train(spec: dict[str, Any], method: str, gloo: Any) -> dict[str, Any]:
    """Seconds of the timed steps, bytes sent in one, and what the report says."""
    import torch

    import hocket

    torch.manual_seed(0)
    model, batch, criterion = stage(spec["model"])
    if method.startswith("DDP"):
        parallel: Any = torch.nn.parallel.DistributedDataParallel(
            model, process_group=gloo, gradient_as_bucket_view=True
        )
        hook(parallel, method, gloo)
    else:
        parallel, _, _ = hocket.distribute(model, compression=method)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        criterion(parallel(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    with parallel.no_sync():
        alone_s = min(slowest(step, gloo) for _ in range(3))
    for _ in range(WARM):
        step()
    before = sent_nbytes()
    times_s = [slowest(step, gloo) for _ in range(spec["steps"])]
    nbytes = (sent_nbytes() - before) / spec["steps"]
    report = None if method.startswith("DDP") else parallel.compression_report()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"step_s": times_s, "nbytes": nbytes, "report": report, "parameters": parameters, "alone_s": alone_s}


def hook(parallel: Any, method: str, group: Any) -> None:
    """Registers torch's own compression."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if method == "DDP fp16 hook":
        parallel.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif method == "DDP PowerSGD hook":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def slowest(action: Any, group: Any) -> float:
    """The seconds that an action takes on the slowest rank; all begin at once, or nearly."""
    import torch
    import torch.distributed as dist

    dist.barrier(group=group)
    begin_s = time.perf_counter()
    action()
    took_s = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
    dist.all_reduce(took_s, dist.ReduceOp.MAX, group=group)
    return took_s.item()


def sent_nbytes() -> int:
    """What has left this network namespace."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    return sum(int(field[9]) for field in fields if field[0] != "lo")


def stage(name: str) -> tuple[Any, tuple[Any, Any], Any]:
    """The model, this rank's batch of made-up samples, and the loss."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    if name == "mlp":  # 16 MB of gradients, next to no work
        layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
        model: Any = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
        inputs = torch.rand(8, 1024, generator=generator)
        return model, (inputs, torch.rand(8, 1024, generator=generator)), torch.nn.functional.mse_loss
    if name == "gpt":
        from hocket.workloads.language_model.model import GPT

        tokens = torch.randint(256, (8, 96), generator=generator)
        following = torch.randint(256, (8, 96), generator=generator)
        return (
            GPT("demo"),
            (tokens, following),
            lambda scores, wanted: torch.nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten()),
        )
    from hocket.workloads.edsr.model import EDSR

    crops = 4 if name == "edsr4" else 1  # four of them take longer than their gradients
    small = torch.rand(crops, 3, 48, 48, generator=generator)
    return EDSR("baseline", 2), (small, torch.rand(crops, 3, 96, 96, generator=generator)), torch.nn.functional.l1_loss


# --- the curves -----------------------------------------------------------------------------------------------------


def draw_curves(asked: argparse.Namespace) -> None:
    """Trains the language model with each method, prints a table, and draws the losses."""
    methods = asked.methods.split(",")
    with tempfile.TemporaryDirectory() as directory:
        spec = json.dumps(
            {
                "steps": asked.steps,
                "methods": methods,
                "optimizer": asked.optimizer,
                "lr": asked.lr or {"adam": 0.009, "sgd": 0.05}[asked.optimizer],
                "directory": directory,
            }
        )
        command = [sys.executable, "-m", "hocket", "run", "-n", "2", __file__, "--curves", spec]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        told = json.loads(Path(directory, "told.json").read_text())
    plain = told["none"]["losses"]
    tail = max(1, asked.steps // 10)
    wanted = statistics.mean(plain[-tail:])
    print(f"| method | mean loss of the last {tail} steps | above none | relative error | bytes sent, of none |")
    print("|---|---:|---:|---:|---:|")
    for method in methods:
        loss, report = statistics.mean(told[method]["losses"][-tail:]), told[method]["report"]
        error = f"{max(one['relative_error'] for one in report['relative_error']):.2g}" if report else "0"
        share = report["sent_nbytes_per_step"] / report["uncompressed_sent_nbytes_per_step"] if report else 1.0
        print(f"| {method} | {loss:.4f} | {loss / wanted - 1:+.2%} | {error} | {share:.1%} |")
    if asked.svg:
        Path(asked.svg).write_text(svg({method: smooth(told[method]["losses"]) for method in methods}))


def train_curves(spec: dict[str, Any]) -> None:
    """Everything that one rank does for the curves."""
    import torch
    from torch.utils.data import DataLoader

    import hocket
    from hocket.planner import Plan
    from hocket.workloads._workload import warm_up_and_cosine
    from hocket.workloads.language_model import data
    from hocket.workloads.language_model.model import GPT
    from hocket.workloads.language_model.settings import SIZES

    texts = data.load()
    told: dict[str, Any] = {}
    for method in spec["methods"]:
        torch.manual_seed(0)
        model = GPT("tiny")
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=spec["lr"], betas=(0.9, 0.95))
        if spec["optimizer"] == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), lr=spec["lr"], momentum=0.9)

        def loss_fn(scores: Any, wanted: Any) -> Any:
            return torch.nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())

        trainer = hocket.Trainer(model, loss_fn, optimizer, Plan(compression=method))
        excerpts: Any = data.Excerpts(texts.training, SIZES["tiny"].context, seed=0, length=64 * spec["steps"])
        losses: list[float] = []
        for batch in trainer.batches(DataLoader(excerpts, batch_size=64)):
            for group in optimizer.param_groups:
                group["lr"] = spec["lr"] * warm_up_and_cosine(len(losses), steps=spec["steps"], warm_up_steps=20)
            losses.append(float(trainer.step(batch)))
        report = trainer.report()
        told[method] = {"losses": losses, "report": report["compression"]}
    if report["rank"] == 0:
        Path(spec["directory"], "told.json").write_text(json.dumps(told))


def smooth(losses: list[float], window: int = 9) -> list[float]:
    """Means over some steps."""
    return [statistics.mean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]


def svg(curves: dict[str, list[float]]) -> str:
    """Losses by steps."""
    width, height, left, top, right, bottom = 760, 400, 60, 36, 160, 46
    steps = max(len(curve) for curve in curves.values())
    lowest = min(min(curve) for curve in curves.values())
    highest = max(max(curve) for curve in curves.values())

    def place(step: int, loss: float) -> str:
        across = left + step / (steps - 1) * (width - left - right)
        return f"{across:.1f} {top + (highest - loss) / (highest - lowest) * (height - top - bottom):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">language model, tiny, 2 ranks: loss in nats per byte</text>',
        f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">steps</text>',
    ]
    for step in range(0, steps + 1, max(1, steps // 5)):
        x = place(min(step, steps - 1), lowest).split()[0]
        parts.append(f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>')
    for tenth in range(int(lowest * 2) + 1, int(highest * 2) + 1):
        y = float(place(0, tenth / 2).split()[1])
        parts.append(f'<path d="M {left} {y:.1f} H {width - right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth / 2:g}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " L ".join(place(step, loss) for step, loss in enumerate(curve))
        parts.append(f'<path d="M {path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        y = top + 18 * number + 10
        parts.append(f'<path d="M {width - right + 12} {y} h 24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{width - right + 42}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["--curves"]:
        train_curves(json.loads(sys.argv[2]))
    else:
        main()
