"""The families of models that `load` maps onto the canonical network: one file each, one row each."""

from rankscope.sources.families.albert import Albert
from rankscope.sources.families.bart import Bart, BartDecoder
from rankscope.sources.families.bert import Bert
from rankscope.sources.families.clip import ClipText, ClipVision, SiglipText, SiglipVision
from rankscope.sources.families.deepseek import DeepSeek
from rankscope.sources.families.dinov2 import DinoV2
from rankscope.sources.families.distilbert import DistilBert
from rankscope.sources.families.family import Family
from rankscope.sources.families.gemma2 import Gemma2
from rankscope.sources.families.gemma3 import Gemma3
from rankscope.sources.families.gpt2 import GPT2
from rankscope.sources.families.gpt_neox import GPTNeoX
from rankscope.sources.families.llama import Llama
from rankscope.sources.families.mixtral import Mixtral
from rankscope.sources.families.modernbert import ModernBert
from rankscope.sources.families.opt import OPT
from rankscope.sources.families.phi3 import Phi3
from rankscope.sources.families.qwen3_next import Qwen3Next
from rankscope.sources.families.roberta import Roberta
from rankscope.sources.families.t5 import T5, T5Decoder
from rankscope.sources.families.vit import ViT
from rankscope.sources.families.whisper import Whisper, WhisperDecoder
from rankscope.sources.families.xlnet import XLNet

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Bert(), Roberta(), DistilBert(), Albert(), XLNet(), GPT2(), OPT(), GPTNeoX(), Llama(), Mixtral(),
        Qwen3Next(), DeepSeek(), Phi3(), Gemma2(), Gemma3(), T5(), T5Decoder(), Bart(), BartDecoder(),
        Whisper(), WhisperDecoder(), ViT(), DinoV2(), ModernBert(), ClipText(), ClipVision(), SiglipText(),
        SiglipVision(),
    )
}  # fmt: skip

__all__ = ["FAMILIES", "Family"]
