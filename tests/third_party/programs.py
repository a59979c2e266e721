"""Small trainings as users of other libraries write them: `programs.py LIBRARY BACKEND`; rank 0 prints its numbers."""

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parts():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), data


def accelerate(backend):
    from accelerate import Accelerator

    dist.init_process_group(backend)
    accelerator, (model, optimizer, data) = Accelerator(cpu=True), parts()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=5, shuffle=True))
    found = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        found += accelerator.gather_for_metrics(model(x)).flatten().tolist()
    return found


def transformers(backend):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(50, (32, 16))]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory, use_cpu=True, report_to=[], max_steps=6, per_device_train_batch_size=2, save_strategy="no"
        )
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        result = trainer.train()
        return [result.training_loss, trainer.evaluate()["eval_loss"]]


def ignite(backend):
    import ignite.distributed as idist
    from ignite.engine import Engine
    from ignite.metrics import MeanSquaredError

    dist.init_process_group(backend)
    model, optimizer, data = parts()
    model = nn.parallel.DistributedDataParallel(model)  # auto_model wraps for backends of its own list only
    optimizer = idist.auto_optim(optimizer)

    def step(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        output = model(x)
        F.mse_loss(output, y).backward()
        optimizer.step()
        return output.detach(), y

    trainer = Engine(step)
    MeanSquaredError().attach(trainer, "error")
    state = trainer.run(idist.auto_dataloader(data, batch_size=8, shuffle=True), max_epochs=2)
    return [state.metrics["error"]]


def fabric(backend):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend))
    fabric.launch()
    model, optimizer, data = parts()
    model, optimizer = fabric.setup(model, optimizer)
    found = []
    for x, y in fabric.setup_dataloaders(DataLoader(data, batch_size=8)):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        found.append(float(fabric.all_reduce(loss.detach())))
    return found


def keras(backend):
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    dist.init_process_group(backend)
    keras.utils.set_random_seed(0)
    data = parts()[2]
    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    wrapped = nn.parallel.DistributedDataParallel(model)  # as Keras' guide to its torch backend has it
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    found = []
    for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False)):
        optimizer.zero_grad()
        loss = F.mse_loss(wrapped(x, training=True), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def fabric_fsdp(backend):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(model, mesh):
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(shard, 2, 1, process_group_backend=backend)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model, optimizer, data = parts()
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    found = []
    for x, y in fabric.setup_dataloaders(DataLoader(data, batch_size=8)):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        found.append(float(fabric.all_reduce(loss.detach())))
    return found


def lightning(backend):
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    net, _, data = parts()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch):
            return F.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch):
            self.log("error", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    with tempfile.TemporaryDirectory() as directory:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, max_epochs=2, strategy=DDPStrategy(process_group_backend=backend),
            gradient_clip_val=0.5, accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=directory,
        )  # fmt: skip
        module, loader = Module(), DataLoader(data, batch_size=8)
        trainer.fit(module, loader, loader)
        return [float(trainer.callback_metrics["error"])]


def torchmetrics(backend):
    from torchmetrics import MeanSquaredError
    from torchmetrics.classification import MulticlassAUROC

    dist.init_process_group(backend)
    model, _, data = parts()
    error, curve = MeanSquaredError(), MulticlassAUROC(num_classes=3)
    for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False)):
        error.update(model(x), y)
        curve.update(x[:, :3].softmax(1), (y[:, 0] * 10).long() % 3)
    return [float(error.compute()), float(curve.compute())]


if __name__ == "__main__":
    torch.set_num_threads(1)
    numbers = globals()[sys.argv[1]](sys.argv[2])
    if os.environ["RANK"] == "0":
        print("numbers", json.dumps(numbers), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
