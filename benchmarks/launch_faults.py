"""Sixteen ranks on eight emulated hosts, each with a real sshd, started by one command: whatever breaks, does all end?

    python -m benchmarks.launch_faults [--only STOP] [--hosts 8] [--slots 2]

Needs root, OpenSSH's server and the extra `fabric`. "Told" is a line that names the rank or host that was hit; "ended"
is when `hocket run` had ended, "nothing left" when no process of the job was on any host, both after the fault.
"""

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hocket.cluster import load
from hocket.fabric import Fabric
from tests.launch.test_ssh import Site, _below
from tests.processes import processes_with

TIMEOUT_S = 10.0  # HOCKET_TIMEOUT of the ranks
GRACE_S = 2  # --shutdown-timeout
PATIENCE_S = 180.0
STEPS = 12
SCRIPT = """
import json, os, sys, time, torch, hocket
rank = int(os.environ.get("RANK", "0"))
if str(rank) == os.environ.get("LEAVES"):
    print("rank", rank, os.getpid(), flush=True)
    sys.exit(0)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 3).double(), torch.randn(64, 1).double())
model = torch.nn.Linear(3, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=32)
if "LEAVES" in os.environ:
    print("rank", rank, os.getpid(), flush=True)
model, optimizer, loader = hocket.distribute(model, optimizer, loader)
losses, epochs = [], int(os.environ["EPOCHS"])
for epoch in range(epochs):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total = loss.detach() * len(x)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        losses.append(total.item() / 32)
    if epoch == 1 and "LEAVES" not in os.environ:
        print("rank", rank, os.getpid(), flush=True)
    time.sleep(0 if epochs < 10 else 0.1)
if rank == 0:
    print("losses", json.dumps(losses), flush=True)
"""


