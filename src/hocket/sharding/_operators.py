"""One name for every form in which a program calls an operator, and which operators work element by element."""

import functools
from typing import Any

import torch

# Names of operators, each with others for it: aliases of torch, torch.special and the ATen library; conversions; and
# those of Python. Spaces, colons and semicolons part them.
_NAMES = """
abs: absolute; acos: arccos; acosh: arccosh; asin: arcsin; asinh: arcsinh; atan: arctan; atan2: arctan2;
atanh: arctanh; clamp: clip; cat: concat concatenate; div: divide true_divide; trunc: fix; gt: greater;
ge: greater_equal; lt: less; le: less_equal; ne: not_equal; movedim: moveaxis; mul: multiply; neg: negative;
sub: subtract; transpose: swapaxes swapdims; dim: ndimension; numel: nelement; interpolate: upsample;
matmul: linalg_matmul; silu: swish; expand: broadcast_to; flatten: ravel;
sigmoid: expit; lgamma: gammaln; digamma: psi; mvlgamma: multigammaln; to: to_copy; view: unsafe_view reshape_alias;
to: bfloat16 half float double char short int long bool byte cfloat cdouble cpu cuda;
div: truediv; floor_divide: floordiv; bitwise_not: not invert; remainder: mod; positive: pos; bitwise_and: and;
bitwise_or: or; bitwise_xor: xor; bitwise_left_shift: lshift; bitwise_right_shift: rshift;
"""
_ALIASES = {
    other: plain.strip()
    for plain, others in (entry.split(":") for entry in _NAMES.strip().rstrip(";").split(";"))
    for other in others.split()
}
_BINARY_NAMES = "add sub mul div truediv pow matmul floordiv mod and or xor lshift rshift"
_BINARY = _BINARY_NAMES.split()
_NUMBERS = ["bool", "int", "float", "complex"]
_DUNDERS = {
    **{f"__r{one}__": one for one in _BINARY if one != "matmul"},  # whose factors are not given in their order
    **{f"__i{one}__": one for one in _BINARY},
    # Python's numbers are of the full tensor's only element, which one rank may have.
    **{f"__{one}__": f"python_{one}" for one in _NUMBERS},
}
_HOMES = frozenset(["torch", "operator", "_operator", "builtins"])
_PLACES = (torch, torch.Tensor, torch.nn.functional, torch.autograd)
# Operators whose ATen form takes its arguments in another order than torch.nn.functional's, which the rules follow.
_OTHER_ORDER = frozenset(["embedding", "batch_norm", "instance_norm"])

_UNTAGGED_NAMES = """
to type type_as contiguous clone detach alias copy fill zero zeros_like ones_like full_like empty_like isclose softsign
tanhshrink hardswish logsigmoid log_sigmoid requires_grad rsub isreal polar complex floor_divide
"""
_UNTAGGED = frozenset(_UNTAGGED_NAMES.split())
# `equal` asks about all elements; `max` and `min` of one tensor, and `where` of one, are no element-wise operators.
_MISTAGGED = frozenset(["equal"])


def canonical(name: str) -> str:
    """Return the name under which the table has an operator, given a name that torch or ATen has for it."""
    name = name.strip("_")
    if name.startswith("special_"):
        plain = name.removeprefix("special_")
        if plain in _ALIASES or hasattr(torch, plain):
            name = plain
    return _ALIASES.get(name, name)


def operator_name(func: Any) -> str:
    """Return one name for all the forms of an operator.

    It is `add` for `torch.add`, `Tensor.add_`, `a + b` and `a += b`; `lt` for `torch.less`; `to` for
    `Tensor.bfloat16()`; and `get_shape` for what reads the attribute `shape`.
    """
    name: str = getattr(func, "__name__", "") or type(func).__name__
    if name == "__get__":
        return f"get_{getattr(func.__self__, '__name__', '')}"
    if name == "__set__":
        return f"set_{getattr(func.__self__, '__name__', '')}"
    home = getattr(func, "__module__", None) or "torch"
    if isinstance(func, torch.jit.ScriptFunction):
        return f"{home}.{name}"  # a user's function, though its module is said to be torch's
    foreign = home.partition(".")[0] not in _HOMES or (home.startswith("torch._ops.") and home != "torch._ops.aten")
    if foreign and not any(getattr(place, name, None) is func for place in _PLACES):  # a program may wrap torch's own
        return f"{home}.{name}"  # a user's function, which may be named as one of torch's
    name = canonical(_DUNDERS.get(name, name))
    return f"aten_{name}" if name in _OTHER_ORDER and home != "torch.nn.functional" else name


def aten_name(func: Any) -> str:
    """Return the name of one of ATen's operators, as `operator_name` has it."""
    name = canonical(func.overloadpacket.__name__)
    return f"aten_{name}" if name in _OTHER_ORDER or func.namespace != "aten" else name


def changes_first(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call changes its first argument, or another that it is given to write to."""
    name: str = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (name.startswith("__i") and name.strip("_")[1:] in _BINARY)
    return name.endswith("_") or kwargs.get("out") is not None or kwargs.get("inplace") is True


@functools.cache
def pointwise(name: str) -> bool:
    """Return whether every element of the result comes from those in the same place, after broadcasting.

    Torch itself knows this of its operators: by `torch.Tag.pointwise`.
    """
    if name in _UNTAGGED or name in _MISTAGGED:
        return name in _UNTAGGED
    return any(_tagged(getattr(torch.ops.aten, one, None)) for one in (name, f"special_{name}"))


def _tagged(packet: Any) -> bool:
    found = False
    for overload in packet.overloads() if packet is not None else ():
        try:
            tags = getattr(packet, overload).tags
        except RuntimeError:  # one of TorchScript's, for numbers alone
            continue
        if torch.Tag.nondeterministic_seeded in tags:
            return False
        found = found or torch.Tag.pointwise in tags
    return found
