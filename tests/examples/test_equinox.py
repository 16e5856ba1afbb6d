"""An Equinox attention layer, written for one row as Equinox has it, over a dense cache and over pages."""

import importlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import PagePool, PageTable, append_paged_kv, apply_rope, paged_attention, rope_frequencies

eqx: Any = importlib.import_module("equinox")

pytestmark = pytest.mark.newest

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, FEATURES = 6, 2, 16, 24
NUM_PAGES, PAGE_SIZE = 14, 4


class Attention(eqx.Module):
    """Grouped-query attention with rotary embedding; `attend` is where the two caches differ."""

    q: Any
    k: Any
    v: Any
    out: Any
    inv_freq: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        sizes = {"q": NUM_Q_HEADS, "k": NUM_KV_HEADS, "v": NUM_KV_HEADS}
        for (name, heads), one in zip(sizes.items(), keys[:3], strict=True):
            setattr(self, name, eqx.nn.Linear(FEATURES, heads * HEAD_DIM, use_bias=False, key=one))
        self.out = eqx.nn.Linear(NUM_Q_HEADS * HEAD_DIM, FEATURES, use_bias=False, key=keys[3])
        self.inv_freq = rope_frequencies(HEAD_DIM)

    def heads(self, x, position):
        """q, k and v [heads, head_dim] of a token x [features]."""
        q, k, v = (linear(x).reshape(-1, HEAD_DIM) for linear in (self.q, self.k, self.v))
        q, k = (apply_rope(x[None], position[None], inv_freq=self.inv_freq)[0] for x in (q, k))
        return q, k, v

    def dense(self, x, position, cache):
        """One row, with a cache (k, v) of [max_len, num_kv_heads, head_dim] of its own."""
        q, k, v = self.heads(x, position)
        k, v = (old.at[position].set(new) for old, new in zip(cache, (k, v), strict=True))
        scores = jnp.einsum("hgd,thd->hgt", q.reshape(NUM_KV_HEADS, -1, HEAD_DIM), k) * HEAD_DIM**-0.5
        seen = jnp.arange(k.shape[0]) <= position
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return self.out(jnp.einsum("hgt,thd->hgd", weights, v).reshape(-1)), (k, v)

    def paged(self, x, position, pools, slots, page_table: PageTable):
        """All rows: their tokens are written at once, then each attends over the pools that all share."""
        q, k, v = jax.vmap(self.heads)(x, position)
        k_pages, v_pages = append_paged_kv(pools[0], pools[1], k, v, slots)
        # Under vmap this is one call, of the whole batch.
        axes = PageTable(indices=None, row_starts=0, row_pages=0, kv_lens=0)  # pyright: ignore
        attend = jax.vmap(lambda q, row: paged_attention(q, k_pages, v_pages, row), in_axes=(0, axes))
        out: Any = attend(q, page_table)
        return jax.vmap(self.out)(out.reshape(out.shape[0], -1)), (k_pages, v_pages)


def test_paged_equals_dense():
    layer = Attention(jax.random.key(0))
    cache = jnp.zeros((2, 20, NUM_KV_HEADS, HEAD_DIM))
    dense_cache = (cache, cache)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    pools = tuple(jnp.zeros((2, NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)))
    dense_step = eqx.filter_jit(lambda layer, *row: jax.vmap(layer.dense)(*row))
    paged_step = eqx.filter_jit(lambda layer, *rows: layer.paged(*rows))

    rows = [pool.allocate(()).seq_id for _ in range(2)]
    for position, x in enumerate(
        np.random.default_rng(0).standard_normal((10, 2, FEATURES)).astype("float32")
    ):
        positions = jnp.full(2, position)
        expected, dense_cache = dense_step(layer, x, positions, dense_cache)
        slots = pool.append_batch(rows, [0, 0]).slots
        table = pool.page_table(rows, width=3)
        actual, pools = paged_step(layer, x, positions, pools, jnp.asarray(slots), table)
        chex.assert_trees_all_close(actual, expected, atol=1e-5)
