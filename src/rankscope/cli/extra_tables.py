"""Tables of a run folder that the report draws beside the curves: the token cloud and the singular values."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from rankscope.nets import Transformer
    from rankscope.profiles import Reader

MOST_VARIANTS = 4  # Variants that are drawn; the whole network is among them


class ReportTables:
    """Reads the token cloud and the singular values of some variants, and makes tables of them.

    A few of the `variants` are drawn. `words` are those of the first text in `X`, which the cloud shows.
    """

    def __init__(
        self, net: "Transformer", variants: Sequence[str], X: "Tensor", padding: "Tensor", words: list[list[str]]
    ) -> None:
        from rankscope.profiles.readers import ShapeReader
        from rankscope.profiles.spectra import SpectrumReader

        chosen = list(variants)[:MOST_VARIANTS]
        if "transformer" in variants and "transformer" not in chosen:
            chosen[-1] = "transformer"
        self.net, self.X, self.padding, self.words = net, X, padding, words
        self._shapes = {name: ShapeReader(samples=1) for name in chosen}
        self._spectra = {name: SpectrumReader(name, samples=2) for name in chosen}

    def readers(self, variant: str) -> "Sequence[Reader]":
        """Readers for the pass over a variant in deviation arithmetic; none if it is not drawn."""
        return [readers[variant] for readers in (self._shapes, self._spectra) if variant in readers]

    def read_alone(self, quiet: bool) -> None:
        """Run a pass for the readers alone, where nothing else is measured in deviation arithmetic."""
        from rankscope.cli.show import progress
        from rankscope.profiles import one_pass

        with progress(quiet) as start:
            start("token cloud, singular values")
            for name in self._shapes:
                net = self.net.variant(name)
                one_pass(net, self.X[:2], self.padding[:2], self.readers(name))

    def tables(self) -> "dict[str, pl.DataFrame]":
        """The tables `cloud` and `spectrum`."""
        import polars as pl

        from rankscope.profiles.cloud import cloud_table

        shapes = {name: reader.result() for name, reader in self._shapes.items()}
        return {
            "cloud": cloud_table(shapes, ~self.padding[:1], self.words),
            "spectrum": pl.concat([reader.result() for reader in self._spectra.values()]),
        }
