"""Digits as images: which digit is written? Scikit-learn's 1,797 images of 8 x 8, in patches."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankscope.extras import need
from rankscope.lab.model import Interface
from rankscope.lab.tasks.task import Batch, Task, decoder, drawn_from
from rankscope.nets import Architecture

SIDE = 8
HELD = 360  # Images that are held out: the last ones, written by other hands than the first


@dataclass(frozen=True)
class Digits(Task):
    """An image is `(8 / patch)^2` tokens of `patch^2` numbers."""

    patch: int = 2
    name: ClassVar[str] = "digits"
    says: ClassVar[str] = "which digit an image shows"

    @cached_property
    def _images(self) -> tuple[Tensor, Tensor]:
        """(tokens `[image, token, number]` of entries about -1 to 1, digits)"""
        need("the task of digits", "sklearn")
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = torch.from_numpy(bunch.images).float() / 8 - 1  # [image, 8, 8] of 0..16
        patches = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        return patches.reshape(len(images), -1, self.patch**2), torch.from_numpy(bunch.target).long()

    @property
    def interface(self) -> Interface:
        """One label of the whole image."""
        return Interface(classes=10, patch=self.patch**2, per="sample")

    def batch(self, samples: int, seed: int, step: int) -> Batch:
        """Images that are not held out, drawn with repetition."""
        tokens, digits = self._images
        chosen = torch.randint(len(tokens) - HELD, (samples,), generator=drawn_from(seed, step))
        return Batch(tokens[chosen], digits[chosen])

    def held_out(self, samples: int) -> Batch:
        """The last images, at most 360."""
        tokens, digits = self._images
        return Batch(tokens[-HELD:][:samples], digits[-HELD:][:samples])

    def architecture(self, layers: int, width: int, heads: int = 4, **fields: Any) -> Architecture:
        """An encoder of all patches of an image, as ViT is: every patch sees every other."""
        return decoder(layers, width, heads, (SIDE // self.patch) ** 2, {"mask": "complete", **fields})

    @property
    def chance(self) -> float:
        """Digits are about equally frequent."""
        return 0.1
