"""Does a script lose the same on n ranks as on one: reads what ranks wrote down, compares, and says what may be why."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hocket._files import json_value

_ROUNDING = 1e-6  # a first difference below it comes from the order of floating-point operations
_SMALL_TYPES = {"bfloat16", "float16"}


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What the ranks of one run wrote down."""

    losses: list[float]  # losses of the global batch, for each backward pass
    facts: list[dict[str, Any]]  # what may explain a difference, for each rank
    repeated: bool = False  # whether several ranks all computed the same losses, so that none spared another any work

    @property
    def relaxed(self) -> list[str]:
        """Why the run was not meant to be that of one process; empty if it was."""
        return [str(reason) for reason in self.facts[0].get("relaxed", ())]


@dataclass(frozen=True, slots=True)
class LossComparison:
    """What `compare` found."""

    equivalent: bool  # whether both runs made the same losses, as many of them, and the ranks shared the work
    n: int  # ranks of the parallel run
    one: list[float]  # losses of one rank, backward pass by backward pass
    several: list[float]  # the losses over the global batch of n ranks
    worst: float  # largest relative difference
    # number (from 1) of the first backward pass beyond the tolerance, or that only one run made
    first_divergent: int | None
    tolerance: float  # the largest relative difference that counts as rounding
    hints: list[str]  # what may be why, as sentences
    # what the script asks for that is not serially equivalent, whether the losses agree or not
    relaxed: list[str] = field(default_factory=list)

    def rows(self) -> list[tuple[float, float, float]]:
        """For each backward pass that both runs made: both losses, and their relative difference."""
        return [(a, b, _difference(a, b)) for a, b in zip(self.one, self.several, strict=False)]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; numbers that JSON does not know are None."""
        return dict(json_value(asdict(self)))


class NothingRecorded(RuntimeError):
    """A script made no backward pass on some rank, or none that can be compared."""


def read(directory: Path, n: int) -> RecordedRun:
    """Put together the losses that `n` ranks wrote into `directory`.

    Raises:
        NothingRecorded: a rank made no backward pass, or those of Keras.
    """
    ranks = []
    facts = []
    for rank in range(n):
        path = directory / f"losses-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        if not lines:
            rule = f"rank {rank} of {n} made no backward pass, so there is no loss to compare"
            raise NothingRecorded(f"{rule}; if it goes on from a checkpoint that is finished, name another directory")
        ranks.append([json.loads(line) for line in lines])
        facts.append(json.loads((directory / f"facts-{rank}.json").read_text()))
    if facts[0]["keras"]:
        raise NothingRecorded(
            "it trains by hocket.keras, and check reads loops with hocket.distribute or hocket.Trainer; compare what "
            "fit returns on one rank and on several: its history is that of the global batches"
        )
    summed = facts[0]["reduction"] == "sum"
    losses = [_joined(entries, summed) for entries in zip(*ranks, strict=False)]
    shared = "whole" in ranks[0][0]  # the Trainer tells every rank the loss of the global batch
    return RecordedRun(losses, facts, repeated=n > 1 and not shared and all(entries == ranks[0] for entries in ranks))


def _joined(entries: tuple[dict[str, Any], ...], summed: bool) -> float:
    """Return the loss of the global batch from those of its parts."""
    if "whole" in entries[0]:
        return float(entries[0]["loss"])
    total = 0.0
    for entry in entries:
        share = entry["share"]
        if share == 0:
            continue  # a rank without samples in this batch
        if summed:
            total += entry["loss"]
        else:
            total += entry["loss"] * (1 / len(entries) if share is None else share)
    return total


def compare(serial: RecordedRun, parallel: RecordedRun, tolerance: float) -> LossComparison:
    """Compare step by step.

    Args:
        serial: The run on one rank.
        parallel: The run on several.
        tolerance: The largest relative difference of losses that passes.
    """
    differences = [_difference(a, b) for a, b in zip(serial.losses, parallel.losses, strict=False)]
    first = next((i for i, difference in enumerate(differences, start=1) if not difference <= tolerance), None)
    if first is None and len(serial.losses) != len(parallel.losses):
        first = len(differences) + 1
    apart = _apart(parallel.facts)
    equivalent = first is None and apart is None and not parallel.repeated
    return LossComparison(
        equivalent=equivalent,
        n=len(parallel.facts),
        one=serial.losses,
        several=parallel.losses,
        worst=max(differences),
        first_divergent=first,
        tolerance=tolerance,
        hints=[] if equivalent else _hints(differences, first, serial, parallel, apart),
        relaxed=_relaxed(parallel.facts[0]),
    )


def _relaxed(facts: dict[str, Any]) -> list[str]:
    return [
        f"Gradients are sent as {method}, which is not serially equivalent: losses may agree within the tolerance, but "
        'they are not those of one device up to rounding. Say compression="none" to compare all else.'
        for method in facts["compression"]
    ]


def _difference(one: float, many: float) -> float:
    if one == many or (math.isnan(one) and math.isnan(many)):
        return 0.0
    difference = abs(one - many) / max(abs(one), abs(many))
    return math.inf if math.isnan(difference) else difference


def _apart(facts: list[dict[str, Any]]) -> str | None:
    """Return the first parameter that has not the same value on all ranks at the end."""
    first = facts[0]["parameters"]
    for other in facts[1:]:
        for mine, theirs in zip(first, other["parameters"], strict=False):
            if mine != theirs:
                return str(mine[0])
    return None


def _hints(
    differences: list[float], first: int | None, serial: RecordedRun, parallel: RecordedRun, apart: str | None
) -> list[str]:
    n, facts = len(parallel.facts), parallel.facts[0]
    hints = []
    if parallel.repeated:
        hints.append(f"Each of the {n} ranks computed the same losses, so each did all of the work.")
    if not facts["distributed"]:
        hints.append(
            f"The script made no call to hocket.distribute, and has no Trainer, so each of the {n} ranks trained for "
            "itself: say `model, optimizer, loader = hocket.distribute(model, optimizer, loader)` before the loop."
        )
    elif not facts["shared_batches"]:
        hints.append(
            "The batches do not come from a loader that hocket.distribute returned, so every rank trained on the same "
            "samples or divided them by itself: pass the loader too, and iterate over what comes back."
        )
    if len(serial.losses) != len(parallel.losses):
        hints.append(
            f"One rank made {len(serial.losses)} backward passes and {n} ranks made {len(parallel.losses)} each. Batch "
            "sizes are global: do not divide the batch size, the data or the number of steps by the number of ranks."
        )
    if apart is not None:
        hints.append(
            f"At the end parameter {apart!r} differs between ranks: something changes it that is not the averaged "
            "gradient, such as another optimizer setting or noise drawn on each rank."
        )
    if first == 1 and facts["distributed"]:
        hints.append(
            "Losses differ from the first step on: look at the initial parameters, at which samples are in the batch, "
            "and at whether the loss is a mean over the samples (for a sum, or a mean over something else, say "
            'loss_reduction="sum").'
        )
    if first == 1 and not facts["seeded"]:
        hints.append(
            "The script does not seed: what each rank makes up at random for itself, such as synthetic data or a "
            "random split, differs between ranks. Say torch.manual_seed(...) at its top, on all ranks alike."
        )
    if facts["dropout"]:
        hints.append(
            f"The model drops values at random ({_some(facts['dropout'])}): ranks cannot draw the numbers that one "
            "device draws. Compare with the rate set to 0."
        )
    if facts["batch_norm"]:
        hints.append(
            f"Batch norm ({_some(facts['batch_norm'])}) uses the statistics of a rank's own samples. Synchronise it "
            "over ranks, use group norm, or compare with it in evaluation mode."
        )
    if facts["draws"] and not facts["dropout"]:
        hints.append(
            "Random numbers are drawn between backward passes (noise, mixing of samples, a sampler without hocket's "
            "loader): ranks draw other numbers than one device. Draw them in the data set, where hocket seeds each "
            "sample."
        )
    small = _SMALL_TYPES.intersection(facts["types"])
    if small:
        hints.append(
            f"Parameters are {' and '.join(sorted(small))}: rounding differences are larger. Compare in float32, or "
            "allow more with --tolerance."
        )
    if first is not None and 1 < first <= len(differences) and differences[0] < _ROUNDING and not small:
        hints.append(
            f"The first losses agree up to rounding ({differences[0]:.1e}) and differences grow from there: small "
            "rounding errors may be amplified by training. Compare in float64 "
            "(torch.set_default_dtype(torch.float64)); there they must stay below 1e-9 for many steps."
        )
    return hints


def _some(names: list[str]) -> str:
    quoted = [repr(name) for name in names[:3]]
    return ", ".join(quoted) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
