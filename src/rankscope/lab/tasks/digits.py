"""The task of digits: images that are there once and for all."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from rankscope.extras import need
from rankscope.lab.model import Interface
from rankscope.lab.tasks.base import Batch, Task, drawn_from
from rankscope.nets import Architecture

IMAGE = 8  # The side of an image of a digit
HELD = 360  # Images that are held out: the last ones, written by other hands than the first


@dataclass(frozen=True)
class Digits(Task):
    """Digits as images: which digit is written? Scikit-learn's 1,797 images of 8 x 8, in patches: an image is
    `(8 / patch)^2` tokens of `patch^2` numbers."""

    patch: int = 2
    name: ClassVar[str] = "digits"

    @cached_property
    def _images(self) -> Batch:
        """All images with their digits; entries of tokens `[image, token, number]` are about -1 to 1."""
        need("the task of digits", "sklearn")
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = torch.from_numpy(bunch.images).float() / 8 - 1  # [image, 8, 8] of 0..16
        patches = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        return Batch(patches.reshape(len(images), -1, self.patch**2), torch.from_numpy(bunch.target).long())

    @property
    def interface(self) -> Interface:
        """One label of the whole image."""
        return Interface(classes=10, patch=self.patch**2, per="sample")

    def batch(self, samples: int, seed: int, step: int) -> Batch:
        """Images that are not held out, drawn with repetition."""
        learnt = len(self._images) - HELD
        return self._images.part(torch.randint(learnt, (samples,), generator=drawn_from(seed, step)))

    def held_out(self, samples: int) -> Batch:
        """The last images, at most 360."""
        return self._images.part(slice(-HELD, None)).part(slice(samples))

    def architecture(self, layers: int, width: int, heads: int = 4, **fields: Any) -> Architecture:
        """An encoder of all patches of an image, as ViT is: every patch sees every other."""
        usual = {"mask": "complete", "length": (IMAGE // self.patch) ** 2}
        return super().architecture(layers, width, heads, **usual | fields)

    @property
    def chance(self) -> float:
        """Digits are about equally frequent."""
        return 0.1
