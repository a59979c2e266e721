"""The collection of garbage with which Python ends, left out where all memory goes back to the system anyway."""

import atexit
import gc
from typing import Final

_NANOBIND: Final = "__nb_internals"  # begins the name by which a library made with nanobind finds the others


def leave_out_last_collection() -> None:
    """Have Python not look through all modules when this process ends: 0.4 s where torch is loaded.

    It does all the same where a library made with nanobind is loaded (Triton, in torch's builds for GPUs): that one
    prints a line for each type and function which is then left, and takes them for a fault.
    """
    atexit.register(_leave_out)


def _leave_out() -> None:
    if _nanobind_counts():
        gc.unfreeze()  # what a program has set aside itself would be told of, too
    else:
        gc.freeze()


def _nanobind_counts() -> bool:
    import ctypes  # here, since `hocket --help` needs it for nothing else

    python = ctypes.pythonapi
    python.PyInterpreterState_Get.restype = ctypes.c_void_p
    python.PyInterpreterState_GetDict.restype = ctypes.c_void_p  # a borrowed reference, which py_object would give back
    python.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
    names = ctypes.cast(python.PyInterpreterState_GetDict(python.PyInterpreterState_Get()), ctypes.py_object).value
    return any(isinstance(name, str) and name.startswith(_NANOBIND) for name in names)
