"""Run pytest, and the few tests that failed once more: alone, one by one. What passes then is named as flaky.

usage: python tests/twice.py "FLAGS OF THE FIRST RUN" FLAGS OF BOTH RUNS...
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

MOST = 10  # more have a common cause, which is no matter of luck
_LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(beside: str, arguments: list[str]) -> int:
    """Return pytest's status: that of the second run where there was one."""
    command = [sys.executable, "-m", "pytest", *arguments]
    if not {"--lf", "--last-failed", "--ff", "--failed-first"} & set(arguments):
        _LAST_FAILED.unlink(missing_ok=True)  # pytest keeps there what failed in runs of other tests
    status = subprocess.run([*command[:3], *shlex.split(beside), *arguments]).returncode
    failed = list(json.loads(_LAST_FAILED.read_text())) if status == 1 and _LAST_FAILED.exists() else []
    if not 0 < len(failed) <= MOST:
        return status
    print(f"\nonce more, alone and one by one: {len(failed)} that failed", flush=True)
    status = subprocess.run([*command, "--last-failed", "--last-failed-no-failures=none"]).returncode
    if status == 0:
        print("flaky: failed beside others, passed alone", *failed, sep="\n  ", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
