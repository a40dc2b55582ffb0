"""Qwen2-VL and Qwen2.5-VL: the text model."""

from rankscope.sources.families.llama import Llama


class Qwen2VL(Llama):
    """The text model of Qwen2-VL and Qwen2.5-VL on text alone, where its three kinds of positions are one."""

    name, inside = "qwen2_vl", "language_model"
    types = ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
