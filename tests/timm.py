"""timm beside a torch that its torchvision was not built for, as torchvision's wheels are not for torch on a CPU.

timm imports torchvision, and torchvision gives shapes to operators of its own library as it is imported: without
that library they are unknown, and the import fails. They are declared by name here, for no ViT calls them.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

_declared: list[torch.library.Library] = []  # torch forgets what a library declared once it is gone


def timm() -> Any:
    """timm; the test is skipped where it or torchvision is missing."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        pytest.skip("timm needs torchvision")
    if not _declared:
        text = Path(spec.origin).with_name("_meta_registrations.py").read_text(encoding="utf-8")
        _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in re.findall(r'register_fake\("torchvision::(\w+)"\)', text):
            if not hasattr(torch.ops.torchvision, name):
                _declared[0].define(f"{name}() -> ()")
    return pytest.importorskip("timm")
