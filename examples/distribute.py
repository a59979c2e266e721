"""A training script of your own on many workers.

`import hocket` and `hocket.distribute` make the training parallel; `average`, `shard` and `total` make its report that
of all workers. The digits are scikit-learn's: `pip install "hocket[workloads]"`.

    hocket run -n 4 examples/distribute.py      four workers
    python examples/distribute.py               one

The loss is the same either way: the batch size is that of all workers together, and so is the order of the samples.
"""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits, 8x8, for training and for testing."""
    found = load_digits()
    images = torch.from_numpy(found.images).to(torch.float32).unsqueeze(1) / 16.0
    labels = torch.from_numpy(found.target)
    return TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])


def main() -> None:
    torch.manual_seed(0)
    training, testing = digits()
    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(training, batch_size=64, shuffle=True)

    model, optimizer, loader = hocket.distribute(model, optimizer, loader)

    # Every worker gets here; one of them speaks. Without a launcher there is no RANK, and this is the only worker.
    say = print if os.environ.get("RANK", "0") == "0" else lambda *_: None

    for epoch in range(5):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        say(f"epoch {epoch}: loss {hocket.average(loss):.4f}")

    right = torch.zeros(())
    with torch.no_grad():
        for images, labels in hocket.shard(DataLoader(testing, batch_size=64)):  # every sample once, over all workers
            right += (model(images).argmax(dim=1) == labels).sum()
    say(f"{hocket.total(right):.0f} of {len(testing)} right")


if __name__ == "__main__":
    main()
