"""Functions that draw from Python's and numpy's generators, as another module has them."""

import random

import numpy as np
import torch


def noise(x):
    return x * torch.from_numpy(np.random.rand(*x.shape))


def noise_of_numbers(x):
    return x * torch.tensor(np.random.rand(*x.shape))


def coin(x):
    return x * 2 if random.random() < 0.5 else x


class Noise:
    """Draws when it is called, and by methods of all kinds."""

    def __call__(self, x):
        return noise(x)

    def method(self, x):
        return noise(x)

    @staticmethod
    def static(x):
        return noise(x)

    @classmethod
    def of_class(cls, x):
        return noise(x)

    @property
    def factor(self):
        return random.random()


class Drawn:
    """Draws when it is made."""

    def __init__(self):
        self.factor = random.random()


noisy = Noise()
