"""The plan: degrees, sharding, schedule, precision, and the other decisions of one way to train on many workers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from hocket._ends import is_cut_off, with_end
from hocket._files import write_whole
from hocket.schedule.pipeline import NAMED_ORDERS
from hocket.units import parse_bytes

from .._findings import PlanError, PlanFinding
from ..axes import axis, inner, product
from ._synchronisation import WRITTEN, Synchronisation

RULES: list[Callable[[Plan, int | None, int | None], list[PlanFinding]]] = []
"""Each returns what a plan breaks, in a world of some size (if known) and with batches of some size (if known)."""

PLAN_VARIABLE = "HOCKET_PLAN"
"""Environment variable in which `hocket run --plan` hands a plan to its ranks, as JSON; a path is understood too."""

Shard = Literal["none", "optimizer", "gradients", "parameters"]
SPLIT_REASON = "by what stages compute, exchange and hold: shorter, or fits, where computation alone would not say so"
"""Of a plan whose stages the search has named. A model that cannot be cut there is cut by computation."""
SHARDS: tuple[Shard, ...] = get_args(Shard)  # by how much of a model is divided
Embeddings = Literal["replicated", "table", "row", "hybrid"]
Precision = Literal["float32", "bfloat16", "float8"]
RecomputePart = Literal["layers", "attention"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a field of a plan must be, for whoever has written something else."""

    what: str  # behind "must be"
    remedy: str  # behind "write"


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_bytes(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


def _as_precision(value: Any) -> Any:
    return "float8" if value == "fp8" else value


def _as_order(value: str) -> str:
    # A file is read when the plan is carried out, or predicted; see `order_findings`.
    if value not in NAMED_ORDERS and not any(mark in value for mark in ("\n", "/", ".")):
        raise ValueError(f"there is no {value!r}")
    return value


def _as_synchronisation(value: str) -> str:
    Synchronisation.parse(value)
    return value


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
        pipeline_schedule: in which order the ranks of the pipeline work: a name of
            `hocket.schedule.pipeline.NAMED_ORDERS`, the path of a file with an order, or the text of one.
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
        precision: of matrix products; parameters and optimizer state are float32 in any case. "float8" is that of
            linear layers, with all else in bfloat16: it is planned and predicted, and nothing carries it out.
        clip_norm: the global norm to which gradients are clipped; None for no clipping.
        bucket_bytes: most bytes of gradients that are reduced together; None to choose by the size of the model.
        priority: whether gradients of the layers that are needed first are sent first, and the next step begins before
            all have arrived.
        compression: of gradients between data-parallel groups: "none", or a method with its parameter, as "int8" or
            "topk:0.01" (see docs/compression.md). Training is not serially equivalent then.
        synchronisation: when workers agree: "every_step"; or, not serially equivalent, "local:H" (parameters averaged
            every H steps), "stale:S" and "ssp:S" (asynchronous, bounded), "hogwild" (no locks, within a host).
        choices: path of a table of collective algorithms; "" for the default.
        shard_degree: among how many neighbouring data-parallel groups parameters are sharded; 0 for all. Among the
            workers of a host, say, while other hosts hold copies (HSDP, hybrid sharding; Zhao et al. 2023).
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
    pipeline_schedule: Annotated[
        str, AfterValidator(_as_order), Wanted("an order", f"{', '.join(NAMED_ORDERS)}, or the path of a file with one")
    ] = "1f1b"
    stages_per_rank: int = 1
    micro_batches: int = 1
    split: Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Wanted("names of modules", '["layer3", ...]')] = ()
    spatial_parallel_degree: int = 1
    accumulate: int = 1
    embeddings: Embeddings = "replicated"
    sync_batch_norm: bool = False
    batch_norm_group: int = 0
    recompute: bool = False
    recompute_part: RecomputePart = "layers"
    precision: Annotated[Precision, BeforeValidator(_as_precision)] = "float32"
    clip_norm: Annotated[float | None, Field(gt=0), Wanted("a positive number", "one, or leave it out")] = None
    bucket_bytes: Annotated[
        int | None,
        Field(gt=0),
        BeforeValidator(_as_bytes),
        Wanted("a positive number", 'a number of bytes, or "25 MiB"'),
    ] = None
    priority: bool = False
    compression: str = "none"
    synchronisation: Annotated[str, AfterValidator(_as_synchronisation), Wanted("a rule", WRITTEN)] = "every_step"
    choices: str = ""
    shard_degree: int = 0
    predicted: Annotated[Mapping[str, float], Wanted("a table of numbers", "a table")] = field(
        default_factory=dict, hash=False
    )
    reasons: Annotated[Mapping[str, str], Wanted("a table of sentences", "a table")] = field(
        default_factory=dict, hash=False
    )

    def __post_init__(self) -> None:
        """Raise PlanError for values of a wrong type, or words that are not among those allowed."""
        try:
            checked = _values().model_validate(vars(self))
        except ValidationError as error:
            faults = {fault["loc"][0]: fault for fault in reversed(error.errors())}
            raise PlanError("this is no plan:", [_told(faults[name]) for name in _FIELDS if name in faults]) from None
        vars(self).update(vars(checked))  # a list has become a tuple, and "25 MiB" a number

    # --- what it says -----------------------------------------------------------------------------------------------

    def resolve(self, world_size: int) -> Plan:
        """Return the plan for a world of `world_size` ranks, all degrees filled in.

        Raises:
            PlanError: a rule is broken; every finding says which and the remedy.
        """
        found = self.findings(world_size)
        if found:
            raise PlanError(f"the plan cannot be carried out by {world_size} workers:", found)
        return dataclasses.replace(self, data_parallel_degree=world_size // product(self, *inner()))

    def findings(self, world_size: int | None = None, *, batch: int | None = None) -> list[PlanFinding]:
        """Return the rules that the plan breaks; none for a plan that can be carried out.

        Args:
            world_size: ranks; None to leave out the rules that need it.
            batch: samples of a global batch; None to leave out the rules that need it.
        """
        return [finding for rules in RULES for finding in rules(self, world_size, batch)]

    def describe(self) -> str:
        """Return the plan in short, as "2 data (gradients sharded) x 2 tensor x 2 pipeline (1f1b, 4 micro-batches)"."""
        words = [one.words(self) for one in (axis("data"), *inner()) if one.name == "data" or one.degree(self) > 1]
        if self.compression != "none":
            words[-1] += f", gradients sent as {self.compression} (not serially equivalent)"
        text = " x ".join(words)
        if self.precision == "float8":
            text += ", linear layers in float8"
        if self.synchronisation != "every_step":
            text += f", synchronisation {self.synchronisation}"
        return text if self.embeddings == "replicated" else f"{text}, embeddings by {self.embeddings}"

    # --- to and from files ------------------------------------------------------------------------------------------

    def to_toml(self) -> str:
        """Return the plan as TOML: what is not as it is by default, by section."""
        single: dict[str, Any] = {}
        tables: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
        for name, item in _FIELDS.items():
            value = getattr(self, name)
            if isinstance(value, Mapping):
                tables[name] = dict(value)
            elif value != item.default:
                section, key = _PLACES.get(name, ("", name))
                (tables[section] if section else single)[key] = value
        said = single | {name: table for name, table in tables.items() if table}
        return tomli_w.dumps(said or {"data": {"degree": self.data_parallel_degree}})  # an empty file is no plan

    @classmethod
    def from_toml(cls, source: str | Path) -> Plan:
        """Read a plan from a file, or from text: a string that holds a line break, or an equals sign, is text.

        Raises:
            PlanError: there is no such file, it is not TOML, or not a plan; the message says where.
        """
        name, text = "the plan", str(source)
        if isinstance(source, Path) or (text and "\n" not in text and "=" not in text):
            name = f"plan {text!r}"
            try:
                text = Path(source).read_text(encoding="utf-8-sig")
            except OSError as error:
                raise PlanError(f"cannot read {name}: {error.strerror}") from None
            except UnicodeDecodeError as error:
                raise PlanError(f"{name} is not TOML: {error}") from None
            if not text.strip():
                raise PlanError(
                    f"{name} is empty; write or copy it again, or write degree = -1 below [data] for data parallelism"
                )
        if is_cut_off(text):
            raise PlanError(f"{name} was cut off: its last line is not there; write or copy it again")
        try:
            values = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise PlanError(f"{name} is not TOML: {error}") from None
        return cls._from_values(values, name)

    def keep(self) -> None:
        """Write the plan into the directory of this run, where `hocket run` has made one."""
        place = os.environ.get("HOCKET_RUN_DIR", "off")
        if place not in ("off", "0"):
            with contextlib.suppress(OSError):  # a host that does not share it, a full disk: training goes on
                text = with_end(f"# {self.describe()}\n{self.to_toml()}")
                write_whole(Path(place, "plan.toml"), text)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        plain = {name: getattr(self, name) for name in _FIELDS}
        plain.update(split=list(self.split), predicted=dict(self.predicted), reasons=dict(self.reasons))
        return plain

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """Return the plan of what `to_json` gave.

        Raises:
            PlanError: it is not one.
        """
        return cls._from_values(value, "the plan")

    @classmethod
    def from_environment(cls) -> Plan | None:
        """Return the plan that `hocket run --plan` has given; None where it has not, or has said "auto".

        Raises:
            PlanError: the variable holds no plan.
        """
        given = os.environ.get(PLAN_VARIABLE, "")
        if given in ("", "auto"):
            return None
        if not given.startswith("{"):
            return cls.from_toml(Path(given))
        try:
            return cls._from_values(json.loads(given), PLAN_VARIABLE)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{PLAN_VARIABLE} is no JSON ({error}): {shorten(given, 60)}; give what `Plan.to_json` gave, or a file"
            ) from None

    @classmethod
    def _from_values(cls, values: Mapping[str, Any], name: str) -> Plan:
        if not isinstance(values, Mapping):
            given = f"{type(values).__name__} ({shorten(repr(values), 60)})"
            raise PlanError(f"{name} is no table of fields but of type {given}; give what `Plan.to_json` gave")
        flat: dict[str, Any] = {}
        wrong: list[PlanFinding] = []
        if values.keys() & {"topology", "nodes"}:
            raise PlanError(
                f"{name} describes a cluster; give it as --cluster, and here what `hocket plan --out` has written"
            )
        for key, value in _flattened(values):
            found = _NAMES.get(key)
            if found is None or found in flat:
                section = key.partition(".")[0] if "." in key else ""
                known = ", ".join(_SECTIONS.get(section) or [*_FIELDS, *(f"[{one}]" for one in _SECTIONS)])
                rule = "a plan has no such field" if found is None else f"{found} is said twice"
                remedy = f"it has {known}" if found is None else "say it once"
                repeated = any(one.remedy == remedy for one in wrong)  # what there is need be said once only
                wrong.append(PlanFinding(key, rule, "choose among those" if repeated else remedy))
            else:
                flat[found] = value
        if wrong:
            raise PlanError(f"{name} cannot be read:", wrong)
        try:
            return cls(**flat)
        except PlanError as error:
            raise PlanError(f"{name} cannot be read:", error.findings) from None


