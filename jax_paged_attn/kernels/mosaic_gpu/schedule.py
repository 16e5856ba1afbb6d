"""Which tiles each thread block walks.

All rows' tiles, one row after another, form one list. `BalancedCuts` cut it into parts that differ by at most
one tile, so that every block has the same work whatever the lengths are. `FixedCuts` cut each row on its own,
from position 0, so that a row's arithmetic does not depend on its batch mates.

Both are computed inside the kernel, from lengths that only the device knows. The arithmetic is plain jnp over
an object `rows`, so that tests run the same code without a kernel.

A row that spans several parts leaves one partial result in each. Its first part owns the row; `followers` is
the number of later parts that go on with it.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax

from .integers import ceil_div, div, rem

i32 = jnp.int32


class Rows(Protocol):
    """What a schedule asks about the batch."""

    def row(self, b: Any) -> Any:
        """Row `b`, which reads tiles [first_tile, end_tile); one without keys has one tile, wholly masked."""
        ...

    def total(self) -> Any:
        """Tiles in the whole list."""
        ...

    def find(self, tile: Any) -> tuple[Any, Any]:
        """(the row that holds the list's `tile`-th tile, tiles of the rows before it)."""
        ...


def even_parts(parts: int, batch: int, given_up: float) -> int:
    """The most parts up to `parts` that end where equal rows do, if that gives up no larger a share."""
    even = next((n for n in range(parts, 0, -1) if n % batch == 0 or batch % n == 0), parts)
    return even if even >= (1 - given_up) * parts else parts


class Run(NamedTuple):
    """A part's share of the list: `num_tiles` tiles, from tile `first_tile` of `row` on."""

    row: Any
    first_tile: Any
    num_tiles: Any


class BalancedCuts:
    """`parts` runs of the whole list, equal within one tile; the longer ones come first."""

    def __init__(self, rows: Rows, parts: int):
        self.rows = rows
        self.total = rows.total()
        self.short, self.num_long = div(self.total, parts), rem(self.total, parts)

    def _cut(self, part):
        return part * self.short + jnp.minimum(part, self.num_long)

    def _part_of(self, tile):
        in_long = self.num_long * (self.short + 1)
        return jnp.where(
            tile < in_long,
            lax.div(tile, self.short + 1),
            self.num_long + lax.div(tile - in_long, jnp.maximum(self.short, 1)),
        )

    def run(self, part) -> Run:
        begin, end = self._cut(part), self._cut(part + 1)
        row, before = self.rows.find(begin)
        return Run(row, row.first_tile + begin - before, end - begin)

    def followers(self, part, row, tiles_done):
        """How many later parts go on with `row`, which begins in `part` after `tiles_done` of its tiles."""
        last = self._cut(part) + tiles_done + (row.end_tile - row.first_tile) - 1
        return self._part_of(last) - part


class FixedCuts:
    """Each row's tiles, from position 0, in `splits` runs of ceil(tiles / splits): row * splits + run."""

    def __init__(self, rows: Rows, splits: int):
        self.rows, self.splits = rows, splits

    def run(self, part) -> Run:
        b, split = div(part, self.splits), rem(part, self.splits)
        row = self.rows.row(b)
        length = div(row.end_tile + (self.splits - 1), self.splits)
        begin = jnp.maximum(split * length, row.first_tile)
        return Run(row, begin, jnp.maximum(jnp.minimum((split + 1) * length, row.end_tile) - begin, 0))

    def followers(self, part, row, tiles_done):
        del part, tiles_done
        length = div(row.end_tile + (self.splits - 1), self.splits)
        return lax.div(row.end_tile - 1, length) - lax.div(row.first_tile, length)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The static choice: the whole list into `parts`, or with `num_splits` each row into so many."""

    batch: int
    parts: int
    num_splits: int | None = None

    @classmethod
    def balanced(cls, batch: int, parts: int) -> "Schedule":
        return cls(batch, parts)

    @classmethod
    def fixed(cls, batch: int, num_splits: int) -> "Schedule":
        return cls(batch, batch * num_splits, num_splits)

    @property
    def cuts_rows(self) -> bool:
        """Whether a row can lie in several parts."""
        return self.num_splits != 1

    @property
    def sides(self) -> int:
        """Pieces that a part can leave: of the row that it continues and of the row that goes on after it."""
        return 2 if self.num_splits is None else 1

    @property
    def cut_row_of_each_row(self) -> bool:
        """Whether each row, rather than each part, has an entry in the list of cut rows."""
        return self.batch <= self.parts

    @property
    def num_cut_rows(self) -> int:
        """Entries in the list of cut rows: a part's end cuts at most one row."""
        return min(self.batch, self.parts)

    def cuts(self, rows: Rows) -> BalancedCuts | FixedCuts:
        if self.num_splits is None:
            return BalancedCuts(rows, self.parts)
        return FixedCuts(rows, self.num_splits)


def pieces_per_row(num_splits: int | None, schedule: Schedule) -> int:
    """Pieces that a row is cut into where all rows are equal, rounded up to a power of two.

    By the `num_splits` that was asked for, where it was: the schedule's depends on capacities.
    """
    pieces = num_splits or ceil_div(schedule.parts, schedule.batch)
    return 1 << (pieces - 1).bit_length()
