"""Writing finished rows: division by the sum of weights, turning, rounding, log-sum-exp."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import softmax
from .integers import div, rem
from .layouts import along_rows, f32
from .operands import Operands
from .plan import Plan


def find_head_tile(plan: Plan, head: Any) -> tuple[Any, Any, Any]:
    """(kv head, first query head, which tile of the kv head's query heads) of the grid's `head`."""
    kv_head, tile = div(head, plan.head_groups), rem(head, plan.head_groups)
    return kv_head, kv_head * plan.group_size + tile * plan.tile_heads, tile


def _for_valid_heads(plan: Plan, tile, store) -> None:
    """Call `store(count)` with the number of query heads in `tile`, a static number each time."""
    rest = plan.group_size - (plan.head_groups - 1) * plan.tile_heads
    if rest == plan.tile_heads:
        store(plan.tile_heads)
        return
    if plan.head_groups > 1:
        pl.when(tile < plan.head_groups - 1)(lambda: store(plan.tile_heads))
    pl.when(tile == plan.head_groups - 1)(lambda: store(rest))


def store_output(
    plan: Plan,
    unit: Operands,
    b: Any,
    head: Any,
    acc: jax.Array,
    max_log2: jax.Array,
    weight_sum: jax.Array,
    sinks_log2: jax.Array | None,
    refs: dict[str, Any],
    first_column: Any = None,
) -> None:
    """Write row `b` of `head`'s tile: its output and its lse.

    `acc` [columns, heads] is not yet divided by `weight_sum` [heads], which lacks the sinks' weights, nor
    multiplied by a scale of V. It has the columns from `first_column` on, or all of them without it.
    """
    kv_head, first_head, tile = find_head_tile(plan, head)
    out_smem, stats_smem = refs["out_smem"], refs["stats_smem"]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    empty = no_weight = weight_sum == 0  # and not of NaN, which goes on into the output and the lse
    rescale = None
    if sinks_log2 is not None:
        peak = jnp.maximum(max_log2, sinks_log2)
        rescale = jnp.exp2(max_log2 - peak)
        max_log2, weight_sum = peak, weight_sum * rescale + jnp.exp2(sinks_log2 - peak)
        no_weight = weight_sum == 0
    weight_sum = jnp.where(no_weight, f32(1), weight_sum)
    factor = 1.0 / weight_sum
    if rescale is not None:
        factor *= rescale
    if plan.problem.v_scale == "head":
        # A row without keys gives 0 whatever the scale is.
        factor *= jnp.where(empty, f32(1), refs["v_scale_gmem"][kv_head])
    if plan.problem.return_lse:
        lse = (max_log2 + jnp.log2(weight_sum)) * f32(softmax.LN_2)
        stats_smem[0] = jnp.where(no_weight, f32(-np.inf), lse)
    unit.turn(acc * along_rows(factor, acc.shape), refs)

    def store(count: int):
        columns, head_dim = acc.shape[0], plan.problem.v_head_dim
        source = out_smem.at[pl.ds(0, count)]
        if first_column is not None:
            target = pl.ds(first_column, columns)
        elif count == 1 and columns != head_dim:
            # A copy of one row is made as a flat one, which would run on into the next row's columns.
            source, target = out_smem.at[pl.ds(0, 1), pl.ds(0, head_dim)], pl.ds(0, head_dim)
        else:
            # A start that isn't constant lets the copy reach past head_dim; what lies there is dropped.
            target = pl.ds(0, columns) if columns == head_dim else pl.ds(head * 0, columns)
        plgpu.copy_smem_to_gmem(source, refs["out_gmem"].at[b, pl.ds(first_head, count), target])
        if not plan.problem.return_lse:
            return

        @pl.when(True if first_column is None else first_column == 0)  # one of a row's slices writes its lse
        def _():
            def store_lse(h, _):
                refs["lse_gmem"][b, first_head + h] = stats_smem[0, h]

            lax.fori_loop(0, count, store_lse, None)

    _for_valid_heads(plan, tile, store)
