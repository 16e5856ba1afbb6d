"""Flax's own attention layer with its dense decode cache exchanged for pages."""

import importlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import PagePool, PageTable, append_paged_kv, paged_attention, slot_mapping

nnx: Any = importlib.import_module("flax.nnx")

pytestmark = pytest.mark.newest

NUM_HEADS, HEAD_DIM, FEATURES = 4, 16, 24
NUM_PAGES, PAGE_SIZE = 12, 4


class PagedMultiHeadAttention(nnx.Module):
    """Takes the projections of an `nnx.MultiHeadAttention`; rows of all lengths share its pages."""

    def __init__(self, dense):
        self.query, self.key, self.value, self.out = dense.query, dense.key, dense.value, dense.out
        shape = (NUM_PAGES, PAGE_SIZE, dense.num_heads, dense.head_dim)  # the layout NHD
        self.k_pages, self.v_pages = nnx.Cache(jnp.zeros(shape)), nnx.Cache(jnp.zeros(shape))

    def __call__(self, x, page_table: PageTable):
        """Attend by x [batch, features], the last token of each row."""
        rows = jnp.arange(x.shape[0])
        slots = slot_mapping(page_table, rows, page_table.kv_lens - 1, page_size=PAGE_SIZE)
        self.k_pages[...], self.v_pages[...] = append_paged_kv(
            self.k_pages[...], self.v_pages[...], self.key(x), self.value(x), slots, kv_layout="NHD"
        )
        out = paged_attention(
            self.query(x), self.k_pages[...], self.v_pages[...], page_table, kv_layout="NHD"
        )
        return self.out(out)


def test_paged_equals_dense():
    dense = nnx.MultiHeadAttention(
        NUM_HEADS, FEATURES, NUM_HEADS * HEAD_DIM, decode=True, use_bias=False, rngs=nnx.Rngs(0)
    )
    dense.init_cache((2, 20, FEATURES))
    paged = PagedMultiHeadAttention(dense)

    @nnx.jit(donate_argnums=0)
    def step(layer, x, page_table):
        return layer(x, page_table)

    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    rows = [pool.allocate(()).seq_id for _ in range(2)]
    for x in np.random.default_rng(0).standard_normal((10, 2, FEATURES)).astype("float32"):
        pool.append_batch(rows, [0, 0])
        expected = dense(x[:, None])[:, 0]
        actual = step(paged, x, pool.page_table(rows, width=3))
        chex.assert_trees_all_close(actual, expected, atol=1e-5)
    assert isinstance(paged.k_pages[...], jax.Array)
