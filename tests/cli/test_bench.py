import importlib.util
import json
import re
import statistics
import sys

import pytest
import torch
from typer.testing import CliRunner

from hocket.cli import main
from hocket.cli._bench import rank, tables
from hocket.cli._bench.world import run_world
from hocket.cli.bench import BenchError, _finish, bench, check_memory, parse_peers, parse_sizes

# allreduce and all-reduce are accepted too.
COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]


def _run(*arguments):
    return CliRunner().invoke(bench, list(arguments))


def test_sizes_are_binary_or_decimal_units_or_plain_bytes():
    assert parse_sizes("1KiB,64kib, 1MiB,2GiB,512,3kB") == [1024, 65536, 2**20, 2**31, 512, 3000]


@pytest.mark.parametrize("text", ["", "1QiB", "x", "0", "-4", "1 KiB 2"])
def test_a_bad_size_is_named(text):
    with pytest.raises(BenchError, match="is no size"):
        parse_sizes(text)


def test_sizes_are_refused_from_where_ranks_fill_the_memory(monkeypatch):
    monkeypatch.setattr("hocket.cli.bench.memory", lambda: (2**40, 2**30))
    check_memory([2**10, 2**28], 4)
    with pytest.raises(BenchError, match="256 MiB is too much: the ranks fill 5 vectors.* 1 GiB .*; take 204 MiB or"):
        check_memory([2**10, 2**28], 5)


def test_an_unknown_peer_is_named():
    assert parse_peers("gloo") == ["gloo"]
    assert parse_peers("") == []
    with pytest.raises(BenchError, match="'nccl' is unknown"):
        parse_peers("gloo,nccl")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["allreduce", "--sizes", "1QiB"], "is no size"),
        (["allreduce", "--sizes", "1KiB,1e9GiB"], "976,562 TiB is too much: the ranks fill 6 vectors"),
        (["allreduce", "--sizes", "1e9GiB", "--registered", "-n", "3"], "fill 12 vectors of that size at once"),
        (["reduce-scatter", "--sizes", "1e9GiB", "--against", ""], "fill 2 vectors of that size at once"),
        (["broadcast", "--sizes", "1e9GiB"], "fill 4 vectors of that size at once"),
        (["allreduce", "--against", "ucx"], "'ucx' is unknown"),
        (["step", "--models", "gpt"], "'gpt' is unknown"),
        (["allreduce", "-n", "0"], "Invalid value for '-n'"),
    ],
)
def test_bad_input_is_one_error_and_exit_code_2(arguments, text):
    result = _run(*arguments)
    assert result.exit_code == 2
    assert text in result.output


