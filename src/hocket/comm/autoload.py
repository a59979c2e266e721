"""Registers the backend "hocket" with torch; torch calls `register` at import through the package's entry point."""

from typing import Any


def register() -> None:
    """Make `init_process_group("hocket")` work; do nothing if it does already, and never raise.

    An exception here would break `import torch` for every program of the environment.
    """
    try:
        from torch.distributed import Backend, is_available

        if is_available() and not hasattr(Backend, "HOCKET"):
            Backend.register_backend("hocket", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:  # a torch without distributed, or one too old: the backend is simply not there
        return


def _create(options: Any, backend_options: Any) -> Any:
    from .group import HocketGroup

    return HocketGroup(options)
