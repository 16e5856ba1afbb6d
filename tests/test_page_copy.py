"""Copies of pages within a pool, against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import copy_pages

NUM_PAGES = 6
SHAPES = {"HND": (NUM_PAGES, 2, 4, 8), "NHD": (NUM_PAGES, 4, 2, 8), "HPND": (2, NUM_PAGES, 4, 8)}


def pools(kv_layout, dtype="float32", v_head_dim=8):
    rng = np.random.default_rng(0)
    shapes = SHAPES[kv_layout], (*SHAPES[kv_layout][:-1], v_head_dim)
    return tuple(jnp.asarray(rng.integers(0, 100, shape), dtype) for shape in shapes)


def expected(pages, pairs, kv_layout, layers=None):
    axis = SHAPES[kv_layout].index(NUM_PAGES) + (layers is not None)
    before = np.moveaxis(np.asarray(pages), axis, 0)
    after = before.copy()
    for source, target in pairs:
        after[target] = before[source]
    return np.moveaxis(after, 0, axis)


@pytest.mark.newest
@pytest.mark.parametrize("kv_layout", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_pages_are_copied(kv_layout, dtype):
    k, v = pools(kv_layout, dtype, v_head_dim=3)
    copied = jax.jit(functools.partial(copy_pages, kv_layout=kv_layout))(k, v, [4, 0], [1, 5])
    for old, new in zip((k, v), copied, strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_array_equal(new, expected(old, [(4, 1), (0, 5)], kv_layout))


def test_sources_are_read_before_targets_are_written():
    k, v = pools("HND")
    for old, new in zip((k, v), copy_pages(k, v, [0, 1, 2], [1, 2, 0]), strict=True):
        np.testing.assert_array_equal(new, expected(old, [(0, 1), (1, 2), (2, 0)], "HND"))


@pytest.mark.parametrize(
    "pair", [(-1, -1), (-1, 2), (2, -1), (NUM_PAGES, 2), (2, NUM_PAGES), (-(2**31), 2), (2, -(2**31))]
)
@pytest.mark.parametrize("kv_layout", SHAPES)
def test_pairs_outside_the_pool_are_skipped(pair, kv_layout):
    k, v = pools(kv_layout)
    sources, targets = np.array([pair, (3, 4), pair]).T
    for old, new in zip((k, v), copy_pages(k, v, sources, targets, kv_layout=kv_layout), strict=True):
        np.testing.assert_array_equal(new, expected(old, [(3, 4)], kv_layout))


def test_no_pairs_and_no_pages():
    k, v = pools("HND")
    np.testing.assert_array_equal(copy_pages(k, v, [], [])[0], k)
    assert copy_pages(k[:, :, :0], v[:, :, :0], [1], [2])[0].shape == (NUM_PAGES, 2, 0, 8)


def test_nan_is_copied():
    k, v = pools("HND")
    k, _ = copy_pages(k.at[0].set(jnp.nan), v, [0], [1])
    assert bool(jnp.isnan(k[:2]).all())
    assert not bool(jnp.isnan(k[2:]).any())


@pytest.mark.parametrize("kv_layout", SHAPES)
@pytest.mark.parametrize("layers", [None, 3])
def test_it_works_in_place_and_under_vmap(kv_layout, layers):
    copy = functools.partial(copy_pages, kv_layout=kv_layout)
    k, v = pools(kv_layout)
    if layers is not None:
        copy = jax.vmap(copy, in_axes=(0, 0, None, None))
        k, v = (jnp.stack([pages + layer for layer in range(layers)]) for pages in (k, v))
    pairs = jnp.array([1, -1], jnp.int32), jnp.array([3, -1], jnp.int32)
    after = expected(k, [(1, 3)], kv_layout, layers)
    compiled = jax.jit(copy, donate_argnums=(0, 1)).lower(k, v, *pairs).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= k.nbytes + v.nbytes
    np.testing.assert_array_equal(compiled(k, v, *pairs)[0], after)


def test_the_pool_is_not_copied():
    def temp_bytes(num_pages):
        pages = jax.ShapeDtypeStruct((num_pages, 2, 16, 64), jnp.bfloat16)
        pairs = jax.ShapeDtypeStruct((8,), jnp.int32)
        lowered = jax.jit(copy_pages, donate_argnums=(0, 1)).lower(pages, pages, pairs, pairs)
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temp_bytes(16384) <= temp_bytes(64) + 4096


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"kv_layout": "NDH"}, "kv_layout"),
        ({"k_pages": "pages"}, "k_pages"),
        ({"k_pages": np.zeros((6, 2, 4), np.float32)}, "k_pages"),
        ({"v_pages": np.zeros((6, 2, 4), np.float32)}, "v_pages"),
        ({"v_pages": np.zeros((7, 2, 4, 8), np.float32)}, "v_pages"),
        ({"sources": [0.0]}, "sources"),
        ({"sources": [[0]]}, "sources"),
        ({"targets": [0, 1]}, "targets"),
        ({"targets": 1}, "targets"),
    ],
)
def test_wrong_use_is_named(change, name):
    k, v = pools("HND")
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        copy_pages(**{"k_pages": k, "v_pages": v, "sources": [0], "targets": [1]} | change)
