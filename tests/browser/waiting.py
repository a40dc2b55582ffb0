"""Waiting for what a page shows, never for a time."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page


def until(page: "Page", condition: str) -> None:
    """Wait for a condition in JavaScript; what it asks of may not be there yet.

    playwright's own way evaluates a string in the page, which the pages forbid.
    """
    said = ""
    for _ in range(1500):
        said = page.evaluate(f"(() => {{ try {{ return String(Boolean({condition})); }}"
                             " catch (error) { return String(error); } })()")  # fmt: skip
        if said == "true":
            return
        page.wait_for_timeout(20)
    pytest.fail(f"never came to be: {condition} ({said})")
