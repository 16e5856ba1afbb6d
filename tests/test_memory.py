"""The XLA implementation's temporary memory: a tile's, whatever the cache's."""

import jax
import jax.numpy as jnp
import pytest

from jax_paged_attn import PageTable, decode_attention, explain, paged_attention

BATCH, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 8, 2, 64, 16


def temp_bytes(fn, *arguments):
    analysis = jax.jit(fn).lower(*arguments).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def arguments(kv_layout, dtype, num_pages):
    sizes = {
        "HND": (num_pages, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM),
        "NHD": (num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM),
        "HPND": (NUM_KV_HEADS, num_pages, PAGE_SIZE, HEAD_DIM),
    }
    pages = jax.ShapeDtypeStruct(sizes[kv_layout], dtype)
    rows = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    # Every row may own every page.
    table = PageTable(jax.ShapeDtypeStruct((BATCH * num_pages,), jnp.int32), rows, rows, rows)  # pyright: ignore[reportArgumentType]
    return jax.ShapeDtypeStruct((BATCH, NUM_Q_HEADS, HEAD_DIM), dtype), pages, pages, table


@pytest.mark.parametrize("kv_layout", ["HND", "NHD", "HPND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_paged(kv_layout, dtype):
    def call(q, k, v, table):
        return paged_attention(q, k, v, table, kv_layout=kv_layout, implementation="xla")

    small, large = (temp_bytes(call, *arguments(kv_layout, dtype, pages)) for pages in (64, 16384))
    tile = explain(call, *arguments(kv_layout, dtype, 64), target="cpu").workspace_bytes
    # The compiler keeps some copies of a tile, in 16 bits also in float32.
    assert large <= small + 4096
    assert large <= 6 * tile


def test_contiguous():
    def call(q, k, v, lens):
        return decode_attention(q, k, v, lens, implementation="xla")

    def of(max_kv_len):
        q = jax.ShapeDtypeStruct((BATCH, NUM_Q_HEADS, HEAD_DIM), jnp.float32)
        cache = jax.ShapeDtypeStruct((BATCH, NUM_KV_HEADS, max_kv_len, HEAD_DIM), jnp.float32)
        return temp_bytes(call, q, cache, cache, jax.ShapeDtypeStruct((BATCH,), jnp.int32))

    assert of(262144) <= of(1024) + 4096
