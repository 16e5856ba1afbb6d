"""Page tables whose values make no sense: clipped as documented, alike by every implementation."""

import jax.numpy as jnp
import numpy as np
import pytest

import jax_paged_attn
from jax_paged_attn import PageTable, dispatch, paged_attention, reference, testing
from jax_paged_attn.kernels.mosaic_gpu import config
from jax_paged_attn.validation import LAYOUT_AXES

NAMES = [implementation.name for implementation in dispatch.IMPLEMENTATIONS]
LOWEST, GREATEST = -(2**31), 2**31 - 1
NUM_PAGES, PAGES_PER_ROW = 9, 3
UNREACHABLE = (1, 2)  # pages that hold NaN


def hostile_inputs(batch, page_size, kv_layout, has_kv_starts, num_splits):
    """Tables in which every field has values out of range, also in entries that a row uses."""
    rng = np.random.default_rng((batch, page_size))
    num_entries, capacity = batch * PAGES_PER_ROW, PAGES_PER_ROW * page_size

    def spoil(values, *absurd):
        values = np.array(values, np.int32)
        values[rng.permutation(values.size)[: len(absurd)]] = absurd
        return jnp.asarray(values)

    reachable = [page for page in range(NUM_PAGES) if page not in UNREACHABLE]
    table = PageTable(
        indices=spoil(rng.choice(reachable, num_entries), -1, -7, LOWEST, NUM_PAGES, 1000, GREATEST),
        row_starts=spoil(np.arange(batch) * PAGES_PER_ROW, -2, LOWEST, num_entries - 1, GREATEST - 100),
        row_pages=spoil(np.full(batch, PAGES_PER_ROW), -1, LOWEST, num_entries + 1),
        kv_lens=spoil(rng.integers(0, capacity + 1, batch), -1, LOWEST, capacity + 1, GREATEST),
    )
    sizes = {"num_pages": NUM_PAGES, "num_kv_heads": 2, "page_size": page_size, "head_dim": 64}
    axes = LAYOUT_AXES[kv_layout]
    pools = rng.standard_normal((2, *(sizes[axis] for axis in axes)))
    np.moveaxis(pools, axes.index("num_pages") + 1, 0)[list(UNREACHABLE)] = np.nan
    q = rng.standard_normal((batch, 4, 64))
    options = {"kv_layout": kv_layout}
    if has_kv_starts:
        options["kv_starts"] = spoil(rng.integers(0, capacity, batch), -5, LOWEST, capacity, 2**30)
    arrays = (jnp.asarray(x, jnp.bfloat16) for x in (q, *pools))
    return testing.Inputs("paged_attention", (*arrays, table), options, {"num_splits": num_splits})


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param((6, 16, "HND", False, None), marks=pytest.mark.newest),
        (6, 100, "NHD", True, None),
        (6, 12, "HPND", True, 2),
        (40, 8, "HND", True, None),  # rows enough for the vector schedule
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", NAMES)
def test_absurd_tables(inputs, implementation):
    inputs = hostile_inputs(*inputs)
    expected = inputs.expected()
    assert np.isfinite(expected[0]).all()
    testing.assert_close(inputs.call(jax_paged_attn, implementation=implementation), expected)


@pytest.mark.parametrize("implementation", NAMES)
def test_starts_past_every_key(implementation):
    """As a mask of whole rows: here of keys that fill their tiles."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16)
        for s in ((3, 4, 64), (4, 2, 64, 64), (4, 2, 64, 64))
    )
    table = PageTable.from_block_tables(np.array([[2, 3], [0, 1], [3, 3]]), np.array([64, 128, 128]))
    starts = jnp.array([GREATEST, GREATEST - 62, 64], jnp.int32)
    out, lse = paged_attention(
        q, k, v, table, kv_starts=starts, return_lse=True, implementation=implementation
    )
    expected = reference.paged_attention(q, k, v, table, kv_starts=starts, return_lse=True)
    testing.assert_close((out, lse), expected)
    assert jnp.isneginf(lse[:2]).all()
    assert not out[:2].any()


def test_more_rows_than_one_launch_takes(monkeypatch):
    monkeypatch.setattr(config, "MAX_ROWS", 2)
    rng = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16)
        for s in ((5, 4, 64), (6, 2, 16, 64), (6, 2, 16, 64))
    )
    table = PageTable.from_block_tables(
        np.array([[2, 3], [0, 1], [3, 3], [5, 4], [1, 2]]), np.arange(0, 35, 7)
    )
    options = {"kv_starts": jnp.arange(5, dtype=jnp.int32), "return_lse": True}
    expected = reference.paged_attention(q, k, v, table, **options)
    # Of a shape that no other test has compiled without the limit.
    actual = paged_attention(q, k, v, table, implementation="mosaic_gpu", **options)
    testing.assert_close(actual, expected)


@pytest.mark.parametrize("implementation", NAMES)
def test_what_is_not_finite_and_used_reaches_the_result(implementation):
    """NaN in a row's q makes its lse NaN, not that of an empty row; inf in V is inf, also after a merge."""
    rng = np.random.default_rng(2)
    q, k, v = (
        np.asarray(rng.standard_normal(s), np.float32) for s in ((2, 4, 64), (8, 2, 64, 64), (8, 2, 64, 64))
    )
    q[0, 1, 5], v[5, 0, 3, 7] = np.nan, np.inf
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    table = PageTable.from_block_tables(np.array([[0, 1, 2, 3], [4, 5, 6, 7]]), np.array([200, 256]))
    out, lse = paged_attention(q, k, v, table, return_lse=True, num_splits=2, implementation=implementation)
    expected_out, expected_lse = reference.paged_attention(q, k, v, table, return_lse=True)
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(expected_lse))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected_out))
    np.testing.assert_array_equal(np.isinf(out), np.isinf(expected_out))
