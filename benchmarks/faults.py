"""Random faults in real trainings, one a job: each must end in time, with right losses and a culprit that is named.

    python -m benchmarks.faults --count 1000 --seed 1 --jobs 2 --out faults.jsonl
    python -m benchmarks.faults --table faults.jsonl

A job trains the Transformer of examples/trainer.py by a random plan, on 2 to 4 ranks of this host, or (as root) on an
emulated cluster of two hosts, with or without an aggregator. Something happens to it at a random moment, from the start
of its processes on: a rank is killed, stopped, crashes or is told to end; a link is cut for ever or mended after two
seconds; the aggregator is killed; the disk is full when a checkpoint is written.

A job ends well when it ends within the time-out and a grace, every loss that it printed is that of one process to nine
digits, the launcher's headline or a rank's error names who is at fault, and nothing is left: no process, no file in
its temporary directory, no shared memory (as root a job has a /dev/shm of its own, so that others' files are not taken
for its). A link that is mended and an aggregator that dies must disturb no job. Seed and number say everything about a
fault but the moment to the microsecond; `--only 7` repeats the seventh. `--jobs 2` plays two at a time, each in a
cluster and a directory of its own. `--out FILE` adds a line of JSON for each job; `--first 71` goes on where a run
was ended, and `--table FILE` adds up what runs have written.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hocket.testing import deadline, leftovers, patience

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 10.0
GRACE_S = 15.0
"""What ending takes at most after a fault, or after the time-out where only that shows it; on an idle machine."""
STEPS = 40
SAVED_AFTER = 5
"""Steps before the checkpoint, in jobs whose disk is full."""
START_S = 60.0
JOIN_S = 300.0
"""What ranks wait for each other at most while they start, whatever HOCKET_TIMEOUT says (docs/backend.md).

A rank that is stopped meanwhile is ended by its launcher, after HOCKET_TIMEOUT and five seconds.
"""
VARIABLE = "HOCKET_FAULTS_JOB"
CLUSTER = "star:hosts=2,bandwidth=1Gbit/s"
OTHERS = re.compile(r"/dev/shm/(sem\.loky|sm_segment)")
"""Names that joblib and Open MPI give to shared memory: of programs that run beside this one, where all share one."""
DIGITS = re.compile(r"step (\d+): ([\d.e+-]+)")

PLANS = {
    "data": {},
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "parameters": {"shard": "parameters"},
    "tensor": {"tensor_parallel_degree": 2},
    "pipeline": {"pipeline_parallel_degree": 2, "micro_batches": 2},
    "tensor and pipeline": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "micro_batches": 2},
}
SIGNALS = {"KILL": signal.SIGKILL, "SEGV": signal.SIGSEGV, "TERM": signal.SIGTERM, "STOP": signal.SIGSTOP}
FAULTS = (*SIGNALS, "link cut", "link mended", "aggregator killed", "disk full")


# --- a rank -----------------------------------------------------------------------------------------------------------


def work(directory: Path, plan_name: str, steps: int, full: str) -> None:
    """Train, and print every loss; `full` is a directory without space for a checkpoint, or empty."""
    rank = int(os.environ.get("RANK", "0"))
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    sys.path.insert(0, str(ROOT / "examples"))
    import torch
    from torch.utils.data import DataLoader
    from trainer import Sorter, loss_fn, rows

    import hocket
    from hocket.planner import Plan

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Sorter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = rows(64 * 8, seed=1)
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=1)
    plan = Plan(**PLANS[plan_name]) if "RANK" in os.environ else None  # type: ignore[arg-type]
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan, sample=data[:64][0])
    step = 0
    while step < steps:
        for batch in trainer.batches(loader):
            loss = float(trainer.step(batch))
            with (directory / f"losses-{rank}").open("a") as file:
                file.write(f"step {step}: {loss!r}\n")
            step += 1
            if full and step == SAVED_AFTER:
                trainer.save(Path(full) / "checkpoint")
            if step == steps:
                break


# --- a job ------------------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """What is to happen in one job."""

    fault: str
    plan: str
    where: str
    """"one host", "two hosts" or "aggregator"."""
    ranks: int
    victim: int
    step: int
    """The step after which it happens; -1: while the ranks start."""
    wait_s: float

    def __str__(self) -> str:
        moment = f"{self.wait_s:.2f} s after the start" if self.step < 0 else f"after step {self.step}"
        return f"{self.fault} of rank {self.victim} {moment}, {self.ranks} ranks on {self.where}, {self.plan}"


class Bad(Exception):
    """A job that did not end as it must; its text says what is wrong."""


def drawn(seed: int, number: int, fabric: bool) -> Trial:
    """Return the fault of a number."""
    draw = random.Random(f"{seed} {number}")
    fault = draw.choice(FAULTS if fabric else list(SIGNALS))
    where = draw.choice(["one host", "two hosts", "aggregator"]) if fabric else "one host"
    if "link" in fault and where == "one host":
        where = "two hosts"
    if fault == "aggregator killed":
        where = "aggregator"
    ranks = draw.choice([2, 3, 4]) if where == "one host" else draw.choice([2, 4])
    plan = draw.choice([name for name, plan in PLANS.items() if ranks % _model_ranks(plan) == 0])
    early = fault in SIGNALS and draw.random() < 0.25
    step = -1 if early else SAVED_AFTER - 1 if fault == "disk full" else draw.randrange(1, STEPS // 2)
    return Trial(fault, plan, where, ranks, draw.randrange(ranks), step, draw.uniform(0.0, 4.0 if early else 0.05))


def _model_ranks(plan: dict[str, Any]) -> int:
    return int(plan.get("tensor_parallel_degree", 1) * plan.get("pipeline_parallel_degree", 1))


def reference(directory: Path) -> list[float]:
    """Return the losses of one process."""
    directory.mkdir()
    command = [sys.executable, __file__, "--rank", str(directory), "data", str(STEPS), ""]
    env = environment("reference") | {"OMP_NUM_THREADS": "1"}  # as ranks have; more take minutes on a busy machine
    subprocess.run(command, check=True, env=env, timeout=deadline(120))
    return losses(directory)[0]


def environment(job: str) -> dict[str, str]:
    """Return the variables of a job."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HOCKET_TIMEOUT": str(TIMEOUT_S),
        VARIABLE: job,
    }


