"""A model's weights go out whole and come in whole, under every plan, to and from plain torch and Hugging Face."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hocket
from hocket.parallel import CheckpointError
from hocket.parallel.state import safetensors
from hocket.planner import Plan
from hocket.testing import deadline, run_ranks

from .. import programs


class Norms(nn.Module):
    """Batch norm's buffers, a buffer that is not kept, frozen weights, half precision, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.ones(8), persistent=False)
        self.last = nn.Linear(8, 3)
        self.offset = nn.Parameter(torch.randn(3).bfloat16())
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x)) * self.scale)) + self.offset
        return out

    def get_extra_state(self) -> Any:
        return {"words": "as they are"}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"words": "as they are"}


def made(name: str, seed: int = 7) -> tuple[nn.Module, Any, Any]:
    model, data, loss = programs.setting("mlp" if name == "norms" else name, torch.float32)
    torch.manual_seed(seed)
    model = Norms() if name == "norms" else type(model)() if name in ("words", "tables") else programs.mlp()[0]
    return model, data, loss


def out_and_in(cases: list[tuple[str, Plan]], folder: str) -> list[Any]:
    """Of each case the weights after a step, how they came out elsewhere, and how well a plain model does with them."""
    found = []
    for i, (name, plan) in enumerate(cases):
        model, data, loss_fn = made(name)
        batch = tuple(tensor[:8] for tensor in data.tensors)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = hocket.Trainer(model, loss_fn, optimizer, plan, sample=batch[0])
        trainer.step(batch)
        state = trainer.state_dict()
        only = trainer.state_dict(rank0_only=True)
        assert (list(only) == list(state)) if os.environ["RANK"] == "0" else only == {}
        path = Path(folder) / str(i)
        trainer.save(path / "checkpoint")
        trainer.save_model(path / "model", "200 B")
        # Other weights come in from rank 0, and go out again.
        doubled = {k: v * 2 if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in state.items()}
        trainer.load_state_dict(doubled if os.environ["RANK"] == "0" else {})
        came = trainer.state_dict()
        lost = trainer.evaluate(DataLoader(data, batch_size=5))
        refused = []
        for wrong in ({"strange": torch.ones(1)}, {**state, next(iter(state)): torch.ones(5)}):
            with pytest.raises(CheckpointError) as error:
                trainer.load_state_dict(wrong)
            refused.append(str(error.value))
        trainer.load_state_dict(path / "model")
        trainer.step(batch)  # all ranks go on with what was loaded
        found.append((state, came, doubled, lost, refused, trainer.state_dict()))
    return found


def check(cases: list[tuple[str, Plan]], ranks: int, folder: Path) -> None:
    results = run_ranks(out_and_in, ranks, cases, str(folder), timeout_s=deadline(100))
    for i, (name, plan) in enumerate(cases):
        state, came, doubled, lost, refused, _ = results[0][i]
        model, data, loss_fn = made(name, seed=1)
        assert list(state) == list(model.state_dict()), plan
        assert refused == results[-1][i][4]
        assert "has more than the model: 'strange'" in refused[0]
        assert f"{next(iter(state))!r} has the shape" in refused[1]
        files = folder / str(i)
        for there in (results[-1][i][0], hocket.read_state_dict(files / "checkpoint")):
            assert same(state, there), plan
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        assert same(tensors, hocket.read_state_dict(files / "model")), plan
        assert same(came, doubled), plan
        assert same(results[0][i][5], results[-1][i][5]), plan
        model.load_state_dict(came)
        model.eval()
        with torch.no_grad():
            expected = loss_fn(model(data.tensors[0]), data.tensors[1])
        assert lost == pytest.approx(float(expected), rel=1e-5), plan  # float32, summed in another order


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) and value.dtype == other[key].dtype
        if isinstance(value, torch.Tensor)
        else value == other[key]
        for key, value in one.items()
    )


PIPELINE = Plan(pipeline_parallel_degree=2, micro_batches=2)


@pytest.mark.long
def test_on_two_ranks(tmp_path: Path) -> None:
    cases = [("words", Plan(shard=shard)) for shard in ("none", "optimizer", "gradients", "parameters")]
    cases += [("words", Plan(tensor_parallel_degree=2)), ("words", PIPELINE), ("mlp", PIPELINE)]
    cases += [("tables", Plan(embeddings=how)) for how in ("row", "table")]
    cases += [("norms", Plan(shard=shard)) for shard in ("none", "gradients")]
    cases += [("norms", Plan(tensor_parallel_degree=2))]
    check(cases, 2, tmp_path)


@pytest.mark.long
def test_on_four_ranks(tmp_path: Path) -> None:
    cases = [("words", Plan(tensor_parallel_degree=2, shard=shard)) for shard in ("none", "gradients", "parameters")]
    cases += [("words", Plan(pipeline_parallel_degree=2, micro_batches=2, shard=s)) for s in ("none", "gradients")]
    cases += [("mlp", Plan(pipeline_parallel_degree=2, micro_batches=2, shard=s)) for s in ("optimizer", "parameters")]
    cases += [("mlp", Plan(pipeline_parallel_degree=2, micro_batches=2, tensor_parallel_degree=2))]
    check(cases, 4, tmp_path)


def trainer_of(model: nn.Module) -> hocket.Trainer:
    return hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))


