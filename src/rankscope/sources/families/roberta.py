"""RoBERTa and its kin: BERT's block; positions start after the padding id."""

from typing import Any, ClassVar

from rankscope.sources.families.bert import Bert
from rankscope.sources.families.family import SMALL_TEXT


class Roberta(Bert):
    """RoBERTa, XLM-RoBERTa and CamemBERT: a BERT with other positions."""

    name, types = "roberta", ("roberta", "xlm-roberta", "camembert")
    tiny_fields: ClassVar = {
        "encoder": (
            "RobertaConfig",
            SMALL_TEXT | {"intermediate_size": 24, "max_position_embeddings": 34, "type_vocab_size": 1},
        )
    }

    def first_position(self, model: Any) -> int:
        """fairseq's habit: rows up to the padding id are not used."""
        return int(model.config.pad_token_id) + 1
