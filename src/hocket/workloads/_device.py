"""Where a worker computes. torch is imported when it is first needed: the command line checks a run before that."""

from typing import TYPE_CHECKING

from hocket.workloads._settings import SettingsError

if TYPE_CHECKING:
    import torch


def check_device(asked: str) -> None:
    """Refuse a device that this machine lacks.

    Raises:
        SettingsError: If a GPU was asked for and torch finds none.
    """
    if asked != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise SettingsError(f"--device {asked}: torch {torch.__version__} finds no GPU here; use --device cpu")


def device_of_worker(asked: str) -> "torch.device":
    """Return this worker's device: workers go round the GPUs of a host, and share them when there are fewer."""
    import torch

    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    from hocket.parallel.mesh import own_gpu

    return own_gpu()
