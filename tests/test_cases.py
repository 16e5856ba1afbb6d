"""Conditions from public bug reports on kernels like these. Each test names its reports.

More of them are problems of `testing.py` (groups, head and page sizes, padded rows) and tests of other files:
x64, one compile, batch mates and capacity in test_transforms.py, empty states in test_merge.py, imports in
test_imports.py.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jax_paged_attn import (
    PageTable,
    decode_attention,
    dispatch,
    explain,
    merge_state,
    paged_attention,
    reference,
    testing,
)

NAMES = [implementation.name for implementation in dispatch.IMPLEMENTATIONS]
each_implementation = pytest.mark.parametrize("implementation", NAMES)


def normal(*shape, dtype="bfloat16", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def cache(num_pages, page_size, num_kv_heads=2, head_dim=64):
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    return normal(*shape, seed=1), normal(*shape, seed=2)


def rows_in_pages(tokens, page_size, order):
    """Lay tokens [rows, kv_len, heads, d] out in pages of an HND pool, in the given order of the pages."""
    rows, kv_len, *rest = tokens.shape
    padded = jnp.pad(tokens, ((0, 0), (0, -kv_len % page_size), (0, 0), (0, 0)), constant_values=jnp.nan)
    pages = padded.reshape(-1, page_size, *rest).swapaxes(1, 2)
    pool = jnp.zeros_like(pages).at[order].set(pages)
    return pool, order.reshape(rows, -1)


@each_implementation
def test_an_empty_first_row(implementation):
    """Flashinfer PR 363, 440."""
    q, (k, v) = normal(2, 4, 64), cache(2, 4)
    both = PageTable.from_csr([0, 0, 2], [1, 0], [0, 1], page_size=4)
    assert both.kv_lens.tolist() == [0, 5]
    alone = PageTable.from_csr([0, 2], [1, 0], [1], page_size=4)
    options = {"num_splits": 1, "return_lse": True, "implementation": implementation}
    out, lse = paged_attention(q, k, v, both, **options)
    chex.assert_trees_all_equal((out[0], lse[0]), (jnp.zeros((4, 64), q.dtype), jnp.full(4, -jnp.inf)))
    if implementation == "xla":  # XLA compiles a batch of another size to other sums
        testing.assert_close((out, lse), reference.paged_attention(q, k, v, both, return_lse=True))
    else:
        chex.assert_trees_all_equal((out[1:], lse[1:]), paged_attention(q[1:], k, v, alone, **options))


@each_implementation
@pytest.mark.newest
def test_zero_scores_give_the_mean_and_the_natural_log(implementation):
    """Flashinfer 3716 (a length under the tile); flashinfer 2113, 4485 (the base of the lse)."""
    k, v = cache(6, 16)
    lens = np.array([16, 64, 1])
    table = PageTable.from_block_tables([[1, -1, -1, -1], [0, 2, 4, 3], [5, -1, -1, -1]], lens)
    q = jnp.zeros((3, 4, 64), jnp.bfloat16)
    out, lse = paged_attention(q, k, v, table, return_lse=True, implementation=implementation)
    chex.assert_trees_all_close(
        lse, jnp.broadcast_to(jnp.log(lens.astype("float32"))[:, None], lse.shape), atol=2e-6
    )
    for row, pages in enumerate(([1], [0, 2, 4, 3], [5])):
        values = np.asarray(v)[pages].astype(np.float64).swapaxes(0, 1).reshape(2, -1, 64)
        mean = np.repeat(values[:, : lens[row]].mean(1), 2, axis=0)
        # Half a unit in the last place of bfloat16, and a little of float32 in the sum.
        np.testing.assert_allclose(np.asarray(out[row]).astype(np.float64), mean, rtol=2.0**-8, atol=1e-6)


@each_implementation
def test_a_scale_and_a_cut_merged_by_lse(implementation):
    """TensorRT-LLM PR 19112."""
    q, (k, v) = normal(1, 4, 64), cache(4, 16)
    options = {"sm_scale": 0.2, "return_lse": True}
    parts = [
        paged_attention(
            q, k, v, PageTable.from_block_tables(pages, [n]), implementation=implementation, **options
        )
        for pages, n in (([[3, 0]], 32), ([[1, 2]], 21))
    ]
    whole = PageTable.from_block_tables([[3, 0, 1, 2]], [53])
    expected = reference.paged_attention(q, k, v, whole, **options)
    out, lse = merge_state(*parts[0], *parts[1])
    # Merging rounds the two halves and the whole to bfloat16.
    chex.assert_trees_all_close(out.astype(jnp.float32), expected[0], atol=2.0**-7, rtol=2.0**-7)
    chex.assert_trees_all_close(lse, expected[1], atol=2e-5)


@each_implementation
def test_more_splits_than_tokens(implementation):
    """Sglang 2465."""
    q, (k, v) = normal(3, 4, 64), cache(3, 16)
    table = PageTable.from_block_tables([[2], [0], [1]], [1, 2, 3])
    results = [
        paged_attention(q, k, v, table, num_splits=splits, return_lse=True, implementation=implementation)
        for splits in (1, 8)
    ]
    expected = reference.paged_attention(q, k, v, table, return_lse=True)
    for result in results:
        testing.assert_close(result, expected)


@each_implementation
def test_a_length_past_the_rows_table(implementation):
    """Flash-attention PR 2711: clipped, without a look at the next row's entries."""
    q, (k, v) = normal(2, 4, 64), cache(4, 16)
    tables = jnp.array([[3, 0], [1, 2]])

    def call(lens, validate_values=False):
        table = PageTable.from_block_tables(tables, lens)
        return paged_attention(q, k, v, table, implementation=implementation, validate_values=validate_values)

    long, full = jnp.array([33, 5]), jnp.array([32, 5])
    chex.assert_trees_all_equal(jax.jit(call)(long), jax.jit(call)(full))
    with pytest.raises(ValueError, match=r"^page_table\.kv_lens: expected"):
        call(long, validate_values=True)


