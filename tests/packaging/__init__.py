"""The wheel and the sdist, installed where the sources are not: `make wheel-check`."""
