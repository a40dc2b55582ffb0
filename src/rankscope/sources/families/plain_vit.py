"""ViTs that are plain modules of torch, without a config: those of vit-pytorch and those of timm. `load(model)`
tells them by how they are laid out; the weights and attributes of their modules say the rest."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankscope.errors import SourceError, require
from rankscope.nets import Architecture, Linear, NormWeights
from rankscope.sources.embedding import ImageEmbedding
from rankscope.sources.families.family import Family
from rankscope.sources.families.parts import Tensors, dense, heads_out, layout, norm, norm_weights, read_block


def of_kind(module: nn.Module, *kinds: type[nn.Module]) -> list[Any]:
    """The modules of these kinds inside a module, in its order."""
    return [part for part in module.modules() if isinstance(part, kinds)]


def activation_of(module: nn.Module) -> str:
    """Our name of the first activation inside a module."""
    names = {"GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "ReLU": "relu", "SiLU": "silu", "Tanh": "tanh"}
    for part in module.modules():
        if isinstance(part, nn.GELU):
            return "gelu_tanh" if part.approximate == "tanh" else "gelu"
        if type(part).__name__ in names:
            return names[type(part).__name__]
    message = f"the activation must be one of GELU, {', '.join(names)}; {type(module).__name__} has another"
    raise SourceError(f"{message}: watch measures it as it is", subject="activation")


class ViTPytorch(Family):
    """`ViT` and `SimpleViT` of vit-pytorch, early and late, on square images; blocks may lack the MLP."""

    name, stack, final_norm = "vit_pytorch", "transformer.layers", "transformer.norm"
    continuous_inputs = True

    def fits(self, model: nn.Module) -> bool:
        """True if patches, positions and pairs of attention and MLP are where vit-pytorch has them."""
        layers = getattr(getattr(model, "transformer", None), "layers", None)
        known = hasattr(model, "to_patch_embedding") and hasattr(model, "pos_embedding") and bool(layers)
        return known and hasattr(_attention(_pair(layers[0])[0]), "to_qkv")  # type: ignore[index]

    def architecture(self, model: Any) -> Architecture:
        """Pre-norm; early versions have no last norm, but one of the class token alone."""
        attention, *mlp = _pair(model.transformer.layers[0])
        part, inside = _attention(attention), of_kind(mlp[0], nn.Linear) if mlp else []
        return Architecture(
            layers=len(model.transformer.layers), width=part.to_qkv.in_features, heads=part.heads,
            head_width=part.to_qkv.out_features // (3 * part.heads), divisor=1 / part.scale,
            mlp="plain" if mlp else "none", mlp_width=inside[0].out_features if mlp else 0,
            activation=activation_of(mlp[0]) if mlp else "gelu", norm_place="pre",
            norm_eps=of_kind(attention, nn.LayerNorm)[0].eps,
            final_norm=isinstance(model.transformer.norm, nn.LayerNorm),
        )  # fmt: skip

    def prepare_for_float64(self, model: Any) -> Any:
        """An identity where an early version has no last norm."""
        if not hasattr(model.transformer, "norm"):
            model.transformer.norm = nn.Identity()
        return model

    def attach(self, block: Any, before: Callable[..., None], after: Callable[..., None]) -> list[Any]:
        """The parts of a block are called one by one; what they are given is added to what the last returns."""
        first, last = _pair(block)[0], _pair(block)[-1]

        def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            after(module, args, output + args[0])

        return [first.register_forward_pre_hook(before, with_kwargs=True), last.register_forward_hook(add)]

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Each part has one norm, and its linear maps in the order in which they are applied."""
        attention, *mlp = _pair(block)
        part, maps = _attention(attention), of_kind(attention, nn.Linear)
        tensors = read_block(part, {"attention.query, attention.key, attention.value": "to_qkv"}, arch) | norm(
            "attention_norm", of_kind(attention, nn.LayerNorm)[0]
        )
        # Where one head is as wide as a token, vit-pytorch has no output projection.
        output = maps[1] if len(maps) > 1 else Linear(torch.eye(arch.width, dtype=maps[0].weight.dtype))
        tensors |= heads_out("attention.output", output, arch.heads)
        for inside in mlp:
            up, down = of_kind(inside, nn.Linear)
            tensors |= dense("mlp.up", up) | dense("mlp.down", down)
            tensors |= norm("mlp_norm", of_kind(inside, nn.LayerNorm)[0])
        return tensors

    def embedding(self, model: Any) -> ImageEmbedding:
        """Patches, through norms in late versions, a class token where there is one, and positions."""
        cut, (linear,) = model.to_patch_embedding[0], of_kind(model.to_patch_embedding, nn.Linear)
        sides = cut.axes_lengths["p1"], cut.axes_lengths["p2"]
        positions = model.pos_embedding.detach().to(linear.weight).reshape(-1, linear.out_features)
        first = getattr(model, "cls_token", linear.weight.new_zeros(0)).detach().reshape(-1, linear.out_features)
        patches = len(positions) - len(first)
        message = f"images of vit-pytorch are mapped where they are square; this model has {patches} patches"
        square = math.isqrt(patches) ** 2 == patches
        require(square, f"{message}: watch measures it as it is", SourceError, "image_size")
        before, after = None, None
        if norms := of_kind(model.to_patch_embedding, nn.LayerNorm):
            gain, bias = (_pixels(part.detach(), sides).flatten() for part in (norms[0].weight, norms[0].bias))
            before, after = NormWeights(gain, bias), norm_weights(norms[1])
        return ImageEmbedding(
            _pixels(linear.weight.detach(), sides), linear.bias.detach(), positions,
            tuple(math.isqrt(patches) * side for side in sides), first if len(first) else None, before, after,
        )  # fmt: skip


