"""`python -m rankscope` is `rankscope`."""

from rankscope.cli import main

main()
