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
from .decode_kernel import store_out
from .integers import div
from .layouts import MatrixUnit, along_rows, f32, full
from .plan import Plan
from .shared_memory import shared_tile

i32 = jnp.int32
CHUNK = 4  # pieces read at once: their latency is what this kernel waits for


def merge(plan: Plan, results: dict[str, jax.Array], *, interpret: Any) -> dict[str, jax.Array]:
    """Writes the cut rows into `results`' "out" (and "lse"), which keep the other rows. -> these alone."""
    p = plan.problem
    unit = MatrixUnit(p.dtype, interpret is not None)
    heads, columns = plan.tile_heads, plan.v_columns
    names = ["out"] + (["lse"] if p.return_lse else [])

    def body(acc_gmem, max_sum_gmem, owners_gmem, *outs, **scratch):
        refs = dict(zip((f"{name}_gmem" for name in names), outs, strict=True)) | scratch
        part, head = lax.axis_index("part"), lax.axis_index("head")
        followers = owners_gmem[part, 0]

        def combine(i, carry):
            acc, max_log2, weight_sum = carry
            pieces = []
            for c in range(CHUNK):
                follower = i * CHUNK + c
                exists = follower <= followers
                side = jnp.where(exists & (follower > 0), 0, 1)
                at = (jnp.where(exists, part + follower, part), side, head)
                stats = max_sum_gmem.at[at]
                # A piece past the last one is the first again, with no weight.
                piece_max = plgpu.load(stats.at[0], layout=unit.acc.reduce(0), optimized=False)
                piece_max = piece_max + jnp.where(exists, f32(0), f32(-np.inf))
                piece_sum = plgpu.load(stats.at[1], layout=unit.acc.reduce(0), optimized=False)
                piece_acc = plgpu.load(acc_gmem.at[at], layout=unit.acc, optimized=False)
                pieces.append((piece_max, piece_sum, piece_acc))
            new_max = functools.reduce(jnp.maximum, [piece_max for piece_max, _, _ in pieces], max_log2)
            rescale = jnp.exp2(max_log2 - new_max)
            acc, weight_sum = acc * along_rows(rescale, acc.shape), weight_sum * rescale
            for piece_max, piece_sum, piece_acc in pieces:
                rescale = jnp.exp2(piece_max - new_max)
                acc = acc + piece_acc * along_rows(rescale, acc.shape)
                weight_sum = weight_sum + piece_sum * rescale
            return acc, new_max, weight_sum

        @pl.when(followers > 0)
        def _():
            row_layout = unit.acc.reduce(0)
            carry = (
                full((columns, heads), 0, unit.acc),
                full((heads,), softmax.LOWEST, row_layout),
                full((heads,), 0, row_layout),
            )
            acc, max_log2, weight_sum = lax.fori_loop(0, div(followers + CHUNK, CHUNK), combine, carry)
            store_out(plan, owners_gmem[part, 1], head, acc, weight_sum, max_log2, refs)
            plgpu.wait_smem_to_gmem(0)

    scratch = {
        "acc_smem": plgpu.SMEM((columns, heads), f32),
        "out_smem": shared_tile((heads, columns), p.dtype, p.v_head_dim),
        "stats_smem": plgpu.SMEM((2, heads), f32),
    }
    outs = [jax.new_ref(results[name]) for name in names]
    plgpu.kernel(
        body,
        out_type=[],
        grid=(plan.schedule.parts, plan.heads),
        grid_names=("part", "head"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="paged_decode_merge",
        interpret=interpret,
    )(results["acc"], results["max_sum"], results["owners"], *outs)
    return {name: jax.freeze(ref) for name, ref in zip(names, outs, strict=True)}
