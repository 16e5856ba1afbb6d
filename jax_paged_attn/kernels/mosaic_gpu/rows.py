"""The batch's rows as the kernel sees them: lengths, tile ranges, page ids, all clipped to what exists."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .integers import ceil_div, div
from .layouts import LANES
from .tiling import Tiling

i32 = jnp.int32
CHUNK = 128  # rows that one vector of the schedule holds, one a thread


def valid_len(kv_len, row_pages, page_size: int, num_entries: int):
    """The row's length, clipped to the tokens that its own table entries can hold."""
    return jnp.clip(kv_len, 0, jnp.clip(row_pages, 0, num_entries) * page_size)


def tile_range(tiling: Tiling, kv_len, kv_start):
    """[first, end) of the tiles with the keys in [kv_start, kv_len); one masked tile where there are none."""
    last_key = jnp.maximum(kv_len - 1, 0)
    end = tiling.tile_of(last_key) + 1
    if kv_start is None:
        return jnp.zeros_like(end), end
    return tiling.tile_of(jnp.clip(kv_start, 0, last_key)), end


@dataclasses.dataclass(frozen=True)
class TableRefs:
    """The page table in GMEM: `indices` [num_entries], the others [batch]; `kv_starts` may be None."""

    indices: Any
    row_starts: Any
    row_pages: Any
    kv_lens: Any
    kv_starts: Any = None


class BatchRows:
    """Scalar access to rows; schedules find their place by a loop over the lengths. For small batches."""

    def __init__(self, refs: TableRefs, tiling: Tiling, batch: int):
        self.refs, self.tiling, self.batch = refs, tiling, batch
        self.num_entries = refs.indices.shape[0]

    def _clip(self, b):
        return jnp.minimum(b, self.batch - 1)

    def kv_len(self, b):
        b = self._clip(b)
        refs, page_size = self.refs, self.tiling.page_size
        return valid_len(refs.kv_lens[b], refs.row_pages[b], page_size, self.num_entries)

    def kv_start(self, b):
        return None if self.refs.kv_starts is None else self.refs.kv_starts[self._clip(b)]

    def tile_range(self, b):
        return tile_range(self.tiling, self.kv_len(b), self.kv_start(b))

    def page_id(self, b, entry, kv_len, num_pages: int):
        """The physical page of the row's `entry`-th page; past the row's last key its last page again."""
        last = div(jnp.maximum(kv_len - 1, 0), self.tiling.page_size)
        at = self.refs.row_starts[self._clip(b)] + jnp.minimum(entry, last)
        return jnp.clip(self.refs.indices[jnp.clip(at, 0, self.num_entries - 1)], 0, num_pages - 1)

    def _num_tiles(self, b):
        first, end = self.tile_range(b)
        return end - first

    def total(self):
        return lax.fori_loop(0, self.batch, lambda b, total: total + self._num_tiles(b), i32(0))

    def find(self, tile):
        def holds_later(at):
            b, before = at
            return (b < self.batch - 1) & (before + self._num_tiles(b) <= tile)

        def next_row(at):
            return at[0] + 1, at[1] + self._num_tiles(at[0])

        return lax.while_loop(holds_later, next_row, (i32(0), i32(0)))


class VectorRows(BatchRows):
    """The same, with all tile counts in registers, a row a thread: sums instead of a loop over rows."""

    @staticmethod
    def scratch(batch: int, has_kv_starts: bool) -> list[Any]:
        fields = 3 if has_kv_starts else 2
        return [
            plgpu.SMEM((fields, ceil_div(batch, CHUNK) * CHUNK), jnp.int32),
            plgpu.Barrier(num_arrivals=fields * ceil_div(batch, CHUNK)),
        ]

    def __init__(self, refs: TableRefs, tiling: Tiling, batch: int, rows_smem, rows_ready):
        super().__init__(refs, tiling, batch)
        fields = [refs.kv_lens, refs.row_pages] + ([] if refs.kv_starts is None else [refs.kv_starts])
        starts = [c * CHUNK for c in range(ceil_div(batch, CHUNK))]
        # A start that isn't a constant lets the last chunk reach past the array; what lies there reads as 0.
        origin = lax.axis_index("part") * 0
        for f, field in enumerate(fields):
            for start in starts:
                plgpu.copy_gmem_to_smem(
                    field.at[pl.ds(origin + start, CHUNK)], rows_smem.at[f, pl.ds(start, CHUNK)], rows_ready
                )
        plgpu.barrier_wait(rows_ready)
        lane = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=LANES)
        self.ids = [lane + start for start in starts]
        self.counts = []
        for start, ids in zip(starts, self.ids, strict=True):
            kv_len, row_pages, *kv_start = (
                plgpu.load(rows_smem.at[f, pl.ds(start, CHUNK)], layout=LANES) for f in range(len(fields))
            )
            kv_len = valid_len(kv_len, row_pages, tiling.page_size, self.num_entries)
            first, end = tile_range(tiling, kv_len, *(kv_start or [None]))
            self.counts.append(jnp.where(ids < batch, end - first, 0))

    def _tiles_before(self, b):
        counted = [jnp.where(ids < b, n, 0) for ids, n in zip(self.ids, self.counts, strict=True)]
        return functools.reduce(jnp.add, counted).sum()

    def total(self):
        return self._tiles_before(i32(self.batch))

    def find(self, tile):
        row, before = i32(0), i32(0)
        bit = 1 << (max(self.batch - 1, 1).bit_length() - 1)
        while bit:  # a binary search for the last row with at most `tile` tiles before it
            tiles = self._tiles_before(row + bit)
            later = (row + bit < self.batch) & (tiles <= tile)
            row, before = jnp.where(later, row + bit, row), jnp.where(later, tiles, before)
            bit //= 2
        return row, before
