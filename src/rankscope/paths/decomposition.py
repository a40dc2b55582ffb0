"""`decompose`: a network on its input as the exact sum of its paths.

The order: `freeze` runs the network once and keeps what depends on the tokens (`frozen.py`). The network is
then linear, and every question is a traversal with other rules: sums by length (`lengths.py`), by layer, head and
source token (`by_part.py`), single paths (`single_paths.py`), the heaviest (`heaviest.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import PathError, require, require_one_of
from rankscope.extras import counted
from rankscope.nets import kept_heads, usual_modes
from rankscope.paths.by_part import HEAD, LAYER, ByPosition, by_head, by_layer, by_position
from rankscope.paths.counts import Path, checked, checked_length, counts_along, length_of, paths_along, sampled_paths
from rankscope.paths.figures import counted_paths, heads_section, lengths_overview, lengths_section
from rankscope.paths.frozen import Frozen, Terms, WholeNetwork, closure_of, freeze
from rankscope.paths.heaviest import Heaviest, Progress, heaviest
from rankscope.paths.lengths import LENGTHS, ByLength, by_length
from rankscope.paths.single_paths import AfterLayer, OwnAttention, PathRules, path_residuals, path_sum
from rankscope.results import Result, Section
from rankscope.runs import Manifest, network_manifest
from rankscope.shapes import Float
from rankscope.sources import InputsLike, NetworkLike, inputs_of

MOST_ENUMERATED = 10**6  # the most paths that are computed one by one


@dataclass(frozen=True, eq=False, repr=False)
class PathTerm:
    """One path: `term = P X W` where the network has no norms, no MLPs, no gates on heads and no parts of
    one's own but on attention's weights (Dong et al. 2021, Thm 2.1), and with attention of its own no biases;
    X has its positions added."""

    path: Path
    term: Float[Tensor, "batch token width"]
    P: Float[Tensor, "batch token token"]  # `P_path`: the product of its attention matrices
    W: Float[Tensor, "width width"]  # `W_path`: the product of its value, output and skip weights

    def __repr__(self) -> str:
        return f"PathTerm{self.path}: length {length_of(self.path)}, term {tuple(self.term.shape)}"


@usual_modes()
@torch.no_grad()
def decompose(
    net: NetworkLike,
    X: InputsLike,
    padding: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    variant: str = "as given",
    device: str | torch.device | None = None,
) -> "Decomposition":
    """Decompose a network on these tokens into paths, with everything that depends on the tokens frozen.

    With attention P_h, norms and gates held as measured, the output is an exact sum over paths (Dong et al.
    2021, Thm 2.1): `output = sum over paths of P_path X W_path` and what starts at biases. That the parts add
    up to the output is checked here, and reported as `closure`.

    Args:
        net: The network, or a Hugging Face model in memory; decomposed in its own dtype.
        X: Texts, what `net.encode` gave, token ids `[batch, token]`, or tokens `[batch, token, width]`.
        padding: `[batch, token]`, True at padding.
        attention_mask: Instead of `padding`, 1 at tokens and 0 at padding (Hugging Face's convention).
        variant: The name of the network in what is saved.
        device: Where to run; where the network is, if left out.

    Returns:
        A `Decomposition`, whose methods sum, select and list paths.

    Raises:
        PathError: The network has parts that no linear rule covers (cross-attention, latents, ...).
        ClosureError: The parts do not add up to the output.

    >>> from rankscope.nets import Architecture, Transformer
    >>> net = Transformer.random(Architecture(layers=12, width=24, heads=12))
    >>> d = decompose(net, torch.randn(1, 5, 24, dtype=torch.float64))
    >>> sum(d.by_length().counts) == 13**12, d.closure < 1e-12
    (True, True)
    """
    net, X, padding = inputs_of("decompose", net, X, padding, attention_mask)
    net = net.to(device=device)
    frozen = freeze(net, X.to(dtype=net.dtype, device=net.device), padding)
    closure_of(WholeNetwork(frozen).run(), frozen)
    return Decomposition(frozen, variant)


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition(Result):
    """A network taken apart into paths: see `decompose`.

    One that was read from a folder has its tables, and no network to ask for further paths.
    """

    kind = "decomposition"
    schemas: ClassVar = {"lengths": LENGTHS, "layers": LAYER, "heads": HEAD}
    network: Frozen | None  # None if it was read from a folder
    variant: str = "as given"
    given: Manifest | None = None  # what was run on what; made of the network if left out
    saved: Mapping[str, pl.DataFrame] = field(default_factory=dict)  # the tables, if they were read
    known: Mapping[str, Any] = field(default_factory=dict)  # what `details` gave, if it was read
    notes: tuple[str, ...] = ()

    @property
    def frozen(self) -> Frozen:
        """The network on its tokens, linear as it was frozen.

        Raises:
            PathError: The decomposition was read from a folder.
        """
        if self.network is None:
            what = "this one was read from a folder, which has tables alone: decompose again"
            raise PathError(f"paths are asked of a network; {what}", subject="network")
        return self.network

    @cached_property
    def manifest(self) -> Manifest:
        """What was decomposed, with what."""
        if self.given is not None:
            return self.given
        samples, tokens, _ = self.frozen.X.shape
        made = network_manifest(self.frozen.net, {"closure": self.closure}, self.variant)
        return made.adding(samples=samples, tokens=tokens, closure=self.closure)

    @cached_property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """Sums by length, by layer and by head."""
        return self.saved or {"lengths": self._lengths.table, "layers": self.by_layer(), "heads": self.by_head()}

    def details(self) -> dict[str, Any]:
        """The sizes of the network and its input, the number of paths, and how nearly they add up."""
        if self.known:
            return dict(self.known)
        paths = str(sum(counts_along(self.frozen.ways)))
        samples, tokens, _ = self.frozen.X.shape
        sizes = {"layers": self.layers, "heads": self.heads, "samples": samples, "tokens": tokens}
        return {"variant": self.variant, **sizes, "paths": paths}

    @classmethod
    def made_of(
        cls, tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]
    ) -> "Decomposition":
        """The decomposition of these tables, without its network."""
        known = {name: value for name, value in details.items() if name != "notes"}
        return cls(None, details["variant"], manifest, tables, known)

    @property
    def title(self) -> str:
        """The sizes of the network and its input, and the number of paths."""
        known = self.details()
        sizes = ", ".join(counted(known[f"{name}s"], name) for name in ("layer", "head", "sample"))
        paths = counted_paths(int(known["paths"]))
        return f"Decomposition: {sizes} of up to {counted(known['tokens'], 'token')}, {paths} paths"

    def __repr__(self) -> str:
        return self.title  # nothing is summed before it is asked for

    def overview(self) -> Section:
        """Shares and residuals by length, which are summed for this."""
        return lengths_overview(self.title, self._table_of_lengths(), self.closure)

    def sections(self) -> list[Section]:
        """Which lengths carry the output, and what each head does."""
        return [lengths_section(self._table_of_lengths(), self.closure), heads_section(self.tables["heads"])]

    def _table_of_lengths(self) -> pl.DataFrame:
        return self.saved["lengths"] if self.saved else self._lengths.table

    @property
    def layers(self) -> int:
        """The number of layers of the network."""
        return int(self.known["layers"]) if self.known else self.frozen.net.arch.layers

    @property
    def heads(self) -> int:
        """The number of heads in each layer."""
        return int(self.known["heads"]) if self.known else self.frozen.net.arch.heads

    @property
    def output(self) -> Float[Tensor, "batch token width"]:
        """The output of the network: the last hidden states, after the final norm if there is one."""
        return self.frozen.restored(self.frozen.output)

    @property
    def closure(self) -> float:
        """How far all terms are from adding up to the output, relative to it."""
        return (self.manifest.closure or 0.0) if self.saved else self._lengths.closure

    @cached_property
    @usual_modes()
    def _lengths(self) -> ByLength:
        return replace(by_length(self.frozen), variant=self.variant)

    def by_length(self) -> ByLength:
        """For every length: how many paths, and what the sum of their terms is."""
        return self._lengths

    @usual_modes()
    def by_layer(self) -> pl.DataFrame:
        """Everything that passes through the heads, and through the MLP, of each layer (`by_part.py`)."""
        return self.saved["layers"] if self.saved else by_layer(self.frozen)

    @usual_modes()
    def by_head(self) -> pl.DataFrame:
        """Everything that passes through each head, and how it contracts (`by_part.py`)."""
        return self.saved["heads"] if self.saved else by_head(self.frozen)

    @usual_modes()
    def by_position(self, query: int | None = -1, *, lengths: bool = False, sizes: bool = False) -> ByPosition:
        """Return the share of the output that starts at each source token, exactly (`by_part.py`).

        Its `table` has the columns sample · start · source · share, a row for each token of a sample and one for all of
        its biases (`start` is "bias", `source` null). The share of a source is `<term, y> / <y, y>`, y the output of
        the query token: those of a sample add up to one, and `closure` says how nearly.

        Args:
            query: The token whose output it is, counted from 0 or, if negative, from the end of each sample; None is
                the output of all tokens.
            lengths: Give a row for each `length` of paths too.
            sizes: Give the `norm` of each term too, which takes a forward pass for each source token.

        Raises:
            PathError: A sample has no such token.
            ClosureError: The shares do not add up to one.

        `source` counts the tokens of a sample from 0, without its padding.

        >>> from rankscope.nets import Architecture, Transformer
        >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2, mask="causal"))
        >>> d = decompose(net, torch.randn(1, 3, 8, dtype=torch.float64))
        >>> d.by_position().table["source"].to_list(), d.by_position(query=0).table["share"][1:].to_list()
        ([0, 1, 2, None], [0.0, 0.0, 0.0])
        """
        return by_position(self.frozen, query, lengths, sizes)

    @usual_modes()
    def path(self, path: Iterable[int | None], attention: str = "shared") -> PathTerm:
        """One path's term: a head, or None to go past the heads, in every layer.

        `attention` is `shared`, of the full network, or `own`, recomputed along the path, with its biases."""
        spec = checked(path, self.frozen.ways, self.heads)
        frozen = self.frozen
        term = self._ended(path_sum(frozen, [spec], self._after_layer(attention)), attention)
        own_patterns = OwnAttention(frozen).matrices(spec) if attention == "own" else None
        n, width = frozen.X.shape[1:]
        P = torch.eye(n, dtype=frozen.X.dtype, device=frozen.X.device).expand(len(frozen.X), n, n)
        W = torch.eye(width, dtype=frozen.X.dtype, device=frozen.X.device)
        for layer, head in zip(frozen.layers, spec, strict=True):
            arch, index = layer.block.arch, layer.block.index
            if head is None:
                W = W * arch.attention_skip
            else:
                w, key = layer.block.weights.attention, head // (arch.heads // arch.key_heads)
                P = (layer.P[:, head] if own_patterns is None else own_patterns[index]) @ P
                W = W @ (w.value.weight[:, key] @ w.output.weight[head])
        if frozen.order is not None:
            P = frozen.order.restored_square(P[:, None])[:, 0]
        return PathTerm(spec, frozen.restored(term), P, W)

    def sample(self, length: int, count: int, seed: int = 0) -> list[Path]:
        """Paths of one length, drawn uniformly without repetition."""
        return sampled_paths(self.frozen.ways, length, count, seed)

    @usual_modes()
    def top(self, count: int = 10, by: str = "norm", budget: int = 2000, progress: Progress | None = None) -> Heaviest:
        """The heaviest single paths by norm or residual, proved as far as the budget goes."""
        return heaviest(self.frozen, count, by, budget, progress)

    @usual_modes()
    def residuals(self, lengths: Sequence[int] | None = None, count: int = 20, seed: int = 0) -> pl.DataFrame:
        """Relative residuals of single paths, `count` drawn of each length, at any scale (`single_paths.py`)."""
        counts = counts_along(self.frozen.ways)
        wanted = [length for length, path_count in enumerate(counts) if path_count] if lengths is None else lengths
        most = {length: min(count, counts[checked_length(length, self.layers)]) for length in wanted}
        paths = [path for length in wanted for path in self.sample(length, most[length], seed)]
        got = f"got a count of {count} and lengths {list(wanted)}: by_length().counts says how many each has"
        require(paths, f"residuals needs a count >= 1 and lengths that have paths; {got}", PathError, "count")
        return path_residuals(self.frozen, paths)

    @usual_modes()
    @torch.no_grad()
    def keep(
        self,
        *,
        lengths: Iterable[int] | None = None,
        paths: Iterable[Iterable[int | None]] | None = None,
        heads: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
        attention: str = "shared",
        biases: bool = True,
    ) -> Float[Tensor, "batch token width"]:
        """The output with only those paths, to be fed to the model's own head.

        One of: `lengths`, every path of these lengths; `paths`, these and no other; `heads`, every path that
        passes through these heads alone, in every layer or by layer {3: [0, 5]} (layers from 1). `attention` is
        `shared`, of the full network, or `own`, recomputed along each path. `biases` adds what starts at a
        bias: of the same lengths, or through the same heads; single paths start at the embedding. Paths of
        their `own` have the biases that they meet in them, always.
        """
        choices = {"lengths": lengths, "paths": paths, "heads": heads}
        named = [name for name, choice in choices.items() if choice is not None]
        got = " and ".join(named) or None
        require(len(named) == 1, f"keep takes one of lengths, paths, heads; got {got}", PathError, "keep")
        if heads is not None:
            sentence = "keep(heads=...) shares attention; else use net.variant(heads=...)"
            require(attention == "shared", sentence, PathError, "attention")
            network = WholeNetwork(self.frozen, kept_heads(self.frozen.net.arch, heads), biases)
            return self.frozen.restored(network.run())
        if lengths is not None:
            if not isinstance(lengths, Iterable):
                raise PathError(f"lengths must be a list; got {lengths!r}: write [{lengths}]", subject="lengths")
            wanted = sorted({checked_length(length, self.layers) for length in lengths})
            if attention == "shared":
                output = self._lengths.embedding[wanted].sum(0)
                return output + self._lengths.bias[wanted].sum(0) if biases else output
            path_count = sum(counts_along(self.frozen.ways)[length] for length in wanted)
            limit = f"at most {MOST_ENUMERATED} paths are computed one by one, as attention of their own needs"
            sentence = f"{limit}; got {path_count}: sample some, and keep(paths=...)"
            require(path_count <= MOST_ENUMERATED, sentence, PathError, "lengths")
            paths = (path for length in wanted for path in paths_along(self.frozen.ways, length))
        assert paths is not None
        specs = [checked(path, self.frozen.ways, self.heads) for path in paths]
        term = path_sum(self.frozen, specs, self._after_layer(attention))
        return self.frozen.restored(self._ended(term, attention))

    def _after_layer(self, attention: str) -> AfterLayer:
        require_one_of("attention", attention, ("shared", "own"), PathError)
        return PathRules(self.frozen).after_layer if attention == "shared" else OwnAttention(self.frozen).after_layer

    def _ended(self, term: Tensor, attention: str) -> Tensor:
        """Through the final norm: frozen, or for paths of their own computed on what they add up to."""
        if attention == "shared":
            return PathRules(self.frozen).end(Terms(term[None]))[0]
        return self.frozen.net.finish(term) * self.frozen.valid[..., None]