class TimmViT(Family):
    """timm's `VisionTransformer`: plain pre-norm blocks, scaled or not, with or without class and register tokens."""

    name, stack, final_norm = "timm_vit", "blocks", "norm"
    continuous_inputs = True
    parts: ClassVar = layout("attn", "qkv proj", norms="norm1 norm2", mlp="mlp.fc1 mlp.fc2")
    scales: ClassVar = {"attention.output": "ls1.gamma or none", "mlp.down": "ls2.gamma or none"}
    embedding_parts: ClassVar = {
        "patches": "patch_embed.proj", "size": "patch_embed.img_size", "positions": "pos_embed", "norm": "norm_pre",
        "first": "cls_token or none, dist_token or none, reg_token or none",
    }  # fmt: skip

    def fits(self, model: nn.Module) -> bool:
        """True if patches, positions and blocks are where timm has them."""
        blocks = getattr(model, "blocks", None)
        known = hasattr(model, "patch_embed") and hasattr(model, "pos_embed") and bool(blocks)
        return known and hasattr(blocks[0], "ls1") and hasattr(blocks[0].attn, "qkv")  # type: ignore[index]

    def architecture(self, model: Any) -> Architecture:
        """Pre-norm; there is no last norm where it is that of the mean of all tokens."""
        block = model.blocks[0]
        return Architecture(
            layers=len(model.blocks), width=block.attn.qkv.in_features, heads=block.attn.num_heads,
            head_width=block.attn.head_dim, mlp_width=block.mlp.fc1.out_features, activation=activation_of(block.mlp),
            norm_place="pre", norm_eps=block.norm1.eps, final_norm=not isinstance(model.norm, nn.Identity),
        )  # fmt: skip


def _pair(block: Any) -> list[nn.Module]:
    """Attention and MLP of a block, or attention alone."""
    return list(block) if isinstance(block, nn.ModuleList) else [block]


def _attention(branch: nn.Module) -> Any:
    """The attention module inside a branch that may begin with a norm."""
    return next((part for part in branch.modules() if hasattr(part, "to_qkv")), None)


def _pixels(weight: Tensor, sides: tuple[int, int]) -> Tensor:
    """Pixels of a patch, `(y x channel)` in the last axis, as axes `[channel, y, x]`."""
    return weight.reshape(*weight.shape[:-1], *sides, -1).movedim(-1, -3)
