"""The host's side of a paged cache: which pages are free, and which belong to which row."""

import numpy as np


class PageAllocator:
    """Hands out page ids to rows that grow and takes them back from rows that are done.

    The free list begins shuffled, so that the pages of a row lie scattered over the pool, as in a server that
    has run for a while.

    Parameters
    ----------
    num_pages, page_size : int
        Pages in the pool of one layer, and tokens in a page.
    batch, max_pages_per_row : int
        The shape of the block table.
    seed : int
        Of the shuffle.

    Attributes
    ----------
    block_tables : int32[batch, max_pages_per_row]
        The pages of each row in order, -1 in entries without a page.
    peak_pages : int
        The most pages that were in use at once.

    Examples
    --------
    >>> pages = PageAllocator(num_pages=4, page_size=16, batch=2, max_pages_per_row=3)
    >>> pages.grow(0, 17)
    >>> pages.num_used
    2
    >>> pages.release(0)
    >>> pages.num_used, pages.peak_pages
    (0, 2)
    """

    def __init__(self, num_pages: int, page_size: int, batch: int, max_pages_per_row: int, *, seed: int = 0):
        self.page_size = page_size
        self.block_tables = np.full((batch, max_pages_per_row), -1, np.int32)
        self.peak_pages = 0
        self._num_pages = num_pages
        self._free = np.random.default_rng(seed).permutation(num_pages).tolist()
        self._row_pages = [0] * batch

    @property
    def num_used(self) -> int:
        """Pages that belong to a row now."""
        return self._num_pages - len(self._free)

    def grow(self, row: int, length: int) -> None:
        """Give `row` the pages it still lacks to hold `length` tokens."""
        needed = pages_for(length, self.page_size)
        while self._row_pages[row] < needed:
            self.block_tables[row, self._row_pages[row]] = self._free.pop()
            self._row_pages[row] += 1
        self.peak_pages = max(self.peak_pages, self.num_used)

    def release(self, row: int) -> None:
        """Put all pages of `row` back on the free list."""
        self._free.extend(self.block_tables[row, : self._row_pages[row]].tolist())
        self.block_tables[row] = -1
        self._row_pages[row] = 0


def pages_for(length: int, page_size: int) -> int:
    """Count the pages that hold `length` tokens."""
    return -(-length // page_size)
