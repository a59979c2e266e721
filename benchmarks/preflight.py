"""What stands between three emulated hosts, many times over: does `hocket doctor --hosts` name it, and nothing else?

    python -m benchmarks.preflight --trials 10

Needs root, `nft` and the extra `fabric`. Hosts a, b and c have 200 Mbit/s each; something is wrong with b. "Named" is a
line that says what, and names b; in the healthy trials, that there is no warning.
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from hocket.cluster import load
from hocket.fabric import Fabric
from tests.launch import test_preflight as cases

NEW = "tcp flags & (syn | ack) == syn tcp dport 1024-65535 drop"
FIREWALL = f"add table inet f; add chain inet f i {{ type filter hook input priority 0; }}; add rule inet f i {NEW}"
FAULTS = {  # key of the test's cases: what it is, and the text that names it
    "none": ("none: healthy hosts", "network: "),
    "link": ("link at a tenth of its rate", "link: b sends and receives at "),
    "firewall": ("blocked ports", "cannot connect to b, "),
    "torch": ("other version of torch", "and 0.9.9 on b"),
    "shm": ("full /dev/shm", "on b /dev/shm has 0 MiB free"),
    "interface": ("wrong interface", "b has no interface eth9"),
    "memory": ("half of the memory", "memory: b has "),
}


def main() -> None:
    """Try all, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10)
    trials = parser.parse_args().trials
    cases.SETUP["firewall"] = f"nft '{FIREWALL}'".replace("{", "{{").replace("}", "}}")
    named = dict.fromkeys(FAULTS, 0)
    others = dict.fromkeys(FAULTS, 0)
    took_s: dict[str, list[float]] = {what: [] for what in FAULTS}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        fabrics = {}
        for rate in (200, 20):
            links = "".join(cases.LINK.format(host, rate if host == "b" else 200) for host in "abc")
            (place / f"{rate}.toml").write_text(cases.CLUSTER + links)
            fabrics[rate] = Fabric(load(str(place / f"{rate}.toml")))
        with fabrics[200], fabrics[20]:
            for trial in range(trials):
                for what, (title, text) in FAULTS.items():
                    fabric = fabrics[20 if what == "link" else 200]
                    begin_s = time.monotonic()
                    said = cases.doctor(fabric, place, what)
                    took_s[what].append(time.monotonic() - begin_s)
                    if what == "firewall":
                        subprocess.run(fabric.command_in(fabric.hosts[1], ["nft", "flush", "ruleset"]), check=True)
                    lines = (said.stdout + said.stderr).splitlines()
                    found = [line for line in lines if line.startswith(("warning", "error")) or "cannot" in line]
                    right = any(text in line for line in lines)
                    named[what] += right
                    others[what] += sum(text not in line for line in found)
                    if not right or any(text not in line for line in found):
                        print(f"trial {trial}, {title}:\n{said.stdout}{said.stderr}", flush=True)
    print(f"| what is wrong with b | named, of {trials} | other warnings in all | s, median |\n|---|---|---|---|")
    for what, (title, _) in FAULTS.items():
        middle_s = sorted(took_s[what])[trials // 2]
        print(f"| {title} | {named[what]} | {others[what]} | {middle_s:.1f} |")


if __name__ == "__main__":
    main()
