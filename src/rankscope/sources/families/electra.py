"""ELECTRA: BERT's blocks, generator or discriminator."""

from typing import Any

from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.bert import Bert
from rankscope.sources.families.family import linear_weights


class Electra(Bert):
    """ELECTRA, as an encoder or as a decoder."""

    name, types = "electra", ("electra",)

    def embedding(self, model: Any) -> TextEmbedding:
        """BERT's; a narrow one is normalised, then widened."""
        into = getattr(model, "embeddings_project", None)
        return self.text(model, after=None if into is None else linear_weights(into))
