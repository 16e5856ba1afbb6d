"""The host's side of a paged cache: which pages are free, which sequences hold which, and what they hold."""

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jax_paged_attn import validation
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.validation import Ints

_INT32_MAX = 2**31 - 1
_UNNAMED = -1  # stands for a token whose id the pool wasn't told
_NO_SEQ = -1  # stands for a row of a batch without a sequence
_FIRST_WIDTH = 8


class PoolExhausted(RuntimeError):
    """The pool has too few free pages for an operation, which has changed nothing.

    Attributes
    ----------
    needed, free : int
        Pages that the operation would have taken, and pages that are free.
    """

    def __init__(self, needed: int, free: int):
        super().__init__(needed, free)  # the arguments themselves, so that it survives pickling
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        return f"the pool is exhausted: {self.needed} pages needed, {self.free} free"


class Allocation(NamedTuple):
    """What `PagePool.allocate` gives.

    Attributes
    ----------
    seq_id : int
        Names the sequence in later calls; no id is given twice.
    num_cached_tokens : int
        Leading tokens whose keys and values are in the pool already. Never the last token, which has to run
        through the model in any case.
    slots : int32[num_tokens - num_cached_tokens]
        Where the keys and values of the other tokens belong: ``page * page_size + offset``. -1 where they are
        in the pool already (the last token, if every page was found): then nothing is to be written.
    """

    seq_id: int
    num_cached_tokens: int
    slots: np.ndarray


class Appended(NamedTuple):
    """What `PagePool.append` and `PagePool.append_batch` give.

    Attributes
    ----------
    slots : int32[total tokens]
        Where the keys and values of the new tokens belong: ``page * page_size + offset``; -1 in batch rows
        without a sequence.
    copies : int32[batch, 2]
        Pages to copy on the device, (source, target) for each sequence, before it writes to these slots and
        before it makes the copies of later calls; (-1, -1) for sequences without a copy, which are most: only
        new tokens in a shared page need one. One shape for each batch size, as `copy_pages` wants it under
        jit.
    """

    slots: np.ndarray
    copies: np.ndarray


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """A pool's counters, for a dashboard.

    Attributes
    ----------
    num_pages, num_used_pages, num_free_pages : int
        All pages; those that sequences hold; the others.
    num_cached_pages : int
        Free pages whose content `PagePool.allocate` can still find, until they are handed out.
    num_shared_pages : int
        Pages that several sequences hold.
    peak_used_pages : int
        The most pages that sequences held at once.
    num_seqs : int
        Live sequences.
    num_looked_up_tokens, num_hit_tokens : int
        Tokens that allocations have named, and how many of those were in the pool already.
    num_copies, num_evictions : int
        Pages copied on write, and cached pages handed out for something else.
    """

    num_pages: int
    num_used_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_shared_pages: int
    peak_used_pages: int
    num_seqs: int
    num_looked_up_tokens: int
    num_hit_tokens: int
    num_copies: int
    num_evictions: int


class _Content:
    """What a full page holds: its tokens, after those of all contents above it in the tree.

    In the tree while a page holds it or another content continues it. `pages` holds either pages that
    sequences hold, or one cached page.
    """

    __slots__ = ("children", "key", "pages", "parent")

    def __init__(self, parent: "_Content | None" = None, key: bytes = b""):
        self.parent = parent
        self.key = key
        self.children: dict[bytes, _Content] = {}
        self.pages: dict[int, None] = {}  # in the order of being filled