@dataclasses.dataclass
class Running:
    """A job that runs: where, its launcher, and the process of each rank."""

    site: Site
    process: "subprocess.Popen[str]"
    ranks: dict[int, int]
    slots: int

    @property
    def address(self) -> str:
        """The address of the host that is hit."""
        return list(self.site.hosts.values())[self.hit // self.slots]

    @property
    def hit(self) -> int:
        """The rank that is hit, in the middle."""
        return len(self.site.hosts) * self.slots // 2 + 1

    def signal_rank(self, number: signal.Signals) -> None:
        """Send a signal to the rank."""
        os.kill(self.ranks[self.hit], number)

    def kill_sshd(self) -> None:
        """Kill the sshd of its host, and the processes that serve the connection."""
        daemon = self.site.daemons[list(self.site.hosts)[self.hit // self.slots]]
        for pid in [daemon.pid, *_below({daemon.pid})]:
            os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def kill_node(self) -> None:
        """Kill the host's own launcher."""
        os.kill(int(re.split(r"[ )]+", Path(f"/proc/{self.ranks[self.hit]}/stat").read_text())[3]), signal.SIGKILL)

    def cut(self, index: int) -> None:
        """Cut the links of a host."""
        host = list(self.site.hosts)[index]
        for link in self.site.fabric.counters():
            if host in link:
                self.site.fabric.cut(link)


Break = Callable[[Running], None]
FAILED_FIRST = "HOST.*rank HIT failed first: killed by {}"
LOST = "HOST failed: the connection to it is lost"
# What breaks, the exit status (None: any but 0), and what is told: HIT is the rank, HOST its host's address.
FAULTS: dict[str, tuple[Break, int | None, str]] = {
    "KILL of a rank": (lambda job: job.signal_rank(signal.SIGKILL), 137, FAILED_FIRST.format("SIGKILL")),
    "SEGV of a rank": (lambda job: job.signal_rank(signal.SIGSEGV), 139, FAILED_FIRST.format("SIGSEGV")),
    "STOP of a rank": (lambda job: job.signal_rank(signal.SIGSTOP), 1, "HOST.*rank HIT|rank HIT.*HOST"),
    "a rank ends, status 0, before it joins": (lambda job: None, 1, "HOST.*rank HIT ended, exit status 0, and has not"),
    "KILL of a host's sshd": (Running.kill_sshd, 1, LOST),
    "KILL of a host's own launcher": (Running.kill_node, 1, f"{LOST}, or its launcher there was killed"),
    "a host is cut off": (lambda job: job.cut(job.hit // job.slots), 1, LOST),
    "the first host, where the command runs, is cut off": (lambda job: job.cut(0), 1, "failed: the connection to it"),
    "Ctrl-C": (lambda job: job.process.send_signal(signal.SIGINT), 130, "SIGINT: the ranks have"),
    "TERM of the command": (lambda job: job.process.send_signal(signal.SIGTERM), 143, "SIGTERM: the ranks have"),
    "HUP of the command": (lambda job: job.process.send_signal(signal.SIGHUP), 129, "SIGHUP: the ranks have"),
    "KILL of the command": (lambda job: job.process.kill(), -9, ""),
    "STOP of the command, CONT when nothing is left": (lambda job: job.process.send_signal(signal.SIGSTOP), None, ""),
}


def started(site: Site, slots: int, script: Path, place: Path, **variables: str) -> "subprocess.Popen[str]":
    """Start the job; what it says on stderr goes to a file."""
    words = [
        "--no-preflight",
        "--no-run-dir",
        "--shutdown-timeout",
        str(GRACE_S),
        "--lost-after",
        "5",
        "-x",
        f"HOCKET_TIMEOUT={TIMEOUT_S}",
    ]
    words += [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    hosts = ",".join(f"{address}:{slots}" for address in site.hosts.values())
    command = [sys.executable, "-m", "hocket", "run", "--hosts", hosts, "--ssh", f"ssh -F {site.directory}/config"]
    with open(place / "err", "w") as err:
        return site.fabric.run_in_host(
            next(iter(site.hosts)), [*command, *words, str(script)], stdout=subprocess.PIPE, stderr=err, text=True
        )


def ranks_of(process: "subprocess.Popen[str]", count: int) -> dict[int, int]:
    """Wait until the ranks have said that they run; their processes."""
    found: dict[int, int] = {}
    assert process.stdout is not None
    while len(found) < count:
        words = process.stdout.readline().split()
        if not words:
            raise RuntimeError("the job has ended before it trained")
        found[int(words[-2])] = int(words[-1])
    return found


def one(site: Site, slots: int, what: str, script: Path, place: Path) -> tuple[str, bool]:
    """Break one job; return the table's line, and whether all was as it must be."""
    act, status, told = FAULTS[what]
    leaves = "before it joins" in what
    more = {"LEAVES": str(Running(site, None, {}, slots).hit)} if leaves else {}  # type: ignore[arg-type]
    process = started(site, slots, script, place, EPOCHS="100000", **more)
    try:
        job = Running(site, process, ranks_of(process, slots * len(site.hosts)), slots)
        begin_s = time.monotonic()
        act(job)
        ended_s = gone_s = float("nan")
        while time.monotonic() < begin_s + PATIENCE_S:
            if process.poll() is not None and ended_s != ended_s:
                ended_s = time.monotonic() - begin_s
            if not set(site.left(place)) - {process.pid} and gone_s != gone_s:
                gone_s = time.monotonic() - begin_s
                if what.startswith("STOP of the command"):
                    process.send_signal(signal.SIGCONT)
            if ended_s == ended_s and gone_s == gone_s:
                break
            time.sleep(0.1)
    finally:
        process.kill()
        process.communicate()
    err = (place / "err").read_text()
    pattern = told.replace("HIT", str(job.hit)).replace("HOST", re.escape(job.address))
    named = re.search(pattern, err) is not None
    right = process.returncode == status if status is not None else process.returncode != 0
    good = named and right and gone_s == gone_s and ended_s == ended_s
    if not good:
        print(
            f"--- {what}: exit status {process.returncode}, left {site.left(place)}\n{err}---",
            file=sys.stderr,
            flush=True,
        )
    said = "-" if not told else "yes" if named else "**no**"
    return f"| {what} | {process.returncode} | {said} | {ended_s:.1f} | {gone_s:.1f} |", good


def equal(site: Site, slots: int, script: Path, place: Path) -> str:
    """Train without a fault; return a sentence that compares the losses with those of one process."""
    variables = {**os.environ, "EPOCHS": str(STEPS // 2)}
    alone = subprocess.run([sys.executable, script], env=variables, capture_output=True, text=True, check=True).stdout
    begin_s = time.monotonic()
    process = started(site, slots, script, place, EPOCHS=str(STEPS // 2))
    out = process.communicate()[0]
    took_s = time.monotonic() - begin_s
    losses = [json.loads(text.partition("losses ")[2].splitlines()[0]) for text in (alone, out)]
    worst = max(abs(one - other) / abs(one) for one, other in zip(*losses, strict=True))
    return f"Without a fault: {len(losses[1])} losses, at most {worst:.0e} from one process's; {took_s:.0f} s in all."


def main() -> None:
    """Break one job after the other, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose names have this in them")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2, help="ranks of each host")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, Fabric(load(f"star:hosts={given.hosts}")) as fabric:
        place = Path(directory)
        os.environ["HOCKET_TEST"] = directory
        (place / "tmp").mkdir()
        os.environ["TMPDIR"] = str(place / "tmp")
        script = place / "train.py"
        script.write_text(SCRIPT)
        site = Site(fabric, place)
        good = tried = 0
        try:
            print(equal(site, given.slots, script, place) + "\n", flush=True)
            print(
                "| what breaks | exit status | told | ended, s | nothing left, s |\n|---|---:|---|---:|---:|",
                flush=True,
            )
            for what in FAULTS:
                if given.only not in what:
                    continue
                tried += 1
                try:
                    line, right = one(site, given.slots, what, script, place)
                except RuntimeError as error:
                    line, right = f"| {what} | **{error}** |", False
                    print((place / "err").read_text(), file=sys.stderr)
                good += right
                print(line, flush=True)
                for link in fabric.counters():
                    fabric.mend(link)
                for host, daemon in site.daemons.items():
                    if daemon.poll() is not None:
                        site.serve(host)
        finally:
            for pid in processes_with("HOCKET_TEST", directory):
                os.kill(pid, signal.SIGKILL)
            for daemon in site.daemons.values():
                daemon.kill()
                daemon.wait()
    print(f"\n{good} of {tried}")


if __name__ == "__main__":
    main()
