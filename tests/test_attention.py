"""Every implementation on every named problem, against the float32 reference."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_paged_attn
from jax_paged_attn import dispatch, paged_attention, testing

NAMES = [implementation.name for implementation in dispatch.IMPLEMENTATIONS]
RUNS = [
    pytest.param(name, case, id=f"{name}-{case.name}", marks=[pytest.mark.newest] if case.newest else [])
    for name, case in testing.runs()
]


@pytest.mark.parametrize(("implementation", "case"), RUNS)
def test_matches_the_reference(implementation, case):
    inputs = testing.make_inputs(case)
    if implementation in case.refused_by:
        with pytest.raises(NotImplementedError, match=rf"'{implementation}' can't run this call: .+"):
            inputs.call(jax_paged_attn, implementation=implementation)
        implementation = None  # which falls to one that can
    result = inputs.call(jax_paged_attn, implementation=implementation)
    chex.assert_type(result[0], case.dtype)
    testing.assert_close(result, inputs.expected())


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("name", ["page_12", "starts_empty", "contiguous", "e4m3_token", "int8_hpnd"])
def test_unused_slots_change_no_bit(implementation, name):
    if implementation in testing.case(name).refused_by:
        implementation = None
    zeroed, *others = (testing.make_inputs(testing.case(name), poison=x) for x in (0.0, np.nan, np.inf))
    expected = zeroed.call(jax_paged_attn, implementation=implementation)
    chex.assert_tree_all_finite(expected[0])
    for poisoned in others:
        chex.assert_trees_all_equal(poisoned.call(jax_paged_attn, implementation=implementation), expected)


@pytest.mark.parametrize("implementation", NAMES)
def test_empty_rows(implementation):
    inputs = testing.make_inputs(testing.case("all_empty"))
    out, lse = inputs.call(jax_paged_attn, implementation=implementation)
    chex.assert_trees_all_equal((out, lse), (jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)))


@pytest.mark.parametrize("implementation", NAMES)
def test_out_does_not_depend_on_return_lse(implementation):
    inputs = testing.make_inputs(testing.case("csr"))
    out = paged_attention(*inputs.args, implementation=implementation)
    chex.assert_trees_all_equal(out, inputs.call(jax_paged_attn, implementation=implementation)[0])


@pytest.mark.parametrize("implementation", NAMES)
def test_same_bits_from_every_call(implementation):
    case = testing.Case("repeated", (4092, 192), 4, 1) if implementation == "xla" else testing.case("one_row")
    inputs = testing.make_inputs(case)
    first = inputs.call(jax_paged_attn, implementation=implementation)
    repeats = 2 if testing.interpreting(implementation) else 10
    for _ in range(repeats):
        chex.assert_trees_all_equal(inputs.call(jax_paged_attn, implementation=implementation), first)


def test_float32_is_as_exact_as_highest_precision_jnp():
    case = testing.Case("exact", (1000, 64, 3), 8, 2, 64, dtype="float32")
    inputs = testing.make_inputs(case)
    with jax.enable_x64(True):
        q, k, v, table = inputs.args
        # The reference's own formula in float64, from pages in table order.
        exact = []
        for row, kv_len in enumerate(case.kv_lens):
            start = int(table.row_starts[row])
            pages = table.indices[start : start + -(-kv_len // case.page_size)]
            keys, values = (
                jnp.moveaxis(x[pages], 1, 2).reshape(-1, 2, 64)[:kv_len].astype("float64") for x in (k, v)
            )
            heads = q[row].reshape(2, 4, 64).astype("float64")
            scores = jnp.einsum("hgd,thd->hgt", heads, keys) / 8
            exact.append(jnp.einsum("hgt,thd->hgd", jax.nn.softmax(scores), values).reshape(8, 64))
        exact = np.stack(exact)

    def error(out):
        return np.sqrt(np.mean((np.asarray(out).astype(np.float64) - exact) ** 2, axis=(1, 2)))

    plain, ours = error(inputs.expected()[0]), error(inputs.call(jax_paged_attn)[0])
    assert (ours <= 2 * plain).all(), (ours, plain)


@pytest.mark.parametrize("implementation", NAMES)
def test_numpy_inputs(implementation):
    inputs = testing.make_inputs(testing.case("one_token"))
    q, k, v, table = inputs.args
    q, k, v, table = jax.tree.map(np.asarray, (q, k, v, table))
    out = paged_attention(q, k, v, table, implementation=implementation)
    assert isinstance(out, jax.Array)
    chex.assert_trees_all_equal(out, inputs.call(jax_paged_attn, implementation=implementation)[0])


@pytest.mark.parametrize(
    "shape",
    [{"batch": 0}, {"num_pages": 0}, {"width": 0}, {"page_size": 0}],
    ids=lambda shape: next(iter(shape)) + "_0",
)
@pytest.mark.parametrize("implementation", [None, *NAMES])
def test_nothing_to_attend_to(implementation, shape):
    sizes = {"batch": 2, "num_pages": 3, "width": 2, "page_size": 16} | shape
    q = jnp.ones((sizes["batch"], 4, 64), jnp.bfloat16)
    pages = jnp.ones((sizes["num_pages"], 2, sizes["page_size"], 64), jnp.bfloat16)
    tables = np.zeros((sizes["batch"], sizes["width"]), int)
    table = jax_paged_attn.PageTable.from_block_tables(tables, np.full(sizes["batch"], 9))
    out, lse = paged_attention(q, pages, pages, table, return_lse=True, implementation=implementation)
    empty = jnp.zeros(q.shape, q.dtype), jnp.full(q.shape[:2], -jnp.inf)
    chex.assert_trees_all_equal_shapes_and_dtypes((out, lse), empty)
    chex.assert_trees_all_equal((out, lse), empty)


def test_contiguous_without_room():
    q, cache = jnp.ones((2, 4, 64)), jnp.ones((2, 2, 0, 64))
    out, lse = jax_paged_attn.decode_attention(q, cache, cache, 3, return_lse=True)
    chex.assert_trees_all_equal((out, lse), (jnp.zeros((2, 4, 64)), jnp.full((2, 4), -jnp.inf)))


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_unbatched_contiguous(implementation, kv_layout):
    name = "contiguous" if kv_layout == "HND" else "contiguous_nhd"
    inputs = testing.make_inputs(testing.case(name))
    q, k, v, kv_lens = (x[3] for x in inputs.args)
    expected = [x[3] for x in inputs.expected()]
    for length in (kv_lens, int(kv_lens)):
        result = jax_paged_attn.decode_attention(
            q, k, v, length, return_lse=True, implementation=implementation, kv_layout=kv_layout
        )
        testing.assert_close(result, tuple(expected))


def test_one_length_for_every_row():
    q, k, v, _ = testing.make_inputs(testing.case("contiguous"), poison=1.0).args
    results = [jax_paged_attn.decode_attention(q, k, v, lens) for lens in (9, jnp.full(4, 9))]
    chex.assert_trees_all_equal(*results)