def losses(directory: Path) -> dict[int, list[float]]:
    """Return what each rank has written so far."""
    found = {}
    for path in directory.glob("losses-*"):
        found[int(path.name.partition("-")[2])] = [float(x) for _, x in DIGITS.findall(path.read_text())]
    return found


def until(limit_s: float, what: str) -> Iterator[None]:
    """Let a loop go on until it has waited for too long. Raises Bad then."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        yield
        time.sleep(0.02)
    raise Bad(f"{what} took more than {limit_s:.0f} s")


def members(job: str) -> dict[int, str]:
    """Return the processes of a job that are not dead, by their environment, and their commands."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{VARIABLE}={job}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def files(shm: Path) -> set[str]:
    """Return what lies in the temporary directory and in shared memory: a job's own as root, else all of this user."""
    memory = {str(path) for path in shm.iterdir()}
    if os.getuid():
        memory = {one for one in leftovers() if one.startswith("file ") and not OTHERS.search(one)}
    return memory | {str(path) for path in Path(os.environ["TMPDIR"]).iterdir()}


def strike(trial: Trial, directory: Path, job: str, run: "subprocess.Popen[Any]", fabric: Any) -> None:
    """Wait for the moment and let it happen."""
    pid_file = directory / f"pid-{trial.victim}"
    for _ in until(deadline(START_S), "starting"):
        started = pid_file.exists() and pid_file.read_text()
        if started and (trial.step < 0 or len(losses(directory).get(trial.victim, ())) > trial.step):
            break
        if run.poll() is not None:
            if trial.fault == "disk full":  # which happens by itself
                return
            raise Bad(f"ended with status {run.returncode} before anything had happened")
    time.sleep(trial.wait_s)
    if trial.fault in SIGNALS:
        os.kill(int(pid_file.read_text()), SIGNALS[trial.fault])
    elif trial.fault == "aggregator killed":
        serving = [pid for pid, command in members(job).items() if " aggregator " in command]
        if not serving:
            raise Bad("there is no aggregator")
        os.kill(serving[0], signal.SIGKILL)
    elif "link" in trial.fault:
        hosts = fabric.hosts
        host = hosts[trial.victim * len(hosts) // trial.ranks]
        link = next(port.link for node in fabric.wiring.nodes if node.name == host for port in node.ports)
        fabric.cut(link)
        if trial.fault == "link mended":
            time.sleep(2.0)
            fabric.mend(link)


def judged(trial: Trial, status: int, log: str, directory: Path, right: list[float]) -> bool:
    """Return whether the culprit is named. Raises Bad: a loss is wrong, or the job ended otherwise than it must."""
    for rank, found in losses(directory).items():
        for step, (loss, expected) in enumerate(zip(found, right, strict=False)):
            if abs(loss - expected) > 1e-9 * abs(expected):
                raise Bad(f"rank {rank}, step {step}: loss {loss!r}, not {expected!r}")
    if trial.fault in ("link mended", "aggregator killed"):
        if status:
            raise Bad(f"ended with status {status}")
        if any(len(found) != STEPS for found in losses(directory).values()):
            raise Bad("steps are missing")
        return True
    if not status:
        raise Bad("ended with status 0")
    if trial.fault == "disk full":
        return "No space left on device" in log
    headlines = [line for line in log.splitlines() if line.startswith("hocket: ")]
    if trial.fault == "link cut":  # whoever is beyond it
        return (
            "rank" in " ".join(headlines)
            and re.search(r"not arrived: rank|waits for rank|rank \d+ \(host", log) is not None
        )
    return any(re.search(rf"rank {trial.victim}\b", line) for line in headlines[-3:])


def play(trial: Trial, job: str, directory: Path, right: list[float], fabric: Any) -> tuple[bool, float]:
    """Run a job with its fault; return whether the culprit was named, and how long it took to end. Raises Bad."""
    env, full = environment(job), ""
    command = [sys.executable, "-m", "hocket", "run", "-n", str(trial.ranks)]
    if trial.where != "one host":
        command += ["--fabric", fabric.name] + (["--aggregate"] if trial.where == "aggregator" else [])
    if trial.fault == "disk full":
        full = str(directory / "full")
        os.mkdir(full)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", full], check=True)
    shm = directory / "shm"
    shm.mkdir()
    if os.getuid() == 0:
        command = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(shm), *command]
    before = files(shm)
    limit_s = deadline(GRACE_S)
    if trial.fault in ("STOP", "link cut"):
        limit_s += JOIN_S if trial.step < 0 and trial.fault == "link cut" else TIMEOUT_S
    log_path = directory / "log"
    try:
        with log_path.open("w") as log:
            run = subprocess.Popen(
                [*command, __file__, "--rank", str(directory), trial.plan, str(STEPS), full],
                cwd=directory, env=env, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            strike(trial, directory, job, run, fabric)
            begin_s = time.monotonic()
            lasts = trial.fault in ("link mended", "aggregator killed", "disk full")
            try:
                status = run.wait(deadline(START_S) if lasts else limit_s)
            except subprocess.TimeoutExpired:
                raise Bad(f"has not ended {time.monotonic() - begin_s:.0f} s after the fault") from None
            took_s = time.monotonic() - begin_s
        finally:
            if trial.fault == "link cut":
                for node in fabric.wiring.nodes:
                    for port in node.ports:
                        fabric.mend(port.link)
            if run.poll() is None:
                run.kill()
                run.wait()
        named = judged(trial, status, log_path.read_text(), directory, right)
        left: set[str] = set()
        with contextlib.suppress(Bad):
            for _ in until(deadline(5), "tidying"):
                left = {f"process {pid}: {command}" for pid, command in members(job).items()}
                left |= files(shm) - before
                if not left:
                    break
        if left:
            raise Bad(f"left behind: {', '.join(sorted(left))[:500]}")
        return named, took_s
    finally:
        for pid in members(job):  # of a job that has not ended well
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if full:
            subprocess.run(["umount", full], check=True)


def one_by_one(asked: argparse.Namespace, directory: Path, out: Path) -> None:
    """Play the faults of some numbers and add a line for each to a file."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory / "tmp")  # of all jobs, and of the fabric
    os.mkdir(tempfile.tempdir)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    with contextlib.ExitStack() as stack:
        fabric = None
        if not asked.one_host:
            from hocket.cluster import load
            from hocket.fabric import Fabric

            fabric = stack.enter_context(Fabric(load(CLUSTER)))
        right = reference(directory / "reference")
        for number in range(asked.first, asked.first + asked.count, asked.step):
            trial = drawn(asked.seed, number, fabric is not None)
            here = directory / str(number)
            here.mkdir()
            named, took_s, wrong = False, 0.0, ""
            try:
                named, took_s = play(trial, f"{os.getpid()}-{number}", here, right, fabric)
                text = f"{took_s:.1f} s{'' if named else ', NOT NAMED'}"
            except Bad as error:
                wrong = str(error)
                text = f"BAD: {error}"
            if named and not asked.keep:
                shutil.rmtree(here)
            else:
                text += f" (log: {here}/log)"
            print(f"{number:4d} {trial}: {text}", flush=True)
            row = {"seed": asked.seed, "number": number, "commit": commit.strip(), **asdict(trial)}
            row |= {"named": named, "took_s": round(took_s, 1), "wrong": wrong, "patience": round(patience(), 1)}
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def side_by_side(asked: argparse.Namespace, directory: Path, out: Path) -> None:
    """Let several processes do that, each with every so manieth number."""
    running = []
    try:
        for index in range(asked.jobs):
            command = [sys.executable, "-m", "benchmarks.faults", *sys.argv[1:], "--jobs", "1", "--out", str(out)]
            command += ["--first", str(asked.first + index), "--count", str(asked.count - index)]
            command += ["--step", str(asked.jobs), "--directory", str(directory / f"job-{index}")]
            running.append(subprocess.Popen(command, cwd=ROOT))
        for one in running:
            one.wait()
    finally:
        for one in running:
            one.terminate()
        for one in running:
            one.wait()


def table(out: Path) -> bool:
    """Print what the jobs of a file came to; return whether all ended well. The last of a number counts."""
    rows = {(row["seed"], row["number"]): row for row in map(json.loads, out.read_text().splitlines())}
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows.values():
        kinds[row["fault"]].append(row)
    print("\n| fault | jobs | ended well | named | ended after, median s | worst s |\n|---|---:|---:|---:|---:|---:|")
    for fault, ends in [*sorted(kinds.items()), ("all", list(rows.values()))]:
        times = [row["took_s"] for row in ends if not row["wrong"]] or [0.0]
        well, named = sum(not row["wrong"] for row in ends), sum(row["named"] for row in ends)
        print(f"| {fault} | {len(ends)} | {well} | {named} | {statistics.median(times):.1f} | {max(times):.1f} |")
    seeds, commits, patiences = ({row[name] for row in rows.values()} for name in ("seed", "commit", "patience"))
    places = [row["where"] for row in rows.values()]
    print(f"\nSeed {seeds}, commits {commits}, patience {min(patiences)} to {max(patiences)};", end=" ")
    print(", ".join(f"{places.count(where)} on {where}" for where in sorted(set(places))))
    print(f"{well} of {len(rows)} ended well, {named} named the culprit")
    for row in rows.values():
        if row["wrong"] or not row["named"]:
            print(f"- seed {row['seed']}, number {row['number']}, {row['fault']}: {row['wrong'] or 'not named'}")
    return not any(row["wrong"] for row in rows.values())


def main() -> int:
    """Play the faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the one of this number")
    parser.add_argument("--first", type=int, default=1, help="the number to begin with")
    parser.add_argument("--step", type=int, default=1, help="to the next number")
    parser.add_argument("--jobs", type=int, default=1, help="how many are played at a time")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each job")
    parser.add_argument("--table", type=Path, help="play nothing; print the table of such a file")
    parser.add_argument("--directory", type=Path, help="for the files of the jobs; a new one")
    parser.add_argument("--one-host", action="store_true", help="signals alone: the other faults need root")
    parser.add_argument("--keep", action="store_true", help="leave the logs of all jobs, and not only of bad ones")
    asked = parser.parse_args()
    if asked.table:
        return int(not table(asked.table))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing of ours is left either
    if asked.only:
        asked.first, asked.count = asked.only, 1
    directory = asked.directory or Path(tempfile.mkdtemp(prefix="hocket-faults-"))
    directory.mkdir(exist_ok=True)
    out = (asked.out or directory / "jobs.jsonl").absolute()
    (side_by_side if asked.jobs > 1 else one_by_one)(asked, directory, out)
    if asked.directory:
        return 0
    well = table(out)
    if well and not asked.keep:
        shutil.rmtree(directory)
    return int(not well)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        sys.exit(main())
