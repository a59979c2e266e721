"""What a user names when a workload is asked for: a shape, a bundled workload, a script's model, or a file."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._beside import watch_for_others
from ._optimizers import optimizer_named

if TYPE_CHECKING:
    from torch import nn

    from hocket.workload import Workload

TARGET_HELP = (
    "gpt-175b, transformer:hidden=4096,layers=32,heads=32, a bundled workload (edsr, resnet50), train.py:build, or a "
    "workload's file."
)


class TargetError(ValueError):
    """What was named is no workload; the message says what to write."""


def resolve_target(
    # see `TARGET_HELP`. Of `train.py:build` the function returns the model and a sample, and perhaps a loss.
    target: str,
    *,
    # where models are captured: "meta" (no times; the default for bundled workloads), "cpu", "cuda"
    device: str | None = None,
    degrees: Sequence[int] = (2, 4, 8),  # see `hocket.workload.capture`
    # ranks that share a host's cores: a model is measured with as many threads as `hocket run` gives each
    sharers: int = 1,
    optimizer: str | None = None,  # of a captured model; see `optimizer_named`
) -> Workload:
    """Return the workload that a user means.

    Raises:
        TargetError: nothing of this name is there, the user's code fails, or its function gives something else; there
            is no such optimizer, or the workload is not captured.
        WorkloadError: it cannot be captured.
    """
    from hocket.workload import SHAPES, named_transformer
    from hocket.workloads import names

    name, more = target.lower(), {}
    if optimizer is not None:
        if ".py:" not in target and (name not in names() or os.path.exists(target)):
            told = "a shape's is Adam in mixed precision, and a workload's file tells what it was captured with"
            raise TargetError(f"--optimizer is of a model that is captured, as train.py:build, not of {target}: {told}")
        more = {"optimizer": optimizer_named(optimizer)}
    if device is not None:
        _check_device(device)
    if name.removeprefix("gpt-") in SHAPES or name.startswith(("gpt-", "lm-", "llama-", "mixtral-")):
        model, _, changed = target.partition(":")
        changes = ("vocabulary", "sequence", *(["eager"] if name.startswith(("llama-", "mixtral-")) else []))
        return named_transformer(model, **_sizes(target, changed, changes, "sequence=32768"))
    if name.startswith("transformer:"):
        return _shape(target.partition(":")[2])
    if ".py:" in target:
        if not os.path.isfile(file := target.rpartition(":")[0]):
            raise TargetError(f"{target}: there is no file {file!r}")
        on_cores = device in (None, "cpu")
        return _with_threads(sharers if on_cores else 1, lambda: _function(target, device, degrees, more))
    if os.path.exists(target) and not os.path.isdir(target):
        return _file(Path(target))
    if name in names():
        on_cores = device == "cpu"
        return _with_threads(sharers if on_cores else 1, lambda: _bundled(name, device or "meta", degrees, more))
    known = ", ".join([*names(), *(f"gpt-{one}" for one in SHAPES)])
    raise TargetError(f"there is no workload {target!r}; there are {known}, or write train.py:build, or a file's path")


def _file(path: Path) -> Workload:
    from hocket.workload import WorkloadError, parse

    if path.suffix == ".py":
        raise TargetError(f"{path}: write {path}:build, the name of a function that returns the model and a sample")
    try:
        return parse(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, WorkloadError) as error:
        raise TargetError(f"{path} is no workload's file: {error}") from None


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).splitlines()[0]
        raise TargetError(f"--device {device}: {said}; take cpu, or meta for no times") from None


def _shape(text: str) -> Workload:
    from hocket.workload import llama, transformer

    modern = ("kv_heads", "feed_forward")  # both or none: a Llama's layers, or GPT's
    experts = ("experts", "active")  # of a Llama's layers
    known = ("hidden", "layers", "heads", *modern, "vocabulary", "sequence", *experts, "eager")
    written = (
        "hidden=4096,layers=32,heads=32[,kv_heads=8,feed_forward=14336[,experts=8,active=2]][,vocabulary=][,sequence=]"
    )
    values = _sizes("transformer", text, known, written)
    needed = known[:5] if values.keys() & {*modern, *experts, "eager"} else known[:3]
    missing = [key for key in needed if key not in values]
    if missing:
        raise TargetError(f"transformer: {missing[0]} is missing; write transformer:hidden=4096,layers=32,heads=32")
    make: Any = llama if len(needed) == 5 else transformer
    sizes = [values.pop(key) for key in needed]
    made: Workload = make(*sizes, **values)
    return made


def _sizes(target: str, text: str, known: Sequence[str], written: str) -> dict[str, int]:
    values: dict[str, int] = {}
    for word in text.split(",") if text else ():
        key, equals, number = word.partition("=")
        if not equals or key not in known or not number.isdecimal():
            raise TargetError(f"{target}: {word!r}; write {written}")
        if key in values:
            raise TargetError(f"{target}: {key} is said twice; say it once")
        values[key] = int(number)
    return values


def built(target: str) -> tuple[nn.Module, Any, Any]:
    """Return what the function of `train.py:build` does: a model, a sample of inputs, and a loss or None.

    Raises:
        TargetError: there is no such file or function, it fails, or it gives something else.
    """
    import torch
    from torch import nn

    file, _, name = target.rpartition(":")
    path = Path(file)
    if not os.path.isfile(file):
        raise TargetError(f"{target}: there is no file {file!r}")
    with _user_code(path):
        if loop := next(
            (one for one in ast.parse(path.read_bytes(), file).body if isinstance(one, ast.For | ast.While)), None
        ):
            rule = 'if it trains, put it under `if __name__ == "__main__":`'
            print(f"hocket: {file}:{loop.lineno}: this loop runs when {name} is looked for; {rule}", file=sys.stderr)
        spec = importlib.util.spec_from_file_location("hocket_target", path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function: Any = getattr(module, name, None)
        if not callable(function):
            raise TargetError(f"{target}: {file} has no function {name!r}")
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise TargetError(f"{target}: {name}() is called without arguments: {error}; give them defaults") from None
        given = function()
        if not isinstance(given, tuple) or len(given) not in (2, 3) or not isinstance(given[0], nn.Module):
            kind = f"({', '.join(type(one).__name__ for one in given)})" if isinstance(given, tuple) else _kind(given)
            rule = f"{name}() must return (model, sample) or (model, sample, loss), as a tuple"
            raise TargetError(f"{target}: {rule}; what it returns is {kind}")
        model, sample, loss = *given[:2], given[2] if len(given) == 3 else None
        if isinstance(sample, torch.optim.Optimizer) or not (loss is None or callable(loss)):
            raise TargetError(
                f"{target}: {name}() must return (model, sample) or (model, sample, loss): what the model takes, and a "
                f"function of the model and that, or nothing; the second is {_kind(sample)}, the third {_kind(loss)}"
            )
        if inspect.isroutine(loss):
            try:
                inspect.signature(loss).bind(model, sample)
            except TypeError as error:
                raise TargetError(f"{target}: the loss is called as loss(model, sample): {error}") from None
        elif isinstance(loss, nn.Module) and type(loss).__module__ == "torch.nn.modules.loss":
            like = f"lambda model, sample: {type(loss).__name__}()(model(sample[0]), sample[1])"
            raise TargetError(f"{target}: the loss is called as loss(model, sample); write it like {like}")
        return model, sample, loss


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _captured(model: nn.Module, sample: Any, **more: Any) -> Workload:
    """Return what a step asks for (`hocket.workload.capture`), and say if others computed while cores were measured."""
    from hocket.parallel.partition import DRY_RUNS
    from hocket.workload import capture

    tell = watch_for_others()
    found = capture(model, sample, dry_runs=DRY_RUNS, **more)
    if found.measured and found.source == "captured on cpu":
        return dataclasses.replace(found, disturbed=round(tell(), 2))
    return found


def _function(target: str, device: str | None, degrees: Sequence[int], optimizer: Mapping[str, Any]) -> Workload:
    from hocket.parallel.pipeline import in_steps
    from hocket.workload import autocast_of_a_gpu

    path = Path(target.rpartition(":")[0])
    with autocast_of_a_gpu() if device == "meta" else nullcontext():  # of which a file may make one when it is read
        model, sample, loss = built(target)
    with _user_code(path):
        more: dict[str, Any] = {"loss": loss, "device": device}
        found = _captured(model, sample, name=path.stem, degrees=degrees, **more, **optimizer)
        if not found.measured or any(value is not None for value in more.values()):
            return found
        # Measured here, and a sample is what the model takes.
        return in_steps(found, model, sample if isinstance(sample, tuple | list) else (sample,))


@contextmanager
def _user_code(file: Path) -> Iterator[None]:
    """Open a block that runs a user's file as `python FILE` would find things; what it raises is said in one line."""
    from hocket.workload import WorkloadError

    folder = str(file.resolve().parent)
    arguments, sys.argv = sys.argv, [str(file)]
    sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):  # stdout has the answer, with `--json` one that is read by programs
            yield
    except TargetError:
        raise
    except SyntaxError as error:
        raise TargetError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, WorkloadError):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if os.path.realpath(frame.filename).startswith(folder + os.sep)]
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(": ")
        if own:
            raise TargetError(f"{own[-1].filename}:{own[-1].lineno}: {said}") from error
        if not any(os.sep + "torch" + os.sep in frame.filename for frame in frames[-3:]):
            raise
        raise TargetError(f"{file}: the model cannot train on its sample: {said}") from error
    finally:
        sys.argv = arguments
        sys.path.remove(folder)


