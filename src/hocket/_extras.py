"""Packages that Hocket uses where they are installed: which extra of Hocket brings each, and how that is said."""

import sys
from importlib.util import find_spec

# By module: the project as its users know it, and the extra in pyproject.toml.
_EXTRAS = {
    "PIL": ("Pillow", "workloads"),
    "skimage": ("scikit-image", "workloads"),
    "sklearn": ("scikit-learn", "workloads"),
    "pyroute2": ("pyroute2", "fabric"),
    "mpi4py": ("mpi4py", "bench"),
    "keras": ("Keras 3", "keras"),
    "tensorboard": ("TensorBoard", "tensorboard"),
}


class MissingExtraError(ModuleNotFoundError):
    """A package that Hocket does not install by itself is missing; the message has the command that installs it."""


def require(user: str, *modules: str) -> None:
    """Make sure that optional packages are installed, without importing them.

    Args:
        user: What needs them, as the subject of a sentence: "the workload edsr".
        modules: Names of modules in `_EXTRAS`, all of one extra.

    Raises:
        MissingExtraError: At least one is not installed.
    """
    missing = [module for module in modules if not _is_installed(module)]
    if missing:
        projects = " and ".join(_EXTRAS[module][0] for module in missing)
        verb = "is" if len(missing) == 1 else "are"
        command = f'pip install "hocket[{_EXTRAS[missing[0]][1]}]"'
        raise MissingExtraError(f"{user} needs {projects}, which {verb} not installed: {command}", name=missing[0])


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None  # a test or a program has put None in its place
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
