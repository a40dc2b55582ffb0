"""`rankscope spread`."""

from dataclasses import dataclass
from typing import Annotated

from rankscope.cli import machine, say
from rankscope.cli import options as opt


@dataclass(frozen=True)
class SpreadOptions:
    """Options of its own, beside those that every command has."""

    model: opt.Model = "bert-tiny"
    scale: Annotated[float, opt.option(opt.TEXT, "NUMBER", "Multiply the tokens by this number.")] = 1.0


def spread(options: SpreadOptions = SpreadOptions(), printing: opt.PrintOptions = opt.PrintOptions()) -> None:
    """Say how large the tokens of a model are.

    Of its last layer, on a sentence.
    """
    from rankscope import fresh, measure  # here, so that `rankscope --help` stays fast

    net = fresh(options.model)
    X, padding = net.encode(["Call me Ishmael."], 8)
    value = float(measure(net, options.scale * X, padding, "spread").curve("spread")[0, -1])
    if printing.as_json:
        return machine({"spread": value})
    say(f"spread: {value:.3g}")
