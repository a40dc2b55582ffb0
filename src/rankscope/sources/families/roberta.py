"""RoBERTa and its kin."""

from typing import Any

from rankscope.sources.families.bert import Bert


class Roberta(Bert):
    """RoBERTa, XLM-RoBERTa and CamemBERT: a BERT with other positions."""

    name, types = "roberta", ("roberta", "xlm-roberta", "camembert")

    def first_position(self, model: Any) -> int:
        """fairseq's habit: rows up to the padding id are not used."""
        return int(model.config.pad_token_id) + 1
