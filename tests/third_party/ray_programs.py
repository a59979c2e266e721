"""Trainings on one process and under Ray Train: `ray_programs.py FOLDER`; a file of losses for each in the folder."""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loops(config):
    """Train as each of `config["kinds"]` says; rank 0 writes the losses to a file of each."""
    for kind in config["kinds"]:
        losses = loop(kind)
        if dist.get_rank() == 0:
            said = {"losses": losses, "backend": dist.get_backend(), "secret": "HOCKET_SECRET" in os.environ}
            (Path(config["folder"]) / f"{kind}-{dist.get_backend()}.json").write_text(json.dumps(said))


def loop(kind):
    """Train as `kind` says and return the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    model, loader = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), DataLoader(data, batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    if kind == "trainer":
        import hocket

        trainer = hocket.Trainer(model, F.mse_loss, optimizer)
        for _ in range(2):
            found += [float(trainer.step(batch)) for batch in trainer.batches(loader)]
    else:
        if kind == "distribute":
            import hocket

            model, optimizer, loader = hocket.distribute(model, optimizer, loader)
        elif kind == "prepare":
            from ray.train.torch import prepare_data_loader, prepare_model

            model, loader = prepare_model(model), prepare_data_loader(loader)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                found.append(mean(loss.detach()))
    return found


def mean(loss):
    """Return the mean over the ranks, whose parts of a batch are equal here."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "one.json").write_text(json.dumps({"losses": loop("plain")}))
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    import hocket.integrations

    own = tempfile.TemporaryDirectory(prefix="ray")  # else /tmp/ray stays
    ray.init(
        num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20, _temp_dir=own.name
    )  # fmt: skip
    # Ray takes 25 s to start workers, so each backend has one start.
    for kinds, backend in ((["prepare"], "gloo"), (["prepare", "distribute", "trainer"], "hocket")):
        trainer = TorchTrainer(
            loops,
            train_loop_config={"kinds": kinds, "folder": str(folder)},
            torch_config=hocket.integrations.RayConfig() if backend == "hocket" else TorchConfig(backend),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(folder / "ray")),
        )
        trainer.fit()
    ray.shutdown()
    own.cleanup()
