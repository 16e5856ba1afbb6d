"""Whole programs on the device: layers in a scan, a decode loop that ends by itself, rematerialization."""

import dataclasses
import functools
import math
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import (
    PageTable,
    append_paged_kv,
    dispatch,
    explain,
    paged_attention,
    reference,
    slot_mapping,
    testing,
)

LAYERS, BATCH, PAGES, PAGE_SIZE, WIDTH = 3, 3, 10, 4, 3
Q_HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
STOP = -0.1  # a row of the decode loop ends where the first value of its output is above it


def inputs(dtype="float32", head_dim=HEAD_DIM):
    """q, k_new and v_new of a step, the pools of all layers, and tables with room for more."""
    rng = np.random.default_rng(0)
    shapes = {
        "q": (LAYERS, BATCH, Q_HEADS, head_dim),
        "k_new": (LAYERS, BATCH, KV_HEADS, head_dim),
        "v_new": (LAYERS, BATCH, KV_HEADS, head_dim),
        "k": (LAYERS, PAGES, KV_HEADS, PAGE_SIZE, head_dim),
        "v": (LAYERS, PAGES, KV_HEADS, PAGE_SIZE, head_dim),
    }
    arrays = {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    tables = jnp.asarray(rng.permutation(PAGES)[: BATCH * WIDTH].reshape(BATCH, WIDTH), jnp.int32)
    return arrays, PageTable.from_block_tables(tables, jnp.array([1, 6, 9]))


def layer(write, attend, table, q, k_new, v_new, k, v):
    """Write the last token of each row, then attend."""
    rows = jnp.arange(table.kv_lens.shape[0])
    slots = slot_mapping(table, rows, table.kv_lens - 1, page_size=k.shape[2])
    k, v = write(k, v, k_new, v_new, slots)
    return attend(q, k, v, table), k, v


ours = functools.partial(layer, append_paged_kv, paged_attention)
theirs = functools.partial(layer, reference.append_paged_kv, reference.paged_attention)


@functools.cache
def expected_of_layers():
    arrays, table = inputs()
    each = [theirs(table, **jax.tree.map(lambda x, i=i: x[i], arrays)) for i in range(LAYERS)]
    return jax.tree.map(lambda *x: jnp.stack(x), *each)


def scanned(arrays, table):
    """Layers in turn, whose pools are slices of one array."""

    def body(carry, of_layer):
        return carry, ours(table, **of_layer)

    return jax.lax.scan(body, None, arrays)[1]


def mapped_rows_and_layers(arrays, table):
    """All layers by one vmap, and each one's rows by another, over the cache that they share."""

    def of_layer(q, k_new, v_new, k, v):
        rows = jnp.arange(BATCH)
        slots = slot_mapping(table, rows, table.kv_lens - 1, page_size=PAGE_SIZE)
        k, v = append_paged_kv(k, v, k_new, v_new, slots)
        axes: Any = dataclasses.replace(table, indices=None, row_starts=0, row_pages=0, kv_lens=0)
        attend = jax.vmap(lambda q, row: paged_attention(q, k, v, row), in_axes=(0, axes))
        return attend(q, table), k, v

    return jax.vmap(lambda arrays: of_layer(**arrays))(arrays)


@pytest.mark.newest
@pytest.mark.parametrize("program", [scanned, mapped_rows_and_layers, jax.checkpoint(scanned)])
def test_layers(program):
    arrays, table = inputs()
    out, k, v = jax.jit(program)(arrays, table)
    expected = expected_of_layers()
    testing.assert_close(out, expected[0])
    chex.assert_trees_all_equal((k, v), expected[1:])


def decode(step, arrays, table, steps):
    """Each row's output is its next query, until it ends; then it writes and attends no more."""
    arrays = jax.tree.map(lambda x: x[0], arrays)
    k_new, v_new = arrays["k_new"], arrays["v_new"]

    def body(state):
        i, q, k, v, kv_lens, live = state

        def attend(q, k, v):
            now = dataclasses.replace(table, kv_lens=jnp.where(live, kv_lens, 0))
            return step(now, q, k_new, v_new, k, v)

        out, k, v = jax.lax.cond(jnp.any(live), attend, lambda *x: x, q, k, v)
        q = jnp.where(live[:, None, None], out, q)
        live &= q[:, 0, 0] < STOP
        return i + 1, q, k, v, kv_lens + live.astype(jnp.int32), live

    state = (0, arrays["q"], arrays["k"], arrays["v"], table.kv_lens, jnp.ones(BATCH, bool))
    return jax.lax.while_loop(lambda s: (s[0] < steps) & jnp.any(s[-1]), body, state)


@pytest.mark.newest
def test_a_decode_loop_stays_on_the_device():
    """Compiled, it is fed and read once; each row ends when it is to."""
    arrays, table = inputs()
    call = jax.jit(functools.partial(decode, ours, steps=3)).lower(arrays, table).compile()
    arrays, table = jax.device_put((arrays, table))
    with jax.transfer_guard("disallow"):
        result = call(arrays, table)
    expected = decode(theirs, arrays, table, steps=3)
    chex.assert_trees_all_close(result, expected, atol=1e-5)
    assert 0 < int(result[-1].sum()) < BATCH, result[1][:, 0, 0]  # some have ended, some not


@pytest.mark.parametrize("program", [mapped_rows_and_layers, decode])
def test_programs_keep_their_kernels_on_hopper(program):
    """An append, a decode kernel and a merge, once each, whatever is mapped; nothing leaves the device."""
    arrays, table = inputs("bfloat16", head_dim=64)
    if program is decode:
        program = functools.partial(decode, ours, steps=9)
    with dispatch.assume_target("sm_90"):
        traced = jax.jit(program).trace(arrays, table)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 3
    targets = set(re.findall(r"custom_call @(\w+)", text))
    assert all(name.startswith("mosaic_gpu") or name == "Sharding" for name in targets), targets
    assert not re.search(r"stablehlo\.(infeed|outfeed|send|recv)|callback", text)


def test_rows_that_share_a_cache_read_it_once():
    """The kernel sees the pool as it is, not a copy for each mapped row, and all rows as one batch."""
    arrays, table = inputs("bfloat16", head_dim=64)

    def program(arrays, table):
        def rows(q, k, v):
            axes: Any = dataclasses.replace(table, indices=None, row_starts=0, row_pages=0, kv_lens=0)
            attend = jax.vmap(lambda q, row: paged_attention(q, k, v, row), in_axes=(0, axes))
            return attend(q, table)

        return jax.vmap(rows)(arrays["q"], arrays["k"], arrays["v"])

    problem = explain(program, arrays, table, target="sm_90").problem
    assert (problem.batch, problem.num_pages) == (LAYERS * BATCH, LAYERS * PAGES)
    with dispatch.assume_target("sm_90"):
        traced = jax.jit(program).trace(arrays, table)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    shapes = [map(int, dims.split("x")) for dims in re.findall(r"tensor<([\dx]+)xbf16>", text)]
    assert max(map(math.prod, shapes)) == arrays["k"].size


def test_rematerialization_and_gradients():
    """`jax.checkpoint` computes the same; a gradient is refused by name, that of the reference is there."""
    arrays, table = inputs()
    q, k, v = arrays["q"][0], arrays["k"][0], arrays["v"][0]

    def loss(attend: Any, q, wrap: Any = jax.checkpoint):
        return jnp.sum(wrap(lambda q: attend(q, k, v, table))(q) ** 2)

    chex.assert_trees_all_close(loss(paged_attention, q), loss(reference.paged_attention, q), rtol=1e-5)
    with pytest.raises(NotImplementedError, match=r"jax_paged_attn\.reference\.paged_attention is diff"):
        jax.grad(functools.partial(loss, paged_attention))(q)
    gradient = jax.grad(functools.partial(loss, reference.paged_attention))(q)
    plain = jax.grad(functools.partial(loss, reference.paged_attention, wrap=lambda f: f))(q)
    chex.assert_trees_all_close(gradient, plain, rtol=1e-5)
    assert bool((gradient != 0).any())
