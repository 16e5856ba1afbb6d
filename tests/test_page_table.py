import copy
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jax_paged_attn import PageTable, paged_attention


def fields(table):
    return {name: np.asarray(getattr(table, name)).tolist() for name in table.__dataclass_fields__}


def test_from_block_tables():
    table = PageTable.from_block_tables([[7, 2], [4, -1]], [20, 3])
    assert fields(table) == {
        "indices": [7, 2, 4, -1],
        "row_starts": [0, 2],
        "row_pages": [2, 2],
        "kv_lens": [20, 3],
    }
    assert all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(table))


def test_from_csr():
    table = PageTable.from_csr([0, 2, 2, 3], [7, 2, 4], [4, 0, 3], page_size=16)
    assert fields(table) == {
        "indices": [7, 2, 4],
        "row_starts": [0, 2, 2],
        "row_pages": [2, 0, 1],
        "kv_lens": [20, 0, 3],
    }


def test_unbatched_block_table():
    table = PageTable.from_block_tables(np.array([7, 2]), 20)
    assert fields(table) == {"indices": [7, 2], "row_starts": 0, "row_pages": 2, "kv_lens": 20}


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_both_forms_give_the_same_bits(implementation):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((3, 4, 64)), jnp.bfloat16)
    k, v = jnp.asarray(rng.standard_normal((2, 6, 2, 16, 64)), jnp.bfloat16)
    block = PageTable.from_block_tables([[5, 1, 3], [-1, -1, -1], [0, -1, -1]], [40, 0, 16])
    csr = PageTable.from_csr([0, 3, 3, 4], [5, 1, 3, 0], [8, 0, 16], page_size=16)
    results = [
        paged_attention(q, k, v, table, return_lse=True, num_splits=1, implementation=implementation)
        for table in (block, csr)
    ]
    chex.assert_trees_all_equal(*results)


@pytest.mark.parametrize(("x64", "make"), [(False, np.asarray), (True, np.asarray), (True, jnp.asarray)])
def test_int64_saturates_and_does_not_wrap(x64, make):
    with jax.enable_x64(x64):
        table = PageTable.from_block_tables(
            make(np.array([[3, 2**32 + 1]])), make(np.array([2**32 + 5], np.int64))
        )
        assert fields(table)["indices"] == [3, 2**31 - 1]
        assert fields(table)["kv_lens"] == [2**31 - 1]
        table = PageTable.from_block_tables(make(np.array([[-(2**40)]])), make(np.array([7], np.uint64)))
        assert fields(table)["indices"] == [-(2**31)]
        assert fields(table)["kv_lens"] == [7]
        assert all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(table))


@pytest.mark.parametrize(
    ("page_size", "kv_lens"),
    [
        (10**9, [10**9 + 7, 2 * 10**9 + 7, 2**31 - 1, 0]),
        (2**30, [2**30 + 7, 2**31 - 1, 2**31 - 1, 0]),
        (2**31 - 1, [2**31 - 1, 2**31 - 1, 2**31 - 1, 0]),
    ],
)
def test_lengths_of_huge_pages_saturate(page_size, kv_lens):
    indptr, last_page_len = [0, 2, 5, 9, 9], [7, 7, 7, 0]
    size: Any = np.int64(page_size)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            table = PageTable.from_csr(
                indptr, np.zeros(9, int), last_page_len, page_size=size, validate_values=True
            )
        assert fields(table)["kv_lens"] == kv_lens
        assert all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(table))


def test_tables_are_compared_by_identity():
    table = PageTable.from_block_tables([[7, 2], [4, -1]], [20, 3])
    assert table == table
    assert table != copy.deepcopy(table)
    assert len({table, table}) == 1


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.uint64])
def test_every_integer_dtype(dtype):
    table = PageTable.from_csr(
        np.array([0, 2], dtype), np.array([1, 0], dtype), np.array([3], dtype), page_size=4
    )
    assert fields(table)["kv_lens"] == [7]


def test_traceable_and_vmappable():
    tables, lens = jnp.arange(12, dtype=jnp.int32).reshape(2, 3, 2), jnp.full((2, 3), 5, jnp.int32)
    expected = [PageTable.from_block_tables(t, n) for t, n in zip(tables, lens, strict=True)]
    mapped = jax.jit(jax.vmap(PageTable.from_block_tables))(tables, lens)
    chex.assert_trees_all_equal(mapped, jax.tree.map(lambda *x: jnp.stack(x), *expected))

    def from_csr(indptr, indices, last_page_len):
        return PageTable.from_csr(indptr, indices, last_page_len, page_size=4)

    arrays = (jnp.array([0, 2, 3]), jnp.array([1, 0, 2]), jnp.array([1, 4]))
    chex.assert_trees_all_equal(jax.jit(from_csr)(*arrays), from_csr(*arrays))


