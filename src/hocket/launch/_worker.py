"""What runs in a rank: the user's program, as `python script.py` would run it, with two differences.

The rank ends when its launcher does, and an uncaught exception is recorded in the error file that
torch.distributed.elastic reads, so that the launcher can show the first failing rank's traceback first.

The launcher starts this file by its path, so that neither hocket nor torch is imported before the user's program:

    python -u _worker.py LAUNCHER_PID JOB_DIRECTORY held|shown script|module|command TARGET [ARGUMENT...]

`held` means that the launcher will show a traceback, so that it need not be printed here.
"""

import contextlib
import ctypes
import faulthandler
import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
from functools import partial
from multiprocessing.process import current_process
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_MOST_SOCKET_DIRECTORY = 89  # the path of a Unix socket has at most 107 characters; multiprocessing's names have 18


def main() -> None:
    """Bind the rank to its launcher, then become the user's program."""
    launcher_pid, job_directory, held, kind, target = sys.argv[1:6]
    arguments = sys.argv[6:]
    _end_with(int(launcher_pid))
    _enter_host()
    if os.environ.get("RANK", "0") != "0":  # one rank may read what the user types, not all in turns
        with open(os.devnull) as null:
            os.dup2(null.fileno(), 0)
    if kind != "command":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to all processes; who saves then sets a handler
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # the launcher blocks it until it ends nobody
    if kind == "command":
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        _become([target, *arguments])
    # Python put this file's directory first; what belongs there is the user's.
    if not sys.flags.safe_path:
        del sys.path[0]
    # Where a crash in compiled code writes the Python stack. The user may call faulthandler.enable() anew.
    faulthandler.enable(open(f"{job_directory}/fault-{os.getpid()}", "w"))  # noqa: SIM115 - open as long as we live
    _keep_temporary(job_directory)
    os.register_at_fork(after_in_child=lambda: _tell_forked(job_directory))
    shown: list[BaseException] = []  # what the launcher will show
    # Whoever sets a hook of his own and calls the one before, as torch's groups do, calls this.
    sys.excepthook = partial(_hook, shown)
    sys.argv = [target, *arguments]
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # blocked as well, until it leaves no traceback
        if kind == "module":
            _run_module(target)
        else:
            _run_script(target)
    except KeyboardInterrupt:
        # The launcher was interrupted and says so once; Python still ends this process by SIGINT after its clean-up.
        sys.excepthook = lambda *_: None
        raise
    except SystemExit as error:
        if error.code not in (None, 0):
            _record(error, error.__traceback__)
        else:
            _tell_left(job_directory, error.__traceback__)
        raise
    except BaseException as error:
        sys.last_value = error  # as Python has it; this rank's groups look there for what to tell the others
        _explain_debugger(error)
        if (batches := sys.modules.get("hocket.parallel.batches.batch")) is not None:
            batches.explain(error)
        if _record(error, error.__traceback__) and held == "held":
            shown.append(error)
        sys.excepthook(type(error), error, error.__traceback__)
    else:
        _tell_left(job_directory, None)
        return
    raise SystemExit(1)


def _explain_debugger(error: BaseException) -> None:
    """Say why pdb has ended where nobody has typed that it should: it found no input (`main`)."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and type(error).__qualname__ == "BdbQuit":
        error.add_note(
            f"rank {rank} reads no input, so that the debugger ends here: rank 0 alone reads what is typed; write "
            'if os.environ["RANK"] == "0": breakpoint()'
        )


def _hook(
    shown: list[BaseException], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an exception as Python does, unless it is among those that are shown elsewhere."""
    if not any(error is one for one in shown):
        sys.__excepthook__(kind, error, trace)


def _end_with(launcher_pid: int) -> None:
    """Ask the kernel for SIGTERM when the launcher dies; it may have died before we could ask.

    SIGTERM, so that a program which saves its state on SIGTERM can; the job's warden sends SIGKILL later.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher_pid:
        raise SystemExit(f"the launcher (process {launcher_pid}) has gone")


def _enter_host() -> None:
    """Under `--fabric`: go to the network of this rank's emulated host, before there is a second thread."""
    path = os.environ.pop("HOCKET_NETWORK_NAMESPACE", None)
    if path is None:
        return
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SystemExit(f"the fabric is not there any more: {error}") from None
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
        raise SystemExit(f"cannot enter the emulated host {path}: {os.strerror(ctypes.get_errno())}")
    os.close(fd)