@pytest.mark.long
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_is_measured_beside_gloo(collective, tmp_path, request):
    if collective != COLLECTIVES[0]:  # whose ranks start as a user's do
        request.getfixturevalue("forked_world")
    out, markdown = tmp_path / "out.json", tmp_path / "results.md"
    result = _run(
        collective, "-n", "2", "--sizes", "1KiB,300KiB", "--rounds", "1", "--registered", "--json",
        "--out", str(out), "--markdown", str(markdown),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    rows = document["rows"]
    assert {(r["system"], r["registered"]) for r in rows} == {("hocket", False), ("hocket", True), ("gloo", False)}
    assert {r["nbytes"] for r in rows} == {1024, 300 * 1024}
    for row in rows:
        assert set(row) == {"system", "n", "nbytes", "registered", "median_s", "p90_s", "algbw_Bps", "busbw_Bps"}
        assert 0 < row["median_s"] <= row["p90_s"]
        assert row["algbw_Bps"] == pytest.approx(row["nbytes"] / row["median_s"])
    assert all(floor["floor_s"] > 0 for floor in document["floor"])
    assert document["machine"]["torch"] == torch.__version__
    assert "| 1 KiB | hocket |" in markdown.read_text()


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed (extra: bench)")
def test_open_mpi_takes_part_in_the_same_run(tmp_path):
    out = tmp_path / "out.json"
    result = _run("allreduce", "--sizes", "4KiB", "--against", "gloo,mpi", "--rounds", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert {r["system"] for r in json.loads(out.read_text())["rows"]} == {"hocket", "gloo", "mpi"}


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed (extra: bench)")
def test_an_mpi_that_cannot_be_loaded_is_one_error(monkeypatch):
    """Ranks ended in tracebacks of mpi4py's."""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(BenchError, match=r"cannot load an MPI \(.*MPI.*pip install"):
        parse_peers("gloo,mpi")


@pytest.mark.parametrize("count", [1, 2, 3, 11, 40])
def test_the_ninetieth_percentile_is_not_below_the_median(count):
    times = [float(time) for time in range(count)]
    assert rank.p90(times) >= statistics.median(times)
    assert sum(time <= rank.p90(times) for time in times) >= 0.9 * count


def test_a_file_that_cannot_be_written_is_an_error(tmp_path, capsys):
    for place in (tmp_path / "no" / "such" / "file", tmp_path):
        for words in (("allreduce", "--out"), ("allreduce", "--markdown"), ("step", "--out")):
            with pytest.raises(SystemExit) as ended:  # before anything is measured
                main(["bench", *words, str(place)])
            assert ended.value.code == 2
            assert f"hocket bench: {words[1]} {str(place)!r} cannot be written" in capsys.readouterr().err


def test_a_file_that_can_no_more_be_written_is_an_error(tmp_path, capsys):
    table = (["size"], [["1 KiB"]])
    for places in ((tmp_path / "no" / "file", None), (None, tmp_path / "no" / "file")):
        with pytest.raises(SystemExit) as ended:
            _finish({"rows": []}, "all_reduce", table, False, *places)
        assert ended.value.code == 2
        said = capsys.readouterr()
        assert "cannot be written" in said.err
        assert "1 KiB" in said.out  # what was measured is not lost


@pytest.mark.long
def test_a_measurement_that_takes_too_long_is_given_up():
    result = _run("allreduce", "--sizes", "64MiB", "--rounds", "1000", "--timeout", "4")
    assert result.exit_code == 2
    assert "did not end within 4 s" in result.output


def test_each_rank_of_a_job_does_not_measure_its_own_host(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(BenchError, match="this is rank 1 of a job of 4, .* cluster probe` measures between hosts"):
        run_world("hocket.cli._bench.collective", {}, 2, what="all_reduce", mpi=False, timeout_s=1.0)


@pytest.mark.long
def test_it_is_told_what_is_being_measured():
    result = _run("allreduce", "--sizes", "1KiB,64KiB", "--rounds", "1", "--against", "", "--json")
    assert result.exit_code == 0, result.output
    assert re.findall(r"measuring all_reduce on 2 ranks: (\S+ \S+)", result.output) == ["1 KiB", "64 KiB"]


def test_tables_compare_with_every_peer_and_the_floor():
    row = {"n": 2, "nbytes": 2**20, "p90_s": 2e-3, "algbw_Bps": 1e9, "busbw_Bps": 1e9}
    result = {
        "rows": [
            {**row, "system": "hocket", "registered": False, "median_s": 1e-3},
            {**row, "system": "hocket", "registered": True, "median_s": 5e-4},
            {**row, "system": "gloo", "registered": False, "median_s": 4e-3},
        ],
        "floor": [{"nbytes": 2**20, "floor_s": 4e-4}],
    }
    headers, cells = tables.collective_cells(result)
    assert headers[-2:] == ["gloo / this", "floor"]
    assert [c[-2] for c in cells] == ["4.00x", "8.00x", "1.00x"]
    assert cells[1][-1] == "80% of 400.0 us"
    assert cells[0][0] == "1 MiB"


@pytest.mark.parametrize(
    ("samples", "kept"),
    [
        ([(1.0, 0.0), (9.0, 1e-3), (2.0, 5e-6), (3.0, 0.0)], [1.0, 2.0, 3.0]),
        ([(1.0, 3e-3), (2.0, 1e-3), (3.0, 2e-3)], [2.0, 3.0]),
    ],
)
def test_samples_that_a_rank_began_late_do_not_count(monkeypatch, samples, kept):
    monkeypatch.setattr(rank.dist, "all_reduce", lambda tensor, operator: None)
    assert rank.Rank.slowest(object.__new__(rank.Rank), samples) == kept
