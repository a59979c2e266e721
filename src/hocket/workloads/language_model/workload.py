"""How the language model is trained and judged."""

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.workloads._workload import Batch, BundledWorkload
from hocket.workloads.language_model import data
from hocket.workloads.language_model.data import Text
from hocket.workloads.language_model.model import GPT
from hocket.workloads.language_model.settings import SIZES, LanguageModelSettings

_PAGES_PER_BATCH = 64


class LanguageModelWorkload(BundledWorkload[LanguageModelSettings]):
    """Cross entropy of the next byte and Adam; the learning rate rises for a hundred steps and falls along a cosine."""

    warm_up_steps = 100

    def __init__(self, settings: LanguageModelSettings) -> None:
        super().__init__(settings)
        self._texts = data.load()

    def model(self) -> GPT:
        """Return a GPT of the chosen size."""
        return GPT(self.settings.size)

    def optimizer(self, model: nn.Module) -> torch.optim.Adam:
        """Adam with GPT-3's constants (arXiv:2005.14165, appendix B)."""
        return torch.optim.Adam(model.parameters(), lr=self.settings.lr, betas=(0.9, 0.95), eps=1e-8)

    def dataset(self) -> Dataset[Batch]:
        """Return excerpts from random places of the training text."""
        context = SIZES[self.settings.size].context
        return cast(Dataset[Batch], data.Excerpts(self._texts.training, context, seed=self.settings.seed))

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy in nats per byte: all samples have as many, so that it is a mean over samples too."""
        return F.cross_entropy(output.float().flatten(0, 1), target.flatten())

    def _judge(self, model: nn.Module, device: torch.device, picture: Path | None) -> dict[str, Any]:
        """Perplexity on held-out paragraphs, beside those of counting; the pages shared out among the workers."""
        pages = data.Pages(self._texts.held_out, SIZES[self.settings.size].context)
        sums = torch.zeros(2, dtype=torch.float64)
        for tokens, following in hocket.shard(DataLoader(pages, batch_size=_PAGES_PER_BATCH)):
            scores = model(tokens.to(device)).float().flatten(0, 1)
            nats = F.cross_entropy(scores, following.to(device).flatten(), reduction="sum")
            sums += torch.tensor([float(nats), following.numel()], dtype=torch.float64)
        nats_sum, count = hocket.total(sums).tolist()
        texts = self._texts
        rows = [
            _row("unigram counts", unigram_nats(texts.training, texts.held_out)),
            _row("bigram counts", bigram_nats(texts.training, texts.held_out)),
            _row("GPT", nats_sum / count),
        ]
        return {
            "title": f"Predicting the next byte of {len(texts.held_out):,} held-out bytes",
            "columns": {"predictor": "predictor", "perplexity": "perplexity", "bits_per_byte": "bits/byte"},
            "rows": rows,
            "summary": (
                f"The GPT's perplexity is {rows[2]['perplexity']:.2f} per byte on paragraphs it has never seen, "
                f"the bigram's {rows[1]['perplexity']:.2f}"
            ),
        }


def _row(predictor: str, nats: float) -> dict[str, Any]:
    return {"predictor": predictor, "perplexity": math.exp(nats), "bits_per_byte": nats / math.log(2.0)}


_BYTES = 256


def unigram_nats(training: Text, held_out: Text) -> float:
    """Mean -ln p of the bytes of ``held_out`` but the first, where p is a byte's share of ``training``, plus one each.

    The first byte is left out so that all predictors are judged on the same bytes.
    """
    counts = np.bincount(training, minlength=_BYTES) + 1.0
    return float(-np.log(counts / counts.sum())[held_out[1:]].mean())


def bigram_nats(training: Text, held_out: Text) -> float:
    """Mean -ln p of the bytes of ``held_out`` but the first, where p is how often a byte follows the one before it.

    As much weight as one observation has goes to the byte's share of the whole text, for pairs never seen.
    """
    share = np.bincount(training, minlength=_BYTES) + 1.0
    share /= share.sum()
    pairs = np.zeros((_BYTES, _BYTES))
    np.add.at(pairs, (training[:-1], training[1:]), 1.0)
    likely = (pairs + share) / (pairs.sum(axis=1, keepdims=True) + 1.0)
    return float(-np.log(likely)[held_out[:-1], held_out[1:]].mean())
