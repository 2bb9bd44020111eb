"""Keras 3 on the torch backend: speakers from short clips, with a layer for statistics over time.

With --bug, that layer takes the square root of the variance as it stands; a clip that is silent has
none.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from keras import layers, ops


class StatisticsPooling(layers.Layer):
    def __init__(self, eps=0.0, **kwargs):
        super().__init__(**kwargs)
        self.eps = eps

    def call(self, x):
        mean = ops.mean(x, axis=1)
        std = ops.sqrt(ops.var(x, axis=1) + self.eps)
        return ops.concatenate([mean, std], axis=-1)


def make_clips(n, seed):
    """Features (time, 6) of four speakers; one recording is silent."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, n)
    x = rng.normal(0, 1, (n, 20, 6)).astype("float32")
    x *= 1 + y[:, None, None]
    x[300] = 0
    return x, keras.utils.to_categorical(y, 4)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keras.utils.set_random_seed(0)
    x, y = make_clips(512, 0)
    model = keras.Sequential(
        [
            keras.Input((20, 6)),
            layers.Conv1D(16, 3, activation="relu"),
            StatisticsPooling(eps=0.0 if args.bug else 1e-5),
            layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3), loss="categorical_crossentropy", metrics=["accuracy"]
    )
    os.makedirs("out", exist_ok=True)
    model.fit(
        x,
        y,
        batch_size=32,
        epochs=3,
        shuffle=False,
        verbose=2,
        callbacks=[
            keras.callbacks.CSVLogger("out/log.csv"),
            keras.callbacks.ModelCheckpoint("out/{epoch}.weights.h5", save_weights_only=True),
        ],
    )
    torch.save({v.path: torch.tensor(ops.convert_to_numpy(v)) for v in model.weights}, "final.pt")


if __name__ == "__main__":
    main()
