"""Constants of a cluster, fitted to a sweep."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hocket import cluster
from hocket.cli import main
from hocket.planner import Constants, Network, PlanError, fit_sweep, read_sweep
from hocket.planner.step._interval import spread
from hocket.planner.step._prediction import StepParts

SIZES = [2**power for power in range(16, 34, 3)]


@pytest.mark.parametrize(("ranks", "name"), [(8, "inside_share"), (64, "network_share")])
def test_a_sweep_that_the_formulas_made_gives_their_constants(ranks: int, name: str) -> None:
    where = Network.of(cluster.load("h100-like"))
    truth = dataclasses.replace(Constants.of(where.reached), collective_s=35e-6, **{name: 0.55})
    sweep = {n: where.collective("all_reduce", float(n), ranks, 1, truth).seconds for n in SIZES}
    found, error = fit_sweep(sweep, where, kind="all_reduce", ranks=ranks)
    assert getattr(found, name) == pytest.approx(0.55, rel=0.01)
    assert found.collective_s == pytest.approx(35e-6, rel=0.05)
    assert found.swept == ranks
    assert (found.basis, found.fitted_workers) == ("assumed", 0)  # the sweep says nothing of computation
    assert error < 0.01


def test_what_was_fitted_to_a_tapered_network_gives_the_sweep_again() -> None:
    """On a cluster that says nothing of what is reached, as it is; and then written with what was found."""
    words = {"topology": "fattree", "k": 4, "taper": 8.0}
    where = Network.of(cluster.build(words))
    truth = dataclasses.replace(Constants.of({}), network_share=0.1)
    sweep = {n: where.collective("all_reduce", float(n), 16, 1, truth).seconds for n in SIZES}
    found, _ = fit_sweep(sweep, where, kind="all_reduce", ranks=16)
    reached = {"network_share": found.network_share, "collective_s": found.collective_s, "swept": 16}
    again = Network.of(cluster.build({**words, "reached": reached}))
    for nbytes, seconds in sweep.items():
        assert again.collective("all_reduce", float(nbytes), 16, 1, found).seconds == pytest.approx(seconds, rel=0.1)


NCCL = """\
# out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    101.9   10.29   18.01      0
    16777216       4194304     float     sum      -1    276.6   60.66  106.15      0
  1073741824     268435456     float     sum      -1   8203.9  130.88  229.04      0
 17179869184    4294967296     float     sum      -1 127997.0  134.22  234.89      0
"""


# As the releases before 2.12 print it: no column of a root.
OLD = """\
#   Rank  0 Pid  12345 on  host0 device  0 [0x07] Tesla V100-SXM2-16GB
#   Rank  1 Pid  12345 on  host0 device  1 [0x0a] Tesla V100-SXM2-16GB
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2   float     sum    43.10    0.00    0.00  1e-07    43.40    0.00    0.00  1e-07
     1048576        262144   float     sum    119.3    8.79   15.38  2e-07    118.0    8.89   15.55  2e-07
     2097152        524288   float     sum    158.1   13.26   23.21  2e-07    157.2   13.34   23.35  2e-07
   134217728      33554432   float     sum   2009.5   66.79  116.88  2e-07   2011.2   66.74  116.79  2e-07
# Avg bus bandwidth    : 53.5
"""
GATHER = """\
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
     1048576         32768   float    119.3    8.79   15.38  0e+00    118.0    8.89   15.55  0e+00
     2097152         65536   float    158.1   13.26   23.21  0e+00    157.2   13.34   23.35  0e+00
   134217728       4194304   float   2009.5   66.79  116.88  0e+00   2011.2   66.74  116.79  0e+00
