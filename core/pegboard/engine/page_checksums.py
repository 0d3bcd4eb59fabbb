"""A debug mode: whether the KV of a page is still what it was when the page was named."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pegboard.interfaces.executor import Executor
from pegboard.interfaces.kv_allocator import Growth
from pegboard.interfaces.prefix_cache import Hit

QUESTION = "page_checksums"
"""What the workers are asked, with a group and its pages: a number for each page."""

Checksum = tuple[int, ...]
"""Of one page, a number a rank."""


class PageChecksums:
    """Checksums of the pages that the prefix cache was told of, by the workers that hold them.

    A page that has changed is not served again before it is handed out anew; `on_change` is told.
    """

    def __init__(self, executor: Executor, on_change: Callable[[str], None]) -> None:
        self._executor = executor
        self._on_change = on_change
        self._known: dict[tuple[int, int], Checksum] = {}
        self._changed: set[tuple[int, int]] = set()

    def note(self, group: int, pages: Sequence[int]) -> None:
        """These pages are complete; 0: the window gave one back."""
        held = [page for page in pages if page]
        for page, checksum in zip(held, self._ask(group, held), strict=True):
            self._known[group, page] = checksum

    def drop(self, growth: Growth) -> None:
        """These pages are handed out, and will be written to."""
        for group, slots in enumerate(growth.slots):
            for _, page in slots:
                self._known.pop((group, page), None)
                self._changed.discard((group, page))

    def distrusts(self, hit: Hit) -> bool:
        """Whether a page of the hit was found changed."""
        return any(
            (group, page) in self._changed
            for group, pages in enumerate(hit.pages if self._changed else ())
            for page in pages
        )

    def confirm(self, pages: Sequence[Sequence[int]]) -> bool:
        """Asks the workers whether the pages, a group, hold what they held."""
        differing = [
            (group, page) for group, ids in enumerate(pages) for page in self._differing(group, ids)
        ]
        self._changed.update(differing)
        for group, page in differing:
            self._on_change(f"page {page} of group {group} is not what it was when it was named")
        return not differing

    def clear(self) -> None:
        """All names are forgotten."""
        self._known.clear()
        self._changed.clear()

    def _differing(self, group: int, pages: Sequence[int]) -> list[int]:
        held = [page for page in pages if page]
        now = self._ask(group, held)
        return [
            page
            for page, checksum in zip(held, now, strict=True)
            if self._known.get((group, page)) != checksum
        ]

    def _ask(self, group: int, pages: Sequence[int]) -> list[Checksum]:
        if not pages:
            return []
        return list(zip(*self._executor.call(QUESTION, group, pages), strict=True))