def test_a_last_page_over_full():
    """Flashinfer 320."""
    table = {"indptr": [0, 1], "indices": [0], "last_page_len": [5], "page_size": 4}
    with pytest.raises(ValueError, match=r"^last_page_len: expected values in \[1, 4\]"):
        PageTable.from_csr(**table, validate_values=True)
    assert PageTable.from_csr(**table).kv_lens.tolist() == [4]


@each_implementation
def test_stale_ids_in_a_reused_table(implementation):
    """Vllm PR 39643."""
    q, (k, v) = normal(2, 4, 64), cache(8, 16)
    v = v.at[5].set(jnp.nan)
    call = jax.jit(lambda table: paged_attention(q, k, v, table, implementation=implementation))
    lens = [17, 3]
    clean = PageTable.from_block_tables([[6, 2, 0, 0], [1, 0, 0, 0]], lens)
    stale = PageTable.from_block_tables([[6, 2, 5, 7], [1, 5, 6, 5]], lens)
    chex.assert_trees_all_equal(call(stale), call(clean))


@pytest.mark.parametrize("head_dim", [7, 20, 264])
def test_an_unsupported_head_dim_is_named(head_dim):
    """Flashinfer 142, 528, 790."""
    q, pages = jnp.ones((1, 4, head_dim), jnp.bfloat16), jnp.ones((2, 2, 16, head_dim), jnp.bfloat16)
    table = PageTable.from_block_tables([[1, 0]], [20])
    with pytest.raises(NotImplementedError, match=f"head_dim {head_dim} unsupported; supported: "):
        explain(paged_attention, q, pages, pages, table, target="sm_90", implementation="mosaic_gpu")
    assert explain(paged_attention, q, pages, pages, table, target="sm_90").implementation == "xla"


@each_implementation
def test_paged_equals_unpaged(implementation):
    """Flash-attention PR 2368: head_dim 192, v's 128, page 16, length 200."""
    q, tokens = normal(2, 4, 192), (normal(2, 208, 2, 192, seed=1), normal(2, 208, 2, 128, seed=2))
    order = np.random.default_rng(0).permutation(26)
    (k, tables), (v, _) = (rows_in_pages(x, 16, order) for x in tokens)
    lens = jnp.array([200, 7])
    options = {"return_lse": True, "implementation": implementation}
    paged = paged_attention(q, k, v, PageTable.from_block_tables(tables, lens), **options)
    unpaged = decode_attention(q, *tokens, lens, kv_layout="NHD", **options)
    expected = reference.decode_attention(q, *tokens, lens, kv_layout="NHD", return_lse=True)
    testing.assert_close(paged, expected)
    testing.assert_close(unpaged, expected)


