"""What a thread block of the decode kernel has of shared memory, and how much that is."""

import math
from typing import Any

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from .integers import round_up
from .layouts import NUM_WARPS, f32
from .page_loading import TileLoader
from .plan import Plan
from .rows import VectorRows

RESERVED = 3072  # bytes that the compiler adds for reductions across warps, and barriers


def scratch_types(plan: Plan) -> dict[str, Any]:
    """Shared memory and barriers of a thread block, by the name of the body's argument."""
    p, heads = plan.problem, plan.tile_heads
    ring = (plan.config.num_stages, plan.config.block_kv)
    types = {
        "k_smem": plan.k_tile.scratch(*ring),
        "v_smem": plan.v_tile.scratch(*ring),
        "stats_smem": plgpu.SMEM((2, heads), f32),
        "fold_smem": plgpu.SMEM((NUM_WARPS, heads), f32),
    } | TileLoader.scratch(plan.tiling, plan.config.num_stages, paged=not p.contiguous)
    q_tile, out_tile = plan.q_tile, plan.out_tile(plan.v_columns)
    if plan.wide:
        # A row's queries are done with before its output is there: apart, two blocks would not fit a core.
        types["q_or_out_smem"] = plgpu.RefUnion(q_tile.scratch(heads), out_tile.scratch(heads))
        types["p_smem"] = plan.p_tile.scratch(heads)
    else:
        types["out_smem"] = out_tile.scratch(heads)
        types["q_smem"] = q_tile.scratch(2, heads)
        types["q_ready"] = plgpu.Barrier()
        types["p_smem"] = plgpu.SMEM((plan.config.block_kv, heads), plan.operand_dtype)
        types["acc_smem"] = plgpu.SMEM((plan.v_columns, heads), f32)
    for name in plan.token_scaled:
        types[f"{name}_smem"] = plgpu.SMEM(ring, f32)
    for name in plan.head_values:
        types[f"{name}_smem"] = plgpu.SMEM((heads,), f32)
    if plan.vector_rows:
        names = ("rows_smem", "sums_smem", "rows_ready")
        fields = (1 if p.contiguous else 3) + ("kv_starts" in p.given)
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
