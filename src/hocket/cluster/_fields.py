"""Fields of documents that carry units, and how a document's faults are reported."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from hocket.units import (
    format_bytes,
    format_flops,
    format_rate,
    format_time,
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_time,
)

from ._cluster import FORMAT_RATES, Reduction
from ._errors import ClusterError


def _rate(value: Any) -> float:
    """Refuse "25" and 25, which nobody means as bytes a second."""
    rate_Bps = parse_rate(value)
    if 1e-3 <= rate_Bps < 1e3 and not (isinstance(value, str) and value.strip()[-1:].isalpha()):
        raise ValueError(f'{value!r} has no unit, and would be {rate_Bps:g} bytes a second; write "25 GB/s"')
    return rate_Bps


# The bounds are far outside of what there is, and inside of what 64 bits hold when multiplied.
Rate = Annotated[float, BeforeValidator(_rate), PlainSerializer(format_rate), Field(gt=0, ge=1e-3, le=1e18)]
Seconds = Annotated[float, BeforeValidator(parse_time), PlainSerializer(format_time), Field(le=1e6)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), PlainSerializer(format_bytes), Field(gt=0, le=2**60)]
Flops = Annotated[float, BeforeValidator(parse_flops), PlainSerializer(format_flops), Field(gt=0, ge=1, le=1e24)]


def _no_truth(value: object) -> object:
    """Refuse true and false, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers; give a number")
    return value


Count = Annotated[int, BeforeValidator(_no_truth)]
Ratio = Annotated[float, BeforeValidator(_no_truth)]


def _scalar(value: object) -> object:
    if not isinstance(value, bool | int | float | str):
        raise ValueError("must be a number, true, false, or text in quotes")
    return value


Reached = dict[str, Annotated[bool | int | float | str, BeforeValidator(_scalar)]]


class TomlTable(BaseModel):
    """A table of a document: its keys are known, and there are no others."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class RatesTable(TomlTable):
    """What a device's products make, by number format; `flops` of those that have no rate of their own."""

    flops: Flops | None = None
    float8_flops: Flops | None = None
    float16_flops: Flops | None = None
    tf32_flops: Flops | None = None
    float32_flops: Flops | None = None

    def rates(self) -> dict[str, float]:
        """By the names that `GraphBuilder.node` takes."""
        return {name: getattr(self, name) or 0.0 for name in ("flops", *FORMAT_RATES)}


class ReductionTable(TomlTable):
    """What a switch that reduces can do; `true` stands for the defaults."""

    groups: Count = Field(default=64, ge=1)
    outstanding: Count = Field(default=2, ge=1)
    payload: Bytes = 256
    low_latency: bool = True
    streaming: bool = False
    efficiency: Ratio = Field(default=0.95, gt=0, le=1)
    delay: Seconds = 0.0

    def capability(self) -> Reduction:
        """Return the value that a node carries."""
        return Reduction(
            self.groups, self.outstanding, self.payload, self.low_latency, self.streaming, self.efficiency, self.delay
        )

    @classmethod
    def of(cls, capability: Reduction) -> "ReductionTable":
        known = vars(capability)
        return cls(**{("delay" if key == "delay_s" else key): value for key, value in known.items()})


def _as_table(value: object) -> object:
    """Read `true` as a table of defaults and `false` as none."""
    return {} if value is True else None if value is False else value


ReductionField = Annotated[ReductionTable | None, BeforeValidator(_as_table)]

_Form = TypeVar("_Form", bound=TomlTable)


def check(form: type[_Form], values: Mapping[str, Any], *, path: str = "") -> _Form:
    """Read a table.

    Args:
        form: What it must look like.
        values: What was found.
        path: Where it stands in the document.

    Raises:
        ClusterError: naming every fault: the path, the value, and what to write instead.
    """
    try:
        return form.model_validate(values)
    except ValidationError as error:
        found = [(_place(path, fault["loc"], values), fault) for fault in error.errors()]
        # An entry that is wrong does not count, which would be a second fault of its list.
        wrong = [where for where, _ in found]
        short = {where for where, fault in found if fault["type"] == "too_short"}
        found = [one for one in found if one[0] not in short or not any(x.startswith(f"{one[0]}[") for x in wrong)]
        faults = [_tell(form, fault, where) for where, fault in found]
        where = found[0][0]
        problem = ClusterError("\n".join(faults))
        problem.path = where
        raise problem from None


def _place(path: str, location: tuple[int | str, ...], values: Any) -> str:
    """Return the path in the document, without pydantic's tags of alternatives, which the document does not hold."""
    text, here = path, values
    for index, part in enumerate(location):
        if isinstance(part, str) and isinstance(here, Mapping) and part not in here and index + 1 < len(location):
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        try:
            here = here[part]
        except (KeyError, IndexError, TypeError):
            here = None
    return text


def _fields_at(form: type[TomlTable], location: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the table at a place; pydantic's tag of an alternative tells which of several it is."""
    forms: list[Any] = [form]
    for part in location:
        if part in forms[0].model_fields:
            forms = _forms(forms[0].model_fields[part].annotation)
        elif isinstance(part, str):
            forms = [one for one in forms if "kind" in one.model_fields and one.model_fields["kind"].default == part]
        if not forms:
            return []
    return list(forms[0].model_fields) if len(forms) == 1 else []


def _forms(annotation: Any) -> list[type[TomlTable]]:
    """Return the tables among an annotation's types."""
    if isinstance(annotation, type) and issubclass(annotation, TomlTable):
        return [annotation]
    return [one for part in get_args(annotation) for one in _forms(part)]


# Of pydantic's faults, what to write; in braces stands what pydantic says of them.
_REMEDIES = {
    "int": "must be a whole number, as 8",
    "float": "must be a number, as 0.5",
    "bool": "must be true or false",
    "string": 'must be text in quotes, as "name"',
    "literal": "must be {expected}",
    "union_tag_invalid": "{tag!r} is unknown; known are {expected_tags}",
    "dict": "must be a table, as {{ key = value }}",
    "model": "must be a table, as {{ key = value }}",
    "tuple": "must be a list, in brackets",
    "too_short": "has {actual_length} entries; give {min_length} or more",
    "too_long": "has {actual_length} entries; give {max_length}",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be {ge:g} or more",
    "less_than_equal": "must be {le:g} or less",
}


def _tell(form: type[TomlTable], fault: Any, where: str) -> str:
    kind, found = fault["type"], fault["input"]
    if kind == "extra_forbidden":
        fields = _fields_at(form, fault["loc"][:-1])
        return f"{where}: unknown key" + (f"; known here are {', '.join(fields)}" if fields else "")
    if kind == "missing":
        return f"{where}: is missing; give it a value"
    remedy = _REMEDIES.get(kind) or _REMEDIES.get(kind.partition("_")[0])
    message = remedy.format(**fault.get("ctx", {})) if remedy else str(fault["msg"]).removeprefix("Value error, ")
    seen = not where or kind == "union_tag_invalid" or repr(found) in message
    return (f"{where}: {message}" if where else message) + ("" if seen else f"; found {found!r}")
