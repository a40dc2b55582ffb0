"""The command `rankscope`. Nothing here imports torch until a command needs it."""

from rankscope.cli.app import app, main

__all__ = ["app", "main"]
