"""Asynchronous copies of K and V tiles from the page pools, driven by the page table through `BlockSpec`s.

The index_map of `page_spec` is the only code that turns "copy j of tile t of row b" into a place in the pool.
`TileLoader` issues the copies in the order in which a part walks its tiles, across the ends of rows, a few
tiles ahead of the arithmetic.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .rows import BatchRows
from .tiling import Tiling

i32 = jnp.int32
# Up to so many page ids are read one tile before they are needed, which hides the table's latency; more would
# not fit in registers and are read when the copies are issued.
MAX_PAGES_AHEAD = 8


def page_spec(
    kv_layout: str, tiling: Tiling, columns: int, page_of: Callable[..., Any], head: Any
) -> plgpu.BlockSpec:
    """Describe the block of a pool that one copy brings: `copy_rows` keys of one page for one kv head.

    Parameters
    ----------
    kv_layout : str
        Order of the pool's dimensions.
    tiling : Tiling
        How keys fall into tiles.
    columns : int
        head_dim as it lies in shared memory; what lies past the pool's head_dim reads as 0.
    page_of : callable
        (row, entry of the row's table, kv_len) -> physical page id.
    head : scalar
        The kv head.
    """
    rows, zero = tiling.copy_rows, i32(0)
    block_shape = {
        "HND": (None, None, rows, columns),  # [num_pages, num_kv_heads, page_size, head_dim]
        "NHD": (None, rows, None, columns),  # [num_pages, page_size, num_kv_heads, head_dim]
        "HPND": (None, None, rows, columns),  # [num_kv_heads, num_pages, page_size, head_dim]
    }[kv_layout]

    def index_map(b, tile, copy, kv_len):
        page = page_of(b, tiling.first_page(tile) + copy, kv_len)
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
        if not isinstance(size, int):
            at.append(index)
        else:
            # Only a start that isn't constant may let the block reach past the array's end.
            at.append(pl.ds(0, dim) if size == dim else pl.ds(index * size, size))
    return gmem.at[tuple(at)]


class Cursor(NamedTuple):
    """The next tile to load: tiles `left`, row, tile, the row's last tile + 1, its length, the blocks."""

    left: Any
    row: Any
    tile: Any
    end: Any
    kv_len: Any
    blocks: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class TileLoader:
    """Copies tiles of K and V into the slots of a ring; `kv_ready[slot]` completes when one is there."""

    spec_k: plgpu.BlockSpec
    spec_v: plgpu.BlockSpec
    tiling: Tiling
    rows: BatchRows
    k_gmem: Any
    v_gmem: Any
    k_smem: Any
    v_smem: Any
    kv_ready: Any

    def _look_up(self, row, tile, kv_len) -> tuple[Any, ...]:
        index_map = self.spec_k.index_map
        assert index_map is not None
        return tuple(index_map(row, tile, copy, kv_len) for copy in range(self.tiling.pages_per_tile))

    def _at(self, left, row, tile) -> Cursor:
        kv_len = self.rows.kv_len(row)
        _, end = self.rows.tile_range(row)
        ahead = self.tiling.pages_per_tile <= MAX_PAGES_AHEAD
        return Cursor(left, row, tile, end, kv_len, self._look_up(row, tile, kv_len) if ahead else ())

    def start(self, run) -> Cursor:
        return self._at(run.num_tiles, run.row, run.first_tile)

    def load(self, cursor: Cursor, slot) -> Cursor:
        """Start copying the cursor's tile, if one is left, into `slot`; -> the cursor of the next tile."""

        @pl.when(cursor.left > 0)
        def _():
            blocks = cursor.blocks or self._look_up(cursor.row, cursor.tile, cursor.kv_len)
            for spec, gmem, smem in (
                (self.spec_k, self.k_gmem, self.k_smem),
                (self.spec_v, self.v_gmem, self.v_smem),
            ):
                for j, block in enumerate(blocks):
                    plgpu.copy_gmem_to_smem(
                        window(spec, gmem, block),
                        smem.at[slot, pl.ds(j * self.tiling.pitch, self.tiling.copy_rows)],
                        self.kv_ready.at[slot],
                    )

        row_ends = cursor.tile + 1 >= cursor.end
        row = jnp.where(row_ends, cursor.row + 1, cursor.row)
        first, _ = self.rows.tile_range(row)
        return self._at(cursor.left - 1, row, jnp.where(row_ends, first, cursor.tile + 1))


def ring_slot(step, num_stages: int):
    return lax.rem(step, i32(num_stages))
