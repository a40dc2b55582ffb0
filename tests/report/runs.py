"""Small run directories, of a tiny network, with everything in them that a report can show."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch

from rankscope.depths import depth
from rankscope.nets import Architecture, Transformer
from rankscope.paths import decompose
from rankscope.profiles import CorpusRows, Profile, Summary, measure
from rankscope.report import write_report
from rankscope.runs import Store
from rankscope.theory import Certificates, certify
from tests.profiles.residual_shapes import cloud, spectra

NET = Transformer.random(Architecture(layers=5, width=16, heads=2), init="xavier")
METRICS = ("relative_residual", "mu")
X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)></title>\u2028"


def profile_of(variants: tuple[str, ...] = ("san", "transformer"), arithmetic: str = "float64") -> Profile:
    nets = {name: NET.variant(name) for name in variants}
    return Profile.join([measure(net, X, metrics=METRICS, variant=v, arithmetic=arithmetic) for v, net in nets.items()])


def summary_of(profile: Profile) -> Summary:
    """The same as a corpus."""
    gathered = CorpusRows()
    gathered.add(profile)
    return gathered.summary()


def links_within(html: str) -> None:
    """Every link of a page leads to an element of it, and no two elements have one id."""
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', html)) <= set(ids)


def whole_run(folder: Path, title: str = "a network", hostile: str = "") -> Path:
    """Every table, and the page; `hostile` stands in for a variant's name, a token and the model's name."""
    nets = {name: NET.variant(name) for name in ("transformer", "san", "transformer-mlp")}
    if hostile:
        nets[hostile] = NET.variant(mask="causal")
    profile = Profile.join([measure(net, X, metrics=METRICS, variant=v) for v, net in nets.items()])
    origin = {"name": hostile or "tiny", "weights": "random"}
    profile = Profile(profile.table, profile.manifest.adding(model=hostile or "tiny", origin=origin, title=title))
    words = [[hostile or f"word{k}" for k in range(9)]] * 2
    tables: dict[str, Any] = {"cloud": cloud(nets, X, words=words), "spectrum": spectra(nets, X)}
    d = decompose(NET, X)
    tables |= {"lengths": d.by_length().table, "heads": d.by_head(), **depth(NET, X).tables}
    found = certify(nets["san"], X)
    (network,) = found.manifest.networks
    manifest = found.manifest.adding(networks=(network.adding(variant=hostile or "san", fingerprint=None),))
    tables["certificates_san"] = Certificates(found.table, manifest)
    with Store(folder) as store:
        store.write("measure", profile.manifest, {"profile": profile, **tables})
    return write_report([folder], folder / "report.html")


def study(folder: Path, picture: bytes, said: str = "a thing") -> None:
    """What `reproduce` leaves of one study."""
    folder.mkdir(parents=True)
    (folder / "drawn.png").write_bytes(picture)
    outcome = {
        "paper": "dong2021", "figure": "fig2", "title": said, "notes": [said],
        "figures": ["drawn", "missing"],
        "comparisons": [{"what": said, "published": "1", "ours": "2", "agrees": False, "because": "seeds"}],
    }  # fmt: skip
    (folder / "outcome.json").write_text(json.dumps(outcome))


class Scripts(HTMLParser):
    """Collects every script of a page, and every attribute that could fetch or run something."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.inside: dict[str, str | None] | None = None
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.active: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.active += [(tag, k, v) for k, v in attrs if k in ("src", "href", "action") or k.startswith("on")]
        if tag == "script":
            self.inside = dict(attrs)
            self.found.append((self.inside, ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside = None if tag == "script" else self.inside

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            self.found[-1] = (self.inside, self.found[-1][1] + data)

    @property
    def data(self) -> str:
        """Of the figures."""
        return next(text for about, text in self.found if about.get("type") == "application/json")


def parsed(html: str) -> Scripts:
    found = Scripts()
    found.feed(html)
    return found
