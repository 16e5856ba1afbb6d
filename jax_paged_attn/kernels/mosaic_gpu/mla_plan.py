"""The static side of a launch of latent attention: the configuration, and what follows from it."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.calls.mla import Problem
from jax_paged_attn.validation import check, check_bool, check_positive_int

from .integers import ceil_div, round_up
from .layouts import f32
from .plan import MAX_PARTS, MAX_SCALAR_ROWS
from .rows import VectorRows
from .schedule import Schedule
from .shared_memory import total_bytes
from .shared_tile import SharedTile
from .tiling import Tiling

BLOCK_QUERIES = 64  # rows of one wgmma
BLOCK_KV = 64
# Tiles in shared memory. With the first seven of nine column blocks of the queries in registers, three of
# 512 + 64 columns fit, less two of the rotated keys.
RING_TILES = 3
VALUE_WARPGROUPS = 2  # which share a latent's columns


BARRIER_BYTES = 512  # at most
RUN_VALUES = 6  # entries of "run", which has places of tiles besides


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel of latent attention cuts its work.

    Attributes
    ----------
    num_parts : int
        Parts that the batch's tiles are cut into, for each 64 queries of a row. Unused with `num_splits`.
    few_heads : bool
        Whether the decode kernel serves few heads, where it can, rather than a block of 64 that is mostly
        padding. Compiled and interpreted, but no GPU has run it so far: therefore not the default.
    """

    num_parts: int = 1
    few_heads: bool = False

    def __post_init__(self):
        check_bool("few_heads", self.few_heads)
        check_positive_int("num_parts", self.num_parts)
        check(self.num_parts <= MAX_PARTS, "num_parts", f"at most {MAX_PARTS}", repr(self.num_parts))
        object.__setattr__(self, "num_parts", int(self.num_parts))  # of numpy's integers


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every static quantity of a launch, derived from the problem and the configuration."""

    problem: Problem
    config: Config

    @property
    def blocks(self) -> int:
        """Blocks of queries; each reads the cache, of which all but the first mostly find it in L2."""
        return ceil_div(self.problem.queries, BLOCK_QUERIES)

    @property
    def queries(self) -> int:
        """Queries of a row, rounded up to whole blocks."""
        return self.blocks * BLOCK_QUERIES

    @property
    def half(self) -> int:
        """Columns of a latent that one warpgroup has."""
        return self.problem.rank // VALUE_WARPGROUPS

    @property
    def tiling(self) -> Tiling:
        return Tiling.choose(self.problem.page_size, BLOCK_KV, 2 * self.problem.rope_dim)

    @property
    def schedule(self) -> Schedule:
        p = self.problem
        if p.num_splits is not None:
            # A row has no more tiles than this; runs of one tile each are all the same from there on.
            tiles = self.tiling.tiles_per_page * ceil_div(p.num_entries, self.tiling.pages_per_tile)
            return Schedule.fixed(p.batch, min(p.num_splits, tiles))
        return Schedule.balanced(p.batch, self.config.num_parts)

    @property
    def vector_rows(self) -> bool:
        """Whether all rows' lengths are summed as vectors; a fixed split needs no sums over rows."""
        return self.problem.num_splits is None and self.problem.batch > MAX_SCALAR_ROWS

    def tile(self, columns: int) -> SharedTile:
        """Swizzled rows in shared memory, in pieces that a row of the pool is made of, too."""
        p = self.problem
        row = columns if p.paired else math.gcd(p.rank + p.rope_dim, columns)
        return SharedTile.choose(p.dtype, columns, row, swizzled=True)

    def partial_shapes(self) -> dict[str, tuple[int, ...]]:
        """Float32 results of row pieces, none where no row is cut."""
        if not self.schedule.cuts_rows:
            return {}
        lead = (self.schedule.parts, self.schedule.sides, self.blocks)
        return {
            "acc": (*lead, BLOCK_QUERIES, self.problem.rank),
            "max_sum": (*lead, 2, BLOCK_QUERIES),
        }

    def scratch_types(self) -> dict[str, Any]:
        """Shared memory and barriers of a thread block, by the name of the body's argument."""
        p, copies = self.problem, self.tiling.pages_per_tile
        latents = self.tile(self.half).scratch(VALUE_WARPGROUPS * RING_TILES, BLOCK_KV)
        # What says which tiles are the block's own is over when the first of them come.
        rows, sums, rows_ready = VectorRows.scratch(p.batch if self.vector_rows else 1, 3)
        return {
            "latents_or_rows": plgpu.RefUnion(latents, [rows, sums]),
            "rope_smem": self.tile(p.rope_dim).scratch(BLOCK_KV),
            "q_last_smem": self.tile(64).scratch(BLOCK_QUERIES),
            "q_rope_smem": self.tile(p.rope_dim).scratch(BLOCK_QUERIES),
            "p_smem": self.tile(BLOCK_KV).scratch(BLOCK_QUERIES),
            "stats_smem": plgpu.SMEM((3, BLOCK_QUERIES), f32),
            "run_smem": plgpu.SMEM((RUN_VALUES + VALUE_WARPGROUPS * RING_TILES * (1 + copies),), jnp.int32),
            "rows_ready": rows_ready,
            "run_ready": plgpu.Barrier(),
            "q_ready": plgpu.Barrier(num_arrivals=2),
            "latents_ready": plgpu.Barrier(num_barriers=VALUE_WARPGROUPS * RING_TILES, num_arrivals=copies),
            "rope_ready": plgpu.Barrier(num_arrivals=copies),
            "row_begun": plgpu.Barrier(),
            "p_ready": plgpu.Barrier(),
            "p_turn": plgpu.Barrier(),
            "p_consumed": plgpu.Barrier(num_arrivals=VALUE_WARPGROUPS),
        }


def smem_bytes(plan: Plan) -> int:
    """Shared memory of a thread block."""
    types = plan.scratch_types()
    union = types.pop("latents_or_rows")
    return total_bytes(types, BARRIER_BYTES) + round_up(union.inner_aval.size, 1024)
