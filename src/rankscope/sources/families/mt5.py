"""mT5, built like T5."""

from rankscope.sources.families.t5 import T5, T5Decoder


class MT5(T5):
    """The encoder of mT5: T5's blocks under another name."""

    name, types = "mt5", ("mt5",)
    loader = "MT5EncoderModel"


class MT5Decoder(T5Decoder):
    """The decoder of mT5."""

    name, types = "mt5_decoder", ("mt5",)
    loader = "MT5Model"
