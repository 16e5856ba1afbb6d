"""The decode kernel: one query token a row over a paged cache, Pallas Mosaic GPU.

Thread block (part, head) walks part `part` of the list of (row, tile) for one kv head and up to 16 of its
query heads. A row that lies in one part is written as it finishes; a row cut by the ends of parts leaves
float32 partial results, which `merge_kernel.py` combines in a second launch.

`schedule.py` says which tiles, `page_loading.py` copies them, `softmax.py` is the arithmetic between the two
products of `layouts.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import softmax
from .integers import div, rem
from .layouts import TURNED, MatrixUnit, along_rows, f32, full
from .page_loading import TileLoader, page_spec, ring_slot
from .plan import Plan
from .rows import BatchRows, TableRefs, VectorRows
from .shared_memory import scratch_types

i32 = jnp.int32


def head_slice(plan: Plan, head):
    """(kv head, first query head, which tile of the kv head's query heads) of the grid's `head`."""
    kv_head, group = div(head, plan.head_groups), rem(head, plan.head_groups)
    return kv_head, kv_head * plan.problem.group_size + group * plan.tile_heads, group


def for_valid_heads(plan: Plan, group, store) -> None:
    """Calls `store(count)` with the number of real query heads of tile `group`, a static number each time."""
    rest = plan.problem.group_size - (plan.head_groups - 1) * plan.tile_heads
    if rest == plan.tile_heads:
        store(plan.tile_heads)
        return
    if plan.head_groups > 1:
        pl.when(group < plan.head_groups - 1)(lambda: store(plan.tile_heads))
    pl.when(group == plan.head_groups - 1)(lambda: store(rest))


def store_out(plan: Plan, b, head, acc, weight_sum, max_log2, refs: dict[str, Any]) -> None:
    """Writes a finished row's output and lse. `acc` [v_columns, heads] is not yet divided by `weight_sum`."""
    _, first_head, group = head_slice(plan, head)
    acc_smem, out_smem, stats_smem = refs["acc_smem"], refs["out_smem"], refs["stats_smem"]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    some = weight_sum > 0
    acc_smem[...] = acc * along_rows(1.0 / jnp.where(some, weight_sum, f32(1)), acc.shape)
    if plan.problem.return_lse:
        lse = (max_log2 + jnp.log2(jnp.where(some, weight_sum, f32(1)))) * f32(softmax.LN_2)
        stats_smem[0] = jnp.where(some, lse, f32(-np.inf))
    plgpu.commit_smem()
    turned = plgpu.load(acc_smem.transpose((1, 0)), layout=TURNED, optimized=False)
    out_smem[...] = turned.astype(plan.problem.dtype)
    plgpu.commit_smem()

    def store(count: int):
        columns = plan.problem.v_head_dim
        # An index that isn't constant lets the copy reach past head_dim; the hardware drops what lies there.
        wide = pl.ds(0, columns) if columns == plan.v_columns else pl.ds(head * 0, plan.v_columns)
        plgpu.copy_smem_to_gmem(
            out_smem.at[pl.ds(0, count)], refs["out_gmem"].at[b, pl.ds(first_head, count), wide]
        )
        if plan.problem.return_lse:

            def store_lse(h, _):
                refs["lse_gmem"][b, first_head + h] = stats_smem[0, h]

            lax.fori_loop(0, count, store_lse, None)

    for_valid_heads(plan, group, store)


def launch(
    plan: Plan, q: Any, k_pages: Any, v_pages: Any, table: TableRefs, sm_scale: Any, *, interpret: Any
) -> dict[str, jax.Array]:
    """Launch the kernel.

    Returns
    -------
    dict
        "out" and (with return_lse) "lse" of the rows that lie in one part, and for the merge: "acc" and
        "max_sum" of row pieces, and "owners" [parts, 2]: how many later parts go on with the row that this
        part owns, and that row.
    """
    p, tiling = plan.problem, plan.tiling
    unit = MatrixUnit(p.dtype, interpret is not None)
    block_kv, heads = plan.config.block_kv, plan.tile_heads
    traced_scale = not isinstance(sm_scale, int | float)

    table_arrays = [table.indices, table.row_starts, table.row_pages, table.kv_lens]
    table_arrays += [table.kv_starts] if p.has_kv_starts else []
    operands = [q, k_pages, v_pages, *table_arrays]
    operands += [jnp.asarray(sm_scale, f32).reshape(1)] if traced_scale else []
    partials = plan.partial_shapes()
    out_types = {"out": jax.ShapeDtypeStruct((p.batch, p.num_q_heads, p.v_head_dim), p.dtype)}
    if p.return_lse:
        out_types["lse"] = jax.ShapeDtypeStruct((p.batch, p.num_q_heads), f32)
    out_types |= {name: jax.ShapeDtypeStruct(shape, f32) for name, shape in partials.items()}
    out_types["owners"] = jax.ShapeDtypeStruct((plan.schedule.parts, 2), i32)

    def body(*args, **scratch):
        q_gmem, k_gmem, v_gmem, *rest = args[: len(operands)]
        table_gmem = TableRefs(*rest[: len(table_arrays)])
        refs = dict(zip((f"{name}_gmem" for name in out_types), args[len(operands) :], strict=True)) | scratch
        part, head = lax.axis_index("part"), lax.axis_index("head")
        kv_head, first_head, _ = head_slice(plan, head)
        scale_log2 = (rest[-1][0] if traced_scale else f32(sm_scale)) * f32(softmax.LOG2_E)

        if plan.vector_rows:
            rows = VectorRows(table_gmem, tiling, p.batch, scratch["rows_smem"], scratch["rows_ready"])
        else:
            rows = BatchRows(table_gmem, tiling, p.batch)
        cuts = plan.schedule.cuts(rows)
        run = cuts.run(part)

        def page_of(b, entry, kv_len):
            return rows.page_id(b, entry, kv_len, p.num_pages)

        loader = TileLoader(
            page_spec(p.kv_layout, tiling, plan.k_columns, page_of, kv_head),
            page_spec(p.kv_layout, tiling, plan.v_columns, page_of, kv_head),
            tiling, rows, k_gmem, v_gmem, scratch["k_smem"], scratch["v_smem"], scratch["kv_ready"],
        )  # fmt: skip

        def load_q(b, slot):
            wide = pl.ds(0, p.head_dim) if p.head_dim == plan.k_columns else pl.ds(part * 0, plan.k_columns)
            # Rows past the tile's own heads belong to other heads or read as 0; their results are dropped.
            plgpu.copy_gmem_to_smem(
                q_gmem.at[b, pl.ds(first_head, heads), wide], scratch["q_smem"].at[slot], scratch["q_ready"]
            )

        def valid_keys(tile, kv_len, kv_start, row):
            position, is_key = tiling.position_of(tile, row)
            valid = position < kv_len
            if kv_start is not None:
                valid &= position >= kv_start
            return valid if is_key is None else valid & is_key

        def attend_tile(masked, tile, carry, q_regs, kv_len, kv_start):
            acc, state, step, cursor = carry
            slot = ring_slot(step, plan.config.num_stages)
            plgpu.barrier_wait(scratch["kv_ready"].at[slot])
            k = plgpu.load(scratch["k_smem"].at[slot], layout=unit.lhs, optimized=False)
            s = unit.dot(full((block_kv, heads), 0, unit.acc), k, q_regs) * scale_log2
            valid = None
            if masked:
                key = plgpu.broadcasted_iota(i32, s.shape, 0, layout=unit.acc)
                valid = valid_keys(tile, kv_len, kv_start, key)
            state, probs, rescale = state.update(s, valid)
            scratch["p_smem"][...] = probs.astype(p.dtype)
            plgpu.commit_smem()
            probs = plgpu.load(scratch["p_smem"], layout=unit.rhs, optimized=False)
            v = plgpu.load(scratch["v_smem"].at[slot].transpose((1, 0)), layout=unit.lhs, optimized=False)
            if masked:  # unused slots may hold NaN, and 0 * NaN is NaN
                key = plgpu.broadcasted_iota(i32, (block_kv,), 0, layout=unit.lhs.reduce(0))
                valid = along_rows(valid_keys(tile, kv_len, kv_start, key), v.shape)
                v = jnp.where(valid, v, full(v.shape, 0, unit.lhs, p.dtype))
            acc = unit.dot(acc * along_rows(rescale, acc.shape), v, probs)
            plgpu.commit_smem()  # everyone is done with the slot and with p_smem
            return acc, state, step + 1, loader.load(cursor, slot)

        cursor = loader.start(run)
        for stage in range(plan.config.num_stages):
            cursor = loader.load(cursor, i32(stage))
        pl.when(run.num_tiles > 0)(lambda: load_q(run.row, i32(0)))

        @pl.when(head == 0)
        def _():
            refs["owners_gmem"][part, 0] = i32(0)

        def attend_row(carry):
            left, b, begin, step, q_slot, cursor = carry
            kv_len, kv_start = rows.kv_len(b), rows.kv_start(b)
            first, last = rows.tile_range(b)
            end = jnp.minimum(begin + left, last)
            plgpu.barrier_wait(scratch["q_ready"])
            q_regs = plgpu.load(
                scratch["q_smem"].at[q_slot].transpose((1, 0)), layout=unit.rhs, optimized=False
            )
            pl.when(left > end - begin)(lambda: load_q(b + 1, 1 - q_slot))

            def attend(masked):
                return lambda tile, c: attend_tile(masked, tile, c, q_regs, kv_len, kv_start)

            acc = full((plan.v_columns, heads), 0, unit.acc)
            c = (acc, softmax.State.empty((block_kv, heads), unit.acc), step, cursor)
            if tiling.dense:  # only the tiles at the ends of the row's keys need a mask
                full_end = jnp.clip(tiling.tile_of(kv_len), begin, end)
                full_begin = begin
                if kv_start is not None:
                    first_full = tiling.tile_of(jnp.maximum(kv_start, 0) + (block_kv - 1))
                    full_begin = jnp.clip(first_full, begin, full_end)
                    c = lax.fori_loop(begin, full_begin, attend(True), c)
                c = lax.fori_loop(full_begin, full_end, attend(False), c)
                c = lax.fori_loop(full_end, end, attend(True), c)
            else:
                c = lax.fori_loop(begin, end, attend(True), c)
            acc, state, step, cursor = c
            weight_sum = state.weights.sum(axis=0)
            whole = (begin == first) & (end == last)
            pl.when(whole)(lambda: store_out(plan, b, head, acc, weight_sum, state.max_log2, refs))

            @pl.when(jnp.logical_not(whole))
            def _():
                side = jnp.where(begin > first, 0, 1)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                scratch["acc_smem"][...] = acc
                scratch["stats_smem"][0] = state.max_log2
                scratch["stats_smem"][1] = weight_sum
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(scratch["acc_smem"], refs["acc_gmem"].at[part, side, head])
                plgpu.copy_smem_to_gmem(scratch["stats_smem"], refs["max_sum_gmem"].at[part, side, head])

                @pl.when((begin == first) & (head == 0))
                def _():
                    refs["owners_gmem"][part, 0] = cuts.followers(part, b, run.num_tiles - left)
                    refs["owners_gmem"][part, 1] = b

            next_first, _ = rows.tile_range(b + 1)
            return left - (end - begin), b + 1, next_first, step, 1 - q_slot, cursor

        lax.while_loop(
            lambda c: c[0] > 0, attend_row, (run.num_tiles, run.row, run.first_tile, i32(0), i32(0), cursor)
        )
        plgpu.wait_smem_to_gmem(0)

    outs = plgpu.kernel(
        body,
        grid=(plan.schedule.parts, plan.heads),
        grid_names=("part", "head"),
        out_type=list(out_types.values()),
        scratch_types=scratch_types(plan),
        # Shared memory passes between warps at the commit_smem() calls alone: automatic barriers cost more.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="paged_decode",
        interpret=interpret,
    )(*operands)
    return dict(zip(out_types, outs, strict=True))
