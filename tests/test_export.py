"""`jax.export` with symbolic dimensions."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jax_paged_attn import PageTable, decode_attention, paged_attention, reference, testing
from jax_paged_attn.calls.attention import Problem

pytestmark = pytest.mark.newest


def abstract(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("kv_layout", ["HND", "NHD", "HPND"])
@pytest.mark.parametrize("num_splits", [None, 2])
def test_symbolic_batch_pages_and_width(kv_layout, num_splits):
    def call(q, k, v, tables, lens, starts):
        table = PageTable.from_block_tables(tables, lens)
        options = {"kv_layout": kv_layout, "num_splits": num_splits, "kv_starts": starts}
        return paged_attention(q, k, v, table, return_lse=True, **options)

    b, p, w = jax.export.symbolic_shape("b, p, w")
    sizes = {"HND": (p, 2, 16, 32), "NHD": (p, 16, 2, 32), "HPND": (2, p, 16, 32)}
    pages = abstract(sizes[kv_layout])
    rows = abstract((b,), "int32")
    exported = jax.export.export(jax.jit(call))(
        abstract((b, 4, 32)), pages, pages, abstract((b, w), "int32"), rows, rows
    )
    rng = np.random.default_rng(0)
    for batch, num_pages, width in ((1, 3, 2), (4, 20, 5)):
        shape = tuple(num_pages if axis is p else axis for axis in sizes[kv_layout])
        q = jnp.asarray(rng.standard_normal((batch, 4, 32)), jnp.float32)
        k, v = jnp.asarray(rng.standard_normal((2, *shape)), jnp.float32)
        tables = jnp.asarray(rng.integers(0, num_pages, (batch, width)), jnp.int32)
        lens = jnp.asarray(rng.integers(0, width * 16 + 1, batch), jnp.int32)
        starts = lens // 3
        options = {"kv_layout": kv_layout, "kv_starts": starts, "return_lse": True}
        table = PageTable.from_block_tables(tables, lens)
        expected = reference.paged_attention(q, k, v, table, **options)
        testing.assert_close(tuple(exported.call(q, k, v, tables, lens, starts)), expected)


def test_symbolic_csr():
    def call(q, k, indptr, indices, last_page_len):
        table = PageTable.from_csr(indptr, indices, last_page_len, page_size=16)
        return paged_attention(q, k, k, table)

    b, p, n = jax.export.symbolic_shape("b, p, n")
    exported = jax.export.export(jax.jit(call))(
        abstract((b, 4, 32)),
        abstract((p, 2, 16, 32)),
        abstract((b + 1,), "int32"),
        abstract((n,), "int32"),
        abstract((b,), "int32"),
    )
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 4, 32), (7, 2, 16, 32)))
    table = jnp.array([0, 2, 3]), jnp.array([6, 1, 4]), jnp.array([5, 16])
    expected = reference.paged_attention(q, k, k, PageTable.from_csr(*table, page_size=16))
    testing.assert_close(exported.call(q, k, *table), expected)


def test_symbolic_contiguous_cache():
    b, s = jax.export.symbolic_shape("b, s")
    cache = abstract((b, 2, s, 32))
    call = jax.jit(lambda q, k, v, lens: decode_attention(q, k, v, lens))
    exported = jax.export.export(call)(abstract((b, 4, 32)), cache, cache, abstract((b,), "int32"))
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((3, 4, 32)), jnp.float32)
    k, v = jnp.asarray(rng.standard_normal((2, 3, 2, 50, 32)), jnp.float32)
    lens = jnp.array([0, 50, 13], jnp.int32)
    testing.assert_close(exported.call(q, k, v, lens), reference.decode_attention(q, k, v, lens))


def test_symbolic_value_checks():
    def call(q, k, tables, lens, starts):
        table = PageTable.from_block_tables(tables, lens)
        return paged_attention(q, k, k, table, kv_starts=starts, validate_values=True, implementation="xla")

    b, p, w = jax.export.symbolic_shape("b, p, w")
    rows = abstract((b,), "int32")
    exported = jax.export.export(jax.jit(checkify.checkify(call)))(
        abstract((b, 4, 32)), abstract((p, 2, 16, 32)), abstract((b, w), "int32"), rows, rows
    )
    q, k = jnp.ones((2, 4, 32)), jnp.ones((3, 2, 16, 32))
    for table, lens, starts, message in (
        ([[2, 0], [1, -1]], [32, 3], [0, 3], None),
        ([[2, 0], [3, -1]], [32, 3], [0, 3], "page_table.indices: expected .*, got 3 at index 2"),
        ([[2, 0], [1, -1]], [32, 17], [0, 3], "page_table.indices: expected .*, got -1 at index 3"),
        ([[2, 0], [1, -1]], [33, 3], [0, 3], "page_table.kv_lens: expected .*, got 33 at index 0"),
        ([[2, 0], [1, -1]], [32, 3], [0, 4], "kv_starts: expected .*, got 4 at index 1"),
    ):
        arrays = (jnp.array(x, jnp.int32) for x in (table, lens, starts))
        result: Any = exported.call(q, k, *arrays)
        error = result[0].get()
        assert error is None if message is None else re.match(message, error)


def test_a_symbolic_head_dim_has_a_default_scale():
    (d,) = jax.export.symbolic_shape("d")
    cache = abstract((2, 2, 50, d))
    call = jax.jit(lambda q, k, lens: decode_attention(q, k, k, lens, implementation="xla"))
    exported = jax.export.export(call)(abstract((2, 4, d)), cache, abstract((2,), "int32"))
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 4, 32), (2, 2, 50, 32)))
    lens = jnp.array([50, 13], jnp.int32)
    testing.assert_close(exported.call(q, k, lens), reference.decode_attention(q, k, k, lens))


def test_a_problem_knows_its_symbolic_dimensions(monkeypatch):
    sizes: Any = jax.export.symbolic_shape("b, p")
    b, p = sizes
    problem = Problem(
        batch=b,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
        v_head_dim=32,
        page_size=16,
        num_pages=p,
        num_entries=b * 3,
        **dict.fromkeys(("dtype", "k_dtype", "v_dtype"), np.dtype("float32")),
    )

    def refuse(self, memo):
        raise AssertionError("a symbolic dimension may not survive a copy")

    monkeypatch.setattr(type(b), "__deepcopy__", refuse, raising=False)
    assert problem.is_symbolic
    assert not dataclasses.replace(problem, batch=2, num_pages=5, num_entries=6).is_symbolic


def test_symbolic_mistakes_are_named():
    b, p, c = jax.export.symbolic_shape("b, p, c")
    table = jax.eval_shape(PageTable.from_block_tables, abstract((b, 3), "int32"), abstract((b,), "int32"))
    pages = abstract((p, 2, 16, 32))
    for q, k, name in (
        (abstract((c, 4, 32)), pages, "page_table"),
        (abstract((b, 4, 32)), abstract((c, 2, 16, 32)), "v_pages"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            jax.eval_shape(paged_attention, q, k, pages, table)
