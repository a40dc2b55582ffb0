"""Deviation arithmetic over long contexts: the same rules, attention by blocks of rows (`blocks.py`)."""

from collections.abc import Callable

from torch import Tensor

from rankscope.deviation.blocks import PatternByRows, RowMaker
from rankscope.deviation.rules import Deviation
from rankscope.deviation.state import State
from rankscope.nets.architecture import Architecture
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.positions import score_bias
from rankscope.nets.traversal import Block
from rankscope.nets.weights import Weights


class StreamedDeviation(Deviation):
    """Rules on states, attention by blocks of rows."""

    def __init__(self, arch: Architecture, settings: PassSettings, weights: Weights) -> None:
        """The settings have no masks; `weights` are the network's."""
        super().__init__(arch, settings)
        self.table = weights

    def pattern(self, block: Block, state: State) -> PatternByRows:  # type: ignore[override]
        """What rows of P share: they are made as they are mixed."""
        mask, settings = self.arch.mask_of(block.index), self.settings
        scores = self.prepared(block, state, self._bias(block))
        return self.rows(
            RowMaker(scores, lambda rows: settings.rows(mask, rows.start, rows.stop), state.valid)
        )

    def cross_pattern(self, there: Block, state: State) -> PatternByRows:  # type: ignore[override]
        """The same of the tokens on the memory."""
        memory, valid = self.settings.memory, state.valid
        assert memory is not None
        scores = self.cross_prepared(there, state)
        return self.rows(
            RowMaker(scores, lambda rows: memory.visible(valid.mask[:, rows]), valid, tokens=False)
        )

    def rows(self, maker: RowMaker) -> PatternByRows:
        """Attention of these rows."""
        return PatternByRows.of(maker)

    def _bias(self, block: Block) -> Callable[[slice], Tensor] | None:
        if self.arch.positions not in ("bias", "alibi"):
            return None
        n, like = self.settings.valid.shape[1], block.weights.attention.query.weight

        def bias(rows: slice) -> Tensor:
            found = score_bias(self.arch, self.table, n, like, rows.start, rows.stop)
            assert found is not None
            return found

        return bias