@pytest.mark.parametrize(
    ("kv_len", "row_pages", "expected"),
    [(33, 2, 32), (32, 2, 32), (-5, 2, 0), (2**31 - 1, 2, 32), (20, -3, 0), (2**31 - 1, 2**31 - 1, 48)],
)
def test_lengths_are_clipped_to_the_rows_own_pages(kv_len, row_pages, expected):
    table = PageTable(*(jnp.asarray(x, jnp.int32) for x in ([0, 1, 2], 0, row_pages, kv_len)))
    assert int(table.clipped(16)[1]) == expected


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (([[0.0, 1.0]], [3]), "block_tables"),
        (([[True]], [3]), "block_tables"),
        ((np.array([[1]], "timedelta64[s]"), [3]), "block_tables"),
        ((np.array([[1]], "datetime64[s]"), [3]), "block_tables"),
        (([[2**70]], [3]), "block_tables"),
        (([[0]], [3.0]), "seq_lens"),
        ((3, 3), "block_tables"),
        (([[[0]]], [[3]]), "block_tables"),
        (([[0], [1]], [3]), "seq_lens"),
        (([[0], [1]], 3), "seq_lens"),
        (([0, 1], [3]), "seq_lens"),
        (([[0], [1, 2]], [3, 4]), "block_tables"),
        (("pages", [3]), "block_tables"),
    ],
)
def test_bad_block_tables(args, name):
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        PageTable.from_block_tables(*args)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"indptr": np.array([0.0, 2.0, 3.0])}, "indptr"),
        ({"indptr": np.array([[0, 2, 3]])}, "indptr"),
        ({"indptr": np.zeros(0, int)}, "indptr"),
        ({"indices": np.array([1.0])}, "indices"),
        ({"indices": np.array([[1]])}, "indices"),
        ({"last_page_len": np.array([1])}, "last_page_len"),
        ({"last_page_len": np.array([1.0, 1.0])}, "last_page_len"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 4.0}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"page_size": 2**31}, "page_size"),
        ({"page_size": np.timedelta64(4, "s")}, "page_size"),
        ({"validate_values": 1}, "validate_values"),
    ],
)
def test_bad_csr(change, name):
    arguments = {"indptr": [0, 2, 3], "indices": [1, 0, 2], "last_page_len": [1, 4], "page_size": 4} | change
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        PageTable.from_csr(**arguments)


BAD_CSR_VALUES = [
    ("indptr", [0, 2, 1], [1, 4]),
    ("indptr", [-1, 2, 3], [1, 4]),
    ("indptr", [0, 2, 4], [1, 4]),
    ("last_page_len", [0, 2, 3], [1, 5]),
    ("last_page_len", [0, 2, 3], [0, 4]),
    ("last_page_len", [0, 2, 3], [-1, 4]),
    ("last_page_len", [0, 2, 2], [1, 1]),
]


@pytest.mark.parametrize(("name", "indptr", "last_page_len"), BAD_CSR_VALUES)
def test_csr_values(name, indptr, last_page_len):
    def build(indptr, last_page_len, validate_values=True):
        return PageTable.from_csr(
            indptr, jnp.array([1, 0, 2]), last_page_len, page_size=4, validate_values=validate_values
        )

    arrays = jnp.array(indptr), jnp.array(last_page_len)
    build(*arrays, validate_values=False)
    with pytest.raises(ValueError, match=f"^{name}: expected "):
        build(*arrays)
    error, _ = jax.jit(checkify.checkify(build))(*arrays)
    assert f"{name}: expected " in error.get()


def test_good_csr_values_pass():
    def build(indptr, last_page_len):
        return PageTable.from_csr(
            indptr, jnp.array([1, 0, 2]), last_page_len, page_size=4, validate_values=True
        )

    arrays = jnp.array([0, 2, 2, 3]), jnp.array([1, 0, 4])
    error, table = jax.jit(checkify.checkify(build))(*arrays)
    assert error.get() is None
    chex.assert_trees_all_equal(table, build(*arrays))
