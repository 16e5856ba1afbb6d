"""The second launch: combines the pieces of rows that the ends of parts cut, in the order of the parts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .integers import ceil_div, div, rem
from .layouts import THREADS, f32, full
from .mla_plan import BLOCK_QUERIES, Plan
from .plan import MAX_MERGE_BLOCKS
from .schedule import pieces_per_row
from .softmax import LN_2, LOWEST

i32 = jnp.int32
# Pieces read at once, as their latency is what this kernel waits for, within 64 registers a thread.
MIN_PIECES, MAX_PIECES = 4, 16
MAX_QUERIES = 4  # one after another in a block


def queries_per_block(plan: Plan) -> int:
    """Queries that a block merges one after another: few where rows are few."""
    blocks = plan.schedule.num_cut_rows * plan.queries
    count = 1
    while count < MAX_QUERIES and blocks > count * MAX_MERGE_BLOCKS:
        count *= 2
    return count


def merge(plan: Plan, results: dict[str, jax.Array], *, interpret: Any) -> dict[str, jax.Array]:
    """Write the cut rows into `results`' "out" (and "lse"), which keep the other rows; -> these alone."""
    p, schedule = plan.problem, plan.schedule
    at_once = min(max(MIN_PIECES, pieces_per_row(p.num_splits, schedule)), MAX_PIECES)
    names = ["out"] + (["lse"] if p.return_lse else [])
    vector = next(n for n in (4, 2, 1) if p.rank % (THREADS * n) == 0)
    layout = plgpu.Layout.WG_STRIDED((p.rank,), vec_size=vector)
    count = queries_per_block(plan)

    def body(acc_gmem, max_sum_gmem, cut_rows_gmem, *rest, out_smem):
        refs = dict(zip(names, rest, strict=True))
        entry, first = lax.axis_index("entry"), lax.axis_index("block") * count
        followers = cut_rows_gmem[entry, 0]

        def merge_query(query):
            part, row = cut_rows_gmem[entry, 1], cut_rows_gmem[entry, 2]
            block, in_block = div(query, BLOCK_QUERIES), rem(query, BLOCK_QUERIES)

            def combine(i, carry):
                acc, max_log2, weight_sum = carry
                pieces = []
                for c in range(at_once):
                    follower = i * at_once + c
                    exists = follower <= followers
                    side = jnp.where(exists & (follower > 0), 0, schedule.sides - 1)
                    at = (jnp.where(exists, part + follower, part), side, block)
                    # A piece past the last one is the first again, at no weight.
                    piece_max = max_sum_gmem[(*at, 0, in_block)] + jnp.where(exists, f32(0), f32(-np.inf))
                    piece_sum = max_sum_gmem[(*at, 1, in_block)]
                    piece = plgpu.load(acc_gmem.at[(*at, in_block)], layout=layout, optimized=False)
                    pieces.append((piece_max, piece_sum, piece))
                new_max = functools.reduce(jnp.maximum, [piece_max for piece_max, _, _ in pieces], max_log2)
                rescale = jnp.exp2(max_log2 - new_max)
                acc, weight_sum = acc * rescale, weight_sum * rescale
                for piece_max, piece_sum, piece in pieces:
                    rescale = jnp.exp2(piece_max - new_max)
                    # An infinite value at no weight would make NaN.
                    weight_sum = weight_sum + jnp.where(rescale != 0, piece_sum * rescale, f32(0))
                    rescale = lax.broadcast_in_dim(rescale, piece.shape, ())
                    acc = acc + jnp.where(rescale != 0, piece * rescale, f32(0))
                return acc, new_max, weight_sum

            carry = (full((p.rank,), 0, layout), f32(LOWEST), f32(0))
            acc, max_log2, weight_sum = lax.fori_loop(0, div(followers + at_once, at_once), combine, carry)
            empty = weight_sum == 0
            weight_sum = jnp.where(empty, f32(1), weight_sum)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[...] = (acc * (1.0 / weight_sum)).astype(p.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, refs["out"].at[row, query])
            if p.return_lse:
                lse = (max_log2 + jnp.log2(weight_sum)) * f32(LN_2)
                refs["lse"][row, query] = jnp.where(empty, f32(-np.inf), lse)

        @pl.when(followers > 0)
        def _():
            def merge_each(i, _):
                query = first + i.astype(i32)
                pl.when(query < p.queries)(lambda: merge_query(query))

            lax.fori_loop(0, count, merge_each, None)
            plgpu.wait_smem_to_gmem(0)

    outs = [jax.new_ref(results[name]) for name in names]
    plgpu.kernel(
        body,
        out_type=[],
        grid=(schedule.num_cut_rows, ceil_div(p.queries, count)),
        grid_names=("entry", "block"),
        scratch_types={"out_smem": plgpu.SMEM((p.rank,), p.dtype)},
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="paged_mla_merge",
        interpret=interpret,
    )(results["acc"], results["max_sum"], results["cut_rows"], *outs)
    # As in the merge of the decode kernel: or XLA could lose the rows that this one leaves alone.
    merged = lax.optimization_barrier([jax.freeze(ref) for ref in outs])
    return dict(zip(names, merged, strict=True))
