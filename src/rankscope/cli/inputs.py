"""The network and the tokens that a command line asks for, the same way in every command."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.cli.named import tell_hub
from rankscope.errors import ArchitectureError, FileError, RankscopeError, SourceError, TokensError

if TYPE_CHECKING:
    from rankscope.nets import Transformer
    from rankscope.profiles import Profile, Summary
    from rankscope.runs import Manifest
    from rankscope.sources import Excerpts

CHARACTERS = 64
"""An excerpt is read up to so many characters a token: no vocabulary has words as long on the average."""

BEGINNING = 90
"""Characters of an excerpt that name it."""


def network(
    model: str,
    mask: str | None = None,
    layers: int | None = None,
    init: str | None = None,
    seed: int | None = None,
    device: str = "cpu",
    stream: bool = False,
    remedies: list[str] | None = None,
    quiet: bool = False,
) -> "Transformer":
    """The network of that name, with its mask, depth, device and remedies as asked for; its layers left in
    their files where that is asked for, or they do not fit into memory. That a hub is asked is said, unless
    `quiet`."""
    from rankscope.remedies import remedy
    from rankscope.sources import named_network

    known = [remedy(each) for each in remedies or ()]
    drawn(model, init, seed)
    if not 0 <= (seed or 0) < 2**31:
        raise ArchitectureError(f"--seed must lie in 0..{2**31 - 1}; got {seed}")
    tell_hub(model, quiet)
    net = named_network(model, seed or 0, init or "bert", device, stream or None)
    net = net if mask is None and layers is None else net.variant(mask=mask, layers=layers)
    for each in known:
        net = net.with_remedy(each)
    return net


def drawn(model: str, init: str | None, seed: int | None) -> bool:
    """Whether the model's weights are random; what draws them must not be asked of a trained one."""
    from rankscope.sources.network_names import is_drawn

    random = is_drawn(model)
    given = [name for name, value in (("--init", init), ("--seed", seed)) if value is not None]
    if given and not random:
        raise SourceError(
            f"{' and '.join(given)} must go with random weights, which {model} does not have: leave "
            f"{'it' if len(given) == 1 else 'them'} out, or name a size as in bert-base"
        )
    return random


def bundled(samples: int, tokens: int) -> list[str]:
    """Excerpts of the bundled text, long enough for so many tokens."""
    from rankscope.sources import bundled_excerpts

    excerpts = bundled_excerpts(tokens)
    if len(excerpts) < samples:
        raise TokensError(
            f"the bundled prose must have {samples} excerpts of {tokens} tokens; it has {len(excerpts)}: "
            "ask for fewer samples or tokens"
        )
    return excerpts[:samples]


def excerpts_of(text: str | None, split: str, field: str, samples: int, tokens: int) -> list[str]:
    """The first excerpts of a text, or of the bundled prose where there is none."""
    if text is None:
        if split != "auto" or field != "text":
            raise FileError("--split and --field must go with --text, which says what is to be read")
        return bundled(samples, tokens)
    return list(islice(stream(text, split, field, tokens), samples))


def stream(text: str, split: str, field: str, tokens: int) -> "Excerpts":
    """All excerpts of a text, one after another, each long enough for so many tokens."""
    from rankscope.sources import excerpts
    from rankscope.sources.texts import LONGEST

    return excerpts(text, split, field, longest=max(LONGEST, CHARACTERS * tokens))


def described(text: str | None, split: str, field: str, read: list[str], tokens: int) -> dict[str, Any]:
    """For the manifest: what was read."""
    from rankscope.runs import Text

    source = Text(path="Moby Dick, bundled") if text is None else Text(path=text, split=split, field=field)
    source = source.adding(first=begins(read[0])) if read else source
    return {"text": source, "samples": len(read), "tokens": tokens}


def begins(text: str) -> str:
    """How an excerpt begins, on one line: enough to know it by.

    >>> begins("Call me  Ishmael.\\nSome years ago")
    'Call me Ishmael. Some years ago'
    """
    line = " ".join(text[: 8 * BEGINNING].split())
    return line if len(line) <= BEGINNING else f"{line[:BEGINNING].rpartition(' ')[0] or line[:BEGINNING]} …"


def listed(option: str, text: str) -> list[str]:
    """The names of a comma-separated option, each once."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise RankscopeError(f"--{option} must name at least one; got {text!r}")
    return parts


def title_of(net: "Transformer") -> str:
    """The heading of a run."""
    from rankscope.nets.origin import titled

    return titled({} if net.origin is None else net.origin.described())


def drawn_at_random(manifest: "Manifest") -> list[str]:
    """A line for each network whose weights are random: its numbers say nothing of a trained one."""
    from rankscope.nets.origin import weights_of

    origins = manifest.more.get("origins") or {(manifest.origin or {}).get("name"): manifest.origin or {}}
    return [
        f"{Path(str(name)).name}: {weights_of(origin)}."
        for name, origin in origins.items()
        if origin.get("weights") == "random"
    ]


def fallbacks(profile: "Profile | Summary") -> list[str]:
    """A line for each network that ran in another arithmetic than was asked for."""
    return [
        f"{network.variant} ran in {network.arithmetic}: {network.checks['arithmetic_asked']} "
        f"arithmetic has no rule for {_without_rule(network.architecture or {})}."
        for network in profile.manifest.networks
        if network.checks["arithmetic_asked"] != network.arithmetic
    ]


def _without_rule(arch: dict[str, Any]) -> str:
    """What made it run in float64, as its manifest has it: its kernel, or its parts where that has a rule."""
    from rankscope.nets.kernels import KERNELS

    parts = [str(part).partition(":")[2].partition(":")[0] for part in arch.get("parts") or ()]
    kernel = KERNELS.get(str(arch.get("kernel")).partition(":")[0])
    alone = kernel is not None and kernel.deviation is not None and parts
    return " and ".join(parts) if alone else f"kernel {arch.get('kernel')}"
