"""EFLOPS (HPCA 2020): BiGraph and HDRM against leaf-spine and ECMP, and servers with a NIC per device."""

from collections.abc import Iterator

from plots import curves, table

from hocket import algorithms, cluster
from hocket.cluster import Cluster
from hocket.schedule import Collective, Schedule
from hocket.simulate import simulate_schedule

SHAPES = {32: (4, 4), 64: (8, 4), 128: (8, 8), 256: (16, 8), 512: (16, 16), 1024: (32, 16), 2048: (32, 32)}
SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "64 MiB": 2**26}
SEEDS = range(5)
RING_UP_TO = 512  # beyond, the ring's quadratic number of messages is left out


def networks(ports: int) -> tuple[Cluster, Cluster]:
    """A BiGraph and a leaf-spine of as many ports, all links and latencies alike, without taper."""
    upper, slots = SHAPES[ports]
    return (
        cluster.load(f"bigraph:upper={upper},ports={slots}"),
        cluster.load(f"leafspine:leaves={2 * upper},ports={slots}"),
    )


def mean_s(schedule: Schedule, described: Cluster, nbytes: int) -> tuple[float, float, float]:
    """Mean, least and greatest over seeds of the hash."""
    each = [simulate_schedule(schedule, described, nbytes, seed=seed).seconds for seed in SEEDS]
    return sum(each) / len(each), min(each), max(each)


def network_rows() -> Iterator[tuple[int, str, dict[str, float]]]:
    """(ports, size, seconds by case)."""
    for ports in SHAPES:
        bigraph, leafspine = networks(ports)
        upper, slots = SHAPES[ports]
        collective = Collective("all_reduce", ports)
        mapped = algorithms.get("hdrm")(collective, upper=upper, ports=slots)
        plain = algorithms.get("halving_doubling")(collective)
        ring = algorithms.get("ring")(collective) if ports <= RING_UP_TO else None
        for label, nbytes in SIZES.items():
            mean, least, most = mean_s(plain, leafspine, nbytes)
            seconds = {
                "HDRM, BiGraph": simulate_schedule(mapped, bigraph, nbytes).seconds,
                "HD, leaf-spine ECMP": mean,
                "least": least,
                "most": most,
                "HD, BiGraph": mean_s(plain, bigraph, nbytes)[0],
            }
            if ring is not None:
                seconds["ring, leaf-spine ECMP"] = mean_s(ring, leafspine, nbytes)[0]
                seconds["ring, BiGraph"] = mean_s(ring, bigraph, nbytes)[0]
            yield ports, label, seconds


def us(seconds: float | None) -> str:
    """Microseconds for a table."""
    return "" if seconds is None else f"{seconds * 1e6:,.0f}"


def network_report() -> tuple[str, str]:
    """The table, and the plot for 64 MiB."""
    rows, lines = [], {}
    for ports, label, seconds in network_rows():
        ratio = seconds["HD, leaf-spine ECMP"] / seconds["HDRM, BiGraph"]
        spread = f"{us(seconds['HD, leaf-spine ECMP'])} ({us(seconds['least'])} to {us(seconds['most'])})"
        rows.append(
            [
                str(ports),
                label,
                us(seconds["HDRM, BiGraph"]),
                spread,
                f"{ratio:.2f}",
                us(seconds["HD, BiGraph"]),
                us(seconds.get("ring, leaf-spine ECMP")),
                us(seconds.get("ring, BiGraph")),
            ]
        )
        if label == "64 MiB":
            for name in (
                "HDRM, BiGraph",
                "HD, leaf-spine ECMP",
                "HD, BiGraph",
                "ring, leaf-spine ECMP",
                "ring, BiGraph",
            ):
                if name in seconds:
                    lines.setdefault(name, []).append((ports, seconds[name] * 1e3))
    head = [
        "ports",
        "bytes",
        "HDRM, BiGraph",
        "HD, leaf-spine ECMP",
        "ratio",
        "HD, BiGraph",
        "ring, leaf-spine",
        "ring, BiGraph",
    ]
    return table(head, rows), curves("All-reduce of 64 MiB, 100 Gbit/s", "ports", "ms", lines)


def server_report() -> str:
    """16 servers around one switch, 1 to 8 devices each: commodity against EFLOPS."""
    rows = []
    for devices in (1, 2, 4, 8):
        world = 16 * devices
        row = [str(devices)]
        for kind in ("commodity", "eflops"):
            described = cluster.load(f"star:hosts=16,server={kind},server.devices={devices}")
            plain = algorithms.get("halving_doubling")(Collective("all_reduce", world))
            ring = algorithms.get("ring")(Collective("all_reduce", world))
            for schedule in (plain, ring):
                row.append(simulate_schedule(schedule, described, 2**26).seconds)
        rows.append(
            [row[0], us(row[1]), us(row[3]), f"{row[1] / row[3]:.2f}", us(row[2]), us(row[4]), f"{row[2] / row[4]:.2f}"]
        )
    head = ["devices", "HD, commodity", "HD, EFLOPS", "ratio", "ring, commodity", "ring, EFLOPS", "ratio"]
    return table(head, rows)