def _with_threads(sharers: int, take: Callable[[], Workload]) -> Workload:
    """Return a workload that is taken with a rank's share of the threads; say so if it was measured with fewer."""
    import torch

    from hocket.launch import threads_of_rank

    before, wanted = torch.get_num_threads(), threads_of_rank(sharers)
    if wanted is None or wanted >= before:
        return take()
    torch.set_num_threads(wanted)
    try:
        found = take()
    finally:
        torch.set_num_threads(before)
    if found.measured:
        print(
            f"measured with {wanted} of {before} threads, as each of {sharers} ranks of a host has; set "
            "OMP_NUM_THREADS to choose",
            file=sys.stderr,
        )
    return found


def _bundled(name: str, device: str, degrees: Sequence[int], optimizer: Mapping[str, Any]) -> Workload:
    import torch

    place = torch.device(device)
    model: torch.nn.Module
    more: dict[str, Any] = {"device": device, "name": name, "degrees": degrees, **optimizer}
    if name == "edsr":  # the paper's full model, magnifying by 4, patches of 48 pixels, 16 at a time
        from hocket.workloads.edsr.model import EDSR

        with place:
            model = EDSR("full", 4)
        patches = torch.zeros(16, 3, 48, 48)
        return _captured(model, patches, unit="image", **more)
    if name == "resnet50":
        from hocket.workloads.resnet50.model import ResNet50

        with place:
            model = ResNet50()
        sample = torch.zeros(32, 3, 224, 224)
        return _captured(model, sample, unit="image", **{"optimizer": "momentum", **more})
    from torch.utils.data import default_collate

    from hocket.workloads import build, settings_from_options

    made = build(settings_from_options(name, {"workers": 1}))
    dataset: Any = made.dataset()
    sample = default_collate([dataset[index] for index in range(4)])

    def loss(model: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return made.loss_fn(model(*given[:-1]), given[-1])

    return _captured(made.model(), tuple(sample), loss=loss, **more)
