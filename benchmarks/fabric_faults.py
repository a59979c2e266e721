"""Random faults during training on an emulated cluster whose switches aggregate: each must end well, and in time.

    python benchmarks/fabric_faults.py --faults 100 --seed 1

4 hosts at 2 leaf switches under a spine, with an aggregator beside each switch: two leaves and the root. The ranks
train (a linear model, in float64, whose losses one process can recompute), and in every step they also sum integers
whose sum is known. Faults are drawn at random and come one at a time. Afterwards every rank must go on within the
deadline, with no wrong sum and the losses of an undisturbed course to nine digits; or, where a host's ranks are killed,
every other rank must end within it, with an error that names a dead rank, and training begins anew.
"""

import argparse
import contextlib
import json
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CLUSTER = "leafspine:leaves=2,ports=2,spines=1,bandwidth=100Mbit/s,latency=0us"
RANKS = 4
NUMEL = 6_000
PORT = 7070
STALL_S = 2.0
DEADLINE_S = 30.0
START_S = 120.0
STOOD_STILL_S = 2.0
ONWARDS = 15
"""A rank has gone on when it has done so many steps after the fault was over."""


# --- the ranks --------------------------------------------------------------------------------------------------------


def work(directory: str) -> None:
    """Train until told to stop; write down every loss."""
    import datetime

    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    spec = json.loads(Path(directory, "spec.json").read_text())
    os.environ["HOCKET_AGGREGATOR"] = spec["leaves"][rank // 2]
    os.environ["HOCKET_AGGREGATOR_TOKEN_FILE"] = spec["token_file"]
    os.environ["HOCKET_AGGREGATOR_STALL_S"] = str(STALL_S)
    torch.set_num_threads(1)
    dist.init_process_group("hocket", timeout=datetime.timedelta(seconds=20))
    from hocket import comm

    weights = torch.zeros(NUMEL, dtype=torch.float64)
    with open(Path(directory, f"losses-{rank}"), "w", buffering=1) as file:
        step = 0
        while True:
            loss, gradient = loss_of(step, rank, weights)
            numbers = torch.arange(700) * (step + 1) + rank
            sums = torch.cat([gradient, loss.view(1)])
            dist.all_reduce(sums)
            dist.all_reduce(numbers)
            stop = torch.tensor(int(rank == 0 and Path(directory, "stop").exists()))
            dist.broadcast(stop, 0)
            wrong = int((numbers != torch.arange(700) * (step + 1) * RANKS + 6).sum())
            weights -= sums[:-1] / RANKS
            (stats,) = comm.aggregation_stats().values()
            print(json.dumps([step, float(sums[-1]), wrong, stats.served, stats.failures, stats.returns]), file=file)
            step += 1
            if stop:
                break
    dist.destroy_process_group()


def loss_of(step: int, rank: int, weights: Any) -> tuple[Any, Any]:
    """One rank's part of a step: mean squares of a sample, and their gradient."""
    import torch

    generator = torch.Generator().manual_seed(step * RANKS + rank)
    wanted = torch.randn(NUMEL, generator=generator, dtype=torch.float64)
    difference = weights - wanted
    return (difference**2).mean(), difference * 0.05


def course(steps: int) -> list[float]:
    """The losses of an undisturbed training, by one process."""
    import torch

    weights = torch.zeros(NUMEL, dtype=torch.float64)
    losses = []
    for step in range(steps):
        parts = [loss_of(step, rank, weights) for rank in range(RANKS)]
        losses.append(float(sum(loss for loss, _ in parts)))
        weights = weights - sum(gradient for _, gradient in parts) / RANKS
    return losses


# --- the stage --------------------------------------------------------------------------------------------------------


class Stage:
    """The fabric, its aggregators, and a training on it."""

    def __init__(self, fabric: Any, directory: Path) -> None:
        self.fabric = fabric
        self.directory = directory
        self.token = secrets.token_hex(32).encode()
        self.token_file = directory / "token"
        self.token_file.touch(0o600)
        self.token_file.write_bytes(self.token)
        self.switches = [node.name for node in fabric.wiring.nodes if node.kind == "switch"]
        self.root = fabric.wiring.central_switch(fabric.hosts)
        self.leaves = list(dict.fromkeys(fabric.wiring.access_switch(host) for host in fabric.hosts))
        self.aggregators: dict[str, Any] = {}
        self.run: Any = None
        self.number = 0
        for switch in [self.root, *self.leaves]:
            self.start_aggregator(switch)

    def start_aggregator(self, switch: str) -> None:
        options = ["--listen", f"{self.fabric.address(switch)}:{PORT}", "--token-file", str(self.token_file)]
        options += ["--stall", "3", "--max-connections", "64", "--name", switch]
        options += [] if switch == self.root else ["--parent", f"{self.fabric.address(self.root)}:{PORT}"]
        command = [sys.executable, "-m", "hocket", "aggregator", *options]
        with open(self.directory / "aggregators.log", "a") as log:
            self.aggregators[switch] = self.fabric.run_in_host(switch, command, stderr=log, stdout=log)

    def train(self) -> None:
        """Begin a training."""
        self.number += 1
        self.here = self.directory / f"run{self.number}"
        self.here.mkdir()
        leaves = [f"{self.fabric.address(leaf)}:{PORT}" for leaf in self.leaves]
        (self.here / "spec.json").write_text(json.dumps({"leaves": leaves, "token_file": str(self.token_file)}))
        command = [sys.executable, "-m", "hocket", "run", "--fabric", self.fabric.name, "-n", str(RANKS), __file__]
        with open(self.here / "log", "w") as log:
            self.run = subprocess.Popen([*command, "--rank", str(self.here)], stdout=log, stderr=log)
        self.go_on(START_S)

    def steps(self) -> list[int]:
        """How many steps every rank has done."""
        counts = []
        for rank in range(RANKS):
            with contextlib.suppress(OSError):
                counts.append((self.here / f"losses-{rank}").read_bytes().count(b"\n"))
        return counts if len(counts) == RANKS else [0] * RANKS

    def go_on(self, deadline_s: float) -> float:
        """Seconds until every rank has done more steps.

        Raises:
            Bad: it does not.
        """
        before = max(self.steps())
        for waited_s in waiting(deadline_s):
            if min(self.steps()) >= before + ONWARDS:
                return waited_s
            if self.run.poll() is not None:
                raise Bad(f"training ended with status {self.run.returncode}")
        raise Bad(f"no {ONWARDS} steps of all ranks within {deadline_s:g} s: {before}, then {self.steps()}")

    def serve_again(self, deadline_s: float) -> float:
        """Seconds until the aggregators have served more.

        Raises:
            Bad: they do not.
        """
        before = self.served()[0]
        for waited_s in waiting(deadline_s):
            if self.served()[0] >= before + ONWARDS:
                return waited_s
        raise Bad(f"the aggregators have not come back within {deadline_s:g} s")

    def served(self) -> tuple[int, int, int]:
        """By rank 0: operations of the aggregator, how often it was lost, how often it came back."""
        last = (self.here / "losses-0").read_text().rsplit("\n", 2)[-2]
        _, _, _, served, failures, returns = json.loads(last)
        return served, failures, returns

    def rank_pids(self, host: str) -> list[int]:
        """The processes of our training in a host."""
        from hocket.fabric._sweep import in_network

        number = os.stat(self.fabric.namespace(host)).st_ino
        found = []
        for pid in in_network({number}):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if (b"--rank" in command and b"hocket\0run" not in command) or b"_worker" in command:
                    found.append(pid)
        return found

    def finish(self) -> None:
        """Stop the training and look at what it has written.

        Raises:
            Bad: a sum or a loss is wrong.
        """
        (self.here / "stop").touch()
        try:
            if self.run.wait(DEADLINE_S):
                raise Bad(f"training ended with status {self.run.returncode}")
        except subprocess.TimeoutExpired:
            raise Bad("training does not end") from None
        self.compare()

    def compare(self) -> None:
        """What the ranks have written so far against an undisturbed course.

        Raises:
            Bad: a sum or a loss is wrong.
        """
        told = []
        for rank in range(RANKS):
            lines = (self.here / f"losses-{rank}").read_text().splitlines(keepends=True)
            told.append([json.loads(line) for line in lines if line.endswith("\n")])
        expected = course(max(map(len, told)))
        for rank, rows in enumerate(told):
            for step, (number, loss, wrong, *_) in enumerate(rows):
                if number != step or wrong or abs(loss - expected[step]) > 1e-9 * abs(expected[step]):
                    raise Bad(f"rank {rank}, step {step}: {wrong} wrong sums, loss {loss}, not {expected[step]}")
        self.compared = len(expected)

    def close(self) -> None:
        if self.run is not None and self.run.poll() is None:
            self.run.kill()
            self.run.wait()


def waiting(deadline_s: float) -> Iterator[float]:
    """Seconds waited so far, until they are too many; those in which this process itself was stopped do not count."""
    waited_s, seen_s = 0.0, time.monotonic()
    while waited_s < deadline_s:
        yield waited_s
        time.sleep(0.05)
        now_s = time.monotonic()
        if now_s - seen_s > STOOD_STILL_S:
            print(f"    this process itself stood still for {now_s - seen_s:.0f} s", flush=True)
        else:
            waited_s += now_s - seen_s
        seen_s = now_s


class Bad(Exception):
    """A fault that did not end as it must."""


# --- the faults -------------------------------------------------------------------------------------------------------


def kill_root(stage: Stage, draw: random.Random) -> str:
    return kill_aggregator(stage, stage.root, draw)


def kill_leaf(stage: Stage, draw: random.Random) -> str:
    return kill_aggregator(stage, draw.choice(stage.leaves), draw)


def kill_aggregator(stage: Stage, switch: str, draw: random.Random) -> str:
    pause_s = draw.choice((0.0, 0.5, 2.0))
    process = stage.aggregators[switch]
    process.kill()
    process.wait()
    time.sleep(pause_s)
    stage.start_aggregator(switch)
    return f"{switch}'s killed, started anew after {pause_s:g} s"


def stall_aggregator(stage: Stage, draw: random.Random) -> str:
    switch, pause_s = draw.choice(stage.switches), draw.choice((0.5, 3.0))
    process = stage.aggregators[switch]
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(pause_s)
    finally:
        process.send_signal(signal.SIGCONT)
    return f"{switch}'s stopped for {pause_s:g} s"


def flap_link(stage: Stage, draw: random.Random) -> str:
    links = [port.link for node in stage.fabric.wiring.nodes for port in node.ports]
    link = draw.choice(links)
    stage.fabric.cut(link)
    try:
        time.sleep(2.0)
    finally:
        stage.fabric.mend(link)
    return f"{link} lost everything for 2 s"


CLIENT = """
import random, socket, sys, time
from hocket.aggregator import AggregationClient
how, host, port, token, seed = sys.argv[1:]
draw = random.Random(int(seed))
address = host, int(port)
until_s = time.monotonic() + 1.5
while time.monotonic() < until_s:
    try:
        if how == "noise":                     # a stranger
            peer = socket.create_connection(address, 1)
            peer.sendall(draw.randbytes(draw.randrange(1, 1 << 16)))
            peer.close()
            continue
        client = AggregationClient(address, token.encode(), timeout_s=2)
        peer = client._link.sock
        peer.settimeout(0.5)
        if how == "garbage":                   # one that holds the token
            peer.sendall(b"\\xa6" + draw.randbytes(draw.randrange(1, 1 << 14)))
        else:                                  # floods with questions; "deaf" reads no answer, and stays
            ping = bytes.fromhex("a60f000008000000") + bytes(8)
            while time.monotonic() < until_s + 4 * (how == "deaf"):
                peer.sendall(ping * 512)
                if how == "flood":
                    peer.recv(1 << 16)
        client.close()
    except Exception as error:
        last = error
        time.sleep(0.01)
"""


def bad_client(how: str) -> Callable[[Stage, random.Random], str]:
    def disturb(stage: Stage, draw: random.Random) -> str:
        host, switch = draw.choice(stage.fabric.hosts), draw.choice(stage.switches)
        words = [how, stage.fabric.address(switch), str(PORT), stage.token.decode(), str(draw.randrange(1 << 30))]
        process = stage.fabric.run_in_host(host, [sys.executable, "-c", CLIENT, *words])
        try:
            process.wait(12)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return f"on {host}, at {switch}'s"

    disturb.__name__ = f"{how}_client"
    return disturb


def kill_host(stage: Stage, draw: random.Random) -> str:
    """Ends a training; the others must say who died."""
    index = draw.randrange(1, len(stage.fabric.hosts))  # the launcher is in host 0
    host = stage.fabric.hosts[index]
    pids = stage.rank_pids(host)
    if not pids:
        raise Bad(f"found no rank in {host}")
    begin_s = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        status = stage.run.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise Bad(f"ranks still run {DEADLINE_S:g} s after those of {host} were killed") from None
    took_s = time.monotonic() - begin_s
    log = (stage.here / "log").read_text()
    if not status or f"rank {index}" not in log:
        raise Bad(f"status {status} after rank {index} was killed; nothing names it: {log[-600:]}")
    stage.compare()
    stage.train()
    return f"rank {index}'s killed: all others ended after {took_s:.1f} s, named it"


FAULTS: tuple[Callable[[Stage, random.Random], str], ...] = (
    kill_root,
    kill_leaf,
    stall_aggregator,
    flap_link,
    bad_client("noise"),
    bad_client("garbage"),
    bad_client("flood"),
    bad_client("deaf"),
    kill_host,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="names of faults, with commas; each is drawn as often")
    parser.add_argument("--keep", action="store_true", help="leave the logs")
    asked = parser.parse_args()

    from hocket.cluster import load
    from hocket.fabric import Fabric

    draw = random.Random(asked.seed)
    kinds = [fault for fault in FAULTS if not asked.only or fault.__name__ in asked.only.split(",")]
    order = [kinds[i % len(kinds)] for i in range(asked.faults)]
    draw.shuffle(order)
    directory = Path(tempfile.mkdtemp(prefix="hocket-faults-"))
    ends: dict[str, list[tuple[float, float]]] = {fault.__name__: [] for fault in kinds}
    bad = steps = 0
    begin_s = time.monotonic()
    with Fabric(load(CLUSTER)) as fabric:
        stage = Stage(fabric, directory)
        try:
            stage.train()
            for number, fault in enumerate(order, 1):
                time.sleep(draw.uniform(0.0, 0.5))
                try:
                    what = fault(stage, draw)
                    took_s = stage.go_on(DEADLINE_S)
                    back_s = took_s + stage.serve_again(DEADLINE_S)
                    ends[fault.__name__].append((took_s, back_s))
                    note = "on after {:.1f} s, aggregated after {:.1f} s; served {}, lost {}, back {}"
                    note = note.format(took_s, back_s, *stage.served())
                    print(f"{number:3d} {fault.__name__}: {what}; {note}", flush=True)
                except Bad as error:
                    bad += 1
                    print(f"{number:3d} {fault.__name__}: BAD: {error}", flush=True)
                    stage.close()
                    stage.train()
            stage.finish()
            steps = stage.compared
        except Bad as error:
            bad += 1
            print(f"BAD: {error}", flush=True)
        finally:
            stage.close()
    if asked.keep or bad:
        print(f"logs are in {directory}")
    else:
        subprocess.run(["rm", "-r", str(directory)], check=True)
    head = ("fault", "times", "on after, median s", "worst s", "aggregated after, median s", "worst s")
    print(f"\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for name, both in ends.items():
        if both:
            columns = [f"{of(times):.1f}" for times in zip(*both, strict=True) for of in (statistics.median, max)]
            print(f"| {name} | {len(both)} | {' | '.join(columns)} |")
    print(
        f"\n{asked.faults} faults in {time.monotonic() - begin_s:.0f} s, {bad} bad; the last training had {steps} steps"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(sys.argv[2])
    else:
        sys.exit(main())
