"""The batch's rows as the kernel sees them: lengths, tile ranges, page ids, all clipped to what exists."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .integers import ceil_div, div, rem
from .layouts import ONE_EACH
from .tiling import Tiling
from .window import Window

i32 = jnp.int32
CHUNK = 128  # rows that one vector of the schedule holds, one a thread


class Table(NamedTuple):
    """The page table, arrays or refs: `indices` [num_entries], the others [batch]; no `kv_starts` is None.

    Of a contiguous cache `indices`, `row_starts` and `row_pages` are None: row b is page `first_row` + b.
    """

    kv_lens: Any
    kv_starts: Any = None
    indices: Any = None
    row_starts: Any = None
    row_pages: Any = None
    first_row: int = 0

    def arrays(self) -> dict[str, Any]:
        """The arrays that there are, by name."""
        fields = self._asdict()
        fields.pop("first_row")
        return {name: array for name, array in fields.items() if array is not None}

    def clipped(self, b, page_size: int) -> tuple[Any, Any, Any]:
        """(first table entry or page, kv_len, kv_start or None) of row `b`, of rows where `b` is a vector.

        Clipped to the entries that exist and the tokens that the row's own can hold.
        """
        kv_len, kv_start = self.kv_lens, self.kv_starts
        if self.indices is None:
            start, capacity = b + self.first_row, page_size
        else:
            num_entries = self.indices.shape[0]
            start = jnp.clip(self.row_starts, 0, num_entries)
            capacity = jnp.clip(self.row_pages, 0, num_entries - start) * page_size
        kv_len = jnp.clip(kv_len, 0, capacity)
        return start, kv_len, None if kv_start is None else jnp.clip(kv_start, 0, kv_len)


class Row(NamedTuple):
    """One row: its keys, of those that count, lie in [kv_start, kv_len), its tiles in [first_tile, end_tile).

    `kv_start` is None where it is 0 in every row.
    """

    index: Any
    kv_len: Any
    kv_start: Any
    first_tile: Any
    end_tile: Any
    table_start: Any


def tile_range(tiling: Tiling, kv_len, kv_start):
    """[first, end) of the tiles with the keys in [kv_start, kv_len); one masked tile where there are none."""
    last_key = jnp.maximum(kv_len - 1, 0)
    end = tiling.tile_of(last_key) + 1
    if kv_start is None:
        return jnp.zeros_like(end), end
    return tiling.tile_of(jnp.clip(kv_start, 0, last_key)), end


class BatchRows:
    """Rows read one by one from a table in GMEM, for small batches."""

    def __init__(self, table: Table, tiling: Tiling, batch: int, window: Window):
        self.table, self.tiling, self.batch, self.window = table, tiling, batch, window

    def row(self, b) -> Row:
        """Row `b`; past the batch, one like the last row."""
        at = jnp.minimum(b, self.batch - 1)
        rows = {name: ref[at] for name, ref in self.table.arrays().items() if name != "indices"}
        return self._row(b, self.table._replace(**rows), at)

    def _row(self, index, of_row: Table, at) -> Row:
        """The row, or rows, whose fields `of_row` holds, from place `at` of the table."""
        table_start, kv_len, kv_start = of_row.clipped(at, self.tiling.page_size)
        kv_start = self.window.first_key(kv_len, kv_start)
        return Row(index, kv_len, kv_start, *tile_range(self.tiling, kv_len, kv_start), table_start)

    @functools.cached_property
    def _all(self) -> list[Row]:
        """Unrolled, so that the loads of all rows are in flight together."""
        return [self.row(i32(b)) for b in range(self.batch)]

    def total(self):
        """Tiles of all rows."""
        return sum(row.end_tile - row.first_tile for row in self._all)

    def find(self, tile) -> tuple[Row, Any]:
        """(the row that holds the `tile`-th tile of all, tiles of the rows before it)."""
        found, before, seen = self._all[0], i32(0), i32(0)
        for row, next_row in zip(self._all, self._all[1:], strict=False):
            seen = seen + (row.end_tile - row.first_tile)
            later = seen <= tile
            found = jax.tree.map(lambda old, new, later=later: jnp.where(later, new, old), found, next_row)
            before = jnp.where(later, seen, before)
        return found, before


class VectorRows(BatchRows):
    """Rows copied to shared memory, with their running tile counts, for large batches.

    Work shared between threads replaces that over rows, and a row costs no trip to GMEM.
    """

    @staticmethod
    def scratch(batch: int, fields: int) -> tuple[Any, Any, Any]:
        """Shared memory for the rows' fields and their running counts, and the barrier of the copies."""
        chunks = ceil_div(batch, CHUNK)
        return (
            plgpu.SMEM((fields, chunks * CHUNK), jnp.int32),
            plgpu.SMEM((2, chunks, 2 * CHUNK), jnp.int32),
            plgpu.Barrier(num_arrivals=fields * chunks),
        )

    def __init__(
        self,
        table: Table,
        tiling: Tiling,
        batch: int,
        rows_smem,
        sums_smem,
        rows_ready,
        window: Window,
    ):
        fields = {name: ref for name, ref in table.arrays().items() if name != "indices"}
        chunks = range(ceil_div(batch, CHUNK))
        # A start that isn't a constant lets the last chunk reach past the array; what lies there reads as 0.
        origin = lax.axis_index("part") * 0
        for f, field in enumerate(fields.values()):
            for c in chunks:
                rows = pl.ds(origin + c * CHUNK, CHUNK)
                plgpu.copy_gmem_to_smem(field.at[rows], rows_smem.at[f, pl.ds(c * CHUNK, CHUNK)], rows_ready)
        fields = {name: rows_smem.at[f] for f, name in enumerate(fields)}
        super().__init__(table._replace(**fields), tiling, batch, window)
        self.sums_smem = sums_smem
        lane = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=ONE_EACH)
        for c in chunks:  # what the shifts below read before a chunk's first row
            for buffer in range(2):
                sums_smem[buffer, c, pl.ds(0, CHUNK)] = jnp.zeros_like(lane)
        plgpu.barrier_wait(rows_ready)
        sums = []
        for c in chunks:
            rows = {
                name: plgpu.load(field.at[pl.ds(c * CHUNK, CHUNK)], layout=ONE_EACH)
                for name, field in fields.items()
            }
            some = self._row(lane, table._replace(**rows), lane)
            sums.append(jnp.where(lane + c * CHUNK < batch, some.end_tile - some.first_tile, 0))
        # Prefix sums of each chunk by shifts of 1, 2, 4, ...; two buffers in turn need one barrier a shift.
        shifts = [1 << k for k in range((CHUNK - 1).bit_length())]
        for k, shift in enumerate(shifts):
            for c in chunks:
                sums_smem[k % 2, c, pl.ds(CHUNK, CHUNK)] = sums[c]
            plgpu.commit_smem()
            for c in chunks:
                earlier = sums_smem.at[k % 2, c, pl.ds(CHUNK - shift, CHUNK)]
                sums[c] = sums[c] + plgpu.load(earlier, layout=ONE_EACH)
        self.sums, self.buffer = sums, len(shifts) % 2
        for c in chunks:
            sums_smem[self.buffer, c, pl.ds(CHUNK, CHUNK)] = sums[c]
        plgpu.commit_smem()

    def _chunk_total(self, c: int):
        return self.sums_smem[self.buffer, c, 2 * CHUNK - 1]

    def total(self):
        """Tiles of all rows."""
        return sum(self._chunk_total(c) for c in range(len(self.sums)))

    def find(self, tile) -> tuple[Row, Any]:
        """(the row that holds the `tile`-th tile of all, tiles of the rows before it)."""
        done, before_chunk = [], i32(0)
        for c, sums in enumerate(self.sums):
            done.append((sums + before_chunk <= tile).astype(i32))
            before_chunk = before_chunk + self._chunk_total(c)
        b = jnp.minimum(functools.reduce(jnp.add, done).sum(), self.batch - 1)
        chunk, before = div(b, CHUNK), i32(0)
        for c in range(len(self.sums) - 1):
            before = before + jnp.where(c < chunk, self._chunk_total(c), 0)
        before = before + self.sums_smem[self.buffer, chunk, CHUNK - 1 + rem(b, CHUNK)]
        return self.row(b), before


class SearchedRows(VectorRows):
    """The same for a kernel that has no shared memory for sums across warps."""

    def find(self, tile) -> tuple[Row, Any]:
        """(the row that holds the `tile`-th tile of all, tiles of the rows before it)."""
        chunk, before, seen = i32(0), i32(0), i32(0)
        for c in range(len(self.sums) - 1):
            seen = seen + self._chunk_total(c)
            chunk, before = jnp.where(seen <= tile, c + 1, chunk), jnp.where(seen <= tile, seen, before)
        lane = i32(0)  # of the first row whose tiles, with those before it, are more than `tile`
        for step in (1 << k for k in reversed(range((CHUNK - 1).bit_length()))):
            passed = before + self.sums_smem[self.buffer, chunk, CHUNK + lane + step - 1] <= tile
            lane = jnp.where(passed, lane + step, lane)
        b = jnp.minimum(chunk * CHUNK + lane, self.batch - 1)
        chunk, lane = div(b, CHUNK), rem(b, CHUNK)
        return self.row(b), before + self.sums_smem[self.buffer, chunk, CHUNK - 1 + lane]
