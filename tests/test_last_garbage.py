"""The last collection of garbage: left out, but where a library counts what is left."""

import subprocess
import sys
import textwrap

import pytest

_PROGRAM = """
import atexit, ctypes, gc
atexit.register(lambda: print(gc.get_freeze_count() > 1_000))  # runs after ours
from hocket._last_garbage import leave_out_last_collection
leave_out_last_collection()
python = ctypes.pythonapi
python.PyInterpreterState_Get.restype = ctypes.c_void_p
python.PyInterpreterState_GetDict.restype = ctypes.c_void_p
python.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
names = ctypes.cast(python.PyInterpreterState_GetDict(python.PyInterpreterState_Get()), ctypes.py_object).value
names[{name!r}] = None
gc.freeze()
"""


@pytest.mark.parametrize(("name", "left_out"), [("__nb_internals_v17_stable___", False), ("something else", True)])
def test_it_takes_place_where_nanobind_would_tell_of_what_is_left(name: str, left_out: bool) -> None:
    command = [sys.executable, "-c", textwrap.dedent(_PROGRAM).format(name=name)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (ran.stdout, ran.stderr) == (f"{left_out}\n", "")