"""


@pytest.mark.parametrize("text", [OLD, GATHER], ids=["no root", "no operation"])
def test_every_version_of_nccl_tests_has_its_time_found(text: str) -> None:
    """Versions have other columns before the time; the rate, which is behind it, is no time."""
    without_header = "\n".join(
        line for line in text.splitlines() if not line.startswith("#") and line.split()[0] != "8"
    )
    tagged = "\n".join(f"[1,0]<stdout>:{line}" for line in text.splitlines())
    labelled = "\n".join(f"0: {line}" for line in text.splitlines())
    newer = "\n".join(f"[prterun-host-1@1,0]<stdout>: {line}" for line in text.splitlines())  # Open MPI 5
    starts = "[default0]:", "gpu-1.x: ", "[pod/a/b] "
    others = ("\n".join(start + line for line in text.splitlines()) for start in starts)
    for one in (text, without_header, tagged, labelled, newer, *others):
        assert read_sweep(one)[134217728] == pytest.approx(2009.5e-6)
        assert read_sweep(one)[2097152] == pytest.approx(158.1e-6)


def test_several_runs_count_as_their_median() -> None:
    """A disturbed run after others does not take their place."""
    assert read_sweep(OLD + OLD + OLD.replace("2009.5   66.79", "9999.0   13.42"))[134217728] == pytest.approx(
        2009.5e-6
    )


def test_sizes_with_fewer_bytes_than_ranks_are_left_out() -> None:
    """nccl-tests prints them as 0 bytes."""
    row = "           0             0     float     sum      -1     0.15    0.00    0.00      0\n"
    assert read_sweep(NCCL.replace("     1048576 ", row + "     1048576 ", 1)) == read_sweep(NCCL)


@pytest.mark.parametrize(
    "text",
    ["bytes,us\n1024,1.5\n2048,2\n1MiB,3\n", "us,bytes\n1.5,1024\n2,2048\n3,1048576\n",
     "bytes,seconds\n1024,1.5e-6\n2048,2e-6\n1048576,3e-6\n"],
)  # fmt: skip
def test_a_header_says_which_column_is_what_in_which_unit(text: str) -> None:
    assert read_sweep(text) == pytest.approx({1024: 1.5e-6, 2048: 2e-6, 2**20: 3e-6})


def test_what_bench_prints_is_read() -> None:
    rows = [
        {"system": system, "n": 2, "nbytes": n, "registered": False, "median_s": n * scale}
        for n in (1024, 65536, 2**20)
        for system, scale in (("hocket", 1e-9), ("gloo", 1e-6))
    ]
    text = json.dumps({"collective": "all_reduce", "rows": rows, "floor": []})
    assert read_sweep(text, ranks=2) == pytest.approx({1024: 1.024e-6, 65536: 65.536e-6, 2**20: 1048.576e-6})
    with pytest.raises(PlanError, match="of 2 ranks, not of 4"):
        read_sweep(text, ranks=4)
    with pytest.raises(PlanError, match="of all_reduce, not of all_gather"):
        read_sweep(text, kind="all_gather")


@pytest.mark.parametrize(
    ("name", "kind", "blocks", "columns"),
    [("Allreduce", "all_reduce", 1, ""), ("Reduce_scatter", "reduce_scatter", 1, ""),
     ("Allgather", "all_gather", 8, ""),
     ("All-to-All Personalized Exchange", "all_to_all", 8, " 0.9 9.9 1000 1.5 1.6 1.7")],
)  # fmt: skip
def test_sizes_of_osu_are_those_of_its_collective(name: str, kind: str, blocks: int, columns: str) -> None:
    """Of some its size is one rank's block, and what links reach had come out eight times too small."""
    head = f"\n# OSU MPI-CUDA {name} Latency Test v7.3\n# Datatype: MPI_CHAR.\n# Size       Avg Latency(us)\n"
    text = head + "".join(f"{2**at}    {at}.5{columns}\n" for at in (10, 16, 20))
    assert read_sweep(text, kind=kind, ranks=8) == {blocks * 2**at: (at + 0.5) * 1e-6 for at in (10, 16, 20)}
    if blocks > 1:
        with pytest.raises(PlanError, match="one rank's block"):
            read_sweep(text)
    with pytest.raises(PlanError, match="of Bandwidth, not of"):
        read_sweep(text.replace(f"{name} Latency", "Bandwidth"), kind=kind, ranks=8)


