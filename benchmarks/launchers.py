"""Every launcher with every way to train: are the losses those of one process? A table in Markdown.

    python -m benchmarks.launchers [--only mpirun]

Two ranks each: on this host, on two emulated hosts with a real sshd each, in a Slurm that runs here. What is not
installed is left out, and says so. It is about equality, so other work on the machine does no harm.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hocket.cluster import load
from hocket.fabric import Fabric
from tests.launch.test_ssh import SSHD, Site

DATA = """
import json, os, torch
from torch.nn.functional import mse_loss
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x, y = torch.randn(64, 4), torch.randn(64, 1)
losses = []
"""
MODEL = """
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(x, y)
"""
LOADER = "loader = torch.utils.data.DataLoader(data, batch_size=16)\n"
LOOP = """
for _ in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        loss = mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
KERAS = """
os.environ["KERAS_BACKEND"] = "torch"
import keras
keras.utils.set_random_seed(0)
keras.config.set_floatx("float64")
model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
model.build((None, 4))
"""
FIT = """
model.compile("adam", "mse")
losses = model.fit(x.numpy(), y.numpy(), batch_size=16, epochs=12, verbose=0).history["loss"]
"""
# What a rank has is a mean over its part of the batch; all parts are equal.
END = """
from torch import distributed as dist
values = torch.tensor(losses)
if dist.is_initialized():
    dist.all_reduce(values)
    values /= dist.get_world_size()
if not dist.is_initialized() or dist.get_rank() == 0:
    with open(os.environ["LOSSES"], "w") as file:
        json.dump([dist.get_world_size() if dist.is_initialized() else 1, values.tolist()], file)
"""
DISTRIBUTE = "import hocket\nmodel, optimizer, loader = hocket.distribute(model, optimizer, loader)\n"
TRAINER = """
import hocket
trainer = hocket.Trainer(model, mse_loss, optimizer)
for _ in range(3):
    losses += [float(trainer.step(batch)) for batch in trainer.batches(loader)]
"""
DDP = """
torch.distributed.is_initialized() or torch.distributed.init_process_group("hocket")  # Ray has done it
model = torch.nn.parallel.DistributedDataParallel(model)
sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
"""
SCRIPTS = {
    "distribute": DATA + MODEL + LOADER + DISTRIBUTE + LOOP + END,
    "Trainer": DATA + MODEL + LOADER + TRAINER + END,
    'DDP on "hocket"': DATA + MODEL + DDP + LOOP + END,
    "Keras": DATA + KERAS + "import hocket.keras\nmodel = hocket.keras.Model(model)\n" + FIT + END,
}
ALONE = {"Keras": DATA + KERAS + FIT + END}
PLAIN = DATA + MODEL + LOADER + LOOP + END

RAY = """
import os, runpy, sys
def loop(config):
    os.environ["LOSSES"] = config["losses"]
    runpy.run_path(config["script"], run_name="__main__")
import ray, tempfile
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from hocket.integrations import RayConfig
with tempfile.TemporaryDirectory(prefix="ray") as place:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20, _temp_dir=place)
    TorchTrainer(loop, train_loop_config={"script": sys.argv[1], "losses": os.environ["LOSSES"]},
        torch_config=RayConfig(), scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=place + "/results")).fit()
    ray.shutdown()
"""

Start = Callable[[str], list["subprocess.Popen[str]"]]
PYTHON = sys.executable
RUN = [PYTHON, "-m", "hocket", "run", "--no-run-dir"]


def here(*words: str, **variables: str) -> Start:
    """One command on this host; the script's path is added."""
    return lambda script: [_popen([*words, script], variables)]


def _popen(words: list[str], variables: dict[str, str]) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def skypilot(script: str) -> list["subprocess.Popen[str]"]:
    """The same command on each node, with the variables that SkyPilot sets."""
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    task = {"SKYPILOT_TASK_ID": f"sky-{os.path.basename(script)}-{os.getpid()}"}
    return [_popen([*RUN, "-n", "1", script], {**nodes, **task, "SKYPILOT_NODE_RANK": str(rank)}) for rank in (0, 1)]


def kubernetes(fabric: Fabric, place: Path) -> Start:
    """The command of the TrainJob that is written, in two emulated hosts with the variables that Trainer sets."""

    def start(script: str) -> list["subprocess.Popen[str]"]:
        import yaml

        file = place / "job.yaml"
        words = [*RUN, f"--kubernetes={file}", "--nnodes=2", "-n", "1", "-x", "LOSSES", script]
        subprocess.run(words, check=True, capture_output=True)
        secret, _, job = yaml.safe_load_all(file.read_text())
        trainer = job["spec"]["trainer"]
        started = []
        for rank, host in enumerate(fabric.hosts):
            pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_PORT": "29400"}
            pod.update(PET_NODE_RANK=str(rank), PET_MASTER_ADDR=fabric.address(fabric.hosts[0]))
            for one in trainer["env"]:
                pod[one["name"]] = one.get("value") or secret["stringData"][one["name"]]
            command = ["env", *(f"{name}={value}" for name, value in pod.items()), PYTHON, "-m", "hocket", "run"]
            command += ["--no-run-dir", *trainer["args"]]
            outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(fabric.run_in_host(host, command, **outputs))
        return started

    return start


