"""The pages hang together: links, paths and code in them are real, and every page can be reached."""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import get_origin

import pytest

from hocket.cli import main
from hocket.testing import deadline

from .processes import script_output, script_outputs

CHECKOUT = Path(__file__).parents[1]
DOCS = CHECKOUT / "docs"
PAGES = sorted(
    [*CHECKOUT.glob("*.md"), *DOCS.glob("*.md"), *(CHECKOUT / "benchmarks").glob("*.md"), *CHECKOUT.glob("src/**/*.md")]
)
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", ".ci")
DATED = re.compile(r"\d{4}-\d\d-\d\d-")  # what was measured then may name files that were there then


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[Path, str]]:
    """The files that a page links to, with the places in them."""
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    inside = [target for target in found if not re.match(r"[a-z]+:", target)]
    split = [target.partition("#") for target in inside]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in split]


def code(page: Path) -> str:
    """The Python blocks of a page, one after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        assert path.exists(), f"{path} is not there"
        assert not anchor or anchor in anchors(path), f"{path.name} has no heading for #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_path_that_is_named_exists(page: Path) -> None:
    if DATED.match(page.name) or page.name == "CHANGELOG.md":
        pytest.skip("tells what was")
    named = re.findall(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*)`", page.read_text())
    missing = [path for path in named if not re.match(r".*[A-Z]{4}", path) and not (CHECKOUT / path).exists()]
    assert missing == []


def test_every_page_is_reached_from_the_index() -> None:
    reached, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [path for path, _ in links(page)]
    assert set(DOCS.glob("*.md")) - reached == set()
    direct = {path for path, _ in links(DOCS / "index.md")}
    assert set(DOCS.glob("*.md")) - direct - {DOCS / "index.md"} == set()
    assert DOCS / "index.md" in {path for path, _ in links(CHECKOUT / "README.md")}


def test_no_row_and_no_paragraph_stands_twice() -> None:
    for page in set(DOCS.glob("*.md")) - {DOCS / "api.md"}:  # two packages may offer one name
        paragraphs = without_code(page.read_text()).split("\n\n")
        lines = [
            line
            for line in page.read_text().splitlines()
            if len(line) > 60 and not re.match(r"\|[^|]+\|[^|]+\|[^|]+\|[^|]+\|", line)
        ]
        remedies = [line.split("|")[1] for line in lines if line.startswith("| ") and len(line.split("|")[1]) > 60]
        for kind in (paragraphs, lines, remedies):
            twice = {text for text in kind if len(text) > 60 and kind.count(text) > 1}
            assert twice == set(), page.name


def test_changes_that_are_written_down_apply_and_touch_only_what_they_change() -> None:
    changes = sorted((DOCS / "changes").glob("*.diff"))
    assert len(changes) == 3
    for change in changes:
        checked = subprocess.run(["git", "apply", "--check", change], cwd=CHECKOUT, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
        files = re.split(r"^diff --git ", change.read_text(), flags=re.MULTILINE)[1:]
        assert all("\n@@ " in file for file in files), "an empty file of another change is in it"


@pytest.mark.long
def test_the_tests_of_changes_that_are_written_down_pass(tmp_path: Path) -> None:
    for name in ("src", "tests", "docs", "pyproject.toml"):
        copy = shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy
        copy(CHECKOUT / name, tmp_path / name)
    tests = []
    for change in sorted((DOCS / "changes").glob("*.diff")):  # none touches what another does
        subprocess.run(["git", "apply", change], cwd=tmp_path, check=True)
        own = re.findall(r"^\+\+\+ b/(tests/.*/test_\w+\.py)$", change.read_text(), re.MULTILINE)
        assert own, change
        tests += own
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "tests/test_golden.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "src")}, capture_output=True, text=True,
        timeout=deadline(240),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tutorial_is_the_example() -> None:
    example = (CHECKOUT / "examples" / "trainer.py").read_text()
    for block in re.findall(r"^```python\n(.*?)^```", (DOCS / "tutorial.md").read_text(), re.DOTALL | re.MULTILINE)[:2]:
        for part in block.split("\n\n\n")[1:] or [block]:
            assert part.strip() in example
    assert "trainer = hocket.Trainer(model, loss_fn, optimizer, sample=sample)" in example


def test_the_plan_that_the_readme_shows_is_the_one_that_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of it is measured, so it is the same everywhere."""
    readme = (CHECKOUT / "README.md").read_text()
    ((words, shown),) = re.findall(r"^\$ hocket (plan .*)\n((?:.+\n)+?)```", readme, re.MULTILINE)
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code in (0, None)
    assert " ".join(shown.split()) in " ".join(capsys.readouterr().out.split())


