import math
import sys

import numpy as np
import pytest
import torch

from hocket.workloads.language_model import data
from hocket.workloads.language_model.model import GPT
from hocket.workloads.language_model.settings import SIZES
from hocket.workloads.language_model.workload import bigram_nats, unigram_nats


def test_the_text_is_real_and_no_paragraph_is_both_learnt_and_judged_by() -> None:
    texts = data.load()
    assert len(texts.training) > 200_000
    assert len(texts.held_out) > 20_000
    assert b"statement" in texts.training.tobytes()
    learnt, held_out = (set(text.tobytes().split(b"\n\n")) for text in (texts.training, texts.held_out))
    assert len(held_out) > 100
    assert not learnt & held_out


def test_a_python_without_its_topics_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(FileNotFoundError, match=r"pydoc_data\.topics.*this Python lacks it"):
        data.load()


def test_the_target_is_the_next_byte() -> None:
    text = np.arange(100, dtype=np.uint8)
    tokens, following = data.Excerpts(text, 8, seed=5)[3]
    assert torch.equal(following, tokens + 1)
    pages = data.Pages(text, 30)
    assert len(pages) == 3
    assert [int(pages[index][0][0]) for index in range(3)] == [0, 30, 60]
    with pytest.raises(ValueError, match="a text of 100 bytes has no excerpt of 100"):
        data.Excerpts(text, 100)


def test_excerpts_are_a_function_of_seed_epoch_and_index() -> None:
    text = data.load().training
    first, again = data.Excerpts(text, 16, seed=2), data.Excerpts(text, 16, seed=2)
    assert torch.equal(first[9][0], again[9][0])
    again.set_epoch(1)
    assert not torch.equal(first[9][0], again[9][0])


def test_counting_predicts_what_was_counted() -> None:
    training = np.frombuffer(b"ab" * 500, dtype=np.uint8)
    assert unigram_nats(training, training) == pytest.approx(math.log(2), abs=0.3)
    assert bigram_nats(training, training) < 0.02


def test_bytes_do_not_see_what_comes_after_them() -> None:
    torch.manual_seed(0)
    model = GPT("tiny")
    tokens = torch.randint(256, (2, 12))
    scores = model(tokens)
    assert scores.shape == (2, 12, 256)
    changed = tokens.clone()
    changed[:, 7] += 1
    changed %= 256
    torch.testing.assert_close(model(changed)[:, :7], scores[:, :7])
    torch.testing.assert_close(model(tokens[:, :5]), scores[:, :5])


def test_one_table_reads_and_predicts() -> None:
    model = GPT("tiny")
    assert model.head.weight is model.tokens.weight
    with torch.device("meta"):
        size = SIZES["full"]
        per_block = 12 * size.width**2 + 13 * size.width
        count = size.layers * per_block + (256 + size.context + 2) * size.width
        assert sum(parameter.numel() for parameter in GPT("full").parameters()) == count
