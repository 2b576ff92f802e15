"""Who holds which page of a pool of keys and values, and which pages hold a known beginning of a prompt."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


class PagePool:
    """Pages 1 to `pages` - 1, counted by their holders; page 0 is nobody's.

    A page full of prompt tokens is known by them and by all tokens before it, and may have many holders. It
    stays known when the last one leaves, until its room is needed: the longest unused goes first.
    """

    def __init__(self, pages: int, page: int) -> None:
        self._page = page
        self._empty = list(range(pages - 1, 0, -1))
        self._holders: dict[int, int] = {}
        self._known: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # known pages without a holder, oldest first

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self._empty) + len(self._unused)

    def held(self, page: int) -> bool:
        """Whether anybody holds this page."""
        return page in self._holders

    def begin(self, tokens: Sequence[int]) -> list[int]:
        """Hold the known pages that a prompt begins with, and return them."""
        pages = []
        for name in self._page_names(tokens):
            if name not in self._known:
                break
            pages.append(self._known[name])
        for page in pages:
            self._unused.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
        return pages

    def take(self, count: int) -> list[int] | None:
        """Hold `count` pages that are nobody's; None, and nothing changes, where there are not so many."""
        if count > self.available:
            return None
        pages = [self._empty.pop() if self._empty else self._oldest() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def know(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Remember the full pages of a prompt; the first holder of a beginning keeps it."""
        for name, page in zip(self._page_names(tokens), pages, strict=False):
            if name not in self._known:
                self._known[name], self._names[page] = page, name

    def release(self, pages: Iterable[int], *, forget: Iterable[int] = ()) -> None:
        """Give pages back; `forget` names those that were never written, unless others hold them."""
        never_written = set(forget)
        # Last pages first: without what comes before it a page is of no use.
        for page in reversed(list(pages)):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._names and page not in never_written:
                self._unused[page] = None
                continue
            if page in self._names:
                del self._known[self._names.pop(page)]
            self._empty.append(page)

    def _oldest(self) -> int:
        page, _ = self._unused.popitem(last=False)
        del self._known[self._names.pop(page)]
        return page

    def _page_names(self, tokens: Sequence[int]) -> Iterable[bytes]:
        """A digest of each full page's tokens and all before them."""
        name = b""
        for start in range(0, len(tokens) - self._page + 1, self._page):
            part = np.asarray(tokens[start : start + self._page], np.int32).tobytes()
            name = hashlib.blake2b(name + part, digest_size=16).digest()
            yield name
