"""What a program has changed in its model since it was distributed, which training would not follow."""

import torch

from hocket._program import warn

from ..mesh import World
from ..state import is_excluded
from ._batch_norm import SynchronisedBatchNorm


class ModelChanges:
    """Refuses parameters that nobody averages, and tells of batch norm that trains.

    Args:
        module: The model.
        world: Its ranks.
        known: Parameters whose gradients are averaged.
    """

    def __init__(self, module: torch.nn.Module, world: World, known: list[torch.nn.Parameter]) -> None:
        self._module, self._world, self._known = module, world, {id(one) for one in known}
        self._forwards = 0
        self._told = False  # of batch norm

    def tell_batch_norms(self) -> None:
        """Warn, once and on one rank, of batch norm whose statistics will be those of a rank's own samples."""
        if self._told:
            return
        plain = torch.nn.modules.batchnorm._BatchNorm
        alone = [
            name
            for name, one in self._module.named_modules()
            if isinstance(one, plain)
            and one.training
            and not isinstance(one, SynchronisedBatchNorm | torch.nn.SyncBatchNorm)
        ]
        self._told = bool(alone)
        if alone and self._world.rank == 0:
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            warn(
                f"batch norm ({alone[0] or 'the model'}{more}) normalises by the statistics of a rank's own samples, "
                "so that losses are not those of one device: pass sync_batch_norm=True for those of the whole batch",
            )

    def refuse_changing(self, names: list[str]) -> None:
        """Refuse parameters that each forward pass changes, and what counts lookups.

        Raises:
            RuntimeError: more passes are made than the loop's, or a rank counts a part of the batch.
        """
        if names:
            raise RuntimeError(
                f"each forward pass changes parameter {names[0]!r}, and more are made than those of your loop (a "
                "look at the model, before the first): change it after optimizer.step(), or keep what is not trained "
                "in buffers (a teacher that follows its student, say)"
            )
        for name, one in self._module.named_modules():
            counting = isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag) and one.scale_grad_by_freq
            if counting and not hasattr(one, "exchange") and one.weight.requires_grad:
                raise RuntimeError(
                    f"{name} has scale_grad_by_freq, which goes by how often the whole batch looks up a row, and a "
                    "rank has a part of it: leave it out, or take hocket.Trainer and a plan that does not cut batches"
                )

    def forward_begins(self) -> None:
        """Refuse parameters that the model had not when it was distributed, in some of the forward passes.

        Look there, too, whether batch norm that evaluated then trains now.

        Raises:
            RuntimeError: there is such a parameter.
        """
        self._forwards += 1
        if self._forwards % 32 and self._forwards & (self._forwards - 1):
            return
        self.tell_batch_norms()
        for name, parameter in self._module.named_parameters():
            if id(parameter) not in self._known and not is_excluded(parameter):
                raise RuntimeError(
                    f"the model had no parameter {name!r} when it was distributed, or another one, so that nobody "
                    "would average its gradient: change the model first, then make the optimizer and distribute"
                )
