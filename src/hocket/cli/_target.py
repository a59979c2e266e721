"""What a user names when a workload is asked for: a shape, a bundled workload, a script's model, or a file."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.workload import Workload

TARGET_HELP = (
    "gpt-175b, transformer:hidden=4096,layers=32,heads=32, a bundled workload (edsr, resnet50), train.py:build, or a "
    "workload's file."
)


class TargetError(ValueError):
    """What was named is no workload; the message says what to write."""


def resolve_target(
    target: str,
    *,
    batch: int | None = None,
    device: str | None = None,
    optimizer: str = "adam",
    degrees: Sequence[int] = (2, 4, 8),
) -> Workload:
    """Return the workload that a user means.

    Args:
        target: See `TARGET_HELP`. Of `train.py:build` the function returns the model and a sample, and perhaps a loss.
        batch: Samples of the captured batch, for bundled workloads.
        device: Where models are captured: "meta" (no times; the default for bundled workloads), "cpu", "cuda".
        optimizer: See `hocket.workload.capture`.
        degrees: See there.

    Raises:
        TargetError: nothing of this name is there, or the function gives something else.
        WorkloadError: it cannot be captured.
    """
    from hocket.workload import SHAPES, named_transformer, parse

    name = target.lower()
    if name.removeprefix("gpt-") in SHAPES or name.startswith("gpt-"):
        return named_transformer(target)
    if name.startswith("transformer:"):
        return _shape(target.partition(":")[2])
    if ".py:" in target:
        return _function(target, device, optimizer, degrees)
    path = Path(target)
    if path.is_file():
        return parse(path.read_text(encoding="utf-8"))
    from hocket.workloads import names

    if name in names():
        return _bundled(name, batch, device or "meta", optimizer, degrees)
    known = ", ".join([*names(), *(f"gpt-{one}" for one in SHAPES)])
    raise TargetError(f"there is no workload {target!r}; there are {known}, or write train.py:build, or a file's path")


def _shape(text: str) -> Workload:
    from hocket.workload import transformer

    values: dict[str, int] = {}
    for word in text.split(","):
        key, equals, number = word.partition("=")
        if not equals or key not in ("hidden", "layers", "heads", "vocabulary", "sequence") or not number.isdecimal():
            raise TargetError(f"transformer: {word!r}; write hidden=4096,layers=32,heads=32[,vocabulary=][,sequence=]")
        values[key] = int(number)
    missing = [key for key in ("hidden", "layers", "heads") if key not in values]
    if missing:
        raise TargetError(f"transformer: {missing[0]} is missing; write transformer:hidden=4096,layers=32,heads=32")
    hidden, layers, heads = values.pop("hidden"), values.pop("layers"), values.pop("heads")
    return transformer(hidden, layers, heads, **values)  # type: ignore[arg-type]


def _function(target: str, device: str | None, optimizer: str, degrees: Sequence[int]) -> Workload:
    from torch import nn

    from hocket.parallel.partition import DRY_RUNS
    from hocket.parallel.pipeline import in_steps
    from hocket.workload import capture

    file, _, name = target.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise TargetError(f"{target}: there is no file {file!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise TargetError(f"{target}: {file} has no function {name!r}")
    given = function()
    if not isinstance(given, tuple) or len(given) not in (2, 3) or not isinstance(given[0], nn.Module):
        raise TargetError(f"{target}: {name}() must return (model, sample) or (model, sample, loss), not {type(given)}")
    loss = given[2] if len(given) == 3 else None
    model, sample = given[:2]
    found = capture(
        model, sample, loss=loss, name=path.stem, device=device, optimizer=optimizer, degrees=degrees, dry_runs=DRY_RUNS
    )
    if not found.measured or device is not None or loss is not None:  # measured here, and a sample is what it takes
        return found
    return in_steps(found, model, sample if isinstance(sample, tuple | list) else (sample,))


def _bundled(name: str, batch: int | None, device: str, optimizer: str, degrees: Sequence[int]) -> Workload:
    import torch

    from hocket.parallel.partition import DRY_RUNS
    from hocket.workload import capture

    place = torch.device(device)
    model: torch.nn.Module
    more: dict[str, Any] = {"device": device, "name": name, "degrees": degrees, "dry_runs": DRY_RUNS}
    if name == "edsr":  # the paper's full model, magnifying by 4, patches of 48 pixels, 16 at a time
        from hocket.workloads.edsr.model import EDSR

        with place:
            model = EDSR("full", 4)
        patches = torch.zeros(batch or 16, 3, 48, 48)
        return capture(model, patches, unit="image", **more)
    if name == "resnet50":
        from hocket.workloads.resnet50.model import ResNet50

        with place:
            model = ResNet50()
        sample = torch.zeros(batch or 32, 3, 224, 224)
        return capture(
            model,
            sample,
            device=device,
            name=name,
            optimizer="momentum",
            unit="image",
            degrees=degrees,
            dry_runs=DRY_RUNS,
        )
    from torch.utils.data import default_collate

    from hocket.workloads import build, settings_from_options

    made = build(settings_from_options(name, {"workers": 1}))
    dataset: Any = made.dataset()
    sample = default_collate([dataset[index] for index in range(batch or 4)])

    def loss(model: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return made.loss_fn(model(*given[:-1]), given[-1])

    return capture(made.model(), tuple(sample), loss=loss, optimizer=optimizer, **more)
