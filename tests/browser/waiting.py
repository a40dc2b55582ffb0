"""A page that is watched, and waiting for what it shows, never for a time."""

from typing import TYPE_CHECKING, Any, Self

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Request


class Watched:
    """A page in a context of its own; what it complained of, and what it asked of the network."""

    def __init__(self, browser: "Browser", **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1300, "height": 900}, **context})
        self.context.set_default_timeout(120_000)  # a busy machine takes longer than the usual 30 seconds
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", self._asked)
        self.page.on("request", self._requested)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def _said(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def _asked(self, dialog: "Dialog") -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _requested(self, request: "Request") -> None:
        if not request.url.startswith(("data:", "blob:")):  # which the page makes itself
            self.requests.append(request.url)


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
