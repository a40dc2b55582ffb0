"""The wheel and the sdist, installed where the sources are not: `python -m tests.packaging`, `make wheel-check`."""
