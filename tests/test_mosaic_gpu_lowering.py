"""Calls lowered for a Hopper GPU from any host: kernels and little beside them, the pool read in place."""

import collections
import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jax_paged_attn import (
    PageTable,
    append_paged_kv,
    decode_attention,
    dispatch,
    paged_attention,
    rope_append_paged_kv,
)
from jax_paged_attn.validation import LAYOUT_AXES

# Of a choice by platform, of small arrays (a contiguous cache's page table, a traced scale), and what only
# orders. No gather, transpose, slice, pad or convert.
HARMLESS = {"constant", "return", "case", "iota", "broadcast_in_dim", "reshape", "optimization_barrier"}

# The default choice, and the kernel asked for, which only a host that takes itself for a GPU lowers.
each_choice = pytest.mark.parametrize("implementation", [None, "mosaic_gpu"])


def kernels_of(function, *arguments, implementation=None, **options):
    """How many kernels a call lowers to; fails if it lowers to more than kernels."""
    call = jax.jit(functools.partial(function, implementation=implementation, **options))
    with dispatch.assume_target("sm_90") if implementation else contextlib.nullcontext():
        traced = call.trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    operations = collections.Counter(re.findall(r" = \"?(?:stablehlo|chlo)\.((?:custom_call @)?\w+)", text))
    kernels = [name for name in operations if re.fullmatch(r"custom_call @mosaic_gpu\w*", name)]
    others = set(operations) - set(kernels) - HARMLESS
    assert not others, operations
    return sum(operations[name] for name in kernels)


def paged(kv_layout="HND", batch=5, page_size=16, head_dim=64):
    sizes = {"num_pages": 40, "num_kv_heads": 2, "page_size": page_size, "head_dim": head_dim}
    pages = jax.ShapeDtypeStruct([sizes[axis] for axis in LAYOUT_AXES[kv_layout]], jnp.bfloat16)
    q = jax.ShapeDtypeStruct((batch, 8, head_dim), jnp.bfloat16)
    entries, rows = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (7 * batch, batch))
    return q, pages, pages, PageTable(entries, rows, rows, rows)  # pyright: ignore[reportArgumentType]


@each_choice
@pytest.mark.parametrize("kv_layout", ["HND", pytest.param("NHD", marks=pytest.mark.newest), "HPND"])
def test_paged(kv_layout, implementation):
    options = {"kv_layout": kv_layout, "implementation": implementation}
    assert kernels_of(paged_attention, *paged(kv_layout), return_lse=True, **options) == 2


@each_choice
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_contiguous(kv_layout, implementation):
    q = jax.ShapeDtypeStruct((4, 8, 64), jnp.float16)
    shape = (4, 2, 300, 64) if kv_layout == "HND" else (4, 300, 2, 64)
    cache, lens = jax.ShapeDtypeStruct(shape, q.dtype), jax.ShapeDtypeStruct((4,), jnp.int32)
    options = {"kv_layout": kv_layout, "implementation": implementation}
    assert kernels_of(decode_attention, q, cache, cache, lens, **options) == 2


@pytest.mark.parametrize("sizes", [{"page_size": 12}, {"page_size": 544}, {"head_dim": 80}, {"batch": 40}])
def test_no_kernel_pads_what_is_not_a_multiple_of_a_tile(sizes):
    assert kernels_of(paged_attention, *paged(**sizes), return_lse=True) == 2


def test_traced_options():
    scalar, rows = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.int32)

    def call(q, k, v, table, sm_scale, kv_starts, implementation):
        options = {"sm_scale": sm_scale, "kv_starts": kv_starts, "implementation": implementation}
        return paged_attention(q, k, v, table, **options)

    assert kernels_of(call, *paged(), scalar, rows) == 2


@pytest.mark.parametrize(("num_splits", "kernels"), [(1, 1), (3, 2)])
def test_a_row_in_one_piece_needs_no_merge(num_splits, kernels):
    assert kernels_of(paged_attention, *paged(), num_splits=num_splits) == kernels


@pytest.mark.parametrize("batch", [3, 41])
def test_a_mapped_call_is_one_larger_batch(batch):
    """Tables whose rows aren't multiples of 16 bytes could not be addressed as two dimensions."""
    q, k, v, table = paged(batch=batch)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((5, *x.shape), x.dtype), (q, table))

    def call(q, table, k, v, implementation):
        def one(q, table):
            return paged_attention(q, k, v, table, implementation=implementation)

        return jax.vmap(one)(q, table)

    with dispatch.assume_target("sm_90"):
        traced = jax.jit(functools.partial(call, implementation="mosaic_gpu")).trace(*stacked, k, v)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 2
    assert "gather" not in text


@each_choice
@pytest.mark.parametrize("rotated", [False, True])
def test_an_append_is_one_kernel(rotated, implementation):
    shape = jax.ShapeDtypeStruct
    pages, scale = shape((40, 2, 16, 64), jnp.int8), shape((2,), jnp.float32)
    q, new = shape((9, 8, 64), jnp.bfloat16), shape((9, 2, 64), jnp.bfloat16)
    slots, inv_freq = shape((9,), jnp.int32), shape((32,), jnp.float32)
    if rotated:

        def call(q, new, slots, pages, scale, inv_freq, **options):
            return rope_append_paged_kv(
                q,
                new,
                new,
                slots,
                pages,
                pages,
                slots,
                inv_freq=inv_freq,
                k_scale=scale,
                v_scale=scale,
                **options,
            )

        assert kernels_of(call, q, new, slots, pages, scale, inv_freq, implementation=implementation) == 1
    else:
        assert kernels_of(append_paged_kv, pages, pages, new, new, slots, implementation=implementation) == 1


def test_a_mapped_append_is_one_larger_one():
    pages, new = (
        jax.ShapeDtypeStruct((5, 40, 2, 16, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((5, 9, 2, 64), jnp.bfloat16),
    )
    slots = jax.ShapeDtypeStruct((5, 9), jnp.int32)
    with dispatch.assume_target("sm_90"):
        append = jax.vmap(functools.partial(append_paged_kv, implementation="mosaic_gpu"))
        traced = jax.jit(append).trace(pages, pages, new, new, slots)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1
    assert "scatter" not in text
