"""A Llama block in JAX alone, over a dense cache and over pages: only `attend` differs."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import (
    PagePool,
    PageTable,
    apply_rope,
    paged_attention,
    rope_append_paged_kv,
    rope_frequencies,
    slot_mapping,
)

pytestmark = pytest.mark.newest

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, FEATURES, HIDDEN = 9, 3, 16, 24, 40
NUM_PAGES, PAGE_SIZE = 16, 4


class Block(NamedTuple):
    attn_norm: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array
    ffn_norm: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array


def init(seed):
    rng = np.random.default_rng(seed)
    kv, q = NUM_KV_HEADS * HEAD_DIM, NUM_Q_HEADS * HEAD_DIM
    of_attention = [(FEATURES,), (FEATURES, q), (FEATURES, kv), (FEATURES, kv), (q, FEATURES)]
    of_ffn = [(FEATURES,), (FEATURES, HIDDEN), (FEATURES, HIDDEN), (HIDDEN, FEATURES)]
    shapes = of_attention + of_ffn
    return Block(*(jnp.asarray(rng.standard_normal(s) / s[0] ** 0.5, jnp.float32) for s in shapes))


def norm(x, weight):
    return weight[None] * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def block(w: Block, x, cache, attend):
    """x [batch, features], the last token of each row; ``attend(q, k, v, cache) -> (out, cache)``."""
    h = norm(x, w.attn_norm)
    q, k, v = ((h @ m).reshape(x.shape[0], -1, HEAD_DIM) for m in (w.q, w.k, w.v))
    out, cache = attend(q, k, v, cache)
    x = x + out.reshape(x.shape[0], -1) @ w.out
    h = norm(x, w.ffn_norm)
    return x + (jax.nn.silu(h @ w.gate) * (h @ w.up)) @ w.down, cache


def dense_step(w, x, cache, lens):
    """With a cache (k, v) of [batch, max_len, num_kv_heads, head_dim]."""

    def attend(q, k, v, cache):
        rows, inv_freq = jnp.arange(x.shape[0]), rope_frequencies(HEAD_DIM)
        q, k = (apply_rope(a, lens - 1, inv_freq=inv_freq) for a in (q, k))
        k, v = (old.at[rows, lens - 1].set(new) for old, new in zip(cache, (k, v), strict=True))
        grouped = q.reshape(x.shape[0], NUM_KV_HEADS, -1, HEAD_DIM)
        scores = jnp.einsum("bhgd,bthd->bhgt", grouped, k) * HEAD_DIM**-0.5
        seen = jnp.arange(k.shape[1])[None] < lens[:, None]
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhgt,bthd->bhgd", weights, v), (k, v)

    return block(w, x, cache, attend)


def paged_step(w, x, cache, page_table: PageTable):
    """With pools (k, v) of [num_pages, num_kv_heads, page_size, head_dim]."""

    def attend(q, k, v, cache):
        rows, positions = jnp.arange(x.shape[0]), page_table.kv_lens - 1
        slots = slot_mapping(page_table, rows, positions, page_size=PAGE_SIZE)
        k_pages, v_pages = cache
        q, k_pages, v_pages = rope_append_paged_kv(
            q, k, v, positions, k_pages, v_pages, slots, inv_freq=rope_frequencies(HEAD_DIM)
        )
        return paged_attention(q, k_pages, v_pages, page_table), (k_pages, v_pages)

    return block(w, x, cache, attend)


def test_paged_equals_dense():
    """Rows that begin at different times, in a pool that is smaller than the dense cache."""
    w = init(0)
    dense_cache = tuple(jnp.zeros((2, 3, 32, NUM_KV_HEADS, HEAD_DIM)))
    pools = tuple(jnp.zeros((2, NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)))
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    rows, lens = [-1, -1, -1], jnp.zeros(3, jnp.int32)
    jit = functools.partial(jax.jit, donate_argnums=2)
    dense, paged = jit(dense_step), jit(chex.assert_max_traces(paged_step, 1))
    for step, x in enumerate(np.random.default_rng(0).standard_normal((16, 3, FEATURES)).astype("float32")):
        if step % 4 == 0 and step < 12:
            rows[step // 4] = pool.allocate(()).seq_id
        live = jnp.array([row >= 0 for row in rows])
        lens = lens + live.astype(jnp.int32)
        pool.append_batch([row for row in rows if row >= 0], [0] * int(live.sum()))
        expected, dense_cache = dense(w, x, dense_cache, lens)
        actual, pools = paged(w, x, pools, pool.page_table(rows, width=4))
        chex.assert_trees_all_close(actual[live], expected[live], atol=1e-5)