@each_implementation
def test_the_same_tokens_in_pages_of_any_size(implementation):
    """Flashinfer 4347, 490; vllm PR 38502 (page 2048)."""
    q, tokens = normal(1, 2, 64), [normal(1, 150, 1, 64, seed=seed) for seed in (1, 2)]
    expected = reference.decode_attention(q, *tokens, kv_lens=150, kv_layout="NHD", return_lse=True)
    results = []
    for page_size in (1, 8, 16, 64, 128, 256, 2048):
        order = np.random.default_rng(page_size).permutation(-(-150 // page_size))
        (k, tables), (v, _) = (rows_in_pages(x, page_size, order) for x in tokens)
        table = PageTable.from_block_tables(tables, [150])
        results.append(paged_attention(q, k, v, table, return_lse=True, implementation=implementation))
        testing.assert_close(results[-1], expected)
    if implementation == "xla":  # whose tiles don't know of pages
        chex.assert_trees_all_equal(*results)


@each_implementation
def test_caches_that_are_views_of_larger_arrays(implementation):
    """Vllm 50427 (K and V in one buffer), flash-attention 772 (a large stride), flashinfer 4044."""
    both = normal(2, 9, 3, 16, 64, seed=1)
    q, table = normal(2, 4, 64), PageTable.from_block_tables([[3, 0], [1, 2]], [20, 31])

    def attend(k, v):
        return paged_attention(q, k, v, table, implementation=implementation)

    k, v = (jnp.asarray(np.ascontiguousarray(np.asarray(x)[1::2, :2])) for x in both)
    expected = attend(k, v)
    sliced = jax.jit(lambda both: attend(both[0, 1::2, :2], both[1, 1::2, :2]))(both)
    interleaved = jnp.stack([k, v], axis=1)
    fused = jax.jit(lambda kv: attend(kv[:, 0], kv[:, 1]))(interleaved)
    turned = jax.jit(lambda k, v: attend(k.swapaxes(1, 2), v.swapaxes(1, 2)))(
        k.swapaxes(1, 2), v.swapaxes(1, 2)
    )
    for out in (sliced, fused, turned):
        chex.assert_trees_all_equal(out, expected)


@each_implementation
def test_page_ids_past_16_bits(implementation):
    """Rocm aiter 3062."""
    ids = [65535, 65536, 65537]
    k, v = (jnp.full((65538, 1, 8, 16), jnp.nan, jnp.bfloat16) for _ in range(2))
    small_k, small_v = cache(3, 8, num_kv_heads=1, head_dim=16)
    k, v = k.at[jnp.array(ids)].set(small_k), v.at[jnp.array(ids)].set(small_v)
    q = normal(1, 2, 16)
    results = [
        paged_attention(q, *pages, PageTable.from_block_tables([table], [23]), implementation=implementation)
        for pages, table in (((k, v), ids), ((small_k, small_v), [0, 1, 2]))
    ]
    chex.assert_trees_all_equal(*results)


@each_implementation
def test_nan_past_the_lengths_and_in_another_rows_pages(implementation):
    """Flash-attention 1745; flashinfer PR 942."""
    q, (k, v) = normal(2, 4, 64), cache(2, 64)
    lens = jnp.array([1, 3])
    call = jax.jit(lambda k, v: decode_attention(q, k, v, lens, implementation=implementation))
    valid = (jnp.arange(64) < lens[:, None])[:, None, :, None]
    zeros, nans = ([jnp.where(valid, x, fill).astype(x.dtype) for x in (k, v)] for fill in (0, jnp.nan))
    expected = call(*zeros)
    chex.assert_tree_all_finite(expected)
    chex.assert_trees_all_equal(call(*nans), expected)
    sick = call(*(x.at[1].set(jnp.nan) for x in zeros))
    chex.assert_trees_all_equal(sick[0], expected[0])
    assert jnp.isnan(sick[1]).all()


def test_checkify_reaches_a_wrong_id_under_jit():
    """Flash-attention PR 2711, under jit with value checks on."""
    q, (k, v) = normal(1, 4, 64), cache(2, 16)

    def call(tables):
        table = PageTable.from_block_tables(tables, [20])
        return paged_attention(q, k, v, table, validate_values=True)

    error, _ = jax.jit(checkify.checkify(call))(jnp.array([[0, 2]]))
    assert "page_table.indices: expected used page ids in [0, 1]" in error.get()
