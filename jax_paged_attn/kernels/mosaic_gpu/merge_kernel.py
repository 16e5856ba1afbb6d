"""The second launch: combines the pieces of rows that the ends of parts cut, in the order of the parts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import softmax
from .columns import Columns
from .integers import div
from .layouts import PIECE, along_rows, f32, full
from .output import find_head_tile, store_output
from .plan import Plan

i32 = jnp.int32
# Pieces read at once, as their latency is what this kernel waits for, within 64 registers a thread.
MIN_PIECES, MAX_PIECES, PIECE_VALUES = 4, 16, 64 * 128


def pieces_at_once(plan: Plan) -> int:
    """Pieces that are read and added together. With fixed splits the batch has no say in it."""
    slices = plan.merge_slices if plan.problem.num_splits is None else 1
    values = plan.tile_heads * plan.v_columns // slices
    return max(1, min(max(MIN_PIECES, plan.pieces_per_row), MAX_PIECES, PIECE_VALUES // values))


def merge(
    plan: Plan, results: dict[str, jax.Array], values: dict[str, jax.Array], *, interpret: Any
) -> dict[str, jax.Array]:
    """Write the cut rows into `results`' "out" (and "lse"), which keep the other rows; -> these alone.

    Block (entry, head, slice) merges a slice of head_dim of one cut row.
    """
    p = plan.problem
    heads, columns = plan.tile_heads, plan.v_columns // plan.merge_slices
    at_once = pieces_at_once(plan)
    names = ["out"] + (["lse"] if p.return_lse else [])
    needed = {"v_scale"} if p.v_scale == "head" else set()
    values = {name: value for name, value in values.items() if name in needed | ({"sinks"} & {*p.given})}
    unit = plan.merge_operands(interpret=interpret is not None)

    def body(acc_gmem, max_sum_gmem, cut_rows_gmem, *rest, **scratch):
        refs = dict(zip((f"{name}_gmem" for name in (*values, *names)), rest, strict=True)) | scratch
        entry, head = lax.axis_index("entry"), lax.axis_index("head")
        first_column = lax.axis_index("slice") * columns
        followers = cut_rows_gmem[entry, 0]

        @pl.when(followers > 0)
        def _():
            part, row = cut_rows_gmem[entry, 1], cut_rows_gmem[entry, 2]

            def combine(i, carry):
                acc, max_log2, weight_sum = carry
                pieces = []
                for c in range(at_once):
                    follower = i * at_once + c
                    exists = follower <= followers
                    side = jnp.where(exists & (follower > 0), 0, plan.schedule.sides - 1)
                    at = (jnp.where(exists, part + follower, part), side, head)
                    stats = max_sum_gmem.at[at]
                    # A piece past the last one is the first again, at no weight.
                    piece_max = plgpu.load(stats.at[0], layout=PIECE.reduce(0), optimized=False)
                    piece_max = piece_max + jnp.where(exists, f32(0), f32(-np.inf))
                    piece_sum = plgpu.load(stats.at[1], layout=PIECE.reduce(0), optimized=False)
                    piece = acc_gmem.at[(*at, pl.ds(first_column, columns))]
                    pieces.append((piece_max, piece_sum, plgpu.load(piece, layout=PIECE, optimized=False)))
                new_max = functools.reduce(jnp.maximum, [piece_max for piece_max, _, _ in pieces], max_log2)
                rescale = jnp.exp2(max_log2 - new_max)
                acc, weight_sum = acc * along_rows(rescale, acc.shape), weight_sum * rescale
                for piece_max, piece_sum, piece in pieces:
                    rescale = jnp.exp2(piece_max - new_max)
                    counts = rescale != 0  # an infinite value at no weight would make NaN
                    weight_sum = weight_sum + jnp.where(counts, piece_sum * rescale, f32(0))
                    rescale = along_rows(rescale, acc.shape)
                    acc = acc + jnp.where(rescale != 0, piece * rescale, f32(0))
                return acc, new_max, weight_sum

            carry = (
                full((columns, heads), 0, PIECE),
                full((heads,), softmax.LOWEST, PIECE.reduce(0)),
                full((heads,), 0, PIECE.reduce(0)),
            )
            acc, max_log2, weight_sum = lax.fori_loop(0, div(followers + at_once, at_once), combine, carry)
            sinks = None
            if "sinks" in p.given:
                kv_head, _, tile = find_head_tile(plan, head)
                columns_of_heads = Columns(heads, p.group_size, kv_head, tile * heads)
                columns_of_heads.bring(refs["sinks_gmem"], f32(softmax.LOG2_E), refs["sinks_smem"])
                plgpu.commit_smem()
                sinks = columns_of_heads.load(refs["sinks_smem"], PIECE)
            sliced = first_column if plan.merge_slices > 1 else None
            store_output(plan, unit, row, head, acc, max_log2, weight_sum, sinks, refs, sliced)
            plgpu.wait_smem_to_gmem(0)

    scratch = {
        "acc_smem": plgpu.SMEM((columns, heads), f32),
        "out_smem": plan.out_tile(columns).scratch(heads),
        "stats_smem": plgpu.SMEM((2, heads), f32),
    }
    if "sinks" in p.given:
        scratch["sinks_smem"] = plgpu.SMEM((heads,), f32)
    outs = [jax.new_ref(results[name]) for name in names]
    plgpu.kernel(
        body,
        out_type=[],
        grid=(plan.schedule.num_cut_rows, plan.heads, plan.merge_slices),
        grid_names=("entry", "head", "slice"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="paged_decode_merge",
        interpret=interpret,
    )(results["acc"], results["max_sum"], results["cut_rows"], *values.values(), *outs)
    # In a loop that stacks its results, XLA (jax 0.11.2, 0.12.0) would fuse this kernel with the stack's
    # update, let it write there, and lose the rows that it leaves alone.
    merged = lax.optimization_barrier([jax.freeze(ref) for ref in outs])
    return dict(zip(names, merged, strict=True))
