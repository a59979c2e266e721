"""What training on several ranks needs of this machine, each thing tried, with the remedy where it fails."""

import mmap
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hocket._limits import memory, quota_cores

from ._clean import leftovers

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that was looked at.

    Attributes:
        name: What was looked at.
        status: "ok", "warning" (works, but slowly or not for long) or "error" (training will fail).
        found: What was found.
        remedy: What to do about it, where there is something to do.
    """

    name: str
    status: str
    found: str
    remedy: str | None = None


def examine(*, bandwidth: bool = False) -> Iterator[Diagnosis]:
    """Look at everything in turn.

    Args:
        bandwidth: Also measure how fast memory can be copied; takes about a second.
    """
    checks: list[Callable[[], Diagnosis]] = [_versions, _torch, _backend, _cores, _memory]
    if bandwidth:
        checks.append(_bandwidth)
    checks += [_shared_memory, _dev_shm, _host_name, _loopback, _temporary, _open_files, _gpu, _leftovers]
    for check in checks:
        try:
            yield check()
        except Exception as error:  # a check that cannot be made is itself a finding
            yield Diagnosis(check.__name__.strip("_").replace("_", " "), "error", f"could not be checked: {error!r}")


def _versions() -> Diagnosis:
    from hocket import __version__

    return Diagnosis("versions", "ok", f"hocket {__version__}, Python {sys.version.split()[0]}, {os.uname().release}")


def _torch() -> Diagnosis:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    found = f"torch {torch.__version__} ({build}), {torch.get_num_threads()} threads"
    if not torch.distributed.is_available():
        remedy = "install a build of torch that has it"
        return Diagnosis("torch", "error", f"{found}, built without distributed", remedy)
    return Diagnosis("torch", "ok", found)


def _backend() -> Diagnosis:
    import torch.distributed as dist

    if "hocket" in dist.Backend.backend_list:
        return Diagnosis("backend", "ok", 'init_process_group("hocket") is known to torch')
    remedy = "reinstall hocket into this environment, so that torch finds its entry point"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        remedy = "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or `import hocket` after torch in the script"
    return Diagnosis("backend", "error", 'torch does not know the backend "hocket"', remedy)


def _cores() -> Diagnosis:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} usable of {present}, load {os.getloadavg()[0]:.1f}"
    quota = quota_cores()
    if quota is not None and quota < usable:
        remedy = f"start at most {max(1, int(quota))} CPU ranks, or raise the container's CPU limit"
        return Diagnosis("cores", "warning", f"{found}, but a quota of {quota:.1f}", remedy)
    if os.getloadavg()[0] > usable:
        remedy = "end what is not needed, or expect slow training and times that vary"
        return Diagnosis("cores", "warning", f"{found}: other processes use them", remedy)
    return Diagnosis("cores", "ok", found)


def _memory() -> Diagnosis:
    total, free = memory()
    found = f"{free / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB"
    if free < 2 * _GIB:
        return Diagnosis("memory", "warning", found, "each rank needs about 0.5 GiB before the model; start fewer")
    return Diagnosis("memory", "ok", found)


def _bandwidth() -> Diagnosis:
    import torch

    source = torch.ones(64 * _MIB, dtype=torch.float32)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(5):
        begin_s = time.perf_counter()
        target.copy_(source)
        best_s = min(best_s, time.perf_counter() - begin_s)
    moved = 2 * source.nbytes  # read and written
    return Diagnosis("memory bandwidth", "ok", f"{moved / best_s / 1e9:.1f} GB/s copying {source.nbytes // _MIB} MiB")


def _shared_memory() -> Diagnosis:
    """Check for memfd and /proc: ranks share memory that has no name, and a peer opens it through /proc."""
    fd = os.memfd_create("hocket-doctor")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as mine:
            code = "import sys; f = open(sys.argv[1], 'r+b'); f.write(b'hocket'); f.close()"
            path = f"/proc/{os.getpid()}/fd/{fd}"
            done = subprocess.run(
                [sys.executable, "-S", "-c", code, path], capture_output=True, timeout=30, check=False
            )
            if done.returncode == 0 and mine[:6] == b"hocket":
                return Diagnosis("shared memory", "ok", "another process can write to memory of this one")
            reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    finally:
        os.close(fd)
    remedy = "allow it: mount /proc without hidepid, and run all ranks as one user in one container"
    return Diagnosis("shared memory", "error", f"another process cannot open {path}: {reason}", remedy)


def _dev_shm() -> Diagnosis:
    usage = shutil.disk_usage("/dev/shm")
    found = f"{usage.free / _MIB:.0f} MiB free of {usage.total / _MIB:.0f} MiB"
    if usage.free < 256 * _MIB:
        remedy = "data loader workers need it: start the container with --shm-size=1g, or delete what is in there"
        return Diagnosis("/dev/shm", "warning", found, remedy)
    return Diagnosis("/dev/shm", "ok", found)


def _host_name() -> Diagnosis:
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        remedy = f'add "127.0.0.1 {name}" to /etc/hosts; one host works without, several do not'
        return Diagnosis("host name", "warning", f"{name} does not resolve ({error.strerror})", remedy)
    return Diagnosis("host name", "ok", f"{name} is {', '.join(addresses)}")


def _loopback() -> Diagnosis:
    try:
        with (
            socket.create_server(("localhost", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5.0),
        ):
            return Diagnosis("loopback", "ok", f"a connection to localhost:{server.getsockname()[1]} was made")
    except OSError as error:
        remedy = 'bring the interface lo up, and let /etc/hosts say "127.0.0.1 localhost"'
        return Diagnosis("loopback", "error", f"no connection to localhost: {error}", remedy)


def _temporary() -> Diagnosis:
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free
    with tempfile.NamedTemporaryFile():
        pass
    if free < 256 * _MIB:
        return Diagnosis("temporary files", "warning", f"{free / _MIB:.0f} MiB free in {directory}", "free space there")
    return Diagnosis("temporary files", "ok", f"{free / _GIB:.1f} GiB free in {directory}")


def _open_files() -> Diagnosis:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        return Diagnosis("open files", "warning", f"at most {soft}", f"raise it: ulimit -n {min(hard, 65536)}")
    return Diagnosis("open files", "ok", f"at most {soft}")


def _gpu() -> Diagnosis:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Diagnosis("GPU", "ok", ", ".join(names))
    if any(Path("/dev").glob("nvidia[0-9]*")):  # a container may have been given another than the first
        if torch.version.cuda is None:
            found, remedy = "there is one, but torch is the CPU build", "install the CUDA build of torch"
            return Diagnosis("GPU", "warning", found, remedy)
        return Diagnosis("GPU", "warning", "there is one, but torch cannot use it", "update the driver; see nvidia-smi")
    return Diagnosis("GPU", "ok", "none; ranks run on the CPU")


def _leftovers() -> Diagnosis:
    found = leftovers()
    if found:
        return Diagnosis("crashed jobs", "warning", f"{len(found)} left something behind", "hocket clean")
    return Diagnosis("crashed jobs", "ok", "nothing left behind")
