"""`jax.export` with symbolic dimensions, and for GPUs from other hosts."""

import dataclasses
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jax_paged_attn import (
    PageTable,
    append_paged_kv,
    decode_attention,
    explain,
    paged_attention,
    reference,
    testing,
)
from jax_paged_attn.calls.attention import Problem
from jax_paged_attn.sharding import ShardedPageTable

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


def step(k_pages, v_pages, q, k_new, v_new, slots, table):
    k_pages, v_pages = append_paged_kv(k_pages, v_pages, k_new, v_new, slots)
    return paged_attention(q, k_pages, v_pages, table, return_lse=True), k_pages, v_pages


def step_inputs(batch=3, num_pages=9, width=2) -> Any:
    rng = np.random.default_rng(0)
    shapes = [(num_pages, 2, 16, 64)] * 2 + [(batch, 4, 64)] + [(batch, 2, 64)] * 2
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    pages = rng.permutation(num_pages)[: batch * width].reshape(batch, width)
    lens = rng.integers(1, width * 16, batch)
    slots = pages[:, 0] * 16
    return *arrays, jnp.asarray(slots, jnp.int32), PageTable.from_block_tables(pages, lens)


def expected_of_step(k_pages, v_pages, q, k_new, v_new, slots, table):
    k_pages, v_pages = reference.append_paged_kv(k_pages, v_pages, k_new, v_new, slots)
    return reference.paged_attention(q, k_pages, v_pages, table, return_lse=True)


def shapes_of(arguments):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)


def test_a_step_with_a_page_table_serialized_for_cuda():
    """From any host; the kernels are in it. Where there is a GPU, it runs."""
    pytest.importorskip("flatbuffers")
    arguments = step_inputs()
    exported = jax.export.export(jax.jit(step, donate_argnums=(0, 1)), platforms=["cuda"])(
        *shapes_of(arguments)
    )
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert again.in_tree == jax.tree.structure((arguments, {}))
    assert again.mlir_module().count("@mosaic_gpu") >= 3  # append, decode, merge
    if jax.default_backend() == "gpu":
        testing.assert_close(again.call(*arguments)[0], expected_of_step(*arguments))
    k_pages, v_pages, q, k_new, v_new, slots, table = shapes_of(arguments)
    for record in (
        explain(append_paged_kv, k_pages, v_pages, k_new, v_new, slots, target="sm_90"),
        explain(paged_attention, q, k_pages, v_pages, table, target="sm_90"),
    ):
        assert record.implementation == "mosaic_gpu"


def test_a_symbolic_step_with_a_page_table_serialized():
    """Batch, pages and entries of the table are symbols: then XLA serves it, and `explain` says why."""
    pytest.importorskip("flatbuffers")
    b, p, n = jax.export.symbolic_shape("b, p, n")
    rows: Any = abstract((b,), "int32")
    entries: Any = abstract((n,), "int32")  # the table's own: b rows of a width would not tell the width
    table = PageTable(entries, rows, rows, rows)
    pages, new = abstract((p, 2, 16, 64), "bfloat16"), abstract((b, 2, 64), "bfloat16")
    q, slots = abstract((b, 4, 64), "bfloat16"), abstract((b,), "int32")
    shapes = (pages, pages, q, new, new, slots, table)
    again = jax.export.deserialize(
        jax.export.export(jax.jit(step), platforms=["cpu", "cuda"])(*shapes).serialize()
    )
    for arguments in (step_inputs(), step_inputs(batch=1, num_pages=12, width=5)):
        testing.assert_close(again.call(*arguments)[0], expected_of_step(*arguments))
    record = explain(paged_attention, q, pages, pages, table, target="sm_90")
    assert record.implementation == "xla"
    assert dict(record.passed_over)["mosaic_gpu"] == "needs static shapes"
    assert explain(append_paged_kv, pages, pages, new, new, slots, target="sm_90").implementation == "xla"


def test_a_sharded_page_table_is_serialized():
    pytest.importorskip("flatbuffers")
    table = ShardedPageTable.from_block_tables([[[1, 0]], [[0, -1]]], [[20], [3]])
    exported = jax.export.export(jax.jit(lambda table: (table, table.tables.kv_lens)))(table)
    same, lens = jax.export.deserialize(exported.serialize()).call(table)
    chex.assert_trees_all_equal(same, table)
    chex.assert_trees_all_equal(lens, table.tables.kv_lens)
