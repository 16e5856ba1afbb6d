"""How keys fall into tiles, for every page size and head_dim; plain integers, no kernel."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn.calls.attention import Problem
from jax_paged_attn.kernels.mosaic_gpu.plan import Config, Plan
from jax_paged_attn.kernels.mosaic_gpu.tiling import Tiling

BLOCK_KV = 64
PAGE_SIZES = (*range(1, 131), 544, 2048)
HEAD_DIMS = tuple(range(16, 257, 8))


def plan(page_size, head_dim, block_kv=BLOCK_KV):
    problem = Problem(
        batch=1,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=head_dim,
        v_head_dim=head_dim,
        page_size=page_size,
        num_pages=9,
        num_entries=9,
        **dict.fromkeys(("dtype", "k_dtype", "v_dtype"), np.dtype(jnp.bfloat16)),
    )
    return Plan(problem, Config(block_kv=block_kv))


def keys_of_tiles(tiling: Tiling, tiles: int):
    """{(tile, row): position} by `position_of`."""
    keys = {}
    for tile, row in itertools.product(range(tiles), range(tiling.block_kv)):
        position, is_key = tiling.position_of(tile, row)
        if is_key is None or is_key:
            keys[tile, row] = position
    return keys


def copied_keys(tiling: Tiling, tiles: int):
    """{(tile, row): position} by the copies, each of which brings a block of a page to its place."""
    keys = {}
    for tile, copy in itertools.product(range(tiles), range(tiling.pages_per_tile)):
        page, offset = tiling.first_page(tile) + copy, tiling.block_in_page(tile) * tiling.copy_rows
        assert 0 <= offset < tiling.page_size  # what such a copy brings past the page's end is no key
        for i in range(min(tiling.copy_rows, tiling.page_size - offset)):
            keys[tile, copy * tiling.pitch + i] = page * tiling.page_size + offset + i
    return keys


@pytest.mark.parametrize("block_kv", [64, 128])
def test_each_key_in_one_place_and_copies_aligned(block_kv):
    plans = [plan(page_size, head_dim, block_kv) for page_size in PAGE_SIZES for head_dim in HEAD_DIMS]
    for tiling in {p.tiling for p in plans}:  # those of many head_dims are alike
        tiles = 2 * tiling.tiles_per_page  # two tiles of small pages, or two large pages
        keys = keys_of_tiles(tiling, tiles)
        assert sorted(keys.values()) == list(range(len(keys))), tiling
        assert all(tiling.tile_of(position) == tile for (tile, _), position in keys.items()), tiling
        assert tiling.tile_of(len(keys)) == tiles, tiling
        assert copied_keys(tiling, tiles) == keys, tiling
        assert tiling.dense == (len(keys) == tiles * block_kv), tiling
        assert len(keys) <= tiles * tiling.keys_per_tile, tiling
    for p in plans:
        tiling = p.tiling
        offsets = [copy * tiling.pitch for copy in range(tiling.pages_per_tile)]
        assert offsets[-1] + tiling.copy_rows <= block_kv, p
        for columns in (p.k_columns, p.v_columns):
            assert not any(offset * columns * p.problem.dtype.itemsize % 128 for offset in offsets), p
        if tiling.swizzled:  # in whole groups of 8 rows
            assert not any(rows % 8 for rows in (*offsets, tiling.copy_rows)), p


@pytest.mark.parametrize("page_size", [1, 12, 16, 61, 64, 100, 128, 544])
def test_traced_positions_equal_plain_ones(page_size):
    tiling = plan(page_size, 16).tiling
    positions = np.arange(3 * max(page_size, BLOCK_KV), dtype=np.int32)
    tiles = jax.jit(tiling.tile_of)(positions)
    assert tiles.dtype == jnp.int32
    assert tiles.tolist() == [tiling.tile_of(position) for position in positions.tolist()]
    rows = np.arange(BLOCK_KV, dtype=np.int32)
    for tile in range(4):
        traced = jax.jit(tiling.position_of)(jnp.int32(tile), rows)
        plain = [tiling.position_of(tile, row) for row in rows.tolist()]
        np.testing.assert_array_equal(traced[0], [position for position, _ in plain])
        are_keys = [None] * BLOCK_KV if traced[1] is None else traced[1].tolist()
        assert are_keys == [is_key for _, is_key in plain]
