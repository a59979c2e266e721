"""The plan: degrees, sharding, schedule, precision, and the other decisions of one way to train on many workers."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from hocket.units import parse_bytes

from ._findings import PlanError, PlanFinding
from ._rules import broken_rules
from ._synchronisation import WRITTEN, Synchronisation

PLAN_VARIABLE = "HOCKET_PLAN"
"""Environment variable in which `hocket run --plan` hands a plan to its ranks, as JSON; a path is understood too."""

Shard = Literal["none", "optimizer", "gradients", "parameters"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Embeddings = Literal["replicated", "table", "row", "hybrid"]
Precision = Literal["float32", "bfloat16"]
RecomputePart = Literal["layers", "attention"]


@dataclass(frozen=True)
class Plan:
    """Every decision about how a model is trained on many workers. Frozen; a small TOML file, made to be compared.

    The four degrees multiply to the number of workers. Ranks are numbered by stage of the pipeline first, then by part
    of the data, and ranks that share tensors, or samples, are neighbours:
    rank = ((p * data + d) * tensor + t) * spatial + s.

    Attributes:
        data_parallel_degree: among how many groups of workers each batch is divided; -1 for the rest of the world.
        shard: what is divided among those groups besides: nothing, the optimizer's state, gradients too, or
            parameters too (stages 1, 2, 3 of ZeRO, Rajbhandari et al. 2020).
        tensor_parallel_degree: among how many workers each layer is divided.
        sequence_parallel: whether norms and residuals between divided layers are divided too, along the sequence.
        pipeline_parallel_degree: how many workers hold the layers one after the other.
        pipeline_schedule: in which order micro-batches pass through the stages.
        stages_per_rank: stages that each worker holds; more than one for "interleaved".
        micro_batches: parts into which the pipeline cuts each worker's part of the batch.
        split: names of modules with which a stage begins, in order; none to balance the stages by measurement.
        spatial_parallel_degree: among how many workers each sample is divided, along the first of its spatial dims.
        accumulate: parts in which a worker computes its part of the batch one after the other, to save memory.
        embeddings: how embedding tables are divided among the data-parallel groups: not at all, whole tables, every
            table by rows, or either by size.
        sync_batch_norm: whether batch norm's statistics are those of several workers' samples together.
        batch_norm_group: of how many neighbouring data-parallel workers; 0 for all.
        recompute: whether activations are computed again in back-propagation instead of kept.
        recompute_part: of what: of whole layers, or of the core of attention only (scores, softmax, dropout), whose
            activations are large and cheap (Korthikanti et al. 2022).
        precision: of matrix products; parameters and optimizer state are float32 in any case.
        clip_norm: the global norm to which gradients are clipped; None for no clipping.
        bucket_bytes: most bytes of gradients that are reduced together; None to choose by the size of the model.
        priority: whether gradients of the layers that are needed first are sent first, and the next step begins before
            all have arrived.
        compression: of gradients between data-parallel groups: "none", or a method with its parameter, as "int8" or
            "topk:0.01" (see docs/compression.md). Training is not serially equivalent then.
        synchronisation: when workers agree: "every_step"; or, not serially equivalent, "local:H" (parameters averaged
            every H steps), "stale:S" and "ssp:S" (asynchronous, bounded), "hogwild" (no locks, within a host).
        choices: path of a table of collective algorithms; "" for the default.
        predicted: what a planner expects, by name with its unit, as "step_s"; information only.
        reasons: why a field is as it is, by the field's name; information only.

    Example::

        plan = Plan(tensor_parallel_degree=2, shard="gradients")
        Path("plan.toml").write_text(plan.to_toml())
    """

    data_parallel_degree: int = -1
    shard: Shard = "none"
    tensor_parallel_degree: int = 1
    sequence_parallel: bool = False
    pipeline_parallel_degree: int = 1
    pipeline_schedule: PipelineSchedule = "1f1b"
    stages_per_rank: int = 1
    micro_batches: int = 1
    split: tuple[str, ...] = ()
    spatial_parallel_degree: int = 1
    accumulate: int = 1
    embeddings: Embeddings = "replicated"
    sync_batch_norm: bool = False
    batch_norm_group: int = 0
    recompute: bool = False
    recompute_part: RecomputePart = "layers"
    precision: Precision = "float32"
    clip_norm: float | None = None
    bucket_bytes: int | None = None
    priority: bool = False
    compression: str = "none"
    synchronisation: str = "every_step"
    choices: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict, hash=False)
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raises PlanError for values of a wrong type, or words that are not among those allowed."""
        wrong = [finding for name in _FIELDS if (finding := _check(name, getattr(self, name))) is not None]
        if wrong:
            raise PlanError("this is no plan:", wrong)

    # --- what it says -----------------------------------------------------------------------------------------------

    def resolve(self, world_size: int) -> Plan:
        """The plan for a world of `world_size` ranks, all degrees filled in.

        Raises:
            PlanError: a rule is broken; every finding says which and the remedy.
        """
        found = self.findings(world_size)
        if found:
            raise PlanError(f"the plan cannot be carried out by {world_size} workers:", found)
        shares = self.tensor_parallel_degree * self.spatial_parallel_degree
        rest = world_size // (shares * self.pipeline_parallel_degree)
        return dataclasses.replace(self, data_parallel_degree=rest)

    def findings(self, world_size: int | None = None, *, batch: int | None = None) -> list[PlanFinding]:
        """The rules that the plan breaks; none for a plan that can be carried out.

        Args:
            world_size: ranks; None to leave out the rules that need it.
            batch: samples of a global batch; None to leave out the rules that need it.
        """
        return broken_rules(self, world_size, batch)

    def describe(self) -> str:
        """The plan in a few words, as "2 data (gradients sharded) x 2 tensor x 2 pipeline (1f1b, 4 micro-batches)"."""
        degree = self.data_parallel_degree
        data = f"{'all' if degree == -1 else degree} data"
        if self.shard != "none":
            data += f" ({self.shard} sharded)"
        words = [data]
        if self.tensor_parallel_degree > 1:
            sequence = " (sequence too)" if self.sequence_parallel else ""
            words.append(f"{self.tensor_parallel_degree} tensor{sequence}")
        if self.spatial_parallel_degree > 1:
            words.append(f"{self.spatial_parallel_degree} spatial")
        if self.pipeline_parallel_degree > 1:
            stages = f", {self.stages_per_rank} stages each" if self.stages_per_rank > 1 else ""
            schedule = f"{self.pipeline_schedule}{stages}, {self.micro_batches} micro-batches"
            words.append(f"{self.pipeline_parallel_degree} pipeline ({schedule})")
        if self.compression != "none":
            words[-1] += f", gradients sent as {self.compression} (not serially equivalent)"
        text = " x ".join(words)
        if self.synchronisation != "every_step":
            text += f", synchronisation {self.synchronisation}"
        return text if self.embeddings == "replicated" else f"{text}, embeddings by {self.embeddings}"

    # --- to and from files ------------------------------------------------------------------------------------------

    def to_toml(self) -> str:
        """The plan as TOML: a line for each field that is not as it is by default."""
        lines = []
        for name in _FIELDS:
            value = getattr(self, name)
            if value == _FIELDS[name].default or name in _TABLES:
                continue
            lines.append(f"{name} = {_toml(value)}")
        for table in _TABLES:
            entries = getattr(self, table)
            if entries:
                lines += ["", f"[{table}]", *(f"{_toml_key(key)} = {_toml(value)}" for key, value in entries.items())]
        return "\n".join(lines).lstrip("\n") + "\n"

    @classmethod
    def from_toml(cls, source: str | Path) -> Plan:
        """Reads a plan from a file, or from text: a string that holds a line break, or an equals sign, is text.

        Raises:
            PlanError: there is no such file, it is not TOML, or not a plan; the message says where.
        """
        name, text = "the plan", str(source)
        if isinstance(source, Path) or (text and "\n" not in text and "=" not in text):
            name = f"plan {text!r}"
            try:
                text = Path(source).read_text()
            except OSError as error:
                raise PlanError(f"cannot read {name}: {error.strerror}") from None
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"{name} is not TOML: {error}") from None
        return cls._from_values(values, name)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        plain = {name: getattr(self, name) for name in _FIELDS}
        plain.update(split=list(self.split), predicted=dict(self.predicted), reasons=dict(self.reasons))
        return plain

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """The plan of what `to_json` gave.

        Raises:
            PlanError: it is not one.
        """
        return cls._from_values(value, "the plan")

    @classmethod
    def from_environment(cls) -> Plan | None:
        """The plan that `hocket run --plan` has given; None where it has not, or has said "auto".

        Raises:
            PlanError: the variable holds no plan.
        """
        given = os.environ.get(PLAN_VARIABLE, "")
        if given in ("", "auto"):
            return None
        return cls.from_json(json.loads(given)) if given.startswith("{") else cls.from_toml(Path(given))

    @classmethod
    def _from_values(cls, values: Mapping[str, Any], name: str) -> Plan:
        unknown = [key for key in values if key not in _FIELDS]
        if unknown:
            near = [PlanFinding(key, "a plan has no such field", f"it has {', '.join(_FIELDS)}") for key in unknown]
            raise PlanError(f"{name} cannot be read:", near)
        plain = dict(values)
        if isinstance(plain.get("split"), list):
            plain["split"] = tuple(plain["split"])
        if isinstance(plain.get("bucket_bytes"), str):
            try:
                plain["bucket_bytes"] = int(parse_bytes(plain["bucket_bytes"]))
            except ValueError as error:
                found = PlanFinding("bucket_bytes", str(error), 'write a number of bytes, or "25 MiB"')
                raise PlanError(f"{name} cannot be read:", [found]) from None
        return cls(**plain)