@pytest.mark.timeout(240)
def test_the_tutorial_runs(tmp_path: Path) -> None:
    (tmp_path / "tutorial.py").write_text(code(DOCS / "tutorial.md").replace("rows(6400", "rows(1280"))
    shown = script_output(tmp_path / "tutorial.py", cwd=tmp_path)
    assert re.search(r"epoch 1: loss [\d.]+, [\d.]+% of the test rows right", shown)
    assert (tmp_path / "checkpoint").is_dir()


def test_the_page_on_checkpoints_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = DOCS / "checkpoints.md"
    (tmp_path / "page.py").write_text(code(page))
    script_output(tmp_path / "page.py", cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    verify, export = (command.split() for command in re.findall(r"^\$ hocket (.*)$", page.read_text(), re.MULTILINE))

    def hocket(words: list[str]) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        return ended.value.code, *capsys.readouterr()

    status, verified, _ = hocket(verify)
    assert status == 0
    assert re.fullmatch(r"checkpoint is whole: 2 files of [\d.]+ \w+ have the checksums .*\n", verified)
    assert hocket(export)[:2] == (0, "exported has model.safetensors\n")
    (tmp_path / "checkpoint" / "__0_0.distcp").write_bytes(b"damaged")
    status, _, said = hocket(verify)
    assert status == 2
    assert "is damaged: __0_0.distcp has 7 bytes of" in said


@pytest.mark.long
@pytest.mark.timeout(400)
def test_your_script_prints_the_same_on_one_rank_and_on_two_and_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "your_script.py"
    page = (DOCS / "your-script.md").read_text()
    script.write_text(code(DOCS / "your-script.md"))
    one = script_output(script, "one", "4", cwd=tmp_path)
    assert one.count("epoch") == 4
    assert one in page
    assert script_outputs(script, "two", "4", n=2, cwd=tmp_path) == [one, ""]
    assert "".join(script_output(script, "stopped", epochs, n=2, cwd=tmp_path) for epochs in ("2", "4")) == one
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"best.pt", "last.pt"}
    (command,) = re.findall(r"^\$ hocket (check your_script.py .*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert not ended.value.code
    assert "Equivalent: 16 losses agree" in capfd.readouterr().out


@pytest.mark.long
def test_fine_tuning_loses_the_same_without_the_lines_of_hocket_and_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = code(DOCS / "losses.md")
    own = [line for line in script.splitlines() if "hocket" in line]
    assert all(line.endswith("# hocket") for line in own)
    (tmp_path / "plain.py").write_text("\n".join(line for line in script.splitlines() if line not in own))
    (tmp_path / "tuned.py").write_text(script)
    one = [float(line.split()[1]) for line in script_output(tmp_path / "plain.py").splitlines()]
    two = script_output(tmp_path / "tuned.py", n=2)
    assert len(one) == 12
    assert [float(line.split()[1]) for line in two.splitlines()] == pytest.approx(one, rel=1e-6)


# --- docs/api.md ------------------------------------------------------------------------------------------------------

# In the order in which a user meets them.
PACKAGES = (
    "hocket",
    "hocket.keras",
    "hocket.optim",
    "hocket.launch",
    "hocket.planner",
    "hocket.workload",
    "hocket.calibrate",
    "hocket.cluster",
    "hocket.simulate",
    "hocket.timeline",
    "hocket.profile",
    "hocket.schedule",
    "hocket.algorithms",
    "hocket.fabric",
    "hocket.comm",
    "hocket.testing",
    "hocket.units",
)


def summary(value: object) -> str:
    """The first sentence of a docstring; of a value the type."""
    if get_origin(value) is Callable:
        return "The type of a function"
    if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        return f"a `{type(value).__name__}`"
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0].rstrip(".").replace("|", "\\|")


def api_page() -> str:
    parts = [
        "# Python names\n\nWhat each package offers, with the first sentence of its docstring; `help(name)` has the "
        "rest.\n"
        "`python -m pytest tests/test_docs.py --golden-update` writes this page.\n"
    ]
    for name in PACKAGES:
        package = importlib.import_module(name)
        rows = [
            f"| `{public}` | {summary(getattr(package, public))} |"
            for public in sorted(package.__all__, key=str.lower)
            if not public.startswith("__")
        ]
        parts.append(f"## `{name}`\n\n{summary(package)}.\n\n| name | |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def test_the_page_of_python_names_is_that_of_the_packages(request: pytest.FixtureRequest) -> None:
    page = DOCS / "api.md"
    if request.config.getoption("--golden-update"):
        page.write_text(api_page())
    assert page.read_text() == api_page(), "write it anew: python -m pytest tests/test_docs.py --golden-update"
