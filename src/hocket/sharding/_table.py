"""The table: for each operator the rule by which it is applied to shards."""

import functools
import inspect
from collections.abc import Callable

from ._call import OperatorCall, Outcome, Rule
from ._operators import pointwise
from ._placement import CannotShard, Placement, Shard

_NUMPY_WORDS = {"axis": "dim", "keepdims": "keepdim"}

RULES: dict[str, Rule] = {}
"""Rules by the operator's canonical name. Element-wise operators need no entry: see `rule_for`."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that enters a rule for operators of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


def rule_for(name: str) -> Rule | None:
    """Return the rule of an operator, by its canonical name; None where it has none of its own."""
    found = RULES.get(name)
    return RULES["pointwise"] if found is None and pointwise(name) else found


def apply(found: Rule, call: OperatorCall) -> Outcome:
    """Apply a rule, and hold its results to what the ranks can have.

    Torch takes numpy's words for some arguments (`axis`, `keepdims`); rules are given torch's own.

    Raises:
        CannotShard: The call cannot be made on shards; says why.
    """
    call.kwargs = {_NUMPY_WORDS.get(word, word): value for word, value in call.kwargs.items()}
    try:
        _signature(found).bind(call, *call.args, **call.kwargs)
    except TypeError as error:
        raise CannotShard(f"{call.name} is called in a form that has no rule ({error})") from None
    target = call.args[0] if call.in_place and call.args else None
    outcome = found(call, *call.args, **call.kwargs)
    if call.in_place and (target is None or call.run is not None or call.args[0] is not target or target.shard is None):
        call.refuse("changes a tensor that is divided in another way than the operand")
    for one in (outcome,) if isinstance(outcome, Placement) else outcome:
        if isinstance(one, Shard):
            if call.exchanges and len(one.bounds) > 1:
                call.refuse("leaves several intervals on a rank")
            if not call.exchanges and not one.equal:
                call.refuse(f"leaves shares of {list(one.segments)}, which cannot be equal")
    return outcome


@functools.cache
def _signature(found: Rule) -> inspect.Signature:
    return inspect.signature(found)
