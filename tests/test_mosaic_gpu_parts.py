"""The decode kernel's parts, each in a small kernel of its own: interpreted on CPU, real on a GPU."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn import reference, testing
from jax_paged_attn.calls.attention import Operands, Problem
from jax_paged_attn.kernels.mosaic_gpu import (
    attention,
    decode_kernel,
    mask_words,
    reductions,
    scores,
    softmax,
)
from jax_paged_attn.kernels.mosaic_gpu.layouts import MMA_ROWS, NUM_WARPS, MatrixUnit, along_rows, f32, full
from jax_paged_attn.kernels.mosaic_gpu.page_loading import page_spec, window
from jax_paged_attn.kernels.mosaic_gpu.plan import Plan
from jax_paged_attn.kernels.mosaic_gpu.rows import Row
from jax_paged_attn.kernels.mosaic_gpu.shared_tile import SharedTile
from jax_paged_attn.kernels.mosaic_gpu.tiling import Tiling
from jax_paged_attn.validation import LAYOUT_AXES

INTERPRETED = testing.interpreting("mosaic_gpu")
i32 = jnp.int32


def run(body, out_type, scratch_types, *operands, grid=(), grid_names=()):
    """Run a kernel as the decode kernel is run."""
    return plgpu.kernel(
        body,
        grid=grid,
        grid_names=grid_names,
        out_type=out_type,
        scratch_types=scratch_types,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if INTERPRETED else None,
    )(*operands)


@pytest.mark.parametrize("kv_layout", ["HND", pytest.param("NHD", marks=pytest.mark.newest), "HPND"])
def test_a_window_is_the_block_that_the_spec_describes(kv_layout):
    heads, num_pages, columns, head = 3, 5, 64, 2
    ids = np.array([4, 1, 3, 0, 2, 4, 2, 1], np.int32)  # the row's pages
    # (page size, tile, copy of the tile, the page of the row it brings, its first key there): a small page;
    # the first, second and last tile of a page of 144 keys, where the last has 16.
    copies = [(16, 1, 2, 6, 0), (144, 0, 0, 0, 0), (144, 4, 0, 1, 64), (144, 8, 0, 2, 128)]
    order = [LAYOUT_AXES["NHD"].index(axis) for axis in LAYOUT_AXES[kv_layout]]
    pools, expected = {}, []
    for page_size, _, _, page, first_key in copies:
        shape = (num_pages, page_size, heads, columns)
        pool = np.arange(math.prod(shape)).reshape(shape) % 251  # exact in bfloat16
        pools[page_size] = jnp.asarray(np.ascontiguousarray(pool.transpose(order)), jnp.bfloat16)
        keys = pool[ids[page], first_key : first_key + min(page_size, 64), head]
        expected.append(np.pad(keys, ((0, 64 - len(keys)), (0, 0))))

    def body(ids_gmem, small_gmem, large_gmem, out_gmem, tile_smem, tile_ready):
        gmem = {16: small_gmem, 144: large_gmem}
        for i, (page_size, tile, copy, _, _) in enumerate(copies):
            tiling = Tiling.choose(page_size, 64, 2 * columns)
            spec = page_spec(kv_layout, tiling, columns, num_pages, i32(head))
            row = Row(*(i32(x) for x in (0, len(ids) * page_size, 0, 0, len(ids), 0)))
            entries = [ids_gmem[tiling.first_page(tile) + j] for j in range(tiling.pages_per_tile)]
            assert spec.index_map is not None
            block = spec.index_map(row, i32(tile), copy, entries)
            layout = plgpu.Layout.WG_STRIDED((64, columns), vec_size=2)
            tile_smem[...] = full((64, columns), 0, layout, jnp.bfloat16)
            plgpu.commit_smem()
            target = tile_smem.at[: tiling.copy_rows]
            plgpu.copy_gmem_to_smem(window(spec, gmem[page_size], block), target, tile_ready)
            plgpu.barrier_wait(tile_ready)
            plgpu.copy_smem_to_gmem(tile_smem, out_gmem.at[i])
            plgpu.wait_smem_to_gmem(0)

    out = run(
        body,
        jax.ShapeDtypeStruct((len(copies), 64, columns), jnp.bfloat16),
        [plgpu.SMEM((64, columns), jnp.bfloat16), plgpu.Barrier()],
        jnp.asarray(ids),
        pools[16],
        pools[144],
    )
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.stack(expected))


@pytest.mark.parametrize("page_size", [1, 12, 16, 64, 544])
def test_an_index_map_never_follows_an_entry_past_the_rows_keys(page_size):
    num_pages, tiling = 7, Tiling.choose(page_size, 64, 128)
    index_map = page_spec("HND", tiling, 64, num_pages, i32(0)).index_map
    assert index_map is not None
    for kv_len in (0, 1, page_size, page_size + 1, 63, 64, 65, 200):
        used = max(-(-kv_len // page_size), 1)
        end_tile = tiling.tile_of(max(kv_len - 1, 0)) + 1
        row = Row(*(i32(x) for x in (0, kv_len, 0, 0, end_tile, 0)))
        for tile in range(end_tile):
            first = tiling.first_page(tile)
            in_row = [3 + (first + j) % 3 for j in range(tiling.pages_per_tile)]
            entries = [page if first + j < used else -1 for j, page in enumerate(in_row)]
            for copy in range(tiling.pages_per_tile):
                page, head, block, column = index_map(row, i32(tile), copy, [i32(x) for x in entries])
                assert int(page) in (entries[copy], entries[0])
                if first + copy < used:
                    assert int(page) == entries[copy]
                assert (int(head), int(block), int(column)) == (0, tiling.block_in_page(tile), 0)


@pytest.mark.parametrize(("entry", "page"), [(-1, 0), (-(2**31), 0), (7, 6), (2**31 - 1, 6), (5, 5)])
def test_an_index_map_clips_page_ids(entry, page):
    tiling = Tiling.choose(64, 64, 128)
    row = Row(*(i32(x) for x in (0, 64, 0, 0, 1, 0)))
    for kv_layout, axis in (("HND", 0), ("NHD", 0), ("HPND", 1)):
        index_map = page_spec(kv_layout, tiling, 64, 7, i32(0)).index_map
        assert index_map is not None
        assert int(index_map(row, i32(0), 0, [i32(entry)])[axis]) == page


@pytest.mark.newest
def test_another_index_map_reads_other_pages(monkeypatch):
    """The index_map alone decides which pages are read."""
    inputs = testing.make_inputs(testing.Case("swapped", (40, 17), page_size=16), spare_pages=0)
    q, k, v, table = inputs.args
    k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
    num_pages = k.shape[0]

    def spec_of_the_next_page(*args):
        spec = page_spec(*args)

        def index_map(*at):
            assert spec.index_map is not None
            page, *rest = spec.index_map(*at)
            return (lax.rem(page + 1, i32(num_pages)), *rest)

        return dataclasses.replace(spec, index_map=index_map)

    monkeypatch.setattr(decode_kernel, "page_spec", spec_of_the_next_page)
    problem = Problem(
        batch=2,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        page_size=16,
        num_pages=num_pages,
        num_entries=table.indices.shape[0],
        **dict.fromkeys(("dtype", "k_dtype", "v_dtype"), np.dtype(q.dtype)),
        return_lse=True,
    )
    config = attention.Config(num_stages=2, num_parts=3)
    # Not through the public function, whose compilations outlive this test.
    call = jax.jit(
        lambda q, k, v, table: attention.run(
            problem, config, Operands(q[:, None], k, v, table, jnp.float32(0.1)), interpret=INTERPRETED
        )
    )
    used = jnp.where((table.indices >= 0) & (table.indices < num_pages), table.indices, 0)
    next_pages = dataclasses.replace(table, indices=(used + 1) % num_pages)
    expected = reference.paged_attention(q, k, v, next_pages, sm_scale=0.1, return_lse=True)
    result = jax.tree.map(lambda x: x[:, 0], call(q, k, v, table))
    testing.assert_close(result, expected)
    as_in_table = reference.paged_attention(q, k, v, table, sm_scale=0.1, return_lse=True)
    assert not np.allclose(expected[0], as_in_table[0], atol=0.1)


# Of float16, weights use the whole range.
UNITS = {name: MatrixUnit(jnp.dtype(name), INTERPRETED) for name in ("bfloat16", "float16")}


def online_softmax(scores, valid, values, unit):
    """Run softmax.State over tiles: the weighted sums of `values`, the sums of weights and the maxima.

    `scores` are float32[batch, tiles, 64, heads] times log2(e), `valid` int32 alike or None, and `values`
    alike. A row of the batch is a thread block.
    """
    batch, tiles, block_kv, heads = scores.shape
    layout = unit.acc

    def body(*args, acc_smem, stats_smem, fold_smem):
        *tiles_gmem, acc_gmem, stats_gmem = args
        b = lax.axis_index("row")

        def add_tile(i, carry):
            acc, state = carry
            tile = [plgpu.load(ref.at[b, i], layout=layout, optimized=False) for ref in tiles_gmem]
            is_valid = None if valid is None else tile[2] > 0
            state, acc, weights = state.update(unit, fold_smem, acc, tile[0], is_valid)
            return acc + weights * tile[1], state

        empty = (full((block_kv, heads), 0, layout), softmax.State.empty(heads))
        acc, state = lax.fori_loop(0, tiles, add_tile, empty)
        acc_smem[...] = acc
        stats_smem[0] = reductions.over_threads(unit, state.weights, "sum", fold_smem)
        stats_smem[1] = state.max_log2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(acc_smem, acc_gmem.at[b])
        plgpu.copy_smem_to_gmem(stats_smem, stats_gmem.at[b])
        plgpu.wait_smem_to_gmem(0)

    shapes = {"acc_smem": (block_kv, heads), "stats_smem": (2, heads)}
    scratch = shapes | {"fold_smem": (NUM_WARPS, heads)}
    acc, stats = run(
        body,
        [jax.ShapeDtypeStruct((batch, *shape), f32) for shape in shapes.values()],
        {name: plgpu.SMEM(shape, f32) for name, shape in scratch.items()},
        *(x for x in (scores, values, valid) if x is not None),
        grid=(batch,),
        grid_names=("row",),
    )
    return np.asarray(acc, np.float64).sum(axis=1), np.asarray(stats[:, 0]), np.asarray(stats[:, 1])


def random_scores(rng, scale):
    return scale * rng.standard_normal((3, 64, 8)).astype(np.float32)


@pytest.mark.parametrize("unit", UNITS)
def test_online_softmax_without_a_mask(unit):
    rng = np.random.default_rng(0)
    # Rising and falling by tile too, so that each rescaling is seen.
    scores = np.stack([random_scores(rng, 1), random_scores(rng, 5000)])
    scores = np.concatenate([scores, scores[:1] + np.array([[[-5000]], [[0]], [[5000]]], np.float32)])
    scores = np.concatenate([scores, scores[2:, ::-1], np.full_like(scores[:1], -5000)])
    values = rng.standard_normal(scores.shape).astype(np.float32)
    check_softmax(scores, None, values, UNITS[unit])


@pytest.mark.newest
@pytest.mark.parametrize("unit", UNITS)
def test_online_softmax_with_a_mask(unit):
    rng = np.random.default_rng(1)
    scores = np.stack([random_scores(rng, scale) for scale in (1, 5000, 1, 1, 1)])
    scores[3] -= 5000  # below what an empty state could be taken to hold
    scores[2, 0] = np.nan  # unused slots may hold it; all of this tile is masked
    values = rng.standard_normal(scores.shape).astype(np.float32)
    valid = (rng.random(scores.shape) < 0.3).astype(np.int32)
    valid[2:4, 0] = 0  # first a tile without keys
    valid[3, 2] = 0  # and last
    valid[4] = 0  # an empty row
    check_softmax(scores, valid, values, UNITS[unit])


def check_softmax(scores, valid, values, unit):
    on_device = [None if x is None else jnp.asarray(x) for x in (scores, valid, values)]
    acc, weight_sum, max_log2 = online_softmax(on_device[0], on_device[1], on_device[2], unit)
    keys = np.ones(scores.shape, bool) if valid is None else valid > 0
    exact = np.where(keys, scores.astype(np.float64), -np.inf)
    some = keys.any(axis=(1, 2))
    headroom = unit.max_weight_log2 - softmax.SLACK
    peak = np.where(some, exact.max(axis=(1, 2)) - headroom, softmax.LOWEST).astype(np.float32)
    assert ((max_log2 <= peak) & (max_log2 >= peak - softmax.SLACK)).all()
    assert (max_log2 < peak).any()
    peak = max_log2.astype(np.float64)
    weights = np.exp2(exact - peak[:, None, None])
    np.testing.assert_allclose(weight_sum, weights.sum(axis=(1, 2)), rtol=1e-5)
    atol = 1e-4 * 2**unit.max_weight_log2
    np.testing.assert_allclose(acc, (weights * values).sum(axis=(1, 2)), rtol=1e-5, atol=atol)
    np.testing.assert_array_equal(weight_sum > 0, some)


@pytest.mark.parametrize(("dtype", "heads"), [("bfloat16", 8), ("float16", 16)])
def test_the_matrix_unit_and_its_twin_agree(dtype, heads):
    """The product, and the row numbers that masks are made of: on a GPU the hardware's, on CPU the twins'."""
    depth, dtype = 64, jnp.dtype(dtype)
    unit, twin = MatrixUnit(dtype, INTERPRETED), MatrixUnit(dtype, interpret=True)
    rng = np.random.default_rng(heads)

    def integers(*shape, dtype):  # small ones: products are exact in any order of summation
        return jnp.asarray(rng.integers(-8, 9, shape), dtype)

    acc, lhs = integers(MMA_ROWS, heads, dtype=f32), integers(MMA_ROWS, depth, dtype=dtype)
    rhs = integers(heads, depth, dtype=dtype)  # turned, as q lies in memory

    def body(acc_gmem, lhs_gmem, rhs_gmem, out_gmem, rhs_smem, out_smem, rhs_ready):
        plgpu.copy_gmem_to_smem(rhs_gmem, rhs_smem, rhs_ready)
        plgpu.barrier_wait(rhs_ready)
        acc = plgpu.load(acc_gmem, layout=unit.acc, optimized=False)
        lhs = plgpu.load(lhs_gmem, layout=unit.lhs, optimized=False)
        rhs = plgpu.load(rhs_smem.transpose((1, 0)), layout=unit.rhs, optimized=False)
        column = plgpu.broadcasted_iota(i32, (depth,), 0, layout=unit.lhs.reduce(0))
        below = along_rows(column, lhs.shape) < 40
        out_smem[0] = unit.dot(acc, lhs, rhs)
        out_smem[1] = unit.dot(acc, jnp.where(below, lhs, full(lhs.shape, 0, unit.lhs, dtype)), rhs)
        out_smem[2] = plgpu.broadcasted_iota(i32, acc.shape, 0, layout=unit.acc).astype(f32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    shape = (3, MMA_ROWS, heads)
    scratch = [
        SharedTile.choose(dtype, depth, depth).scratch(rhs.shape[0]),
        plgpu.SMEM(shape, f32),
        plgpu.Barrier(),
    ]
    out = run(body, jax.ShapeDtypeStruct(shape, f32), scratch, acc, lhs, rhs)
    column = jnp.arange(depth)
    row = jnp.broadcast_to(jnp.arange(MMA_ROWS, dtype=f32)[:, None], acc.shape)
    products = [twin.dot(acc, x, rhs.T) for x in (lhs, jnp.where(column < 40, lhs, jnp.zeros_like(lhs)))]
    chex.assert_trees_all_equal(out, jnp.stack([*products, row]))


def test_tanh_to_a_few_units_in_the_last_place():
    x = np.concatenate(
        [np.geomspace(1e-30, 100, 4000), [0, 0.25, np.nextafter(np.float32(0.25), 0), 1e30, np.inf]]
    )
    x = np.concatenate([x, -x]).astype(np.float32)
    np.testing.assert_allclose(scores.tanh(jnp.asarray(x)), np.tanh(x.astype(np.float64)), rtol=1e-6)
    assert np.isnan(scores.tanh(jnp.float32(np.nan)))


def test_a_cap_of_0_changes_no_bit():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000) * 1000, f32)
    cap = scores.SoftCap.of(jnp.float32(0))
    chex.assert_trees_all_equal(cap.apply(x / cap.size), x * f32(softmax.LOG2_E))


@pytest.mark.parametrize("mask_len", [1, 32, 33, 128])
def test_the_words_of_a_mask(mask_len):
    problem = Problem(
        batch=3,
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        page_size=16,
        num_pages=9,
        num_entries=9,
        **dict.fromkeys(("dtype", "k_dtype", "v_dtype"), np.dtype(jnp.bfloat16)),
        q_len=7,
        mask_len=mask_len,
    )
    plan = Plan(problem, attention.Config())
    mask = np.random.default_rng(mask_len).random((3, 7, mask_len)) < 0.3
    packed = mask_words.pack(plan, jnp.asarray(mask))
    words, column = mask_words.num_words(mask_len), jnp.arange(mask_len, dtype=i32)
    for row in range(3):
        seen = mask_words.bit(lambda w: packed["mask_seen"][row, w], words, column)  # noqa: B023
        np.testing.assert_array_equal(seen, mask[row].any(axis=0))
        for c in range(plan.group_size):
            tile, at = divmod(c, plan.tile_heads)
            of_column = packed["mask_words"][row, tile, :, at]
            visible = mask_words.bit(lambda w: of_column[w], words, column)  # noqa: B023
            np.testing.assert_array_equal(visible, mask[row, c // 3])
