"""Shared memory: its layout and size, and what a thread block of the decode kernel has of it."""

import math
from typing import Any

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from .integers import round_up
from .layouts import f32
from .page_loading import TileLoader
from .plan import Plan
from .rows import VectorRows

RESERVED = 3072  # bytes that the compiler adds for reductions across warps, and barriers


def swizzle_columns(head_dim: int) -> int:
    """Columns of a shared-memory tile: the widest of 64, 32, 16 and 8 that divides head_dim."""
    return next(c for c in (64, 32, 16, 8) if head_dim % c == 0)


def shared_tile(shape: tuple[int, ...], dtype: Any, head_dim: int, *, swizzled: bool = False) -> Any:
    """Shared memory for [.., rows, columns] whose columns hold `head_dim` values and maybe padding.

    Swizzled in groups of 8 rows, matrix operands load from it without bank conflicts. Otherwise rows follow
    one another; a tiling of one row says so, since with none the compiler would choose one of 8 by itself.
    """
    width = math.gcd(swizzle_columns(head_dim), shape[-1])
    if not swizzled:
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((1, width)),))
    transforms: tuple[Any, ...] = (plgpu.TilingTransform((8, width)),)
    if width > 8:
        transforms += (plgpu.SwizzleTransform(width * dtype.itemsize),)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def scratch_types(plan: Plan) -> dict[str, Any]:
    """Shared memory and barriers of a thread block, by the name of the body's argument."""
    p, heads = plan.problem, plan.tile_heads
    ring = (plan.config.num_stages, plan.config.block_kv)
    types = {
        "k_smem": shared_tile((*ring, plan.k_columns), p.dtype, p.head_dim, swizzled=plan.tiling.swizzled),
        "v_smem": shared_tile((*ring, plan.v_columns), p.dtype, p.v_head_dim, swizzled=plan.tiling.swizzled),
        "q_smem": shared_tile((2, heads, plan.k_columns), p.dtype, p.head_dim),
        "p_smem": plgpu.SMEM((plan.config.block_kv, heads), p.dtype),
        "acc_smem": plgpu.SMEM((plan.v_columns, heads), f32),
        "out_smem": shared_tile((heads, plan.v_columns), p.dtype, p.v_head_dim),
        "stats_smem": plgpu.SMEM((2, heads), f32),
        "q_ready": plgpu.Barrier(),
    } | TileLoader.scratch(plan.tiling, plan.config.num_stages, paged=not p.contiguous)
    if plan.vector_rows:
        names = ("rows_smem", "sums_smem", "rows_ready")
        fields = (1 if p.contiguous else 3) + p.has_kv_starts
        types |= zip(names, VectorRows.scratch(p.batch, fields), strict=True)
    return types


def smem_bytes(plan: Plan) -> int:
    """Shared memory of a thread block of the decode kernel."""
    return total_bytes(scratch_types(plan))


def total_bytes(types: dict[str, Any]) -> int:
    """Shared memory that scratch types take, from above: each array starts on a kilobyte."""
    arrays = [ref for ref in types.values() if hasattr(ref, "memory_space")]
    sizes = (math.prod(ref.shape) * np.dtype(ref.dtype).itemsize for ref in arrays)
    return RESERVED + sum(round_up(size, 1024) for size in sizes)
