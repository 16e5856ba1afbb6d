"""Asynchronous copies of tiles of latents and rotated keys from the page pool, driven by the page table.

Each of two warpgroups brings its half of the columns of latents into slots that it frees itself. Page ids are
looked up while the matrix unit is busy, just before their copies; rotated keys, of which a single tile has
room, come when the tile before has been read.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .integers import rem
from .mla_plan import RING_TILES, RUN_VALUES, VALUE_WARPGROUPS, Plan
from .rows import Row

i32 = jnp.int32


class Place(NamedTuple):
    """Where a tile lies in the pool: the page of each of its copies, and which part of a large page."""

    pages: tuple[Any, ...]
    block: Any


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

    def _place(self, row: Row, tile: Any) -> Place:
        p, tiling = self.plan.problem, self.plan.tiling
        first, pages = tiling.first_page(tile), []
        for copy in range(tiling.pages_per_tile):
            entry = first + copy
            if (
                copy > 0
            ):  # entries past the row's last page are never trusted: the tile's first page stands in
                entry = jnp.where(entry * tiling.page_size < row.kv_len, entry, first)
            page = self.indices_gmem[jnp.clip(row.table_start + entry, 0, p.num_entries - 1)]
            pages.append(jnp.clip(page, 0, p.num_pages - 1))
        return Place(tuple(pages), tiling.block_in_page(tile))

    def look_up(self, row: Row, in_row: Any, tile: Any) -> None:
        """Look up where the part's `tile`-th tile lies, the row's `in_row`-th, and keep it in shared memory.

        Registers for that would be too many. Warps have to meet before it is read.
        """
        place, first = self._place(row, in_row), self._kept_at(tile)
        for i, value in enumerate((place.block, *place.pages)):
            self.places_smem[first + i] = value

    def _kept(self, tile: Any) -> Place:
        first, copies = self._kept_at(tile), self.plan.tiling.pages_per_tile
        block, *pages = (self.places_smem[first + i] for i in range(1 + copies))
        return Place(tuple(pages), block)

    def _kept_at(self, tile: Any) -> Any:
        slot = self.half * RING_TILES + rem(tile, RING_TILES)
        return RUN_VALUES + slot * (1 + self.plan.tiling.pages_per_tile)

    def load_latents(self, tile: Any) -> None:
        """Begin to bring half of the columns of the part's `tile`-th tile into its slot."""
        slot, columns = slot_of(tile, self.half), pl.ds(self.half * self.plan.half, self.plan.half)
        smem, ready = self.latents_smem.at[slot], self.latents_ready.at[slot]
        self._load(self.latents_gmem, columns, self._kept(tile), smem, ready)

    def load_rope(self, tile: Any) -> None:
        """Begin to bring the rotated keys of the part's `tile`-th tile."""
        p = self.plan.problem
        columns = pl.ds(0 if p.paired else p.rank, p.rope_dim)
        self._load(self.rope_gmem, columns, self._kept(tile), self.rope_smem, self.rope_ready)

    def _load(self, gmem: Any, columns: Any, place: Place, smem: Any, ready: Any) -> None:
        tiling = self.plan.tiling
        for copy, page in enumerate(place.pages):
            # Only a start that isn't constant may let the copy reach past the page's end, into zeros.
            whole = tiling.copy_rows == tiling.page_size
            rows = pl.ds(0 if whole else place.block * tiling.copy_rows, tiling.copy_rows)
            target = smem.at[pl.ds(copy * tiling.pitch, tiling.copy_rows)]
            plgpu.copy_gmem_to_smem(gmem.at[page, rows, columns], target, ready)


def slot_of(tile: Any, half: int) -> Any:
    """The slot of the ring for half of the columns of a part's `tile`-th tile."""
    return VALUE_WARPGROUPS * rem(tile, RING_TILES) + half