class PagePool:
    """Hands out the pages of one pool to sequences that grow, share beginnings, fork and end.

    The pool is kept on the host, in numpy: it says where keys and values belong (`Appended.slots`) and which
    pages have to be copied first (`Appended.copies`), and gives the tables that attention reads. It touches
    no device, but for `page_table`, and waits for none, unless it is given a `jax.Array`. The caches of all
    layers use the same pages. Every operation is O(1) a token, amortised. Not thread-safe.

    Sequences that begin with the same tokens share their full pages by themselves: `allocate` finds the pages
    that hold the beginning of a new sequence, also those of sequences that were freed, until they are needed
    for something else. What identifies a page is its tokens and all tokens before them, compared exactly.
    Token ids are compared and never interpreted: where more than the tokens decides the keys (an adapter, an
    image), mix it into the ids, as in ``tokens + adapter * 2**32``. Tokens without ids are never found.

    A page can be found from the moment its last slot is handed out. So write what one call gives before, or
    together with, what a later call gives; and before you free a sequence early, `truncate` it to the tokens
    that were really written.

    Pages that hold nothing are handed out first, the last freed first; then cached ones, the longest unused
    first and the end of a sequence before its beginning. The same calls give the same pages.

    Parameters
    ----------
    num_pages, page_size : int
        Pages in the pool, and tokens a page; ``num_pages * page_size`` slots fit int32.
    free_order : int[num_pages], optional
        The order in which unused pages are handed out, a permutation of ``range(num_pages)``; None is
        ascending.

    Raises
    ------
    ValueError
        From every method, if an argument is wrong; the message names it, what was expected and what came.
        Nothing has changed then.
    PoolExhausted
        From `allocate`, `append` and `append_batch`, if too few pages are free. Nothing has changed then:
        free a sequence and call again.

    Examples
    --------
    >>> pool = PagePool(num_pages=8, page_size=4)
    >>> first = pool.allocate([7, 7, 7, 7, 1, 2])
    >>> first.num_cached_tokens, first.slots.tolist()
    (0, [0, 1, 2, 3, 4, 5])

    A second sequence that begins alike shares the full page:

    >>> second = pool.allocate([7, 7, 7, 7, 3])
    >>> second.num_cached_tokens, second.slots.tolist()
    (4, [8])

    A fork shares every page, until one side writes into the last one:

    >>> child = pool.fork(first.seq_id)
    >>> slots, copies = pool.append_batch([first.seq_id, second.seq_id, child], [5, 6, 7])
    >>> slots.tolist(), copies.tolist()
    ([14, 9, 6], [[1, 3], [-1, -1], [-1, -1]])
    >>> pool.block_tables([child, first.seq_id, -1], width=3).tolist()
    [[0, 1, -1], [0, 3, -1], [-1, -1, -1]]
    >>> pool.truncate(child, 6)
    >>> pool.kv_lens([child, first.seq_id, -1]).tolist()
    [6, 7, 0]
    """

    def __init__(self, num_pages: int, page_size: int, *, free_order: Ints | None = None):
        validation.check_positive_int("page_size", page_size, _INT32_MAX)
        validation.check_positive_int("num_pages", num_pages, _INT32_MAX // int(page_size))
        self.num_pages = int(num_pages)
        self.page_size = int(page_size)
        order = np.arange(self.num_pages)
        if free_order is not None:
            expected, order = order, validation.as_integers("free_order", free_order)
            validation.check(
                order.ndim == 1 and np.array_equal(np.sort(order), expected),
                "free_order",
                f"a permutation of range({self.num_pages})",
                f"{order}",
            )

        # By page: how many sequences hold it, the tokens it holds, and its content where that can be found.
        self._refs = np.zeros(self.num_pages, np.int32)
        self._tokens = np.full((self.num_pages, self.page_size), _UNNAMED, np.int64)
        self._contents: list[_Content | None] = [None] * self.num_pages
        self._root = _Content()

        # Free pages: those that hold nothing, the next one last; and those that can be found, the next one
        # first. Not a dict: taking from the front of one is not O(1).
        self._empty: list[int] = order[::-1].tolist()
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()

        # By sequence: a row of pages and its length. Row 0 stays empty: it serves _NO_SEQ.
        self._rows = {_NO_SEQ: 0}
        self._free_rows: list[int] = []
        self._table = np.full((1, _FIRST_WIDTH), -1, np.int32)
        self._lens = np.zeros(1, np.int64)

        self._next_seq_id = 0
        self._peak_used_pages = 0
        self._num_looked_up_tokens = 0
        self._num_hit_tokens = 0
        self._num_copies = 0
        self._num_evictions = 0

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds, those included whose content can still be found."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used_pages(self) -> int:
        """Pages that sequences hold."""
        return self.num_pages - self.num_free_pages

    def stats(self) -> PoolStats:
        """Read all counters."""
        return PoolStats(
            num_pages=self.num_pages,
            num_used_pages=self.num_used_pages,
            num_free_pages=self.num_free_pages,
            num_cached_pages=len(self._cached),
            num_shared_pages=int(np.count_nonzero(self._refs > 1)),
            peak_used_pages=self._peak_used_pages,
            num_seqs=len(self._rows) - 1,
            num_looked_up_tokens=self._num_looked_up_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_copies=self._num_copies,
            num_evictions=self._num_evictions,
        )

    def allocate(self, tokens: Ints | None = None, *, num_tokens: int | None = None) -> Allocation:
        """Begin a sequence, on pages that hold its beginning already where there are any.

        Parameters
        ----------
        tokens : int[num_tokens]
            The ids of its tokens, at least 0. It may be empty.
        num_tokens : int
            Instead of `tokens`: how many tokens it has, where nothing is to be shared.

        Returns
        -------
        Allocation
            The sequence's id, the tokens that were found, and the slots of the others.
        """
        ids, count = _as_tokens(tokens, num_tokens)
        found = self._find(ids)
        held = len(found) * self.page_size
        # Cached pages among those found are no longer free either.
        num_revived = int(np.count_nonzero(self._refs[found] == 0))
        self._check_room(self._pages_for(count - held) + num_revived)

        seq_id, row = self._new_sequence()
        for page in found:
            self._cached.pop(page, None)
        self._hold(row, found, held)
        rest = None if ids is None else ids[held:]
        slots = self._extend(np.array([row]), np.array([count - held]), rest).slots
        num_cached = min(held, max(count - 1, 0))
        if num_cached < held:
            slots = np.full(1, -1, np.int32)
        if ids is not None:
            self._num_looked_up_tokens += count
            self._num_hit_tokens += num_cached
        return Allocation(seq_id, num_cached, slots)

    def num_cached_tokens(self, tokens: Ints) -> int:
        """Count the leading tokens that `allocate` would find now; this changes nothing.

        Parameters
        ----------
        tokens : int[num_tokens]
            The ids of the tokens, at least 0.

        Returns
        -------
        int
            `Allocation.num_cached_tokens`. To prefill in chunks, allocate these tokens and those of the first
            chunk, and append the others chunk by chunk.
        """
        ids, count = _as_tokens(tokens, None)
        return min(len(self._find(ids)) * self.page_size, max(count - 1, 0))

    def append(self, seq_id: int, tokens: Ints | None = None, *, num_tokens: int | None = None) -> Appended:
        """Append tokens to one sequence.

        Parameters
        ----------
        seq_id : int
            The sequence.
        tokens : int[num_tokens]
            The ids of the new tokens, at least 0.
        num_tokens : int
            Instead of `tokens`: how many there are. Then neither their pages nor any later ones of this
            sequence can be found.

        Returns
        -------
        Appended
            Their slots, and the page to copy first, if any, ``[1, 2]``.
        """
        row = self._row(seq_id)
        ids, count = _as_tokens(tokens, num_tokens)
        return self._extend(np.array([row]), np.array([count]), ids)

    def append_batch(self, seq_ids: Ints, tokens: Ints | None = None, *, num_tokens: Ints = 1) -> Appended:
        """Append tokens to several sequences, to all or, if the pool is exhausted, to none.

        Parameters
        ----------
        seq_ids : int[batch]
            The sequences, each at most once; -1 for rows without one.
        tokens : int[total tokens], optional
            The ids of the new tokens, row after row; anything in rows without a sequence. None appends tokens
            without ids.
        num_tokens : int or int[batch]
            How many tokens each row gets.

        Returns
        -------
        Appended
            The slots of all tokens, in their order, and the pages to copy first, ``[batch, 2]``.
        """
        rows = self._rows_of(seq_ids)
        live = rows != 0
        num_live, num_distinct = np.count_nonzero(live), len(np.unique(rows[live]))
        validation.check(
            num_distinct == num_live, "seq_ids", "each id once", f"{num_live} of which {num_distinct} differ"
        )
        counts = _as_counts(num_tokens, len(rows))
        ids = None
        if tokens is not None:
            total = int(counts.sum())
            ids = validation.as_integers("tokens", tokens)
            validation.check(ids.shape == (total,), "tokens", f"shape ({total},)", f"shape {ids.shape}")
            ids = _checked_ids(ids[np.repeat(live, counts)])
        slots = np.full(int(counts.sum()), -1, np.int32)  # before anything changes: it may not fit
        appended = self._extend(rows[live], counts[live], ids)
        slots[np.repeat(live, counts)] = appended.slots
        copies = np.full((len(rows), 2), -1, np.int32)
        copies[live] = appended.copies
        return Appended(slots, copies)

    def fork(self, seq_id: int, num_tokens: int | None = None) -> int:
        """Begin a sequence that shares the pages of another one. Takes no page.

        Parameters
        ----------
        seq_id : int
            The other sequence.
        num_tokens : int, optional
            How many of its leading tokens the new one has; None is all.

        Returns
        -------
        int
            The id of the new sequence.
        """
        row = self._row(seq_id)
        length = int(self._lens[row])
        if num_tokens is not None:
            validation.check_int("num_tokens", num_tokens, 0, length)
            length = int(num_tokens)
        pages = self._table[row, : self._pages_for(length)]
        child_id, child = self._new_sequence()
        self._hold(child, pages, length)
        return child_id

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Keep the leading tokens of a sequence only, as if the others had never been appended.

        For rejected drafts, and for tokens whose keys and values were never written: their pages can't be
        found any more, unless another sequence holds them.

        Parameters
        ----------
        seq_id : int
            The sequence.
        num_tokens : int
            How many tokens to keep.
        """
        row = self._row(seq_id)
        length = int(self._lens[row])
        validation.check_int("num_tokens", num_tokens, 0, length)
        kept = int(num_tokens)  # a narrow numpy integer would overflow
        if kept == length:
            return
        cut = self._table[row, kept // self.page_size : self._pages_for(length)]
        for page in cut[self._refs[cut] == 1].tolist():
            self._forget(page)
        self._release(row, self._pages_for(kept))
        self._lens[row] = kept

    def free(self, seq_id: int) -> None:
        """End a sequence; its pages are free once no other sequence holds them, and can still be found."""
        row = self._row(seq_id)
        self._release(row, 0)
        self._free_rows.append(row)
        del self._rows[seq_id]

    def pages(self, seq_id: int) -> np.ndarray:
        """Read the pages of a sequence, in the order of its tokens: int32[pages]."""
        row = self._row(seq_id)
        return self._table[row, : self._pages_for(self._lens[row])].copy()

    def ref_counts(self) -> np.ndarray:
        """Read how many sequences hold each page: int32[num_pages]."""
        return self._refs.copy()

    def kv_lens(self, seq_ids: Ints) -> np.ndarray:
        """Read the lengths of sequences: int32[batch].

        Parameters
        ----------
        seq_ids : int[batch]
            The sequences, in any order; -1 for rows without one, whose length is 0.
        """
        return self._lens[self._rows_of(seq_ids)].astype(np.int32)

    def block_tables(self, seq_ids: Ints, *, width: int | None = None) -> np.ndarray:
        """Read the pages of sequences as a block table.

        The pool keeps the row of every sequence up to date as pages come and go; this only gathers rows, into
        an array of the caller's own.

        Parameters
        ----------
        seq_ids : int[batch]
            The sequences, in any order; -1 for rows without one.
        width : int, optional
            Entries a row, at least the pages of the longest one. None is a width that the pool keeps: the
            least power of two, from 8, that has sufficed for all of its sequences so far. So jitted functions
            compile again a few times only.

        Returns
        -------
        int32[batch, width]
            Padded with -1.
        """
        rows = self._rows_of(seq_ids)
        if width is None:
            return self._table[rows]
        longest = int(self._pages_for(self._lens[rows].max(initial=0)))
        validation.check_int("width", width, longest, 2**31 - 1)
        kept = self._table[rows, :width]
        return np.pad(kept, ((0, 0), (0, int(width) - kept.shape[1])), constant_values=-1)

    def csr(
        self, seq_ids: Ints, *, num_entries: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read the pages of sequences as compressed rows.

        Parameters
        ----------
        seq_ids : int[batch]
            The sequences, in any order; -1 for rows without one.
        num_entries : int, optional
            The length of ``indices``, for one shape in every step; at least the pages of all rows together,
            which None takes.

        Returns
        -------
        indptr : int32[batch + 1]
            Row ``b`` has the pages ``indices[indptr[b]:indptr[b + 1]]``.
        indices : int32[num_entries]
            Padded with -1.
        last_page_len : int32[batch]
            Valid tokens of each row's last page; 0 in a row without pages.
        """
        rows = self._rows_of(seq_ids)
        counts = self._pages_for(self._lens[rows])
        indptr = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        indices = self._table[np.repeat(rows, counts), _ranges(np.zeros_like(counts), counts)]
        if num_entries is not None:
            validation.check_int("num_entries", num_entries, len(indices), 2**31 - 1)
            indices = np.pad(indices, (0, int(num_entries) - len(indices)), constant_values=-1)
        last_page_len = self._lens[rows] - np.maximum(counts - 1, 0) * self.page_size
        return indptr, indices, last_page_len.astype(np.int32)

    def page_table(self, seq_ids: Ints, *, width: int | None = None) -> PageTable:
        """Make the `PageTable` of `block_tables` and `kv_lens`, with the same arguments as `block_tables`."""
        return PageTable.from_block_tables(self.block_tables(seq_ids, width=width), self.kv_lens(seq_ids))

    def _row(self, seq_id: Any) -> int:
        """The row of a live sequence."""
        is_int = isinstance(seq_id, int | np.integer) and not isinstance(seq_id, bool | np.timedelta64)
        row = self._rows.get(int(seq_id), 0) if is_int else 0
        validation.check(row != 0, "seq_id", "the id of a live sequence", repr(seq_id))
        return row

    def _rows_of(self, seq_ids: Ints) -> np.ndarray:
        """The rows of live sequences, and row 0 for _NO_SEQ: int64[batch]."""
        ids = validation.as_integers("seq_ids", seq_ids)
        validation.check(ids.ndim == 1, "seq_ids", "shape [batch]", f"shape {ids.shape}")
        rows = [self._rows.get(seq_id) for seq_id in ids.tolist()]
        if None in rows:
            wrong = ids[rows.index(None)]
            validation.check(False, "seq_ids", "ids of live sequences, or -1", f"{wrong}")
        return np.array(rows, np.int64)

    def _pages_for(self, length: Any) -> Any:
        """How many pages hold `length` tokens; of an int or an array."""
        return -(-length // self.page_size)

    def _check_room(self, needed: int) -> None:
        if needed > self.num_free_pages:
            raise PoolExhausted(needed, self.num_free_pages)

    def _new_sequence(self) -> tuple[int, int]:
        """Begin an empty sequence: its id and its row."""
        if not self._free_rows:
            rows = len(self._lens)
            self._table = np.pad(self._table, ((0, rows), (0, 0)), constant_values=-1)
            self._lens = np.pad(self._lens, (0, rows))
            self._free_rows = list(range(rows, 2 * rows))[::-1]
        seq_id, row = self._next_seq_id, self._free_rows.pop()
        self._next_seq_id += 1
        self._rows[seq_id] = row
        return seq_id, row

    def _extend(self, rows: np.ndarray, counts: np.ndarray, ids: np.ndarray | None) -> Appended:
        """Append `counts` tokens to distinct rows; what follows the check of room can't fail."""
        starts = self._lens[rows]
        ends = starts + counts
        first_new = self._pages_for(starts)
        num_new = self._pages_for(ends) - first_new
        # Rows whose first new token goes into a page that holds tokens already.
        inside = np.flatnonzero((starts < first_new * self.page_size) & (counts > 0))
        tails = self._table[rows[inside], first_new[inside] - 1]
        # All but the last of a page's holders copy it; the last one writes in place.
        shared, writers = np.unique(tails[self._refs[tails] > 1], return_counts=True)
        num_copies = int((writers - (writers == self._refs[shared])).sum())
        self._check_room(int(num_new.sum()) + num_copies)

        copies = np.full((len(rows), 2), -1, np.int32)
        for index, page in zip(inside.tolist(), tails.tolist(), strict=True):
            if self._refs[page] > 1:
                copies[index] = page, self._copy_tail(rows[index], first_new[index] - 1)
            else:
                self._forget(page)  # if another sequence had filled it: it won't hold that content any more
        for index in np.flatnonzero(num_new).tolist():
            new = [self._take() for _ in range(num_new[index])]
            self._set_pages(rows[index], first_new[index], new)
        positions = _ranges(starts, counts)
        pages = self._table[np.repeat(rows, counts), positions // self.page_size].astype(np.int64)
        slots = pages * self.page_size + positions % self.page_size
        self._tokens.reshape(-1)[slots] = _UNNAMED if ids is None else ids
        self._lens[rows] = ends
        for index in np.flatnonzero(ends // self.page_size > starts // self.page_size).tolist():
            self._identify(rows[index], starts[index] // self.page_size, ends[index] // self.page_size)
        self._num_copies += num_copies
        self._peak_used_pages = max(self._peak_used_pages, self.num_used_pages)
        return Appended(slots.astype(np.int32), copies)

    def _copy_tail(self, row: int, index: int) -> int:
        """Give a row a page of its own in place of its shared last one."""
        source, target = self._table[row, index], self._take()
        self._tokens[target] = self._tokens[source]
        self._refs[source] -= 1
        self._table[row, index] = target
        return target

    def _set_pages(self, row: int, first: int, pages: Any) -> None:
        """Put pages into a row from its entry `first`."""
        end = first + len(pages)
        width = self._table.shape[1]
        if end > width:
            more = (1 << (int(end) - 1).bit_length()) - width
            self._table = np.pad(self._table, ((0, 0), (0, more)), constant_values=-1)
        self._table[row, first:end] = pages

    def _hold(self, row: int, pages: Any, length: int) -> None:
        """Let an empty row hold pages that have content, for its first `length` tokens."""
        self._set_pages(row, 0, pages)
        self._refs[pages] += 1
        self._lens[row] = length

    def _take(self) -> int:
        """Hand out a free page."""
        if self._empty:
            page = self._empty.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
            self._num_evictions += 1
        self._refs[page] = 1
        return page

    def _release(self, row: int, kept: int) -> None:
        """Let a row hold its first `kept` pages only."""
        released = self._table[row, kept : self._pages_for(self._lens[row])]
        # Backwards: a cached page is of no use without those before it, so it has to be handed out sooner.
        for page in released[::-1].tolist():
            self._refs[page] -= 1
            if self._refs[page] > 0:
                continue
            content = self._contents[page]
            if content is not None and len(content.pages) == 1:
                self._cached[page] = None
            else:
                self._forget(page)
                self._empty.append(page)
        released[:] = -1

    def _find(self, ids: np.ndarray | None) -> list[int]:
        """Pages that hold the beginning of these tokens."""
        found: list[int] = []
        if ids is None:
            return found
        content = self._root
        for end in range(self.page_size, len(ids) + 1, self.page_size):
            content = content.children.get(ids[end - self.page_size : end].tobytes())
            if content is None or not content.pages:
                break
            found.append(next(iter(content.pages)))
        return found

    def _identify(self, row: int, first: int, end: int) -> None:
        """Let the pages that a row has just filled be found, where all of their tokens have ids."""
        parent = self._root if first == 0 else self._contents[self._table[row, first - 1]]
        for page in self._table[row, first:end].tolist():
            if parent is None or self._tokens[page].min() == _UNNAMED:
                return
            key = self._tokens[page].tobytes()
            content = parent.children.get(key)
            if content is None:
                content = parent.children[key] = _Content(parent, key)
            older = next(iter(content.pages), None)
            content.pages[page] = None
            self._contents[page] = content
            if older in self._cached:  # this page keeps the content now, and for longer
                del self._cached[older]
                self._forget(older)
                self._empty.append(older)
            parent = content

    def _forget(self, page: int) -> None:
        """Let a page not be found any more, and drop the contents that nothing needs then."""
        content = self._contents[page]
        if content is None:
            return
        self._contents[page] = None
        del content.pages[page]
        while content.parent is not None and not content.pages and not content.children:
            del content.parent.children[content.key]
            content = content.parent


def _as_tokens(tokens: Ints | None, num_tokens: int | None) -> tuple[np.ndarray | None, int]:
    """The ids of one sequence's tokens, None if they have none, and their number."""
    if tokens is None and num_tokens is not None:
        validation.check_int("num_tokens", num_tokens, 0, _INT32_MAX)
        return None, int(num_tokens)
    validation.check(
        tokens is not None and num_tokens is None,
        "tokens",
        "either tokens or num_tokens",
        "neither" if tokens is None else "both",
    )
    ids = validation.as_integers("tokens", tokens)
    validation.check(ids.ndim == 1, "tokens", "shape [num_tokens]", f"shape {ids.shape}")
    return _checked_ids(ids), len(ids)


def _as_counts(num_tokens: Ints, batch: int) -> np.ndarray:
    """How many tokens each row gets: int64[batch]."""
    counts = validation.as_integers("num_tokens", num_tokens)
    validation.check(
        counts.shape in ((), (batch,)), "num_tokens", f"shape () or ({batch},)", f"shape {counts.shape}"
    )
    least, most = counts.min(initial=0), counts.max(initial=0)
    in_range = least >= 0 and most <= _INT32_MAX
    validation.check(in_range, "num_tokens", f"values in [0, {_INT32_MAX}]", f"{least} to {most}")
    return np.broadcast_to(counts.astype(np.int64), batch)


def _checked_ids(ids: np.ndarray) -> np.ndarray:
    """Check the ids of tokens and give them the one dtype in which they are compared."""
    ids = ids.astype(np.int64)  # uint64 values that don't fit become negative
    validation.check(bool((ids >= 0).all()), "tokens", "ids in [0, 2**63 - 1]", f"{ids.min(initial=0)}")
    return ids


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``range(start, start + count)`` of each pair, one after another."""
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts)