@contextlib.contextmanager
def launchers(place: Path) -> Iterator[dict[str, Start | str]]:
    """Yield what starts a script under each launcher, or why nothing does."""
    found: dict[str, Start | str] = {
        "hocket run": here(*RUN, "-n", "2"),
        "torchrun": here(PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    }
    own = Path(PYTHON).parent / "mpirun"
    open_mpi = str(own) if own.exists() else shutil.which("mpirun.openmpi")
    root = ["--allow-run-as-root", "--oversubscribe"]
    found["mpirun (Open MPI)"] = here(open_mpi, *root, "-n", "2", PYTHON) if open_mpi else "openmpi is not installed"
    hydra = shutil.which("mpirun.mpich")
    found["mpirun (MPICH)"] = here(hydra, "-n", "2", PYTHON) if hydra else "MPICH is not installed"
    slurm = shutil.which("sinfo") and not subprocess.run(["sinfo", "-h"], capture_output=True).returncode
    found["srun"] = here("srun", "-N2", "-n2", "--overcommit", PYTHON) if slurm else "no Slurm runs here"
    allocated = here("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", *RUN)
    found["salloc hocket run"] = allocated if slurm else "no Slurm runs here"
    found["SkyPilot"] = skypilot
    for name, module, start in (
        ("Ray Train", "ray", here(PYTHON, str(place / "ray_loop.py"))),
        (
            "accelerate launch",
            "accelerate",
            here(
                PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
                "--mixed_precision=no", "--dynamo_backend=no",
            ),
        ),
    ):  # fmt: skip
        found[name] = start if importlib.util.find_spec(module) else f"{module} is not installed"
    (place / "ray_loop.py").write_text(RAY)
    if os.getuid() != 0 or SSHD is None:
        yield {**found, "ssh": "needs root and OpenSSH's server", "Kubernetes": "needs root"}
        return
    with Fabric(load("star:hosts=2")) as fabric:
        site = Site(fabric, place)
        found["ssh"] = lambda script: [site.start("--no-run-dir", "-x", "LOSSES", script)]
        found["Kubernetes"] = kubernetes(fabric, place)
        try:
            yield found
        finally:
            for daemon in site.daemons.values():
                daemon.kill()
                daemon.wait()


def losses(start: Start, script: str, file: Path) -> tuple[int, list[float]] | str:
    """Return the size of the group and the losses, or what went wrong."""
    file.unlink(missing_ok=True)
    os.environ["LOSSES"] = str(file)
    started = start(script)
    try:
        ended = [process.communicate(timeout=180)[0] for process in started]
    except subprocess.TimeoutExpired:
        return "not ended after 180 s"
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started) or not file.exists():
        return "\n".join(ended)[-3000:]
    size, values = json.loads(file.read_text())
    return size, values


def main() -> None:
    """Start all, and print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="launchers whose names have this in them")
    only = parser.parse_args().only
    right = tried = 0
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        file = place / "losses.json"
        expected = {}
        for kind, text in SCRIPTS.items():
            (place / "alone.py").write_text(ALONE.get(kind, PLAIN))
            found = losses(here(PYTHON), str(place / "alone.py"), file)
            assert not isinstance(found, str), found
            expected[kind] = found[1]
            (place / f"{kind.split()[0]}.py").write_text(text)
        print(f"| started by | {' | '.join(SCRIPTS)} |\n|---|{'---|' * len(SCRIPTS)}", flush=True)
        with launchers(place) as starts:
            for name, start in starts.items():
                if only not in name:
                    continue
                cells = []
                for kind in SCRIPTS:
                    if isinstance(start, str):
                        cells.append(start)
                        continue
                    tried += 1
                    found = losses(start, str(place / f"{kind.split()[0]}.py"), file)
                    if isinstance(found, str):
                        print(f"{name}, {kind}: {found}", file=sys.stderr, flush=True)
                        cells.append("**failed**")
                        continue
                    size, values = found
                    pairs = zip(values, expected[kind], strict=True)
                    worst = max(abs(one - other) / abs(other) for one, other in pairs)
                    good = size == 2 and worst < (1e-6 if kind == "Keras" else 1e-12)
                    right += good
                    cells.append(f"equal ({worst:.0e})" if good else f"**{size} ranks, {worst:.0e}**")
                print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\n{right} of {tried} equal")


if __name__ == "__main__":
    main()
