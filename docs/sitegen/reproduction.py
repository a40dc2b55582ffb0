"""What `rankscope reproduce` wrote into the docs of the studies: sections of its two pages, by paper and figure."""

import re
from dataclasses import dataclass
from pathlib import Path

from sitegen import file_of, picture

PAGES = {"reproduction/REPRODUCTION.md": "", "reproduction/full/REPRODUCTION.md": " --full"}
PAPERS = {"dong2021": "Dong, Cordonnier, Loukas 2021", "wu2024": "Wu, Ajorlou, Wang, Jegelka, Jadbabaie 2024"}


@dataclass(frozen=True)
class Section:
    """One figure of a paper, run again."""

    paper: str
    figure: str
    title: str
    body: str
    """With its pictures, named from the top of the site."""
    option: str
    """What the command had beside paper and figure."""

    @property
    def command(self) -> str:
        """That makes it."""
        return f"rankscope reproduce {self.paper} {self.figure}{self.option}"

    @property
    def heading(self) -> str:
        """Which figure it is, said once, and what it is of."""
        title = re.sub(rf"( \({named(self.figure)}\)$)|(^{named(self.figure)}: )", "", self.title)
        return f"{named(self.figure)}: {title}"

    @property
    def pictures(self) -> list[str]:
        """Their files, from the top of the site."""
        return re.findall(r"!\[[^]]*\]\(([^)]+)\)", self.body)


def sections() -> list[Section]:
    """All that were run, first at quick sizes, then at full ones."""
    found = []
    for page, option in PAGES.items():
        text = file_of(page).read_text(encoding="utf-8")
        folder = str(Path(page).parent)
        text = re.sub(r"(!\[[^]]*\]\()", rf"\g<1>{folder}/", text)
        for part in text.split("\n## ")[1:]:
            title, _, body = part.partition("\n")
            match = re.match(r"(\w+), (\w+): (.*)", title)
            assert match, title
            found.append(Section(match[1], match[2], match[3], body.strip(), option))
    return found


def page(paper: str) -> str:
    """A paper's figures: as published and as they came out here, and at full size where that was run."""
    own = [each for each in sections() if each.paper == paper]
    quick = [each for each in own if not each.option]
    full = {each.figure: each for each in own if each.option}
    parts = []
    for each in quick:
        parts += [f"## {each.heading}", f"`{each.command}`", placed(each.body)]
        if each.figure in full:
            larger = full[each.figure]
            parts.append(f":::::{{dropdown}} At full size: `{larger.command}`\n\n{placed(larger.body)}\n:::::")
    return "\n\n".join(parts)


def named(figure: str) -> str:
    """`fig2` as a reader says it."""
    found = re.fullmatch(r"(fig|thm)(\d+)", figure)
    return f"{ {'fig': 'Figure', 'thm': 'Theorem'}[found[1]] } {found[2]}" if found else figure.capitalize()


def placed(body: str) -> str:
    """Pictures, as a page of the site names them, each on its own."""
    return re.sub(r"!\[([^]]*)\]\(([^)]+)\)\n?", lambda found: f"![{found[1]}]({picture(found[2])})\n\n", body)
