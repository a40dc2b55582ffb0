"""The page on watching is true: its Python runs, in order, in a plain interpreter."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "watch.md").read_text(encoding="utf-8")


def test_the_python_of_the_page_runs() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
    assert code.count("with torch.no_grad()") == 5
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)
