"""The hosts of a job as the user names them: `--hosts a:4,b:4`, or a file in Open MPI's, Horovod's or MPICH's form."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

MARK: Final = "HOCKET-NODE "  # before what a host says to the launcher of its job
LOST: Final = 255  # exit status by which ssh says that its connection has failed
BEAT_S: Final = 1.0  # between two signs of life of that launcher

_ENTRY = re.compile(
    r"^(?P<host>(?:[^\s@:/,]+@)?(?:\[[0-9a-fA-F:.]+(?:%\w+)?\]|(?!-)[\w.+-]+))(?::(?P<count>\d+))?(?P<rest>(?:\s.*)?)$"
)
_FORMS = (
    "names no host; write HOST, HOST:RANKS or HOST slots=RANKS (a port: --ssh 'ssh -p 2222', or Port in ~/.ssh/config)"
)


def read_hosts(hosts: str | None, hostfile: str | None, each: int | None) -> dict[str, int]:
    """Return the ranks of each host, in the order of ranks. A host that is named twice gets the sum.

    Args:
        hosts: "a:4,b:4", or "a,b".
        hostfile: A file of lines "a slots=4" (Open MPI, Horovod), "a:4" (MPICH) or "a"; "#" begins a comment.
        each: Ranks of a host that has no number; 1 if None.

    Raises:
        ValueError: Something is written in no such form.
    """
    if hostfile is not None:
        try:
            lines = Path(hostfile).read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise ValueError(f"--hostfile {hostfile}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"--hostfile {hostfile}: is no text") from None
        entries: Iterable[tuple[str, str]] = ((f"{hostfile}:{i}", line) for i, line in enumerate(lines, 1))
    else:
        entries = (("--hosts", word) for word in (hosts or "").split(","))
    found: dict[str, int] = {}
    for where, line in entries:
        text = line.partition("#")[0].strip()
        if not text and hostfile is not None:
            continue
        entry = _ENTRY.match(text)
        words = [word.partition("=")[::2] for word in entry["rest"].split()] if entry else []
        settings = {name.replace("-", "_"): value for name, value in words}
        settings.pop("max_slots", None)
        given = [*filter(None, [entry and entry["count"]]), *settings.values()]
        if (
            entry is None
            or settings.keys() - {"slots"}
            or len(words) != len(dict(words))
            or len(given) > 1
            or not all(count.isdecimal() and int(count) for count in given)
        ):
            raise ValueError(f"{where}: {line!r} {_FORMS}")
        host = entry["host"].replace("[", "").replace("]", "")
        found[host] = found.get(host, 0) + (int(given[0]) if given else each or 1)
    if not found:
        raise ValueError(f"{hostfile or '--hosts'}: {_FORMS}")
    return found


# What a job's ranks need of the first host's environment: where programs are, and settings of what computes and sends.
_PREFIXES = ("HOCKET_", "OMP_", "MKL_", "NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "KERAS_", "HF_", "WANDB_", "PYTHON")
_NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LOGLEVEL", "NO_COLOR")


def passed_on() -> dict[str, str]:
    """Return the variables of this process that the other hosts' launchers get."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES) or name in _NAMES}
    for name in ("HOCKET_JOB", "HOCKET_HOST", "HOCKET_FABRIC", "HOCKET_RUN_DIR"):  # these say where this process is
        kept.pop(name, None)
    return kept
