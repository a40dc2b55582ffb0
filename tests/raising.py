"""Errors told apart by their class and by what they are about, so that tests do not depend on prose."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rankscope.errors import RankscopeError


@contextmanager
def raises(kind: type[RankscopeError], subject: str | None = None) -> Iterator[pytest.ExceptionInfo[RankscopeError]]:
    """Expect an error of exactly this class and, if given, with exactly this `subject`.

    Args:
        kind: The class of the error; a subclass does not do.
        subject: The argument, field, file or part that the error must be about; any if left out.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind
    if subject is not None:
        assert caught.value.subject == subject, f"about {caught.value.subject!r}: {caught.value}"
    assert str(caught.value), "an error says what was expected, what came and what to do"
