"""What other programs read: the ranks' state as text for Prometheus, each step's parts as scalars for TensorBoard."""

from collections.abc import Callable, Iterable
from pathlib import Path

from hocket._extras import require
from hocket.profile import LiveRank

from ._explain import Explanation

_METRICS: dict[str, tuple[str, str, Callable[[LiveRank], float]]] = {
    "hocket_up": ("gauge", "Whether the rank can go on by itself.", lambda one: int(not one.gone)),
    "hocket_steps_total": ("counter", "Steps of training that were made.", lambda one: one.steps),
    "hocket_step_seconds": ("gauge", "How long the last step took.", lambda one: one.step_s),
    "hocket_waiting_seconds": ("gauge", "How long the rank has waited for others by now.", lambda one: one.waits_s),
    "hocket_resident_bytes": ("gauge", "Resident memory of the rank.", lambda one: one.nbytes),
    "hocket_core_ratio": ("gauge", "Share of a core that the main thread has.", lambda one: one.busy),
}


def prometheus_text(ranks: Iterable[LiveRank]) -> str:
    """Return the ranks' state in Prometheus' text format, for its textfile collector."""
    ranks, lines = list(ranks), []
    for name, (kind, text, value) in _METRICS.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for one in ranks:
            host = one.host.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            lines.append(f'{name}{{rank="{one.rank}",host="{host}"}} {value(one):g}')
    return "\n".join(lines) + "\n"


def write_scalars(found: Explanation, folder: Path) -> None:
    """Write the seconds of each step and of its parts, the mean over ranks, and rank 0's values, for TensorBoard.

    Raises:
        MissingExtraError: TensorBoard is not installed.
        OSError: The folder cannot be written.
    """
    require("--tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for name, rows in found.run.ranks[0].values().items():
            for step, at_s, value in rows.tolist():
                writer.add_scalar(name, value, step, found.run.epoch_s + at_s)
        if (parts := found.parts) is None:
            return
        columns = {"step": parts.lengths_s, **{name: parts.of(name) for name, _ in parts.means()}}
        for name, seconds in columns.items():
            means, ends_s = seconds.mean(axis=0).tolist(), parts.bounds_s[0, 1:].tolist()
            for number, (mean_s, end_s) in enumerate(zip(means, ends_s, strict=True)):
                tag = f"seconds/{name.replace(' ', '_')}"
                writer.add_scalar(tag, mean_s, parts.first + number, found.run.epoch_s + end_s)