def _keep_temporary(job_directory: str) -> None:
    """Let multiprocessing, hence data loaders, put their sockets into the job's directory, which goes with the job.

    They remove a directory of their own only if the rank ends by itself.
    """
    place = f"{job_directory}/m{os.getpid()}"
    if len(place) <= _MOST_SOCKET_DIRECTORY:
        os.mkdir(place)
        vars(current_process())["_config"]["tempdir"] = place


def _tell_forked(job_directory: str) -> None:
    """Tell the job of this process, a data loader's worker say: it may end, with its rank, before anybody sees it.

    The file has the rank's number if the program itself has forked, not multiprocessing for it.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "multiprocessing.popen_fork":
        frame = frame.f_back
    with contextlib.suppress(OSError):
        file = os.open(f"{job_directory}/forked-{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        if frame is None:
            os.write(file, os.environ.get("RANK", "0").encode())
        os.close(file)


def _tell_left(job_directory: str, trace: TracebackType | None) -> None:
    """Tell the job when and at which line this rank ends well: others may still wait for it.

    Its process may still take its time to end, and be ended meanwhile with the others.
    """
    now_s, frames = time.time(), traceback.extract_tb(trace)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    with contextlib.suppress(OSError), open(f"{job_directory}/left-{os.getpid()}", "w") as file:
        file.write(f"{now_s!r} {place}")


def _become(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        raise SystemExit(127 if isinstance(error, FileNotFoundError) else 126) from None


def _run_script(path: str) -> None:
    """Run a file as `python PATH` does: https://docs.python.org/3/using/cmdline.html#cmdoption-arg-script."""
    if not os.path.isfile(path) or path.endswith((".zip", ".pyz")):
        runpy.run_path(path, run_name="__main__")  # a directory or archive with a __main__.py
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    full_path = os.path.join(os.getcwd(), path)
    with io.open_code(full_path) as file:
        source = file.read()
    loader = importlib.machinery.SourceFileLoader("__main__", full_path)
    module = _new_main(full_path, loader, spec=None, package=None)
    exec(compile(source, full_path, "exec", dont_inherit=True), vars(module))


def _run_module(name: str) -> None:
    """Run a module as `python -m NAME` does."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    spec = None
    with contextlib.suppress(ModuleNotFoundError):  # a missing parent package; it is reported below
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    loader: Any = spec.loader if spec else None
    code = loader.get_code(spec.name) if spec and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        print(f"{sys.executable}: No module named {name}, or it cannot be run", file=sys.stderr)
        raise SystemExit(1)
    sys.argv[0] = spec.origin or name
    exec(code, vars(_new_main(spec.origin, loader, spec, spec.parent, spec.cached)))


def _new_main(path: str | None, loader: Any, spec: Any, package: str | None, cached: str | None = None) -> ModuleType:
    module = ModuleType("__main__")
    names: dict[str, Any] = {
        "__file__": path,
        "__loader__": loader,
        "__spec__": spec,
        "__package__": package,
        "__cached__": cached,
        "__builtins__": sys.modules["builtins"],
        "__annotations__": {},
    }
    vars(module).update(names)
    sys.modules["__main__"] = module
    return module


def _record(error: BaseException, trace: TracebackType | None) -> bool:
    """Write the error file in elastic's form; return whether that went well.

    The error's traceback is then without the frames of this file.
    """
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    now_s = time.time()
    try:
        text = str(error)
        record = {
            "message": f"{type(error).__name__}: {text}" if text else type(error).__name__,
            # elastic reads the timestamp as whole seconds, too coarse to say which rank failed first.
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(type(error), error, trace)),
                "timestamp": str(int(now_s)),
                "timestamp_s": repr(now_s),
                "culprits": list(getattr(error, "culprits", ())),  # ranks that Hocket's errors name
            },
        }
        # In one step: a rank that is killed while it writes must not leave half a file.
        with open(f"{path}.part", "w") as file:
            json.dump({"message": record}, file)
        os.replace(f"{path}.part", path)
    except Exception:  # a full disk; an error of the program's whose text or attributes are no such thing
        return False
    return True


if __name__ == "__main__":
    main()
