"""Asynchronous copies of K and V tiles from the page pools, driven by the page table through `BlockSpec`s.

A part walks its tiles across the ends of rows, and two cursors run ahead of the arithmetic on the same walk:
one fetches the table entries of each tile, the other, a few tiles behind it, looks the page ids up in what
came and copies the pages. Under load the table's latency is the memory's, as long as several tiles take:
fetched just before they are needed, page ids would hold up every copy.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .integers import rem, round_up
from .rows import BatchRows, Row
from .schedule import Run
from .tiling import Tiling
from .token_scales import TokenScales

i32 = jnp.int32
ENTRIES_AHEAD = 4  # tiles between the two cursors
ENTRY_GROUP = 4  # copies begin at multiples of 16 bytes (an illegal instruction otherwise) and have as many
ENTRY_PITCH = 32  # table entries between two copies' targets, which lie 128 bytes apart


def _entries_per_copy(tiling: Tiling) -> int:
    return round_up(tiling.pages_per_tile + ENTRY_GROUP - 1, ENTRY_GROUP)


def entry_spec(tiling: Tiling) -> plgpu.BlockSpec:
    """Describe the groups of the flat page table with the entries that a tile needs, by (row, tile)."""

    def index_map(row: Row, tile):
        first = row.table_start + tiling.first_page(tile)
        return (first - rem(first, ENTRY_GROUP),)

    return plgpu.BlockSpec((pl.Element(_entries_per_copy(tiling)),), index_map)


def page_spec(kv_layout: str, tiling: Tiling, columns: int, num_pages: int, head: Any) -> plgpu.BlockSpec:
    """Describe the block of a pool that one copy brings, by (row, tile, copy, the tile's table entries).

    Parameters
    ----------
    kv_layout : str
        Order of the pool's dimensions.
    tiling : Tiling
        How keys fall into tiles.
    columns : int
        head_dim as it lies in shared memory; what lies past the pool's head_dim reads as 0.
    num_pages : int
        Pages of the pool.
    head : scalar
        The kv head.
    """
    rows, zero = tiling.copy_rows, i32(0)
    block_shape = {
        "HND": (None, None, rows, columns),  # [num_pages, num_kv_heads, page_size, head_dim]
        "NHD": (None, rows, None, columns),  # [num_pages, page_size, num_kv_heads, head_dim]
        "HPND": (None, None, rows, columns),  # [num_kv_heads, num_pages, page_size, head_dim]
    }[kv_layout]

    def index_map(row: Row, tile, copy: int, entries: list[Any]):
        page = entries[copy]
        if copy > 0:  # entries past the row's last page are never trusted: the tile's first page stands in
            used = (tiling.first_page(tile) + copy) * tiling.page_size < row.kv_len
            page = jnp.where(used, page, entries[0])
        page = jnp.clip(page, 0, num_pages - 1)
        block = tiling.block_in_page(tile)
        return {
            "HND": (page, head, block, zero),
            "NHD": (page, block, head, zero),
            "HPND": (head, page, block, zero),
        }[kv_layout]

    return plgpu.BlockSpec(block_shape, index_map)


def window(spec: plgpu.BlockSpec, gmem: Any, block_index: tuple[Any, ...]) -> Any:
    """The part of `gmem` that `spec` describes at `block_index`."""
    at = []
    for index, size, dim in zip(block_index, spec.block_shape or (), gmem.shape, strict=True):
        if isinstance(size, pl.Element):
            at.append(pl.ds(index, size.block_size))
        elif not isinstance(size, int):
            at.append(index)
        else:
            # Only a start that isn't constant may let the block reach past the array's end.
            at.append(pl.ds(0, dim) if size == dim else pl.ds(index * size, size))
    return gmem.at[tuple(at)]


class Cursor(NamedTuple):
    """A place on a part's walk."""

    row: Row
    tile: Any


class Cursors(NamedTuple):
    """The next tile whose table entries to fetch (None without a table), and the next one to copy."""

    entries: Cursor | None
    pages: Cursor


def next_tile(row: Row, tile: Any, rows: BatchRows) -> tuple[Row, Any]:
    """Go on to the row's next tile, or to the next row's first one."""
    row_ends = tile + 1 >= row.end_tile
    row = lax.cond(row_ends, lambda: rows.row(row.index + 1), lambda: row)
    return row, jnp.where(row_ends, row.first_tile, tile + 1)


@dataclasses.dataclass(frozen=True)
class TileLoader:
    """Copies tiles of K and V into the slots of a ring; `kv_ready[slot]` completes when one is there.

    A contiguous cache has no table: `indices_gmem` and what holds its entries are None. Where values are part
    of the keys, `v_smem` is None. `scales` are pairs of a flat pool of scales of tokens and their ring, to be
    waited for by `token_scales`.
    """

    entries: plgpu.BlockSpec
    k_pages: plgpu.BlockSpec
    v_pages: plgpu.BlockSpec
    tiling: Tiling
    rows: BatchRows
    num_stages: int
    indices_gmem: Any
    k_gmem: Any
    v_gmem: Any
    entries_smem: Any
    k_smem: Any
    v_smem: Any
    entries_ready: Any
    kv_ready: Any
    token_scales: TokenScales
    scales: tuple[tuple[Any, Any], ...]

    @staticmethod
    def scratch(tiling: Tiling, num_stages: int, pools: int, *, paged: bool) -> dict[str, Any]:
        """Shared memory of the fetched table entries, and the barriers of all copies."""
        arrivals = pools * tiling.pages_per_tile
        types: dict[str, Any] = {"kv_ready": plgpu.Barrier(num_barriers=num_stages, num_arrivals=arrivals)}
        if paged:
            # All are filled at the start; later one when a tile is copied, whose entries lie in another.
            slots, columns = num_stages + ENTRIES_AHEAD, round_up(_entries_per_copy(tiling), ENTRY_PITCH)
            types["entries_smem"] = plgpu.SMEM((slots, columns), i32)
            types["entries_ready"] = plgpu.Barrier(num_barriers=slots)
        return types

    def start(self, run: Run) -> Cursors:
        """Fetch the entries of the run's first tiles and start copying as many as the ring holds."""
        first = Cursor(run.row, run.first_tile)
        entries = None
        if self.indices_gmem is not None:
            entries = lax.fori_loop(
                0, self.entries_smem.shape[0], functools.partial(self._fetch_entries, run), first
            )
        pages = lax.fori_loop(0, self.num_stages, functools.partial(self._copy_pages, run), first)
        return Cursors(entries, pages)

    def load(self, run: Run, step: Any, cursors: Cursors) -> Cursors:
        """Go on after the run's tile `step`, the last reader of whose slot must be done with it."""
        pages = self._copy_pages(run, step + self.num_stages, cursors.pages)
        if cursors.entries is None:
            return Cursors(None, pages)
        return Cursors(self._fetch_entries(run, step + self.entries_smem.shape[0], cursors.entries), pages)

    def _fetch_entries(self, run: Run, step: Any, cursor: Cursor) -> Cursor:
        slot = rem(step, self.entries_smem.shape[0])

        @pl.when(step < run.num_tiles)
        def _():
            assert self.entries.index_map is not None
            source = window(self.entries, self.indices_gmem, self.entries.index_map(cursor.row, cursor.tile))
            target = self.entries_smem.at[slot, pl.ds(0, source.shape[0])]
            plgpu.copy_gmem_to_smem(source, target, self.entries_ready.at[slot])

        return Cursor(*next_tile(cursor.row, cursor.tile, self.rows))

    def _copy_pages(self, run: Run, step: Any, cursor: Cursor) -> Cursor:
        slot = rem(step, self.num_stages)

        @pl.when(step < run.num_tiles)
        def _():
            entries = self._entries(step, cursor)
            index_map = self.k_pages.index_map  # V's pages lie where K's do
            assert index_map is not None
            blocks = [index_map(cursor.row, cursor.tile, j, entries) for j in range(len(entries))]
            for spec, gmem, smem in (
                (self.k_pages, self.k_gmem, self.k_smem),
                (self.v_pages, self.v_gmem, self.v_smem),
            ):
                if smem is None:
                    continue
                for j, block in enumerate(blocks):
                    target = smem.at[slot, pl.ds(j * self.tiling.pitch, self.tiling.copy_rows)]
                    plgpu.copy_gmem_to_smem(window(spec, gmem, block), target, self.kv_ready.at[slot])
            for gmem, smem in self.scales:
                self.token_scales.fetch(blocks, gmem, smem.at[slot])

        return Cursor(*next_tile(cursor.row, cursor.tile, self.rows))

    def _entries(self, step: Any, cursor: Cursor) -> list[Any]:
        """The page ids of a tile's copies, once they are there."""
        copies = self.tiling.pages_per_tile
        if self.indices_gmem is None:  # a row is one page, at whose end its keys end
            return [cursor.row.table_start] * copies
        slot = rem(step, self.entries_smem.shape[0])
        plgpu.barrier_wait(self.entries_ready.at[slot])
        skip = rem(cursor.row.table_start + self.tiling.first_page(cursor.tile), ENTRY_GROUP)
        return [self.entries_smem[slot, skip + j] for j in range(copies)]
