"""The names of Keras that are not public, in one place; checked against Keras 3.12 to 3.15."""

from keras.src import backend as backend
from keras.src import tree as tree
from keras.src.backend.torch import random as torch_random
from keras.src.backend.torch.trainer import TorchEpochIterator as TorchEpochIterator
from keras.src.backend.torch.trainer import TorchTrainer as TorchTrainer
from keras.src.models.functional import Functional as Functional
from keras.src.models.functional import unpack_singleton as unpack_singleton
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer as LossScaleOptimizer
from keras.src.random.seed_generator import SeedGenerator as SeedGenerator
from keras.src.trainers.compile_utils import CompileMetrics as CompileMetrics
from keras.src.trainers.data_adapters import get_data_adapter as get_data_adapter
from keras.src.trainers.data_adapters import is_grain_dataset as is_grain_dataset
from keras.src.trainers.data_adapters import is_tf_dataset as is_tf_dataset
from keras.src.trainers.data_adapters import is_torch_dataloader as is_torch_dataloader
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter as ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import train_validation_split as train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight as unpack_x_y_sample_weight

__all__ = [
    "ArrayDataAdapter",
    "CompileMetrics",
    "DataAdapter",
    "Functional",
    "LossScaleOptimizer",
    "SeedGenerator",
    "TorchEpochIterator",
    "TorchTrainer",
    "backend",
    "get_data_adapter",
    "is_grain_dataset",
    "is_tf_dataset",
    "is_torch_dataloader",
    "torch_random",
    "train_validation_split",
    "tree",
    "unpack_singleton",
    "unpack_x_y_sample_weight",
]
