"""Asynchronous copies of tiles of latents and rotated keys from the page pool, driven by the page table.

Each of two warpgroups brings its half of the columns of latents into slots that it frees itself. Page ids are
looked up while the matrix unit is busy, just before their copies; rotated keys, of which a single tile has
room, come when the tile before has been read.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .integers import rem
from .mla_plan import RING_TILES, RUN_VALUES, VALUE_WARPGROUPS, Plan
from .rows import Row
from .shared_tile import SWIZZLE_ROWS

i32 = jnp.int32


@dataclasses.dataclass(frozen=True)
class LatentLoader:
    """Copies tiles into shared memory, of latents one `half` of the columns.

    `rope_gmem` is the pool of latents or a pool of its own.
    """

    plan: Plan
    half: int
    indices_gmem: Any
    latents_gmem: Any
    rope_gmem: Any
    latents_smem: Any
    rope_smem: Any
    latents_ready: Any
    rope_ready: Any
    places_smem: Any

    def look_up(self, row: Row, in_row: Any, tile: Any) -> None:
        """Look up where the part's `tile`-th tile lies, the row's `in_row`-th, and keep it in shared memory.

        Registers for that would be too many. Warps have to meet before it is read.
        """
        p, tiling = self.plan.problem, self.plan.tiling
        kept, first = self._kept_at(tile), tiling.first_page(in_row)
        self.places_smem[kept] = tiling.block_in_page(in_row)

        def look_up_page(copy):
            # Entries past the row's last page aren't trusted: the tile's first page stands in.
            entry = jnp.where((first + copy) * tiling.page_size < row.kv_len, first + copy, first)
            page = self.indices_gmem[jnp.clip(row.table_start + entry, 0, p.num_entries - 1)]
            self.places_smem[kept + 1 + copy] = jnp.clip(page, 0, p.num_pages - 1)

        self._for_each_copy(look_up_page)

    def load_latents(self, tile: Any) -> None:
        """Begin to bring half of the columns of the part's `tile`-th tile into its slot."""
        slot, columns = slot_of(tile, self.half), pl.ds(self.half * self.plan.half, self.plan.half)
        smem, ready = self.latents_smem.at[slot], self.latents_ready.at[slot]
        self._load(self.latents_gmem, columns, tile, smem, ready)

    def load_rope(self, tile: Any) -> None:
        """Begin to bring the rotated keys of the part's `tile`-th tile."""
        p = self.plan.problem
        columns = pl.ds(0 if p.paired else p.rank, p.rope_dim)
        self._load(self.rope_gmem, columns, tile, self.rope_smem, self.rope_ready)

    def _load(self, gmem: Any, columns: Any, tile: Any, smem: Any, ready: Any) -> None:
        tiling, kept = self.plan.tiling, self._kept_at(tile)
        rows, block = tiling.copy_rows, self.places_smem[kept]
        # Only a start that isn't constant may let the copy reach past the page's end, into zeros.
        source_rows = pl.ds(0 if rows == tiling.page_size else block * rows, rows)

        def copy_page(copy):
            page, first = self.places_smem[kept + 1 + copy], copy * tiling.pitch
            first = first if isinstance(first, int) else pl.multiple_of(first, SWIZZLE_ROWS)
            plgpu.copy_gmem_to_smem(gmem.at[page, source_rows, columns], smem.at[pl.ds(first, rows)], ready)

        self._for_each_copy(copy_page)

    def _kept_at(self, tile: Any) -> Any:
        slot = self.half * RING_TILES + rem(tile, RING_TILES)
        return RUN_VALUES + slot * (1 + self.plan.tiling.pages_per_tile)

    def _for_each_copy(self, body: Callable[[Any], None]) -> None:
        copies = self.plan.tiling.pages_per_tile
        if copies == 1:
            body(0)
        else:  # in a loop, as registers are rare
            lax.fori_loop(0, copies, lambda copy, _: body(copy.astype(i32)), None)


def slot_of(tile: Any, half: int) -> Any:
    """The slot of the ring for half of the columns of a part's `tile`-th tile."""
    return VALUE_WARPGROUPS * rem(tile, RING_TILES) + half
