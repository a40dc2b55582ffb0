"""RoBERTa and its kin: BERT's block; positions start after the padding id."""

from typing import Any

from rankscope.sources.families.bert import Bert
from rankscope.sources.families.family import SMALL_TEXT


class Roberta(Bert):
    """RoBERTa, XLM-RoBERTa and CamemBERT: a BERT with other positions."""

    name = "roberta"
    types = ("roberta", "xlm-roberta", "camembert")

    def first_position(self, model: Any) -> int:
        """fairseq's habit: rows up to the padding id are not used."""
        return int(model.config.pad_token_id) + 1

    def tiny_configs(self) -> dict[str, Any]:
        """One config of an encoder."""
        from transformers import RobertaConfig

        more: dict[str, Any] = {"intermediate_size": 24, "max_position_embeddings": 34, "type_vocab_size": 1}
        return {"encoder": RobertaConfig(**SMALL_TEXT | more)}
