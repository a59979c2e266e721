"""How the translation is trained and judged."""

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.workloads._workload import Batch, BundledWorkload
from hocket.workloads.translation.data import HeldOut, Language, Pairs
from hocket.workloads.translation.model import PADDING, Transformer
from hocket.workloads.translation.settings import SIZES, TranslationSettings
from hocket.workloads.translation.spelling import SPELL, english, join, word_by_word

HELD_OUT = 1000
_PAIRS_PER_BATCH = 250
_SHOWN = 3  # translations in the table


class TranslationWorkload(BundledWorkload[TranslationSettings]):
    """Cross entropy of the next word and Adam; the learning rate rises for a hundred steps and falls along a cosine."""

    warm_up_steps = 100

    def __init__(self, settings: TranslationSettings) -> None:
        super().__init__(settings)
        self._source, self._target = Language("english"), Language(settings.language)

    def model(self) -> Transformer:
        """Return a Transformer of the chosen size."""
        source, target = self._source, self._target
        return Transformer(
            SIZES[self.settings.size],
            source_words=len(source.words),
            target_words=len(target.words),
            source_length=source.length,
            target_length=target.length,
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Adam:
        """Adam with the paper's constants."""
        return torch.optim.Adam(model.parameters(), lr=self.settings.lr, betas=(0.9, 0.98), eps=1e-9)

    def dataset(self) -> Dataset[Batch]:
        """Return random numbers in both languages."""
        return cast(Dataset[Batch], Pairs(self._source, self._target, seed=self.settings.seed))

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy in nats per word: the mean over the words of a sentence, and of that over the sentences."""
        nats = F.cross_entropy(output.float().transpose(1, 2), target, ignore_index=PADDING, reduction="none")
        return (nats.sum(dim=1) / (target != PADDING).sum(dim=1)).mean()

    def _judge(self, model: nn.Module, device: torch.device, picture: Path | None) -> dict[str, Any]:
        """Return how many held-out numbers are translated without mistakes; the numbers shared out among workers."""
        transformer = cast(Transformer, model)
        held_out = HeldOut(self._source, self._target, HELD_OUT)
        sums = torch.zeros(3, dtype=torch.float64)  # nats, exact translations, sentences
        for source, so_far, expected in hocket.shard(DataLoader(held_out, batch_size=_PAIRS_PER_BATCH)):
            source, expected = source.to(device), expected.to(device)
            nats = self.loss_fn(model(source, so_far.to(device)), expected) * len(source)
            written = transformer.translate(source, self._target.length)
            exact = ((written == expected) | (expected == PADDING)).all(dim=1).sum()
            sums += torch.tensor([float(nats), float(exact), len(source)], dtype=torch.float64)
        nats_sum, exact_count, count = hocket.total(sums).tolist()
        shown = torch.stack([held_out[index][0] for index in range(_SHOWN)]).to(device)
        examples = transformer.translate(shown, self._target.length).tolist()
        language = self.settings.language
        baseline = sum(self._word_by_word_is_right(number) for number in held_out.numbers) / len(held_out)
        rows = [
            {"translator": "word by word", "exact_percent": 100.0 * baseline},
            {"translator": "Transformer", "exact_percent": 100.0 * exact_count / count},
        ]
        number = held_out.numbers[0]
        return {
            "title": f"English to {language.capitalize()}, {int(count):,} held-out numbers (generated text)",
            "columns": {"translator": "translator", "exact_percent": "without mistakes (%)"},
            "rows": rows,
            "loss": nats_sum / count,
            "examples": {
                join("english", english(held_out.numbers[index])): join(language, self._target.decode(example))
                for index, example in enumerate(examples)
            },
            "summary": (
                f"{rows[1]['exact_percent']:.1f}% of numbers it has never seen are right to the last letter, "
                f"{nats_sum / count:.4f} nats per word; {join('english', english(number))} became "
                f"{join(language, self._target.decode(examples[0]))}"
            ),
        }

    def _word_by_word_is_right(self, number: int) -> bool:
        target = self._target
        return word_by_word(target.name, english(number)) == SPELL[target.name](number)