_FIELDS = {item.name: item for item in dataclasses.fields(Plan)}
# How a file groups the fields: by section, key and field. A file may name fields without sections, too.
_SECTIONS = {
    **{one.name: one.fields for one in (axis("data"), *inner())},
    "reduce": {name: name for name in ("bucket_bytes", "priority", "compression", "synchronisation", "choices")},
}
_PLACES = {name: (section, key) for section, keys in _SECTIONS.items() for key, name in keys.items()}
_NAMES = {f"{section}.{key}": name for name, (section, key) in _PLACES.items()} | {name: name for name in _FIELDS}


def _flattened(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a file with their values, those of a section as "section.key"."""
    for key, value in values.items():
        if key in _SECTIONS and isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", one) for inner, one in value.items())
        else:
            yield key, value


_HYBRID = (
    "sharding within a host and replicating between hosts (HSDP), which takes two fields",
    'say shard = "parameters", and shard_degree = the workers of a host',
)
_FP8 = ("one of the two formats that products in float8 take", 'say "float8"')
# Words that others have for what is not there, or is said otherwise: what it is, and the remedy.
_OTHER_WORDS = {
    **{("shard", word): _HYBRID for word in ("hybrid", "hsdp", "hybrid_shard")},
    **{("precision", word): _FP8 for word in ("fp8_e4m3", "fp8_e4m3fn", "fp8_e5m2")},
    ("precision", "fp16"): ("half precision, whose loss must be scaled, which no plan does", 'say "bfloat16"'),
}


_KINDS = {"int": "a whole number", "bool": "true or false", "str": "it in quotes", "float": "a number"}


@functools.cache
def _values() -> type[BaseModel]:
    """Return what checks the values of a plan's fields, made of their annotations."""
    hints = get_type_hints(Plan, include_extras=True)
    fields: dict[str, Any] = {name: (hints[name], ...) for name in _FIELDS}
    return create_model("_Values", __config__=ConfigDict(strict=True), **fields)


def _told(fault: Any) -> PlanFinding:
    """Return what pydantic has found in our words."""
    name, value, context = fault["loc"][0], fault["input"], fault.get("ctx", {})
    wanted = next((one for one in _values().model_fields[name].metadata if isinstance(one, Wanted)), None)
    if isinstance(value, str) and (told := _OTHER_WORDS.get((name, value.lower().replace("float", "fp")))):
        return PlanFinding(name, f"{value!r} is {told[0]}", told[1])
    if fault["type"] == "literal_error":
        return PlanFinding(name, f"there is no {value!r}", f"choose among {context['expected']}")
    if fault["type"] == "value_error":
        return PlanFinding(name, str(context["error"]), f"write {wanted.remedy if wanted else 'another'}")
    if wanted is not None:
        return PlanFinding(name, f"must be {wanted.what}, not {value!r}", f"write {wanted.remedy}")
    kind = type(_FIELDS[name].default).__name__
    return PlanFinding(name, f"must be of type {kind}, not {value!r}", f"write {_KINDS.get(kind, kind)}")
