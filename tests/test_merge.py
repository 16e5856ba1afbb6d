import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import merge_state, merge_states, paged_attention, reference, testing
from jax_paged_attn.page_table import PageTable

DTYPES = ["float32", "bfloat16", "float16"]


def states(n, shape=(3, 4), head_dim=8, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    outs = jnp.asarray(rng.standard_normal((n, *shape, head_dim)), dtype)
    return outs, jnp.asarray(5 * rng.standard_normal((n, *shape)), jnp.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)], ids=str)
def test_against_the_reference(dtype, shape):
    outs, lses = states(4, shape, dtype=dtype)
    merged = merge_states(outs, lses)
    assert merged[0].dtype == dtype
    testing.assert_close(merged, reference.merge_states(outs, lses))
    pair = (outs[0], lses[0], outs[1], lses[1])
    testing.assert_close(merge_state(*pair), reference.merge_state(*pair))


@pytest.mark.newest
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("empty_lse", [-np.inf, np.inf])
@pytest.mark.parametrize("empty_out", [0.0, np.nan, np.inf])
def test_an_empty_state_changes_no_bit(dtype, empty_lse, empty_out):
    outs, lses = states(1, dtype=dtype)
    real = outs[0], lses[0]
    empty = jnp.full_like(outs[0], empty_out), jnp.full_like(lses[0], empty_lse)
    chex.assert_trees_all_equal(merge_state(*real, *empty), real)
    chex.assert_trees_all_equal(merge_state(*empty, *real), real)
    chex.assert_trees_all_equal(jax.jit(merge_state)(*empty, *real), real)


@pytest.mark.parametrize("empty_lse", [-np.inf, np.inf])
def test_only_empty_states(empty_lse):
    outs, lses = jnp.full((3, 2, 4), jnp.nan), jnp.full((3, 2), empty_lse)
    empty = jnp.zeros((2, 4)), jnp.full((2,), -jnp.inf)
    chex.assert_trees_all_equal(merge_states(outs, lses), empty)
    chex.assert_trees_all_equal(merge_states(outs[:0], lses[:0]), empty)


def test_extreme_lse_does_not_overflow():
    outs, _ = states(2, ())
    for lse in (1e30, -1e30, 300.0):
        out, merged = merge_states(outs, jnp.full(2, lse))
        testing.assert_close((out, merged), (outs.mean(0), jnp.float32(lse) + jnp.log(jnp.float32(2))))


def test_nan_lse_is_not_hidden():
    outs, lses = states(2)
    out, lse = merge_states(outs, lses.at[0, 1, 1].set(jnp.nan))
    expected = np.zeros(lse.shape, bool)
    expected[1, 1] = True
    np.testing.assert_array_equal(jnp.isnan(lse), expected)
    np.testing.assert_array_equal(jnp.isnan(out).all(-1), expected)


@hypothesis.given(st.lists(st.floats(-80, 80, width=32) | st.just(-np.inf), min_size=2, max_size=6))
def test_order_and_grouping_do_not_matter(lses):
    outs, _ = states(len(lses), ())
    lses = jnp.asarray(lses, jnp.float32)
    merged = merge_states(outs, lses)
    one_by_one = outs[0], lses[0]
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        one_by_one = merge_state(*one_by_one, out, lse)
    expected = reference.merge_states(outs, lses)
    for result in (merged, one_by_one, merge_states(outs[::-1], lses[::-1])):
        # A running merge rounds once a step.
        chex.assert_trees_all_close(result, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("sm_scale", [None, 0.3])
def test_a_row_cut_in_two_and_merged_equals_the_whole(sm_scale):
    case = testing.case("float32")
    q, k, v, table = testing.make_inputs(case).args
    cut = table.row_pages // 2 * 0 + 2
    head = PageTable(table.indices, table.row_starts, cut, table.kv_lens)
    tail_lens = table.kv_lens - cut * case.page_size
    tail = PageTable(table.indices, table.row_starts + cut, table.row_pages - cut, tail_lens)
    options = {"sm_scale": sm_scale, "return_lse": True}
    parts = [paged_attention(q, k, v, part, **options) for part in (head, tail)]
    whole = reference.paged_attention(q, k, v, table, **options)
    testing.assert_close(merge_state(*parts[0], *parts[1]), whole)


def test_vmap_equals_the_batched_call():
    outs, lses = states(4)
    mapped = jax.jit(jax.vmap(merge_states, in_axes=1))(outs, lses)
    chex.assert_trees_all_close(mapped, merge_states(outs, lses), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"out_b": jnp.ones((3, 5))}, "out_b"),
        ({"out_b": jnp.ones((3, 4), jnp.bfloat16)}, "out_b"),
        ({"out_a": jnp.ones((3, 4), jnp.int32)}, "out_a"),
        ({"out_a": jnp.float32(1)}, "out_a"),
        ({"lse_a": jnp.ones((3, 1))}, "lse_a"),
        ({"lse_b": jnp.ones(3, jnp.int32)}, "lse_b"),
    ],
)
def test_bad_state(change, name):
    state = {"out_a": jnp.ones((3, 4)), "lse_a": jnp.ones(3), "out_b": jnp.ones((3, 4)), "lse_b": jnp.ones(3)}
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        merge_state(**(state | change))


@pytest.mark.parametrize(
    ("outs", "lses", "name"),
    [
        (np.ones((2, 3, 4)), np.ones((2, 4)), "lses"),
        (np.ones(4), np.float32(1), "lses"),
        (np.ones((2, 3, 4), int), np.ones((2, 3)), "outs"),
        ("state", np.ones((2, 3)), "outs"),
        (2**70, 1.0, "outs"),
        (np.ones((1, 3), np.float32), [2**70], "lses"),
    ],
)
def test_bad_states(outs, lses, name):
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        merge_states(outs, lses)
