"""Networks that read what they are to predict are found, at any depth."""

from rankscope.lab.lookahead import reads_ahead
from rankscope.lab.tasks import Copying
from rankscope.nets import Transformer


def test_reading_ahead_is_found_where_tokens_become_the_same() -> None:
    """After 48 layers without skips nothing of what was read is left, to float64."""
    deep = Copying().architecture(48, 8, 2, attention_skip=0.0, mlp_skip=0.0)
    assert reads_ahead(Transformer.random(deep).with_remedy("sinkhorn"))
    assert deep.mask == "causal" and not reads_ahead(Transformer.random(deep))
