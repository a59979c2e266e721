"""`import hocket`: what it offers, what it costs, and what it leaves alone."""

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import hocket
from hocket.testing import deadline


def run_python(code: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=deadline(60))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.flaky(reruns=2)  # it measures, on a machine that may be busy
def test_import_costs_less_than_50_ms() -> None:
    # Timed inside the process, so that Python's own start does not count; one of several is enough, since other
    # processes can only make it longer.
    code = "from tests.pace import timed; print(timed(lambda: __import__('hocket'))[1])"
    assert any(float(run_python(code)) < 0.050 for _ in range(7))


def test_import_loads_no_third_party_package() -> None:
    loaded = run_python("import sys; before = set(sys.modules); import hocket; print(*(set(sys.modules) - before))")
    roots = {name.partition(".")[0] for name in loaded.split()}
    assert roots - set(sys.stdlib_module_names) == {"hocket"}


def test_what_every_rank_imports_loads_nothing_that_few_need() -> None:
    """Torch's compiler, its checkpoints and DTensor, scipy and rich took as long as torch itself, in every rank."""
    code = "import sys, hocket.parallel, hocket.profile, hocket.workload, hocket.calibrate; print(*sys.modules)"
    heavy = {"torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.pipelining"}
    heavy |= {"torch.distributed.tensor", "sympy", "scipy", "networkx", "rich", "pandas", "matplotlib", "keras"}
    assert not heavy & set(run_python(code).split())


def test_all_lists_what_type_checkers_see() -> None:
    tree = ast.parse(Path(hocket.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {
        alias.asname or alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen | {"__version__"} == set(hocket.__all__)
    assert list(hocket.__all__) == sorted(hocket.__all__)
    assert list(hocket.__all__) == dir(hocket)


@pytest.mark.parametrize("name", sorted(hocket._PACKAGES))
def test_every_public_package_loads_when_asked_for(name: str) -> None:
    assert getattr(hocket, name) is importlib.import_module(f"hocket.{name}")


@pytest.mark.parametrize("name", sorted(hocket._HOMES))
def test_every_public_name_is_its_package_s_own(name: str) -> None:
    home = importlib.import_module(hocket._HOMES[name])
    assert name in home.__all__
    assert getattr(hocket, name) is getattr(home, name)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'hocket' has no attribute 'distribut'"):
        _ = hocket.distribut


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("hocket") == hocket.__version__


STAND_IN_REGISTER = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
autoload = types.ModuleType("hocket.comm.autoload")
def register():
    {body}
autoload.register = register
sys.modules["hocket.comm.autoload"] = autoload
# The parent package must not be loaded for real: this torch is hollow.
sys.modules["hocket.comm"] = types.ModuleType("hocket.comm")
import hocket
"""


def test_backend_is_registered_with_a_torch_that_was_there_first() -> None:
    assert run_python(STAND_IN_REGISTER.format(body="print('registered')")) == "registered"


def test_a_failing_registration_does_not_fail_the_import() -> None:
    code = STAND_IN_REGISTER.format(body="raise RuntimeError('no shared memory')") + "print(hocket.__version__)"
    assert run_python(code, "-W", "ignore") == hocket.__version__
    with pytest.raises(AssertionError, match="no shared memory"):
        run_python(code, "-W", "error")
