"""The report: made from a directory alone, nothing in it but text, numbers and its own scripts."""

import base64
import hashlib
import json
import re
from pathlib import Path

from rankscope.figures.text import power
from rankscope.profiles import Profile
from rankscope.report import verdict
from tests.report.runs import HOSTILE, parsed, whole_run


def test_the_page_stands_alone_and_runs_only_its_own_scripts(tmp_path: Path) -> None:
    html = whole_run(tmp_path, HOSTILE, HOSTILE).read_text()
    found = parsed(html)
    executed = [text for attributes, text in found.found if attributes.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in executed]
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert len(policy) == 1
    allowed = re.findall(r"&#39;sha256-([^&]+)&#39;", policy[0])
    assert len(executed) == 3 and allowed == hashes
    assert "default-src &#39;none&#39;" in policy[0]
    assert "unsafe-eval" not in policy[0] and "connect-src" not in policy[0]
    assert "alert(" not in "".join(text for text in executed[1:])
    for tag, name, value in found.active:
        assert name in ("href", "src") and (value or "").startswith(("#", "data:")), (tag, name, value)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "\u2028" not in found.data and "<" not in found.data
    assert {key.split("-figure-")[1] for key in json.loads(found.data)} >= {
        "curves", "cloud", "spectrum", "lengths", "heads", "bounds-0"
    }  # fmt: skip
    assert len(html) < 8e6


def test_the_page_shows_each_layers_value_and_marks_the_floor(written: tuple[Profile, Path]) -> None:
    profile, page = written
    html = page.read_text()
    for variant in profile.variants:
        for log10 in profile.curve("relative_residual", "log10", variant=variant).mean(0).tolist():
            assert f">{power(log10)}</td>" in html
    marked = profile.at_floor("relative_residual", variant="san").sum()
    assert html.count('class="noise"') == int(marked) > 0
    bare = re.sub(r'<span class="number">([^<]*)</span>', r"\1", html)
    assert verdict(profile) in bare.replace("&#39;", "'")