def test_columns_of_a_table_are_found_by_their_names() -> None:
    text = "count,us,bytes\n1,9,1024\n2,19,2048\n3,29,4096\n"
    assert read_sweep(text) == pytest.approx({1024: 9e-6, 2048: 19e-6, 4096: 29e-6})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1024,inf\n2048,2\n4096,3\n", "no measurement"),
        ("1024,1\n2048,-2\n4096,3\n", "no measurement"),
        ("bytes,hours\n1024,1\n2048,2\n4096,3\n", "no unit of time"),
        ("1024,256,9\n2048,512,19\n4096,1024,29\n", "no header says"),
        (OLD.replace("158.1   13.26", "185.1   13.26"), "no column of microseconds"),
        ("# Collective test starting: all_gather_perf\n" + GATHER, "of all_gather, not of all_reduce"),
        (OLD, "of 2 ranks, not of 8"),
        ('{"rows": [{}]}', "no measurement of `hocket bench`"),
        (NCCL + "# Out of bounds values : 3 FAILED\n", "wrong results"),
        (NCCL.replace("134.22  234.89      0", "134.22  234.89      7"), "wrong results"),
        (
            f"# Collective test starting: all_gather_perf\n{GATHER}# Collective test starting: all_reduce_perf\n{OLD}",
            "runs of all_gather and of all_reduce",
        ),
        (OLD + OLD.replace("#   Rank  1 Pid", "#"), "runs of 2 ranks and of 1 ranks"),
        (NCCL.replace("18.01      0", "18.01      0  9").replace("#wrong", "#wrong #wrong"), "wrong results"),
        (NCCL.replace("106.15", " 53.08"), "busbw is 1.75 of algbw"),  # an all-gather's, by a version that names none
        (NCCL.replace("234.89", "260.05"), "busbw is 1.75 of algbw"),  # of 32 ranks
    ],
)
def test_what_is_no_sweep_of_this_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        read_sweep(text, kind="all_reduce", ranks=2 if "column" in said else 8)


@pytest.mark.parametrize(("scale", "said"), [(1e-6, "at the least"), (1e6, "no share of its links")])
def test_times_that_the_links_cannot_have_taken_are_refused(scale: float, said: str) -> None:
    """Seconds for microseconds, as an example."""
    where = Network.of(cluster.load("selene-like"))
    sweep = {n: seconds * scale for n, seconds in read_sweep(NCCL).items()}
    with pytest.raises(PlanError, match=said):
        fit_sweep(sweep, where, kind="all_reduce", ranks=8)


def test_a_disturbed_size_moves_little_and_a_sweep_that_is_missed_makes_nothing_surer() -> None:
    """One size of six that took ten times as long had the fit refused, or what the links reach moved by a quarter."""
    where = Network.of(cluster.load("h100-like"))
    truth = dataclasses.replace(Constants.of(where.reached), collective_s=35e-6, inside_share=0.55)
    sweep = {n: where.collective("all_reduce", float(n), 8, 1, truth).seconds for n in SIZES}
    disturbed = sweep | {SIZES[2]: 10 * sweep[SIZES[2]]}
    found, _ = fit_sweep(disturbed, where, kind="all_reduce", ranks=8)
    assert found.inside_share == pytest.approx(0.55, rel=0.1)
    assert found.swept == 8
    noisy = {n: seconds * (1.4 if at % 2 else 0.7) for at, (n, seconds) in enumerate(sweep.items())}
    found, error = fit_sweep(noisy, where, kind="all_reduce", ranks=8)
    assert error > 0.2
    assert found.swept == 0
    with pytest.raises(PlanError, match="at the least"):  # a file that was cut off in its last number
        fit_sweep(sweep | {SIZES[-1]: 6e-6}, where, kind="all_reduce", ranks=8)


