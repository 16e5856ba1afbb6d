"""The decode kernel: one query token a row over a paged cache, Pallas Mosaic GPU.

Thread block (part, head) walks part `part` of the list of (row, tile) for one kv head and some of its query
heads. A row that lies in one part is written as it finishes; a row cut by the ends of parts leaves float32
partial results, which `merge_kernel.py` combines in a second launch.

`schedule.py` says which tiles, `page_loading.py` copies them, `softmax.py` is the arithmetic between the two
products. `layouts.py` has those of 16-bit caches, `byte_operands.py` those of quantized ones, and
`wide_operands.py` those of large groups.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.validation import LAYOUT_AXES

from . import softmax
from .integers import rem
from .layouts import along_columns, along_rows, f32, full
from .output import find_head_tile, store_output
from .page_loading import TileLoader, entry_spec, page_spec
from .plan import Plan
from .rows import BatchRows, Table, VectorRows
from .shared_memory import scratch_types
from .token_scales import TokenScales, value_bias
from .wide_operands import WideOperands

i32 = jnp.int32


def launch(
    plan: Plan,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    table: Table,
    scales: dict[str, jax.Array],
    q_rope: jax.Array | None = None,
    *,
    interpret: Any,
) -> dict[str, jax.Array]:
    """Launch the kernel.

    `scales` are "sm_scale" and, where there are such, "k_scale", "v_scale", flat. `q_rope` has the last
    columns of queries, where `q` lacks them; only operands in shared memory take it.

    Returns
    -------
    dict
        "out" and (with return_lse) "lse" of the rows that lie in one part, and for the merge: "acc" and
        "max_sum" of row pieces, and "cut_rows" [.., 3]: how many pieces follow the first one, its part, its
        row. There is an entry a row, or a part (the row that goes on past its end), whichever are fewer.
    """
    p, tiling = plan.problem, plan.tiling
    unit = plan.operands(interpret=interpret is not None)
    block_kv, heads = plan.config.block_kv, plan.tile_heads
    table_arrays = table.arrays()
    parts = {"q": q} if q_rope is None else {"q": q, "q_rope": q_rope}
    q_arrays = {
        name: part.reshape(p.batch, p.num_kv_heads, p.group_size, part.shape[-1])
        for name, part in parts.items()
    }
    operands = [k_pages, v_pages, *table_arrays.values(), *scales.values(), *q_arrays.values()]
    partials = plan.partial_shapes()
    out_types = {"out": jax.ShapeDtypeStruct((p.batch, p.num_q_heads, p.v_head_dim), p.dtype)}
    if p.return_lse:
        out_types["lse"] = jax.ShapeDtypeStruct((p.batch, p.num_q_heads), f32)
    out_types |= {name: jax.ShapeDtypeStruct(shape, f32) for name, shape in partials.items()}
    if plan.cuts_rows:
        out_types["cut_rows"] = jax.ShapeDtypeStruct((plan.schedule.num_cut_rows, 3), i32)

    def body(*args, **scratch):
        k_gmem, v_gmem, *rest = args[: len(operands)]
        table_gmem = table._replace(**dict(zip(table_arrays, rest, strict=False)))
        names = [f"{name}_gmem" for name in (*scales, *q_arrays, *out_types)]
        refs = dict(zip(names, [*rest[len(table_arrays) :], *args[len(operands) :]], strict=True)) | scratch
        part, head = lax.axis_index("part"), lax.axis_index("head")
        kv_head, _, head_tile = find_head_tile(plan, head)
        scale_log2 = refs["sm_scale_gmem"][0] * f32(softmax.LOG2_E)
        if p.k_scale == "head":
            scale_log2 *= refs["k_scale_gmem"][kv_head]

        if plan.vector_rows:
            memory = (scratch["rows_smem"], scratch["sums_smem"], scratch["rows_ready"])
            rows = VectorRows(table_gmem, tiling, p.batch, *memory)
        else:
            rows = BatchRows(table_gmem, tiling, p.batch)
        cuts = plan.schedule.cuts(rows)
        run = cuts.run(part)

        token_scales = TokenScales(
            tiling, k_pages.shape[:3], LAYOUT_AXES[p.kv_layout].index("page_size"), interpret is not None
        )
        loader = TileLoader(
            entries=entry_spec(tiling),
            k_pages=page_spec(p.kv_layout, tiling, plan.k_columns, p.num_pages, kv_head),
            v_pages=page_spec(p.kv_layout, tiling, plan.v_columns, p.num_pages, kv_head),
            tiling=tiling,
            rows=rows,
            num_stages=plan.config.num_stages,
            indices_gmem=table_gmem.indices,
            k_gmem=k_gmem,
            v_gmem=v_gmem,
            token_scales=token_scales,
            scales=tuple((refs[f"{name}_gmem"], scratch[f"{name}_smem"]) for name in plan.token_scaled),
            entries_smem=scratch.get("entries_smem"),
            entries_ready=scratch.get("entries_ready"),
            v_smem=scratch.get("v_smem"),
            **{name: scratch[name] for name in ("k_smem", "kv_ready")},
        )

        def load_q(b, slot):
            wide = pl.ds(0, p.head_dim) if p.head_dim == plan.k_columns else pl.ds(part * 0, plan.k_columns)
            # Rows past the tile's own heads belong to other heads or read as 0; their results are dropped.
            plgpu.copy_gmem_to_smem(
                refs["q_gmem"].at[b, kv_head, pl.ds(head_tile * heads, heads), wide],
                scratch["q_smem"].at[slot],
                scratch["q_ready"],
            )

        def valid_keys(row, tile, key):
            position, is_key = tiling.position_of(tile, key)
            valid = position < row.kv_len
            if row.kv_start is not None:
                valid &= position >= row.kv_start
            return valid if is_key is None else valid & is_key

        def token_scale(name, slot):
            at = scratch[f"{name}_smem"].at[slot]
            return plgpu.load(at, layout=unit.acc.reduce(1), optimized=False)

        def attend_tile(masked, tile, carry, queries, score_scale, row):
            acc, state, step, cursors = carry
            slot = rem(step, plan.config.num_stages)
            plgpu.barrier_wait(scratch["kv_ready"].at[slot])
            s = unit.scores(scratch["k_smem"].at[slot], queries) * score_scale
            if plan.token_scaled and plan.config.num_stages == 1:
                # This tile's scales were begun after the wait at the end of the last one.
                token_scales.wait()
                plgpu.commit_smem()
            if p.k_scale == "token":
                s *= along_columns(token_scale("k_scale", slot), s.shape)
            valid = None
            if masked:
                key = plgpu.broadcasted_iota(i32, s.shape, 0, layout=unit.acc)
                valid = valid_keys(row, tile, key)
            if p.v_scale == "token":
                v_scale = token_scale("v_scale", slot)
                state, probs, rescale = state.update(s, valid, unit.headroom, value_bias(v_scale))
                probs *= along_columns(v_scale, s.shape)
                if valid is not None:  # unused scales may be NaN
                    probs = jnp.where(valid, probs, f32(0))
            else:
                state, probs, rescale = state.update(s, valid, unit.headroom)
            is_key = functools.partial(valid_keys, row, tile) if masked else None
            acc = acc * along_rows(rescale, acc.shape)
            if p.values_in_keys:
                values = scratch["k_smem"].at[slot, :, pl.ds(0, plan.v_columns)]
            else:
                values = scratch["v_smem"].at[slot]
            acc = unit.add_values(acc, values, probs, scratch["p_smem"], is_key)
            if plan.token_scaled:
                token_scales.wait()  # for the next tile's
            plgpu.commit_smem()  # everyone is done with the slot and with p_smem
            return acc, state, step + 1, loader.load(cursors)

        if not plan.wide:
            pl.when(run.num_tiles > 0)(lambda: load_q(run.row.index, i32(0)))
        cursors = loader.start(run)
        if plan.token_scaled:
            token_scales.wait()
            plgpu.commit_smem()

        if plan.cuts_rows and not plan.schedule.cut_row_of_each_row:

            @pl.when(head == 0)
            def _():
                refs["cut_rows_gmem"][part, 0] = i32(0)

        def store_piece_or_output(row, begin, end, left, acc, max_log2, weight_sum):
            begins, ends = begin == row.first_tile, end == row.end_tile
            whole = begins & ends

            @pl.when(whole)
            def _():
                store_output(plan, unit, row.index, head, acc, max_log2, weight_sum, refs)

            @pl.when(jnp.logical_not(whole))
            def _():
                at = (part, jnp.where(begins, plan.schedule.sides - 1, 0), head)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                scratch["stats_smem"][0] = max_log2
                scratch["stats_smem"][1] = weight_sum
                unit.store_piece(acc, refs, refs["acc_gmem"].at[at])
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(scratch["stats_smem"], refs["max_sum_gmem"].at[at])

            def record(followers):
                entry = row.index if plan.schedule.cut_row_of_each_row else part
                for i, value in enumerate((followers, part, row.index)):
                    refs["cut_rows_gmem"][entry, i] = value

            @pl.when(begins & (head == 0) & jnp.logical_not(whole))
            def _():
                record(cuts.followers(part, row, run.num_tiles - left))

            if plan.schedule.cut_row_of_each_row:
                pl.when(whole & (head == 0))(lambda: record(i32(0)))

        def attend_row(carry):
            left, b, begin, step, q_slot, cursors = carry
            row = rows.row(b)
            end = jnp.minimum(begin + left, row.end_tile)
            if isinstance(unit, WideOperands):
                column = 0
                for name, part in q_arrays.items():
                    source = refs[f"{name}_gmem"].at[b, kv_head]
                    unit.bring_queries(source, head_tile * heads, scratch["q_smem"], column)
                    column += part.shape[-1]
                queries, factor = scratch["q_smem"], None
            else:
                plgpu.barrier_wait(scratch["q_ready"])
                queries, factor = unit.load_queries(scratch["q_smem"].at[q_slot])
                pl.when(left > end - begin)(lambda: load_q(b + 1, 1 - q_slot))
            score_scale = scale_log2
            if factor is not None:
                score_scale = along_rows(factor * scale_log2, (block_kv, heads))

            def attend(masked):
                return lambda tile, c: attend_tile(masked, tile, c, queries, score_scale, row)

            acc = full((plan.v_columns, heads), 0, unit.acc)
            c = (acc, softmax.State.empty((block_kv, heads), unit.acc), step, cursors)
            if tiling.dense:  # only the tiles at the ends of the row's keys need a mask
                full_end = jnp.clip(tiling.tile_of(row.kv_len), begin, end)
                full_begin = begin
                if row.kv_start is not None:
                    first_full = tiling.tile_of(row.kv_start + (block_kv - 1))
                    full_begin = jnp.clip(first_full, begin, full_end)
                    c = lax.fori_loop(begin, full_begin, attend(True), c)
                c = lax.fori_loop(full_begin, full_end, attend(False), c)
                c = lax.fori_loop(full_end, end, attend(True), c)
            else:
                c = lax.fori_loop(begin, end, attend(True), c)
            acc, state, step, cursors = c
            weight_sum = state.weights.sum(axis=0)
            if plan.cuts_rows:
                store_piece_or_output(row, begin, end, left, acc, state.max_log2, weight_sum)
            else:
                store_output(plan, unit, b, head, acc, state.max_log2, weight_sum, refs)
            return left - (end - begin), b + 1, rows.row(b + 1).first_tile, step, 1 - q_slot, cursors

        lax.while_loop(
            lambda c: c[0] > 0,
            attend_row,
            (run.num_tiles, run.row.index, run.first_tile, i32(0), i32(0), cursors),
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
