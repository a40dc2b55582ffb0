"""A module that cannot be imported."""

raise OSError("libmine.so.1: cannot open shared object file")


def failing() -> None:
    """Fail when it is called, not before."""
