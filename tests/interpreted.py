"""Tests of kernels for GPUs on the host: Triton's interpreter runs them, which `conftest.py` asks for.

Triton reads `TRITON_INTERPRET` wherever a kernel is defined, its own functions among them, and an interpreted kernel
can call only what is interpreted too: so it is set before anything imports triton. With a GPU it is left alone, as an
interpreted kernel can be part of no CUDA graph.
"""

import os
from importlib.util import find_spec

import pytest

needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton's interpreter runs kernels: torch for CPUs needs pip install triton, a GPU TRITON_INTERPRET=1",
)
