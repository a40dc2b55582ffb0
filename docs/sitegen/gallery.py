"""Every picture of docs/ with the command that makes it."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from sitegen import DOCS, STUDIES, file_of, picture
from sitegen.reproduction import sections

OWN = "images/pictures.toml"


@dataclass(frozen=True)
class Picture:
    """A picture, and where it comes from."""

    path: str
    """From the top of the site."""
    title: str
    command: str
    page: str
    """That explains it, from the top of the site."""


def pictures() -> list[Picture]:
    """Those of pages, of questions, then those of the papers' figures at their quick sizes."""
    told = tomllib.loads((DOCS / OWN).read_text(encoding="utf-8"))
    found = [Picture(path=f"images/{name}", **each) for name, each in told.items()]
    for kept in sorted((STUDIES / "studies").glob("data/*/kept.json")):
        told = json.loads(kept.read_text(encoding="utf-8"))
        page = f"studies/{told['study']}.md"
        title = file_of(page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        drawn = sorted(STUDIES.glob(f"studies/images/{told['study']}.png")) + sorted(
            STUDIES.glob(f"studies/images/{told['study']}_*.png")
        )
        found += [Picture(str(path.relative_to(STUDIES)), title, told["command"], page) for path in drawn]
    for each in sections():
        for path in each.pictures:
            name = Path(path).stem.replace("_", " ")
            title = each.heading + (f" ({name})" if len(each.pictures) > 1 else "")
            found.append(Picture(path, title, each.command, f"papers/{each.paper}.md"))
    return found


def page() -> str:
    """Cards, grouped by where pictures come from."""
    groups = {
        "From the commands": [each for each in pictures() if each.path.startswith("images/")],
        "Questions answered by experiment": [each for each in pictures() if each.path.startswith("studies/")],
        "Dong, Cordonnier, Loukas 2021": _of("dong2021"),
        "Wu et al. 2024": _of("wu2024"),
    }
    return "\n\n".join(f"## {title}\n\n{_cards(own)}" for title, own in groups.items())


def _of(paper: str) -> list[Picture]:
    own = [each for each in pictures() if each.page == f"papers/{paper}.md"]
    full = [each for each in own if "--full" in each.command]
    larger = {each.path.replace("/full/", "/") for each in full}
    return [each for each in own if each in full or each.path not in larger]


def _cards(own: list[Picture]) -> str:
    cards = [
        f":::{{grid-item-card}} {each.title}\n:link: /{each.page.removesuffix('.md')}\n"
        f":link-type: doc\n:img-top: {picture(each.path)}\n:img-alt: {each.title}\n"
        f"{_shape(each)}\n`{each.command}`\n:::"
        for each in own
    ]
    return "::::{grid} 1 1 2 2\n:gutter: 3\n\n" + "\n\n".join(cards) + "\n::::"


def _shape(each: Picture) -> str:
    """Of a picture that is taller than wide, a page mostly, a card shows the top; of others the whole."""
    size = file_of(each.path).read_bytes()[16:24]  # width and height, where every PNG has them
    tall = int.from_bytes(size[4:]) > int.from_bytes(size[:4])
    return ":class-img-top: tall\n" if tall else ""
