"""Results as tables for people, on the terminal and in Markdown."""

from typing import Any

from rich.table import Table

from hocket.units import format_bytes

Cells = list[list[str]]


def seconds(value_s: float) -> str:
    """Return a time in the unit that suits it."""
    return f"{value_s * 1e6:.1f} us" if value_s < 1e-3 else f"{value_s * 1e3:.2f} ms"


def collective_cells(result: dict[str, Any]) -> tuple[list[str], Cells]:
    """Return headers and cells: every row beside its peers' medians and the memory-bandwidth floor."""
    peers = [s for s in dict.fromkeys(row["system"] for row in result["rows"]) if s != "hocket"]
    headers = ["size", "system", "median", "p90", "algbw GB/s", "busbw GB/s", *(f"{p} / this" for p in peers), "floor"]
    floors = {floor["nbytes"]: floor["floor_s"] for floor in result.get("floor", [])}
    medians = {(row["nbytes"], row["system"]): row["median_s"] for row in result["rows"] if not row["registered"]}
    cells = []
    for row in result["rows"]:
        ratios = [f"{medians[row['nbytes'], peer] / row['median_s']:.2f}x" for peer in peers]
        floor_s = floors.get(row["nbytes"])
        cells.append(
            [
                format_bytes(row["nbytes"]),
                row["system"] + (" registered" if row["registered"] else ""),
                seconds(row["median_s"]),
                seconds(row["p90_s"]),
                f"{row['algbw_Bps'] / 1e9:.2f}",
                f"{row['busbw_Bps'] / 1e9:.2f}",
                *ratios,
                f"{floor_s / row['median_s']:.0%} of {seconds(floor_s)}" if floor_s is not None else "",
            ]
        )
    return headers, cells


def step_cells(result: dict[str, Any]) -> tuple[list[str], Cells]:
    headers = ["model", "system", "median", "p90", "speed-up over DDP on Gloo"]
    cells = [
        [
            row["model"],
            row["system"],
            seconds(row["median_s"]),
            seconds(row["p90_s"]),
            f"{row['speedup_over_ddp_gloo']:.2f}x",
        ]
        for row in result["rows"]
    ]
    return headers, cells


def terminal_table(title: str, headers: list[str], cells: Cells) -> Table:
    table = Table(title=title, title_justify="left")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < 2 else "right")
    for row in cells:
        table.add_row(*row)
    return table


def markdown(title: str, machine: dict[str, Any], headers: list[str], cells: Cells) -> str:
    """Return a section of a dated results file."""
    lines = [f"## {title}", "", f"`{machine['command']}`, {machine['date']}", ""]
    kept = {k: v for k, v in machine.items() if k not in ("command", "date") and v is not None}
    lines += [", ".join(f"{key} {value}" for key, value in kept.items()), ""]
    lines += ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join(lines) + "\n"
