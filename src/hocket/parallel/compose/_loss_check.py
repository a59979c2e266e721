"""Compares the loss of some samples with that of their parts, before the first step is made."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from hocket._program import warn
from hocket.planner import PlanError, PlanFinding
from hocket.workload.division import seed

from ..batches import Alone, BatchPart, LossForm, MeasuredLoss, cut_fields, mapped, tensors_in, undisturbed
from ..data import (
    LESS_RANDOM,
    ForwardState,
    StateProbe,
    SynchronisedBatchNorm,
    as_evaluated,
    as_trained,
    draws_of,
    tell,
)
from ..mesh import World
from ..pipeline import changing_buffers
from ._composition import Composition
from ._kept_by_passes import kept_by_passes, tensors_of
from ._loss_function import as_before, modules_in
from ._loss_judge import LossJudge, LossVerdict, no_part, said
from ._padding import WHOLE, refuse_unlike_padding
from ._precision import exactly

_SAMPLES = 8
"""Most samples that are compared: enough to tell one form of loss from another, at the price of two small forwards."""

_ENOUGH = 4
"""Samples from which on those of one rank do: of fewer, what a loss divides by may look like many things."""


class LossCheck:
    """Finds how a loss adds up over parts of a batch, or that it does not.

    The model is run as it trains, but in full precision, and with dropout and batch norm as they evaluate: what these
    do is no matter of the loss. Where it draws random numbers all the same, it is run as it evaluates, then with noise
    that is alike for all samples. Random states, buffers and attributes of modules are put back. `form` is made to fit.
    """

    def __init__(self, composition: Composition, form: LossForm) -> None:
        self._composition, self._form = composition, form
        self.done = False
        self._seen: dict[str, tuple[type, str]] = {}  # of parameters, as a first pass leaves them
        held = [composition.model, *(module for module, _ in composition.modules)]
        known = {id(inner) for one in held for inner in one.modules()}
        used = modules_in(composition.passes.loss_fn)
        self._outside = [one for one in used if not any(id(inner) in known for inner in one.modules())]
        plan, mesh = composition.plan, composition.mesh
        self._cuts = [
            text
            for text, count in (
                (f"{mesh['data'].size} data-parallel ranks", mesh["data"].size),
                (f"accumulate = {plan.accumulate}", plan.accumulate),
                (f"micro_batches = {plan.micro_batches}", plan.micro_batches if mesh["pipeline"].size > 1 else 1),
            )
            if count > 1
        ]

    def run(self, part: BatchPart, batch: BatchPart | None = None, alone: Alone | None = None) -> None:
        """Compare, and be done if there were samples enough that count for it; a collective operation.

        Args:
            part: This rank's part of the first batch.
            batch: All of the first batch, where every rank has it.
            alone: Some of the part's samples as a `BatchPart`, if others pad them to another length.

        Raises:
            PlanError: the plan cuts batches, and the loss of a batch does not follow from that of its parts, or the
                model takes no part of a batch. Or each pass changes parameters.
        """
        composition = self._composition
        if not self._cuts and composition.mesh["pipeline"].size > 1 and not _alike(part):
            self.done = True  # nodes and edges, say: a cut may be no batch, and where one stage fails the others wait
            return
        few = few_samples(part, composition.mesh["data"])
        if few is not None:
            with as_before(composition.passes.loss_fn):
                self.done = self._run(few, batch)
            self.compare_padding(part, alone)
        if self.done and self._cuts:
            composition.passes.known.begin()

    def compare_padding(self, part: BatchPart, alone: Alone | None) -> None:
        """Compare the loss of some samples with theirs where others do not pad them; a collective operation.

        Arguments are as for `run`.

        Raises:
            PlanError: it is another one.
        """
        if self._composition.mesh["data"].size > 1:
            with as_before(self._composition.passes.loss_fn):
                refuse_unlike_padding(self._composition, self._form, part, alone, self._modules)

    def run_again(self, part: BatchPart) -> None:
        """Compare a loss that is computed otherwise than that of the first step was; a collective operation.

        What was found out about the loss then is kept.

        Raises:
            PlanError: as for `run`.
        """
        composition = self._composition
        few = few_samples(part, composition.mesh["data"])
        if few is None:
            return
        judge, modules = LossJudge(composition, self._form, few, known=True), self._modules
        with as_before(composition.passes.loss_fn), undisturbed(modules), self._exactly():
            found, _ = self._compared(judge, modules, few)
        verdicts = composition.mesh.whole.from_all(None if isinstance(found, str) else found)
        verdict = next((one for one in verdicts if one is not None), None)
        if verdict is not None and not verdict.empty:
            composition.passes.known.compared()
            self._refuse(replace(verdict, problem=verdict.problem and _LATER + verdict.problem))

    @property
    def _modules(self) -> list[torch.nn.Module]:
        return [self._composition.model, *(module for module, _ in self._composition.modules), *self._outside]

    @property
    def _looked_at(self) -> list[tuple[torch.nn.Module, dict[str, str]]]:
        """Modules, with names of their buffers."""
        outside = [(one, {name: f"loss_fn.{name}" for name, _ in one.named_buffers()}) for one in self._outside]
        return [*self._composition.modules, *outside]

    def _run(self, few: BatchPart, batch: BatchPart | None) -> bool:
        composition, mesh, modules = self._composition, self._composition.mesh, self._modules
        self._seen = {}
        if self._cuts:
            self._refuse_tables(modules)
        if mesh["data"].size > 1 and mesh["pipeline"].size == 1:  # the first step shows what stages draw
            with torch.no_grad():  # FSDP keeps what it has gathered for a backward
                draws = draws_of(modules, few.samples, lambda: composition.passes.value(few.copied(), lambda *_: None))
            composition.passes.numbers.look()
            composition.passes.numbers.decide(draws)
        judge = LossJudge(composition, self._form, few)
        with undisturbed(modules), self._exactly():
            found, steady = self._compared(judge, modules, few)
            failed = found if isinstance(found, str) else mesh.whole.first(judge.failed)
            if isinstance(found, str):
                found = self._whole_alone(modules, few, batch, found)
        verdicts = composition.mesh.whole.from_all(found)
        verdict = next((one for one in verdicts if one is not None), None)
        if verdict is not None and verdict.empty:
            return False
        if verdict is not None:
            self._follow(verdict)
        if failed and self._cuts:
            self._tell(_FAILED.format(failed))
        if self._cuts and any(composition.mesh.whole.from_all(any(map(_keeps_state, modules)))):
            with undisturbed(modules), self._exactly():
                state = self._look_at_state(modules, few, steady=steady)
            composition.passes.state = ForwardState(*state)  # its hooks are there to stay
        before, after = self._seen, self._parameters()
        mine = [name for name, one in before.items() if one[0] is after[name][0] and one != after[name]]
        if changed := sorted({name for names in composition.mesh.whole.from_all(mine) for name in names}):
            named = changed[0] if len(changed) == 1 else f"{changed[0]} and {len(changed) - 1} more"
            rule = f"each forward pass changes {named}, and more are made than one a step (this check is one)"
            raise PlanError("the model cannot be trained so:", [PlanFinding("model", rule, _CHANGE)])
        return True

    def _refuse_tables(self, modules: Sequence[torch.nn.Module]) -> None:
        """Refuse tables that look at all rows of a whole batch, or whose gradients ranks cannot average."""
        several = self._composition.mesh["data"].size > 1
        for name, one in (row for module in modules for row in module.named_modules()):
            if not isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag) or hasattr(one, "exchange"):
                continue
            trained = one.weight.requires_grad
            what = (
                "max_norm" if one.max_norm is not None else "scale_grad_by_freq" * (one.scale_grad_by_freq and trained)
            )
            rule, remedy = f"{name} has {what}, which goes by all rows that a batch looks up", WHOLE
            if one.sparse and trained and several and not what:
                rule, remedy = f"{name} has sparse gradients, and ranks average dense ones only", "say sparse=False"
            elif not what:
                continue
            finding = PlanFinding("model", f"{rule}. This plan cuts batches ({', '.join(self._cuts)})", remedy)
            raise PlanError("the plan does not train as one process:", [finding])

    def _parameters(self) -> dict[str, tuple[type, str]]:
        """Return what tells whether parameters have been changed; and whether they were shards, or gathered.

        Where a step has several passes it is also told whether what is not trained was written to: the teacher may be
        equal to the student yet.
        """
        several = len(self._cuts) > (self._composition.mesh["data"].size > 1)
        rows = [(p, names[name]) for one, names in self._composition.modules for name, p in one.named_parameters()]
        rows += [(p, f"loss_fn.{name}") for one in self._outside for name, p in one.named_parameters()]
        found = {}
        for p, name in rows:
            local: torch.Tensor = p.to_local() if hasattr(p, "to_local") else p
            if not local.is_meta and local.layout is torch.strided:
                total = local.detach().sum(dtype=torch.complex128 if local.is_complex() else torch.float64)
                written = (p._version, p.data_ptr()) if several and local is p and not p.requires_grad else ()
                found[name] = type(p), f"{total.item()} {written}"
        return found

    def _exactly(self) -> AbstractContextManager[None]:
        """Open a block in full precision, but for pipelines, whose messages must be alike."""
        return exactly() if self._composition.passes.pipeline is None else nullcontext()

    def _look_at_state(self, modules: Sequence[torch.nn.Module], few: BatchPart, *, steady: bool) -> Any:
        """Find what passes leave in buffers; tell of what cannot be kept right; return what `ForwardState` takes.

        `modules` are what this rank computes; a `steady` model draws no random numbers but in its dropout.
        """
        composition, whole = self._composition, self._composition.mesh.whole
        plan, mesh = composition.plan, composition.mesh
        alone = plan.accumulate == 1 and mesh["pipeline"].size == 1  # passes on a rank
        told = mesh["pipeline"].size > 1 and plan.micro_batches > 1  # by the pipeline

        def skipped(module: torch.nn.Module) -> bool:
            if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                return False
            return not module.training or told or (alone and isinstance(module, SynchronisedBatchNorm))

        for module in modules:
            for inner in module.modules():
                if isinstance(inner, torch.nn.modules.dropout._DropoutNd) or (
                    skipped(inner) and isinstance(inner, torch.nn.modules.batchnorm._BatchNorm)
                ):
                    inner.training = False
        looked_at = self._looked_at
        judge, probe = LossJudge(composition, self._form, few), StateProbe(looked_at, skipped)
        count, cut = few.samples, few.samples // 2  # batch norm takes no part of one sample
        losses: list[list[MeasuredLoss]] = []
        try:
            left = [
                probe.left_by(lambda a=a, b=b: losses.append(judge.measured(a, b)))  # type: ignore[misc]
                for a, b in ((0, count), (0, cut), (cut, count))
            ]
            found = probe.changed(left[0], left[1:], (cut / count, 1 - cut / count))
        except Exception:  # a part of one sample, say, that the model does not take
            found, losses = probe.norms(), []
            pipeline = composition.passes.pipeline
            for stage in pipeline.stages if told and pipeline is not None else ():
                if line := changing_buffers(stage):
                    self._tell(line)
        first = [one[0] for one in losses if one]
        off = judge.distance(first[0], first[1:]) if len(first) == 3 and steady else 0.0
        offs = whole.from_all(off)
        others = any(whole.from_all(any(one.kind == "other" for one in found)))
        if others or max(offs) > 1e-4:
            lines = tell(found, max(offs), max(offs) > 1e-4, self._cuts, speak=mesh["data"].rank == 0)
            composition.notes += lines
        return looked_at, mesh["data"], found

    def _compared(
        self, judge: LossJudge, modules: Sequence[torch.nn.Module], few: BatchPart
    ) -> tuple[LossVerdict | str | None, bool]:
        """Return what explains the loss, or the error that the samples raise, and whether no random numbers matter."""
        from_all = self._composition.mesh.whole.from_all
        steady = False
        error = ""
        for calm, quiet in LESS_RANDOM:
            calm(modules)
            first: list[MeasuredLoss] = []

            def agrees(one: list[MeasuredLoss]) -> bool:
                seed(1)
                other = judge.measured(0, few.samples)
                if not one or not math.isfinite(one[0].value):
                    return True
                return judge.close(one[0].value, other[0].value, 1e-2)

            same = True
            try:
                with undisturbed(modules), quiet():
                    seed(0)
                    first = judge.measured(0, few.samples)
                    self._seen = self._seen or self._parameters()
                    same = agrees(first)
            except Exception as caught:  # what is no mere matter of the mode will be met in the step itself
                same, error = False, said(caught)
            if all(from_all(same)):
                with quiet():
                    return judge.verdict(first), steady or calm is as_trained
            if calm is as_trained and not any(from_all(error)):
                with undisturbed(modules):  # perhaps it was no random number, but what the first pass left in buffers
                    steady = all(from_all(agrees(first)))
                if steady and self._composition.mesh["pipeline"].size == 1:
                    several = self._composition.plan.accumulate > 1
                    kept = kept_by_passes(judge, modules, self._looked_at, few.samples, several=several)
                    judge.keeps = self._composition.mesh.whole.first(kept) or ""
        if not (found := self._composition.mesh.whole.first(error)):
            judge.failed = "the model or the loss draws random choices in each pass, also as it evaluates"
        return LossVerdict(problem=judge.keeps) if judge.keeps else found, steady

    def _whole_alone(
        self, modules: Sequence[torch.nn.Module], few: BatchPart, batch: BatchPart | None, error: str
    ) -> LossVerdict | None:
        """Return that the model takes the whole batch and no part of it, if it is so; a collective operation."""
        from_all = self._composition.mesh.whole.from_all
        if not self._cuts or not all(from_all(batch is not None and batch.samples > few.samples)):
            return None
        assert batch is not None
        as_evaluated(modules)
        try:
            self._composition.passes.measured(batch.copied(), whole=True)
            takes = True
        except Exception:  # an error of the model's own, which the step will meet
            takes = False
        return LossVerdict(problem=no_part(few.samples, batch.samples, error)) if all(from_all(takes)) else None

    def _follow(self, verdict: LossVerdict) -> None:
        form, notes = self._form, self._composition.notes
        self._refuse(verdict)
        if verdict.counter is not None:
            form.counter = verdict.counter
            notes.append(f"the loss is a mean over {verdict.counter}, by which parts of a batch are weighted")
        if verdict.kind:
            form.kind = verdict.kind  # type: ignore[assignment]
        form.rate, form.ratios = verdict.rate, verdict.ratios
        form.inside = verdict.inside if verdict.inside is not None else form.inside
        if form.kind == "graph" and verdict.kind and not math.isclose(verdict.rate, 1.0):
            notes.append("parts of a batch are weighted by what their loss divides by, as its graph says")

    def _refuse(self, verdict: LossVerdict) -> None:
        if verdict.problem and self._cuts:
            rule = f"{verdict.problem} This plan cuts batches ({', '.join(self._cuts)})"
            findings = [PlanFinding("loss_fn", rule, _REMEDY)]
            for name, one in self._composition.model.named_modules():
                if isinstance(one, torch.nn.modules.batchnorm._BatchNorm) and one.running_mean is None:
                    findings.insert(0, PlanFinding(f"model, layer {name!r}", _UNTRACKED, _TRACK))
                    break
            raise PlanError("the plan does not keep the loss of one process:", findings)
        if verdict.guarded and self._cuts:
            self._tell(_GUARDED)

    def _tell(self, line: str) -> None:
        self._composition.notes.append(line)
        if self._composition.mesh.whole.rank == 0:
            warn(line)


_LATER = "it is computed otherwise in this step, which was made, than in earlier ones (a term came?), and "
_CHANGE = (
    "change parameters after trainer.step, or keep what is not trained in buffers (a teacher that follows its student, "
    "say)"
)
_FAILED = (
    "the loss of some samples could not be compared with that of their parts, so that nothing shows whether samples "
    "meet in it (in-batch negatives, a statistic of the batch), where it would not be that of one process: {}"
)
_GUARDED = (
    "the loss divides by more than it counts where that is little (`sum / count.clamp(min=10)`, `sum / (count + 1)`), "
    "and a part of a batch counts less than all of it: where it does, the loss is not that of one process. Return "
    "(sum, count) from loss_fn"
)
_REMEDY = (
    "if it is a mean over something else (tokens, weights), return (sum, count) from loss_fn, or pass loss_weight, "
    'which gives the count for a part of a batch; if it is a sum, say loss_reduction = "sum"; if samples meet in it '
    "(in-batch negatives, a statistic of the batch), " + WHOLE
)

_UNTRACKED = (
    "this batch norm keeps no running statistics (track_running_stats=False), so that samples meet in it in "
    "evaluation, too, and each part of a batch has its own"
)
_TRACK = "say track_running_stats=True, which changes nothing in training, and sync_batch_norm = true; or " + WHOLE


def few_samples(part: BatchPart, data: World) -> BatchPart | None:
    """Return the same few samples of the first batch on every rank; a collective operation.

    None if there are not two, or if what ranks have of them cannot be put together.
    """
    count = min(part.samples, _SAMPLES)
    counts = data.from_all(count)
    device = next((t.device for t in tensors_in([part.inputs, part.target])), torch.device("cpu"))
    values: Any = (part.inputs, part.target)
    if part.samples > count:
        values = cut_fields(part.inputs, part.target, 0, count, part.samples)
    mine = values = mapped(values, lambda tensor: tensor.detach().cpu())
    first = (data.from_root(values), counts[0]) if counts[0] >= 2 else (None, 0)
    values, count = first
    if counts[0] < _ENOUGH:
        rows = [(value, n) for value, n in zip(data.from_all(mine), counts, strict=True) if n][:_SAMPLES]
        try:
            columns = zip(*(tensors_in(value) for value, _ in rows), strict=True)
            joined = iter([_joined(column, [n for _, n in rows]) for column in columns])
            values, count = mapped(rows[0][0], lambda _: next(joined)), sum(n for _, n in rows)
        except (ValueError, RuntimeError, IndexError):  # padded by each rank to a length of its own
            values, count = first
    if values is None or count < 2:
        return None
    inputs, target = mapped(values, lambda tensor: tensor.to(device))
    return BatchPart(inputs, target, count, count)


def _joined(column: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """Return one tensor of the ranks' samples, of which each rank has so many; what is no row of samples as it is."""
    if all(one.dim() and len(one) == count for one, count in zip(column, counts, strict=True)):
        return torch.cat(list(column))
    return column[0]


def _keeps_state(module: torch.nn.Module) -> bool:
    return any(inner._buffers for inner in module.modules()) or any(tensors_of([module]).values())


def _alike(part: BatchPart) -> bool:
    """Return whether all tensors of a batch have as many entries."""
    return len({len(one) for one in tensors_in([part.inputs, part.target]) if one.dim()}) == 1
