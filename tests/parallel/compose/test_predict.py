"""What a model says of a batch is what one process says, under every plan, and so is what it generates."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

from .. import prediction_programs, programs

TWO = [
    Plan(),
    Plan(shard="gradients"),
    Plan(shard="parameters"),
    Plan(tensor_parallel_degree=2),
    Plan(tensor_parallel_degree=2, sequence_parallel=True),
    Plan(pipeline_parallel_degree=2, micro_batches=4),
]
FOUR = [
    Plan(pipeline_parallel_degree=2, micro_batches=2, stages_per_rank=2, pipeline_schedule="interleaved"),
    Plan(pipeline_parallel_degree=2, micro_batches=2),
    Plan(tensor_parallel_degree=2, shard="parameters"),
    Plan(pipeline_parallel_degree=2, tensor_parallel_degree=2, micro_batches=2),
]


@functools.cache
def one_process(mean: bool = False) -> Any:
    return prediction_programs.plain(mean)


def close(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, tuple | list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            close(one, other)
    elif isinstance(wanted, np.ndarray):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-10)  # float64: the order of sums
    else:
        assert found == wanted


OTHERS = [
    ("conv", Plan(spatial_parallel_degree=2)),
    ("tables", Plan(embeddings="row")),
    ("words", Plan(pipeline_parallel_degree=2, micro_batches=2)),
    ("mlp", Plan(priority=True)),
]


def check(found: list[Any], plans: list[Plan], *, mean: bool = False) -> None:
    for plan, (loss, *rest) in zip(plans, found, strict=True):
        assert loss == pytest.approx(one_process(mean)[0], rel=1e-10), plan
        close(rest, list(one_process(mean)[1:]))


@pytest.mark.long
def test_outputs_and_generated_tokens_are_those_of_one_process() -> None:
    unsplit = [TWO[0], TWO[-1]]
    ranks = run_ranks(prediction_programs.all_of_two, 2, TWO, unsplit, OTHERS, timeout_s=110)
    for plain, with_a_mean_over_the_batch, said, others in ranks:
        check(plain, TWO)
        check(with_a_mean_over_the_batch, unsplit, mean=True)
        for (name, _), found in zip(OTHERS, others, strict=True):
            model, data, _ = programs.setting(name, torch.float64)
            wanted = model.eval()(data.tensors[0]).detach().numpy()
            close(found, [wanted, wanted])
        assert said == ranks[0][2]
        assert said[0].startswith("StageError: stage 0 of 2 of the pipeline has failed: IndexError")
        assert "trained by trainer.step" in said[1]
        assert said[-1] == "torch.Size([4, 9, 29])"


@pytest.mark.long
def test_four_ranks_with_two_axes_predict_what_one_process_does() -> None:
    for rank in run_ranks(prediction_programs.predict, 4, FOUR, timeout_s=110):
        check(rank, FOUR)


def stepped_after_an_evaluation() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(63, 4, dtype=torch.float64)
    trainer.evaluate(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64))
    # As many samples as a rank's part of that evaluation had.
    return [float(trainer.step((x[:32], x[:32].sum(1, keepdim=True)))) for _ in range(3)]


def test_a_global_batch_after_an_evaluation_is_not_taken_for_a_part() -> None:
    alone = stepped_after_an_evaluation()
    for found in run_ranks(stepped_after_an_evaluation, 2):
        assert found == pytest.approx(alone, rel=1e-12)


def predicted_beside_parts_that_share_their_memory() -> list[list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(16, 4, dtype=torch.float64)
    batches = list(zip(x.split(8), x.sum(1, keepdim=True).split(8), strict=True))
    trainer.evaluate(batches)
    found = [trainer.predict(batches[0])]
    for batch in trainer.batches(batches):
        trainer.step(batch)
        found += [trainer.predict(batch), trainer.predict(batch[0][:, :])]
    rows = [*((i, i + 4) for i in range(0, 16, 4)), (0, 8), (8, 16), (0, 16)]
    return [one.flatten().tolist() for one in [*found, *(trainer.predict(x[i:j]) for i, j in rows)]]


def test_global_batches_that_share_memory_with_a_rank_s_part_are_whole() -> None:
    alone = predicted_beside_parts_that_share_their_memory()
    for found in run_ranks(predicted_beside_parts_that_share_their_memory, 2):
        for one, other in zip(found, alone, strict=True):
            assert one == pytest.approx(other, rel=1e-12)


def written_by_gpt2(staged: bool) -> tuple[list[int], list[str]]:
    """The tokens that a model of transformers generates, and what is said where it is to keep keys and values."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: Any = {"vocab_size": 40, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)).double().eval()
    ids = torch.arange(3, 15).reshape(2, 6)
    plan = Plan(pipeline_parallel_degree=2, micro_batches=2) if staged else Plan()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(
        model, lambda out, y: torch.nn.functional.cross_entropy(out.logits[:, -1], y), optimizer, plan, sample=ids
    )
    with torch.no_grad():
        generate: Any = trainer.model.generate
        tokens = generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
        said = []
        for uses in ({}, {"use_cache": True}) if staged else ():
            with pytest.raises(TypeError) as refused:
                generate(ids, max_new_tokens=6, do_sample=False, **uses)
            said.append(str(refused.value))
    return tokens.flatten().tolist(), said


@pytest.mark.long
def test_what_transformers_generates_in_a_pipeline_is_what_one_process_does_and_a_cache_is_refused() -> None:
    pytest.importorskip("transformers")
    tokens, _ = written_by_gpt2(False)
    for found, said in run_ranks(written_by_gpt2, 2, True, timeout_s=90):
        assert found == tokens
        assert all("say use_cache=False, as in trainer.model.generate" in one for one in said)
