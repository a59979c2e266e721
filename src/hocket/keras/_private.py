"""The names of Keras that are not public, in one place; checked against Keras 3.14 and 3.15."""

from keras.src import backend, tree
from keras.src.backend.torch import random as torch_random
from keras.src.backend.torch.trainer import TorchEpochIterator, TorchTrainer
from keras.src.models.functional import Functional, unpack_singleton
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random.seed_generator import SeedGenerator
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.trainers.data_adapters import get_data_adapter, is_tf_dataset, is_torch_dataloader
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

__all__ = [
    "ArrayDataAdapter", "BaseOptimizer", "CompileMetrics", "DataAdapter", "Functional", "LossScaleOptimizer",
    "SeedGenerator", "TorchEpochIterator", "TorchTrainer", "VERBS", "backend", "get_data_adapter",
    "is_tf_dataset", "is_torch_dataloader", "torch_random", "train_validation_split", "tree", "unpack_singleton",
    "unpack_x_y_sample_weight",
]  # fmt: skip

_NAMES = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
VERBS = {name: getattr(TorchTrainer, name) for name in _NAMES}
"""What Keras itself does at each verb, whatever a model's class makes of it."""
