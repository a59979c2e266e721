"""Each rank holds a part of every parameter, and a whole block only while it is computed: torch's FSDP2 underneath."""

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.distributed.device_mesh import DeviceMesh

from hocket import comm
from hocket.comm import torch_adapter

from ..batches import mapped
from ..mesh import World
from ..state import Owned, ParameterPlacement, ShardBox, is_excluded, parameters_of
from ._copies import AverageOfCopies
from ._hooks import has_own_hooks
from ._lost_writes import LostWrites
from ._overlap import ForwardPrefetch, OverlappedAllGather, OverlappedReduceScatter, on_several_hosts
from ._strategy import Replicated, ShardingStrategy
from ._used_parameters import UsedParameters, in_order, start_over

_PARTS = (
    "the model or the loss computes with parameters outside of the block that they belong to (a sum over "
    "model.parameters(), say), and shard = 'parameters' has a part of them there: say shard = 'gradients'"
)


class FullySharded(ShardingStrategy):
    """Parameters, gradients and optimizer state divided among data-parallel ranks (stage 3 of ZeRO), or some (HSDP).

    Each block of a module is gathered before it is computed, in the forward and in the backward pass, and its gradients
    are reduce-scattered after. What belongs to no block is held like one more. A stage of a pipeline has the blocks of
    the model that it was cut from, as far as they are in it. While a block is computed the next one is gathered and
    the gradients of the one before are reduced, but for CPUs of one host (`_overlap.py`). Where other ranks hold copies
    of the same shards, these average what the reduce-scatters of the last pass have brought (`_copies.py`). Parameters
    without dimensions or elements, which FSDP2 does not take, are whole on every rank.
    """

    def __init__(
        self,
        # what this rank computes, with the model's name for each of their parameters
        modules: Sequence[tuple[torch.nn.Module, Mapping[str, str]]],
        places: Mapping[str, ParameterPlacement],  # where each parameter lies in the model's own, by the model's names
        world: World,  # the ranks among which they are divided
        copies: World,  # the ranks that hold the same shards
        replicas: World,  # all of these
        whole: Sequence[str],  # names of the model's blocks
        # gives parameters their memory, if they have none yet: those of one block after another
        fill: Callable[[Iterable[torch.Tensor]], None] = lambda _: None,
    ) -> None:
        from torch.distributed.fsdp import fully_shard  # lazy: it loads DTensor and sympy

        torch_adapter.read_whole_numbers()
        super().__init__()
        self._sharded: list[tuple[torch.nn.Parameter, Owned]] = []
        self._gathered: list[tuple[Any, str]] = []  # FSDP2's parameters, with the model's names
        self._writes = LostWrites()
        self._reductions: list[OverlappedReduceScatter] = []
        self._ahead: list[ForwardPrefetch] = []
        self._averages: list[AverageOfCopies] = []
        self._copies = copies
        self._used = UsedParameters([world, copies])
        self._modules: list[torch.nn.Module] = []
        several_hosts = on_several_hosts(world)
        for module, names in modules:
            excluded = dict.fromkeys(p for p in parameters_of(module) if is_excluded(p) or not _is_divisible(p))
            before = {name: p for name, p in module.named_parameters() if p not in excluded}
            if not before:
                fill(excluded)
                continue
            for parameter in before.values():
                if not parameter.is_contiguous():  # a matter of speed only, and FSDP2 takes no others
                    parameter.data = parameter.detach().contiguous()
            module.register_forward_hook(_apart)  # before what lets go of parameters at its end
            given = _OtherData()
            module.register_forward_pre_hook(given)  # before FSDP2's own
            device = next(iter(before.values())).device.type
            mesh = DeviceMesh.from_group(world.group, device)
            groups = _together(module, names, whole)
            left = dict(before)
            for group in [*groups, [module]]:  # each lets go of the whole parameters before the next is filled
                own = {id(p) for one in group for p in parameters_of(one)}
                here = {name: p for name, p in left.items() if id(p) in own}
                for one in group:
                    if one is not module:
                        one.register_forward_hook(_apart)  # before FSDP2's own, which hang on what it returns
                    one.__deepcopy__ = _no_copy  # type: ignore[assignment]
                fill([*here.values(), *(excluded if group == [module] else ())])
                fully_shard(group if group != [module] else module, mesh=mesh, ignored_params=set(excluded))
                for block in group if group != [module] else ():
                    _call_with_hooks(block)
                    _gather_when_used(block, module)
                gathered = group[0]._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
                known = {id(module.get_parameter(name)): names[name] for name in here}
                held = [] if gathered is None else [(one, known[id(one.sharded_param)]) for one in gathered.fsdp_params]
                self._gathered += held
                for one, name in held:
                    self._writes.follow(one, name)
                if gathered is not None:
                    self._used.follow(gathered)
                for one in group:
                    _refuse_other_parameters(one, held)
                for name, original in here.items():
                    self._take(original, sharded := module.get_parameter(name), places[names[name]], world)
                    given.watch(names[name], sharded)
                    original.data = original.new_empty(0)  # optimizers and programs may hold on to it
                    del left[name]
            for one in module.modules():
                one.register_parameter = functools.partial(_register_parameter, one)  # type: ignore[method-assign]
            module.register_forward_pre_hook(_refuse_part_called_first, prepend=True)
            self._used.compare_passes(module)
            self._modules.append(module)
            if copies.size > 1:
                for together, parameters in _held(module, groups, set(excluded)):
                    self._averages.append(average := AverageOfCopies(parameters, copies))
                    together[0].set_all_reduce_hook(average)
            elif device == "cpu" and several_hosts:
                self._overlap(module, groups, set(excluded))
        self._replicated = self._undivided(modules, places, replicas)

    def _undivided(
        self,
        modules: Sequence[tuple[torch.nn.Module, Mapping[str, str]]],
        places: Mapping[str, ParameterPlacement],
        replicas: World,
    ) -> Replicated:
        """Take what is whole on every rank; its gradients add up on each, and are averaged after the last pass."""
        found = {names[name]: p for module, names in modules for name, p in module.named_parameters()}
        whole = {name: p for name, p in found.items() if not _is_divisible(p) and not is_excluded(p)}
        trained = {name: p for name, p in whole.items() if p.requires_grad}
        frozen = {name: p for name, p in whole.items() if not p.requires_grad}
        form = Replicated(trained, frozen, places, replicas, None)
        self.owned += form.owned
        self.frozen += form.frozen
        return form

    def _overlap(
        self, module: torch.nn.Module, groups: list[list[torch.nn.Module]], excluded: set[torch.nn.Parameter]
    ) -> None:
        """Have collectives overlap with computation, as they do on GPUs anyway."""
        under_way: deque[Any] = deque()
        for group, parameters in _held(module, groups, excluded):
            reduction = OverlappedReduceScatter(parameters, under_way)
            self._reductions.append(reduction)
            group[0].set_custom_all_gather(OverlappedAllGather())
            group[0].set_custom_reduce_scatter(reduction)
        self._ahead.append(ForwardPrefetch(groups))

    def _take(self, original: torch.nn.Parameter, sharded: Any, place: ParameterPlacement, world: World) -> None:
        local = sharded.detach().to_local()
        if local.numel() == 0:
            return
        # FSDP2 cuts the first axis as torch.chunk does.
        each = -(-original.shape[0] // world.size)
        offsets = (world.rank * each, *(0 for _ in original.shape[1:]))
        leaf = torch.nn.Parameter(local, original.requires_grad)
        item = Owned(leaf, original, ShardBox(place, offsets), self._copies.size)
        if not original.requires_grad:
            self.frozen.append(item)
            return
        self.owned.append(item)
        self._sharded.append((sharded, item))

    # Gradients are reduced in every pass, and weights gathered in the next forward: there is nothing to publish.

    @contextmanager
    def passing(self, last: bool) -> Iterator[None]:
        for sharded, item in self._sharded:
            if has_own_hooks(sharded) or has_own_hooks(item.parameter):
                raise RuntimeError(
                    f"there is a hook on the gradient of parameter {item.name!r}, and no rank has this gradient as a "
                    "whole, since the plan shards it: take the hook off, or say shard = 'none'"
                )
        for average in self._averages:
            average.last = last
        try:
            with in_order(), self._replicated.adding():
                yield
        except Exception as error:
            with suppress(comm.CommError):  # gathers that others may not come to
                for module in self._modules:
                    start_over(module)
            if any(said in str(error) for said in ("mixed torch.Tensor and DTensor", "Sharding propagation failed")):
                raise RuntimeError(_PARTS) from error
            if "storage of size 0" not in str(error):
                raise
            raise RuntimeError(
                "back-propagation needs parameters of a block whose back-propagation is over, as gradients of "
                "gradients do (create_graph=True), and shard = 'parameters' has let them go: say shard = 'gradients'"
            ) from error
        for parameter, name in self._gathered:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                raise RuntimeError(
                    f"a gradient of parameter {name!r} came after those of its block were reduced, since the model "
                    "uses the parameter outside of the block, too: say shard = 'gradients'"
                )
        self._writes.refuse()

    def adding(self) -> AbstractContextManager[None]:
        return self.passing(last=False)

    @in_order()
    def collect(self) -> None:
        for reduction in self._reductions:
            reduction.finish()
        for average in self._averages:
            average.begin()
        for average in self._averages:
            average.finish()
        for ahead in self._ahead:
            ahead.settle()
        self._replicated.reduce()
        used = self._used.anywhere()
        for sharded, item in self._sharded:
            gradient: Any = sharded.grad
            item.leaf.grad = None if gradient is None or id(sharded) not in used else gradient.to_local()

    def forget(self) -> None:
        for reduction in self._reductions:
            reduction.forget()
        for average in self._averages:
            average.forget()
        self._used.forget()
        for sharded, _ in self._sharded:
            sharded.grad = None
        super().forget()


def _is_divisible(parameter: torch.Tensor) -> bool:
    """Return whether FSDP2 takes a parameter."""
    return parameter.dim() > 0 and parameter.numel() > 0


def _held(
    module: torch.nn.Module, groups: list[list[torch.nn.Module]], excluded: set[torch.nn.Parameter]
) -> Iterator[tuple[list[Any], list[torch.nn.Parameter]]]:
    """Yield what FSDP2 holds together, the module itself last, each with the sharded parameters in it alone."""
    rest = dict.fromkeys(p for p in parameters_of(module) if p not in excluded)
    for group in [*groups, [module]]:
        parameters = [p for one in group for p in parameters_of(one) if p in rest]
        for parameter in parameters:
            rest.pop(parameter, None)
        yield group, parameters


def _call_with_hooks(block: torch.nn.Module) -> None:
    """Have `block.forward(...)`, by which some models compute their layers, gather parameters as `block(...)` does."""
    plain, called = block.forward, False

    def note(module: torch.nn.Module, args: Any) -> None:
        nonlocal called
        called = True

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        if not called:
            return block(*args, **kwargs)
        called = False
        return plain(*args, **kwargs)

    block.register_forward_pre_hook(note)
    block.forward = forward


def _refuse_other_parameters(block: torch.nn.Module, held: list[tuple[Any, str]]) -> None:
    """Refuse to call a block with other parameters than FSDP2's, in whose place it would put its own."""

    def check(_: torch.nn.Module, __: Any) -> None:
        if any(level.key() == TransformType.Grad for level in get_interpreter_stack() or ()):
            raise RuntimeError(
                "the model is called inside a transform of torch.func (grad, vjp, jacrev, hessian), in which "
                "shard = 'parameters' would lose gradients: say shard = 'gradients'"
            )
        for one, name in held:
            found = one._module_info.module._parameters.get(one._module_info.param_name)
            if found is not one.sharded_param and found is not getattr(one, "_unsharded_param", None):
                raise RuntimeError(
                    f"another tensor stands in the place of parameter {name!r} (torch.func.functional_call, say), and "
                    "shard = 'parameters' would compute with the parameter: say shard = 'gradients'"
                )

    block.register_forward_pre_hook(check, prepend=True)  # before FSDP2's own


def _register_parameter(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
    """Register a parameter with a module, unless it is one of FSDP2's by another name, as pruning registers it."""
    taken = name in module._parameters or not hasattr(parameter, "to_local")
    known = None if taken else next((key for key, one in module._parameters.items() if one is parameter), None)
    if known is not None:
        raise RuntimeError(
            f"parameter {known!r} of {type(module).__name__.removeprefix('FSDP')} is to be {name!r}, too "
            "(torch.nn.utils.prune does this), after the Trainer was made, and shard = 'parameters' goes on with the "
            "parameter: change the model before the Trainer is made, or make a new one"
        )
    type(module).register_parameter(module, name, parameter)


class _OtherData:
    """Refuses to run a module whose parameters a program has given other data: FSDP2 goes on with what it holds."""

    def __init__(self) -> None:
        # by name each parameter, the storage that it shows (none of it is used), and the tensor that it stands for
        self._known: dict[str, tuple[Any, torch.UntypedStorage, torch.Tensor]] = {}

    def watch(self, name: str, sharded: Any) -> None:
        self._known[name] = sharded, sharded.untyped_storage(), sharded._local_tensor

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        for name, (sharded, storage, local) in self._known.items():
            if sharded.untyped_storage()._cdata == storage._cdata:
                continue
            if sharded._local_tensor is local:
                raise RuntimeError(
                    f"parameter {name!r} was given other data (p.data = ...), which sharded parameters do not take: "
                    "write into them (p.data.copy_(...)), or say shard = 'optimizer'"
                )
            self.watch(name, sharded)  # it was moved, by model.to(...) say


class _GatheredWhenRead:
    """Comes before a block's class: what is read from the block while the model runs is gathered, called or not."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        block: Any = self
        if name not in block._parameters or not hasattr(value, "to_local"):
            return value
        if block._get_fsdp_state()._state_ctx.iter_forward_root is None or "_gathering" in block.__dict__:
            return value  # the model does not run: a program looks at what this rank holds
        block.__dict__["_gathering"] = True  # setting a parameter reads it first
        try:
            block.unshard()
            _hold(block, read=True)
        finally:
            del block.__dict__["_gathering"]
        return super().__getattr__(name)  # type: ignore[misc]


def _hold(block: Any, *, read: bool) -> None:
    """Let a block whose parameters were read keep them, and gather gradients, until all of back-propagation is over.

    What is made of a parameter before the block is called has its gradient after that of the block's inputs, at which
    FSDP2 reduces the block's gradients otherwise.
    """
    group = block._get_fsdp_state()._fsdp_param_group
    if group is None:  # all that it has are divided otherwise
        return
    block.set_reshard_after_forward(not read, recurse=False)
    if read:
        group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)
    else:
        group.__dict__.pop("_register_post_backward_hook", None)


def gathered(model: torch.nn.Module) -> set[int]:
    """Return the identities of what FSDP2 has put in place of parameters for a pass that goes on, or that failed."""
    modules: list[Any] = [one for one in model.modules() if hasattr(one, "_get_fsdp_state")]
    states = [one._get_fsdp_state() for one in modules]
    held = [one for state in states if state._fsdp_param_group for one in state._fsdp_param_group.fsdp_params]
    return {id(one._unsharded_param) for one in held if hasattr(one, "_unsharded_param")}


def _refuse_part_called_first(model: Any, _: Any) -> None:
    """Refuse a model of which a block has run before it: FSDP2 takes that for a model of its own, and fails later."""
    if model._get_fsdp_state()._is_root is None:
        for name, one in model.named_modules():
            if one is not model and hasattr(one, "_get_fsdp_state") and one._get_fsdp_state()._is_root:
                raise RuntimeError(
                    f"the program has called {name!r}, a part of the model, before the model's first step, which "
                    "shard = 'parameters' does not take: make a step before, or say shard = 'gradients'"
                )


def _gather_when_used(block: Any, model: torch.nn.Module) -> None:
    """Have parameters gathered that models use past their block: a layer's that they read, or a part that they call.

    Back-propagation lets them go again. Without it the end of the forward pass does.
    """
    inside = [one for one in block.modules() if one is not block and one._parameters]
    used = not inside

    def gather(inner: torch.nn.Module, _: Any) -> None:
        nonlocal used
        if any(hasattr(one, "to_local") for one in inner._parameters.values()):
            block.unshard()
            used = True

    def let_go(_: torch.nn.Module, __: Any, ___: Any) -> None:
        nonlocal used
        if used and not torch.is_grad_enabled():
            block.reshard()
        if not inside:
            _hold(block, read=False)
        used = not inside

    if not inside:
        block.__class__ = type(type(block).__name__, (_GatheredWhenRead, type(block)), {})
    for one in inside:
        one.register_forward_pre_hook(gather)
    model.register_forward_hook(let_go)


def _no_copy(memo: Any) -> NoReturn:
    raise RuntimeError(
        "a model with sharded parameters cannot be copied, as averages of weights (EMA, SWA) copy it: say shard = "
        "'gradients', average what each rank has of trainer.model.parameters(), or copy trainer.state_dict()"
    )


def _apart(_: torch.nn.Module, __: Any, output: Any) -> Any:
    """Copy parameters, which FSDP2 lets go of, and views: changing one in place would drop FSDP2's hooks."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if hasattr(tensor, "to_local"):
            raise RuntimeError(_PARTS)
        viewed = tensor._is_view() and (tensor.requires_grad or isinstance(tensor._base, torch.nn.Parameter))
        return tensor.clone() if viewed or isinstance(tensor, torch.nn.Parameter) else tensor

    return mapped(output, copied)


def _together(module: torch.nn.Module, names: Mapping[str, str], whole: Sequence[str]) -> list[list[torch.nn.Module]]:
    """Return the blocks of a module, those in one list that come from one block of the model."""
    found: dict[str, list[torch.nn.Module]] = {}
    rows = blocks(module)
    holders = Counter(id(p) for _, block in rows for p in parameters_of(block))
    for name, block in rows:
        if any(holders[id(p)] > 1 for p in parameters_of(block)):
            continue  # a part that is in other blocks, too: it is held with the module
        first = names[f"{name}.{next(iter(block.named_parameters()))[0]}"]
        key = next((one for one in whole if first.startswith(f"{one}.")), first)
        found.setdefault(key, []).append(block)
    return list(found.values())


def blocks(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules to hold, or to compute again, one at a time, in the order in which the model has them.

    The elements of the model's lists and sequences (layers of a Transformer, stages of a ResNet), however deep they
    stand, but none inside another; where a module has no lists, its children that have parameters. Left out are those
    whose parameters other modules use too, those that are not called (as a list is not), and those without parameters.
    """
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    found: list[torch.nn.Module] = []
    _descend(model, found)
    return [(names[id(module)], module) for module in dict.fromkeys(found) if _owns_parameters(module, uses)]


def _descend(module: torch.nn.Module, found: list[torch.nn.Module]) -> None:
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.Sequential):
            for item in child.children():  # but for those that are None
                if _uncalled(item):
                    _descend(item, found)
                elif _has_parameters(item):
                    found.append(item)
        elif _holds_list(child) or _uncalled(child):
            _descend(child, found)
        elif _has_parameters(child):
            found.append(child)
    if not found and _has_parameters(module) and isinstance(module, torch.nn.Sequential):
        found.extend(child for child in module.children() if _has_parameters(child))


def _uncalled(module: torch.nn.Module) -> bool:
    """Return whether calling the module is impossible: a mere container."""
    return type(module).forward is torch.nn.Module.forward


def _holds_list(module: torch.nn.Module) -> bool:
    return any(isinstance(inner, torch.nn.ModuleList | torch.nn.Sequential) for inner in module.modules())


def _has_parameters(module: torch.nn.Module) -> bool:
    return next(parameters_of(module), None) is not None


def _owns_parameters(module: torch.nn.Module, uses: Counter[int]) -> bool:
    inside = Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)
    return all(uses[key] == count for key, count in inside.items())