@pytest.mark.parametrize("largest", [64, 2**16, 2**20])
def test_sizes_that_are_nothing_but_starts_tell_nothing_of_the_links(largest: int) -> None:
    """They had been said to reach all of the data sheet: any share explains such times."""
    where = Network.of(cluster.load("h100-like"))
    truth = dataclasses.replace(Constants.of(where.reached), collective_s=30e-6)
    sizes = [largest // 8, largest // 4, largest // 2, largest]
    sweep = {n: where.collective("all_reduce", float(n), 8, 1, truth).seconds for n in sizes}
    with pytest.raises(PlanError, match="measure larger sizes"):
        fit_sweep(sweep, where, kind="all_reduce", ranks=8)


def test_sizes_in_which_a_start_is_lost_leave_it_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A nanosecond had come out, of 1 to 4 GiB with a percent of noise."""
    where = Network.of(cluster.load("h100-like"))
    truth = dataclasses.replace(Constants.of(where.reached), collective_s=30e-6, inside_share=0.7)
    noise = {2**30: 0.985, 2**31: 1.01, 2**32: 1.0}
    sweep = {n: where.collective("all_reduce", float(n), 8, 1, truth).seconds * off for n, off in noise.items()}
    found, _ = fit_sweep(sweep, where, kind="all_reduce", ranks=8)
    assert found.collective_s == Constants.of(where.reached).collective_s
    assert found.inside_share == pytest.approx(0.7, rel=0.02)
    (tmp_path / "sweep.csv").write_text("bytes,seconds\n" + "".join(f"{n},{seconds}\n" for n, seconds in sweep.items()))
    with pytest.raises(SystemExit, match="0"):
        main(["cluster", "fit", "h100-like", str(tmp_path / "sweep.csv"), "-n", "8", "--json"])
    assert list(json.loads(capsys.readouterr().out)["fitted"]) == ["inside_share"]


def test_a_sweep_makes_communication_surer_and_not_computation() -> None:
    where = Network.of(cluster.load("h100-like"))
    swept = fit_sweep(read_sweep(NCCL), where, kind="all_reduce", ranks=8)[0]

    def width(name: str, constants: Constants, workers: int = 8) -> float:
        parts = dict(StepParts().rows()) | {name: 1.0}
        return spread(parts, constants, workers=workers, hidden_s=0.0, measured=False)

    plain = dataclasses.replace(swept, swept=0)
    assert width("compute", swept) == width("compute", plain)
    assert width("gradients", swept) < 0.9 * width("gradients", plain)
    assert width("gradients", swept) < width("gradients", swept, 32) < width("gradients", swept, 512)
    assert width("gradients", swept, 512) == width("gradients", plain, 512)  # of a sweep in one host


def test_nccl_tests_output_becomes_a_cluster_that_predicts_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight A100: 235 of 300 GB/s, 78%."""
    assert read_sweep(NCCL)[16777216] == pytest.approx(276.6e-6)
    assert read_sweep("bytes,us\n8,1.5\n16,2\n32,3\n")[8] == pytest.approx(1.5e-6)
    (tmp_path / "sweep.txt").write_text(NCCL)
    words = ["cluster", "fit", "selene-like", str(tmp_path / "sweep.txt"), "-n", "8", "-o", str(tmp_path / "mine.toml")]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["fitted"]["inside_share"] == pytest.approx(0.78, abs=0.05)
    mine = cluster.load(str(tmp_path / "mine.toml"))
    assert Constants.of(mine.reached).inside_share == found["fitted"]["inside_share"]
    assert Constants.of(mine.reached).interference == 0.15  # what the sweep says nothing of stays
    with pytest.raises(PlanError, match="2 sizes were read"):
        read_sweep("1,2\n3,4\n")
    with pytest.raises(PlanError, match="^1 size was read"):
        read_sweep("1,2\n")
