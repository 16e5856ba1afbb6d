"""`jax.export` of decode steps, serialized: for CUDA from any host, and with symbolic dimensions."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import PageTable, append_paged_kv, explain, paged_attention, reference, testing
from jax_paged_attn.sharding import ShardedPageTable

pytestmark = pytest.mark.newest


def shape(dims, dtype="bfloat16") -> Any:
    return jax.ShapeDtypeStruct(dims, dtype)


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
    b, p, n = jax.export.symbolic_shape("b, p, n")
    rows: Any = shape((b,), "int32")
    entries: Any = shape((n,), "int32")  # the table's own: b rows of a width would not tell the width
    table = PageTable(entries, rows, rows, rows)
    pages, new = shape((p, 2, 16, 64)), shape((b, 2, 64))
    q, slots = shape((b, 4, 64)), shape((b,), "int32")
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
    table = ShardedPageTable.from_block_tables([[[1, 0]], [[0, -1]]], [[20], [3]])
    exported = jax.export.export(jax.jit(lambda table: (table, table.tables.kv_lens)))(table)
    same, lens = jax.export.deserialize(exported.serialize()).call(table)
    chex.assert_trees_all_equal(same, table)
    chex.assert_trees_all_equal(lens, table.tables.kv_lens)