def test_files_are_those_of_the_package_safetensors(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.randn(3, 4), "b": torch.tensor([True, False]), "c": torch.tensor(5), "e": torch.empty(0, 3)}
    tensors |= {"d": torch.randn(3).bfloat16(), "f": torch.randn(2, 2).t(), "g": torch.randn(3).to(torch.float8_e5m2)}
    table = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    files = safetensors.SafetensorsFolder(tmp_path, table, {}, 10**6)
    for name in files.order:
        files.add(name, tensors[name])
    files.finish()
    assert same(tensors, package.load_file(tmp_path / "model.safetensors"))
    package.save_file({k: t.contiguous() for k, t in tensors.items()}, tmp_path / "model.safetensors")
    assert same(tensors, hocket.read_state_dict(tmp_path))
    words = programs.Words()
    trainer_of(words).save_model(tmp_path / "tied")
    other = programs.Words()
    package.load_model(other, str(tmp_path / "tied" / "model.safetensors"))  # knows what is tied
    assert same(words.state_dict(), other.state_dict())


def test_a_folder_of_safetensors_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    trainer.save_model(tmp_path, 100)
    files = sorted(tmp_path.iterdir())
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert [p.name for p in files] == names
    before = trainer.state_dict()
    for file in files:
        content = file.read_bytes()
        for damaged in (content[:-2], content[: len(content) // 2], b"", b"\xff" * 20 + content[20:], content + b"x"):
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                trainer.load_state_dict(tmp_path)
        file.unlink()
        with pytest.raises(CheckpointError):
            trainer.load_state_dict(tmp_path)
        file.write_bytes(content)
    assert same(before, trainer.state_dict())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 2 * (16 + 4) * 4}
    trainer.save_model(tmp_path)  # one file, and none of those left
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert same(before, hocket.read_state_dict(tmp_path))


def test_what_plain_torch_would_take_is_taken(tmp_path: Path) -> None:
    words = programs.Words()
    trainer = trainer_of(words)
    state = {key: value.clone() for key, value in words.state_dict().items()}
    tied = {key: value for key, value in state.items() if key != "out.weight"}
    assert trainer.load_state_dict({**tied, "more": torch.ones(1)}, strict=False) == ([], ["more"])
    assert trainer.load_state_dict({}, strict=False).missing_keys == list(state)
    trainer.load_state_dict({key: value.double() for key, value in tied.items()})
    torch.save(state, tmp_path / "state.pt")
    trainer.load_state_dict(tmp_path / "state.pt")
    assert same(state, dict(words.state_dict()))
    for wrong, said in (
        ({**state, "out.weight": state["out.weight"] + 1}, "are one tensor of the model, and differ"),
        ({**state, "mix.bias": state["mix.bias"].long()}, "'mix.bias' is torch.float32 here and torch.int64 in it"),
        (tmp_path / "none", "there is nothing at"),
        (tmp_path, "has 0 files of safetensors"),
    ):
        with pytest.raises(CheckpointError, match=said):
            trainer.load_state_dict(wrong)
    (tmp_path / "text").write_text("no tensors")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module")
    for name, said in (("text", "not written by torch.save"), ("module", r"can run code \(torch.nn.*Linear\); save")):
        with pytest.raises(CheckpointError, match="is no file of tensors") as refused:
            trainer.load_state_dict(tmp_path / name)
        assert re.search(said, str(refused.value))
        assert "mmap" not in str(refused.value)
        assert "two options" not in str(refused.value)


@pytest.mark.long
def test_transformers_loads_what_was_written_and_its_own_folders_come_in(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=19, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    trainer_of(model).save_model(tmp_path / "ours", "2 KB")
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 1
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert same(dict(model.state_dict()), dict(back.state_dict()))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")
    other = transformers.GPT2LMHeadModel(config)
    trainer_of(other).load_state_dict(tmp_path / "theirs")
    assert same(dict(model.state_dict()), dict(other.state_dict()))


@pytest.mark.long
def test_what_transformers_renames_and_joins_comes_in_as_it_loads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "num_local_experts": 2, "vocab_size": 20}
    config = transformers.MixtralConfig(**sizes, **more)
    model, other = transformers.MixtralForCausalLM(config), transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs")
    assert any("experts.0" in key for key in hocket.read_state_dict(tmp_path / "theirs"))  # and one tensor in the model
    assert trainer_of(other).load_state_dict(tmp_path / "theirs") == ([], [])
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    (tmp_path / "theirs" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="has no"):
        trainer_of(other).load_state_dict(tmp_path / "theirs")


def test_what_transformers_would_draw_anew_is_missing(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=19, bos_token_id=0, eos_token_id=0)
    transformers.GPT2Model(config).save_pretrained(tmp_path / "theirs")
    model = transformers.GPT2ForSequenceClassification(config)
    before = model.score.weight.detach().clone()
    with pytest.raises(CheckpointError, match="has no 'score.weight'"):
        trainer_of(model).load_state_dict(tmp_path / "theirs")
    assert trainer_of(model).load_state_dict(tmp_path / "theirs", strict=False).missing_keys == ["score.weight"]
    assert torch.equal(model.score.weight, before)


class Caching(nn.Module):
    """Keeps what it computes from sizes in a buffer that is there from its first forward pass on, as ALiBi does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("places", torch.arange(4.0), persistent=False)
        return self.layers(x) + self.places


def keys_of_what_caches(folder: str) -> list[str]:
    model = Caching()
    plan, optimizer = Plan(tensor_parallel_degree=2), torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=torch.randn(8, 4))
    trainer.step((torch.ones(8, 4), torch.ones(8, 4)))
    trainer.save(f"{folder}/checkpoint")
    return list(trainer.state_dict())


def test_buffers_that_a_forward_pass_makes_do_not_keep_a_state_from_being_saved(tmp_path: Path) -> None:
    for keys in run_ranks(keys_of_what_caches, 2, str(tmp_path)):
        assert keys == list(Caching().state_dict())