_FIELDS = {item.name: item for item in dataclasses.fields(Plan)}
_TABLES = ("predicted", "reasons")
_WORDS: dict[str, tuple[str, ...]] = {
    "shard": get_args(Shard),
    "pipeline_schedule": get_args(PipelineSchedule),
    "embeddings": get_args(Embeddings),
    "precision": get_args(Precision),
    "recompute_part": get_args(RecomputePart),
}
_OPTIONAL: dict[str, Any] = {"clip_norm": (int, float), "bucket_bytes": (int,)}


def _check(name: str, value: Any) -> PlanFinding | None:
    """What is wrong with the type of a field, or with its word."""
    if name in _WORDS:
        if isinstance(value, str) and value in _WORDS[name]:
            return None
        return PlanFinding(name, f"there is no {value!r}", "choose among " + ", ".join(map(repr, _WORDS[name])))
    if name in _OPTIONAL:
        number = isinstance(value, _OPTIONAL[name]) and not isinstance(value, bool)
        fine = value is None or (number and value > 0)
        return None if fine else PlanFinding(name, f"must be a positive number, not {value!r}", "give one, or leave it")
    if name == "split":
        fine = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        return None if fine else PlanFinding(name, f"must be names of modules, not {value!r}", 'write ["layer3", ...]')
    if name in _TABLES:
        kinds = (int, float) if name == "predicted" else (str,)
        fine = isinstance(value, Mapping) and all(isinstance(item, kinds) for item in value.values())
        what = "numbers" if name == "predicted" else "sentences"
        return None if fine else PlanFinding(name, f"must be a table of {what}, not {value!r}", "write a table")
    if name == "synchronisation" and isinstance(value, str):
        return _check_synchronisation(value)
    wanted = type(_FIELDS[name].default)
    if type(value) is wanted:
        return None
    return PlanFinding(name, f"must be of type {wanted.__name__}, not {value!r}", f"write it as a {wanted.__name__}")


def _check_synchronisation(value: str) -> PlanFinding | None:
    try:
        Synchronisation.parse(value)
    except ValueError as error:
        return PlanFinding("synchronisation", str(error), f"write {WRITTEN}")
    return None


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return {"inf": "inf", "-inf": "-inf", "nan": "nan"}.get(repr(value), repr(value))
    # A basic string of TOML is one of JSON, except that TOML wants DEL escaped too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else str(value)


def _toml_key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key) else _toml(key)
