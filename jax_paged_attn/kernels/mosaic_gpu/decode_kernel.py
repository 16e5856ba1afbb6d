"""The decode kernel: one query token a row, or a few, over a paged cache, Pallas Mosaic GPU.

Thread block (part, head) walks part `part` of the list of (row, tile) for one kv head and some of its query
heads. A row that lies in one part is written as it finishes; a row cut by the ends of parts leaves float32
partial results, which `merge_kernel.py` combines in a second launch.

`schedule.py` says which tiles, `page_loading.py` copies them, `softmax.py` is the arithmetic between the two
products. `layouts.py` has those of 16-bit caches, `byte_operands.py` those of quantized ones, and
`wide_operands.py` those of large groups.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.validation import LAYOUT_AXES

from . import mask_words, reductions, softmax
from .columns import Columns
from .integers import rem
from .layouts import along_columns, along_rows, f32, full
from .output import find_head_tile, store_output
from .page_loading import TileLoader, entry_spec, page_spec
from .plan import Plan
from .rows import BatchRows, Table, VectorRows
from .scores import SoftCap
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
    values: dict[str, jax.Array],
    *,
    interpret: Any,
) -> dict[str, jax.Array]:
    """Launch the kernel.

    Parameters
    ----------
    q : [batch, num_kv_heads, queries of a kv head, head_dim]
    values
        "sm_scale" and, where there are such, other scales and modifiers, flat; and the words of a mask.

    Returns
    -------
    dict
        "out" and (with return_lse) "lse" of the rows that lie in one part, and for the merge: "acc" and
        "max_sum" of row pieces, and "cut_rows" [.., 3]: how many pieces follow the first one, its part, its
        row. There is an entry a row, or a part (the row that goes on past its end), whichever are fewer.
    """
    p, tiling = plan.problem, plan.tiling
    unit = plan.operands(interpret=interpret is not None)
    block_kv, heads, num_words = plan.config.block_kv, plan.tile_heads, mask_words.num_words(p.mask_len)
    table_arrays = table.arrays()
    operands = [q, k_pages, v_pages, *table_arrays.values(), *values.values()]
    partials = plan.partial_shapes()
    out_types = {"out": jax.ShapeDtypeStruct((p.batch, plan.num_q_heads, p.v_head_dim), p.dtype)}
    if p.return_lse:
        out_types["lse"] = jax.ShapeDtypeStruct((p.batch, plan.num_q_heads), f32)
    out_types |= {name: jax.ShapeDtypeStruct(shape, f32) for name, shape in partials.items()}
    if plan.cuts_rows:
        out_types["cut_rows"] = jax.ShapeDtypeStruct((plan.num_cut_rows, 3), i32)

    def body(*args, **scratch):
        q_gmem, k_gmem, v_gmem, *rest = args[: len(operands)]
        if plan.wide:
            scratch["q_smem"], scratch["out_smem"] = scratch.pop("q_or_out_smem")
        table_gmem = table._replace(**dict(zip(table_arrays, rest, strict=False)))
        names = [f"{name}_gmem" for name in (*values, *out_types)]
        refs = dict(zip(names, [*rest[len(table_arrays) :], *args[len(operands) :]], strict=True)) | scratch
        part, head = lax.axis_index("part"), lax.axis_index("head")
        kv_head, _, head_tile = find_head_tile(plan, head)
        columns = Columns(heads, p.group_size, kv_head, head_tile * heads)
        window = plan.window
        if "window_left" in p.given:
            window = dataclasses.replace(window, left=refs["window_left_gmem"][0])
        soft_cap = SoftCap.of(refs["soft_cap_gmem"][0]) if "soft_cap" in p.given else None
        scale = refs["sm_scale_gmem"][0] * f32(softmax.LOG2_E)
        if soft_cap is not None:
            scale = refs["sm_scale_gmem"][0] / soft_cap.size
        if p.k_scale == "head":
            scale *= refs["k_scale_gmem"][kv_head]

        if plan.vector_rows:
            memory = (scratch["rows_smem"], scratch["sums_smem"], scratch["rows_ready"])
            rows = VectorRows(table_gmem, tiling, p.batch, *memory, window)
        else:
            rows = BatchRows(table_gmem, tiling, p.batch, window)
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
            **{name: scratch[name] for name in ("k_smem", "v_smem", "kv_ready")},
        )

        def load_q(b, slot):
            wide = pl.ds(0, p.head_dim) if p.head_dim == plan.k_columns else pl.ds(part * 0, plan.k_columns)
            # Rows past the tile's own heads belong to other heads or read as 0; their results are dropped.
            plgpu.copy_gmem_to_smem(
                q_gmem.at[b, kv_head, pl.ds(head_tile * heads, heads), wide],
                scratch["q_smem"].at[slot],
                scratch["q_ready"],
            )

        def valid_keys(row, tile, key):
            """Which rows of a tile are keys that a query may see, as far as ranges tell; their positions."""
            position, is_key = tiling.position_of(tile, key)
            valid = position < row.kv_len
            if row.kv_start is not None:
                valid &= position >= row.kv_start
            return valid if is_key is None else valid & is_key, position

        def seen_keys(row, tile, key):
            """Which rows of a tile are keys that some query sees."""
            valid, position = valid_keys(row, tile, key)
            if p.mask_len and jnp.issubdtype(p.v_dtype, jnp.floating):  # integers have no NaN to keep out
                column = position - (row.kv_len - p.mask_len)
                seen = refs["mask_seen_gmem"].at[row.index]
                drafted = mask_words.bit(lambda w: jnp.full_like(column, seen[w]), num_words, column)
                valid &= drafted | (column < 0)
            return valid

        def visible_keys(row, tile, key):
            """Which keys each column sees, [block_kv, heads]."""
            valid, position = valid_keys(row, tile, key)
            if not window.differs:
                return valid

            def is_drafted(column):
                def word(w):
                    of_columns = refs["mask_words_gmem"].at[row.index, head_tile, w]
                    words = plgpu.load(of_columns, layout=unit.acc.reduce(0), optimized=False)
                    return along_rows(words, column.shape)

                return mask_words.bit(word, num_words, column)

            return valid & window.sees(row, position, columns.tokens(unit.acc), is_drafted)

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
                unit.meet()
            if p.k_scale == "token":
                s *= along_columns(token_scale("k_scale", slot), s.shape)
            if soft_cap is not None:
                s = soft_cap.apply(s)
            if "alibi_slopes" in p.given:
                key = plgpu.broadcasted_iota(i32, s.shape[:1], 0, layout=unit.acc.reduce(1))
                position, _ = tiling.position_of(tile, key)
                distance = along_columns((position - (row.kv_len - p.q_len)).astype(f32), s.shape)
                if p.q_len > 1:
                    distance -= along_rows(columns.tokens(unit.acc).astype(f32), s.shape)
                slopes = columns.load(scratch["alibi_slopes_smem"], unit.acc)
                s += distance * along_rows(slopes, s.shape)
            valid = None
            if masked:
                key = plgpu.broadcasted_iota(i32, s.shape, 0, layout=unit.acc)
                valid = visible_keys(row, tile, key)
            if p.v_scale == "token":
                v_scale = token_scale("v_scale", slot)
                state, acc, probs = state.update(
                    unit, scratch["fold_smem"], acc, s, valid, value_bias(v_scale)
                )
                probs *= along_columns(v_scale, s.shape)
                if valid is not None:  # unused scales may be NaN
                    probs = jnp.where(valid, probs, f32(0))
            else:
                state, acc, probs = state.update(unit, scratch["fold_smem"], acc, s, valid)
            is_key = functools.partial(seen_keys, row, tile) if masked else None
            acc = unit.add_values(acc, scratch["v_smem"].at[slot], probs, scratch["p_smem"], is_key)
            if plan.token_scaled:
                token_scales.wait()  # for the next tile's
            unit.meet()  # everyone is done with the slot and with p_smem
            return acc, state, step + 1, loader.load(run, step, cursors)

        if not plan.wide:
            pl.when(run.num_tiles > 0)(lambda: load_q(run.row.index, i32(0)))
        cursors = loader.start(run)
        for name in plan.head_values:
            columns.bring(refs[f"{name}_gmem"], f32(softmax.LOG2_E), scratch[f"{name}_smem"])
        if plan.head_values:
            plgpu.commit_smem()
        if plan.token_scaled:
            token_scales.wait()
            unit.meet()

        if plan.cuts_rows and not plan.cut_row_of_each_row:

            @pl.when(head == 0)
            def _():
                refs["cut_rows_gmem"][part, 0] = i32(0)

        def store(b, acc, max_log2, weight_sum):
            sinks = columns.load(scratch["sinks_smem"], unit.acc) if "sinks" in p.given else None
            store_output(plan, unit, b, head, acc, max_log2, weight_sum, sinks, refs)

        def store_piece_or_output(row, begin, end, left, acc, max_log2, weight_sum):
            begins, ends = begin == row.first_tile, end == row.end_tile
            whole = begins & ends

            @pl.when(whole)
            def _():
                store(row.index, acc, max_log2, weight_sum)

            @pl.when(jnp.logical_not(whole))
            def _():
                at = (part, jnp.where(begins, plan.sides - 1, 0), head)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                scratch["stats_smem"][0] = max_log2
                scratch["stats_smem"][1] = weight_sum
                unit.store_piece(acc, refs, refs["acc_gmem"].at[at])
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(scratch["stats_smem"], refs["max_sum_gmem"].at[at])

            def record(followers):
                entry = row.index if plan.cut_row_of_each_row else part
                for i, value in enumerate((followers, part, row.index)):
                    refs["cut_rows_gmem"][entry, i] = value

            @pl.when(begins & (head == 0) & jnp.logical_not(whole))
            def _():
                record(cuts.followers(part, row, run.num_tiles - left))

            if plan.cut_row_of_each_row:
                pl.when(whole & (head == 0))(lambda: record(i32(0)))

        def attend_row(carry):
            left, b, begin, step, q_slot, cursors = carry
            row = rows.row(b)
            end = jnp.minimum(begin + left, row.end_tile)
            if isinstance(unit, WideOperands):
                unit.bring_queries(q_gmem.at[b, kv_head], head_tile * heads, scratch["q_smem"])
                queries, factor = scratch["q_smem"], None
            else:
                plgpu.barrier_wait(scratch["q_ready"])
                queries, factor = unit.load_queries(scratch["q_smem"].at[q_slot])
                pl.when(left > end - begin)(lambda: load_q(b + 1, 1 - q_slot))
            score_scale = scale
            if factor is not None:
                score_scale = along_rows(factor * scale, (block_kv, heads))

            def attend(masked):
                return lambda tile, c: attend_tile(masked, tile, c, queries, score_scale, row)

            acc = full((plan.v_columns, heads), 0, unit.acc)
            c = (acc, softmax.State.empty(heads), step, cursors)
            if tiling.dense:  # only the tiles at the ends of the row's keys need a mask
                first_key, end_key = window.seen_by_all(row)
                full_end = jnp.clip(tiling.tile_of(end_key), begin, end)
                if first_key is None:
                    c = lax.fori_loop(begin, full_end, attend(False), c)
                    c = lax.fori_loop(full_end, end, attend(True), c)
                else:
                    first_full = tiling.tile_of(first_key + (block_kv - 1))
                    full_begin = jnp.clip(first_full, begin, full_end)

                    def attend_end(last, c):
                        first = jnp.where(last > 0, full_end, begin)
                        full = jnp.where(last > 0, end, full_begin)
                        c = lax.fori_loop(first, full, attend(True), c)
                        return lax.fori_loop(full, jnp.maximum(full, full_end), attend(False), c)

                    # One code for the masked tiles of both ends: two would take more registers.
                    c = lax.fori_loop(0, 2, attend_end, c)
            else:
                c = lax.fori_loop(begin, end, attend(True), c)
            acc, state, step, cursors = c
            weight_sum = reductions.over_threads(unit, state.weights, "sum", scratch["fold_smem"])
            if plan.cuts_rows:
                store_piece_or_output(row, begin, end, left, acc, state.max_log2, weight_sum)
            else:
                store(b, acc, state.max_log2, weight_sum)
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
        # Shared memory passes between warps where they meet: automatic barriers cost more.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="paged_decode",
        interpret=interpret,
    )(*operands)
    return dict(zip(out_types, outs, strict=True))
