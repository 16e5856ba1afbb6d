"""The references against a dense softmax in float64 numpy, which shares no code with them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import PageTable, reference, testing
from jax_paged_attn.validation import LAYOUT_AXES

CASES = [
    "page_12",
    "nhd",
    "hpnd_page_8",
    "float16",
    "float32",
    "group_71",
    "v_head_dim_128",
    "scale_zero",
    "scale_negative",
    "starts_empty",
    "csr",
    "csr_shared",
    "contiguous",
    "contiguous_nhd",
    "contiguous_starts",
    "all_empty",
    "e4m3_tensor",
    "e5m2_nhd",
    "int8_head",
    "int8_hpnd",
    "e4m3_contiguous",
    "cap_large_scores",
    "window_starts_splits",
    "alibi_group_3",
    "sinks",
    "queries_3_all_group_3",
    "queries_4_not_causal",
    "queries_5_tree_all_starts",
    "queries_7_contiguous_nhd",
    "mask_of_one_query",
    "ragged_more_queries_than_keys",
    "ragged_all_starts_splits",
    "ragged_tree",
    "ragged_not_causal_e4m3_token",
]


def float64(x):
    return np.asarray(x).astype(np.float64)


def dense_query(q, keys, values, positions, query, case, options):
    """Attention of one query at position `query`, head by head: q [hq, d], keys and values [keys, hk, d]."""
    sinks = float64(options.get("sinks", np.full(q.shape[0], -np.inf)))
    slopes = float64(options.get("alibi_slopes", np.zeros(q.shape[0])))
    out, lse = np.zeros((q.shape[0], values.shape[-1])), sinks.copy()
    for head in range(q.shape[0]) if len(keys) else ():
        kv_head = head // (q.shape[0] // keys.shape[1])
        scores = (
            keys[:, kv_head] @ q[head] * (case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale)
        )
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        scores += slopes[head] * (positions - query)
        peak = max(scores.max(), sinks[head])
        weights = np.exp(scores - peak)
        total = weights.sum() + np.exp(sinks[head] - peak)
        out[head] = weights @ values[:, kv_head] / total
        lse[head] = peak + np.log(total)
    return out, lse


def sees(case, mask, kv_len, query, index, key):
    """Whether the query of this position and index sees the key at position `key`, apart from `kv_starts`."""
    if mask is not None and key >= kv_len - mask.shape[-1]:
        return bool(mask[index, key - kv_len + mask.shape[-1]])
    if case.causal and key > query:
        return False
    return case.window_left is None or key >= query - case.window_left


def dequantized(cache, scale, case):
    """A cache in float64, times its scales."""
    cache = float64(cache)
    if scale is None:
        return cache
    scale = float64(scale)
    if scale.ndim == 1:  # of heads
        axis = LAYOUT_AXES[case.kv_layout].index("num_kv_heads")
        scale = scale.reshape([-1 if i == axis else 1 for i in range(3)])
    return cache * scale[..., None]


def dense(inputs, case):
    """Attention of every row, its tokens collected one by one."""
    q, k, v, where = inputs.args[:4]
    scales = [inputs.options.get(name) for name in ("k_scale", "v_scale")]
    q, (k, v) = float64(q), (dequantized(x, scale, case) for x, scale in zip((k, v), scales, strict=True))
    starts = case.kv_starts or (0,) * len(case.kv_lens)

    def token(cache, row, position):
        if inputs.function == "decode_attention":
            page, slot = row, position
        else:
            entry = int(where.row_starts[row]) + position // case.page_size
            page, slot = int(where.indices[entry]), position % case.page_size
        if case.kv_layout == "HPND":
            return cache[:, page, slot]
        return cache[page, :, slot] if case.kv_layout == "HND" else cache[page, slot]

    q = q.reshape(-1, case.num_q_heads, case.head_dim)
    masks = inputs.options.get("mask")
    masks = masks if masks is None else np.asarray(masks).reshape(len(q), -1)
    results, done = [], 0
    for row, (start, kv_len) in enumerate(zip(starts, case.kv_lens, strict=True)):
        q_len = case.q_lens[row] if case.q_lens else case.q_len or 1
        of_row, done = slice(done, done + q_len), done + q_len
        mask = None if masks is None else masks[of_row]
        for index, heads in enumerate(q[of_row]):
            query = kv_len - q_len + index
            seen = [p for p in range(start, kv_len) if sees(case, mask, kv_len, query, index, p)]
            keys = np.array([token(k, row, p) for p in seen])
            values = [token(v, row, p) for p in seen]
            values = np.array(values).reshape(-1, case.num_kv_heads, case.v_head_dim or case.head_dim)
            results.append(dense_query(heads, keys, values, np.array(seen), query, case, inputs.options))
    results += [(np.zeros_like(results[0][0]), np.full(case.num_q_heads, -np.inf))] * (len(q) - done)
    return tuple(np.reshape(x, (*inputs.args[0].shape[:-2], *x[0].shape)) for x in zip(*results, strict=True))


def assert_exact(actual, expected):
    """Float32 arithmetic apart, the same as float64."""
    for got, want in zip(actual, expected, strict=True):
        chex.assert_type(got, jnp.float32)
        chex.assert_trees_all_close(float64(got), want, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("name", CASES)
def test_attention(name):
    case = testing.case(name)
    inputs = testing.make_inputs(case)
    assert_exact(inputs.expected(), dense(inputs, case))


def test_unbatched_is_a_batch_of_one():
    inputs = testing.make_inputs(testing.case("one_row"))
    (q, k, v, table), (out, lse) = inputs.args, inputs.expected()
    row = PageTable(table.indices, table.row_starts[0], table.row_pages[0], table.kv_lens[0])
    assert_exact(reference.paged_attention(q[0], k, v, row, return_lse=True), (out[0], lse[0]))
    batched = reference.decode_attention(q, k[:1], v[:1], 9)
    alone = reference.decode_attention(q[0], k[0], v[0], 9)
    assert_exact([alone], [batched[0]])


def test_without_lse():
    inputs = testing.make_inputs(testing.case("one_row"))
    out = reference.paged_attention(*inputs.args)
    chex.assert_trees_all_close(out, inputs.expected()[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (0, 3)], ids=str)
def test_nothing_to_attend_to(shape):
    num_pages, width = shape
    pages = jnp.ones((num_pages, 2, 16, 8))
    table = PageTable.from_block_tables(np.zeros((3, width), int), [1, 0, 5])
    out, lse = reference.paged_attention(jnp.ones((3, 4, 8)), pages, pages, table, return_lse=True)
    chex.assert_trees_all_equal((out, lse), (jnp.zeros((3, 4, 8)), jnp.full((3, 4), -jnp.inf)))


def test_a_query_of_another_head_dim_is_refused():
    pages = jnp.ones((3, 2, 8, 16))
    table = PageTable.from_block_tables([[2, 0], [1, -1]], [12, 3])
    for call in (
        lambda q: reference.paged_attention(q, pages, pages, table),
        lambda q: reference.decode_attention(q, pages[:2], pages[:2], jnp.array([5, 3])),
    ):
        with pytest.raises(ValueError, match=r"^q: expected head_dim 16.*, got shape \(2, 8, 8\)"):
            call(jnp.ones((2, 8, 8)))


def test_merge_states():
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((5, 3, 4, 8)), 3 * rng.standard_normal((5, 3, 4))
    lses[1:3, 0], lses[:, 1, 1] = -np.inf, np.inf
    lses[:4, 2, 2] = -np.inf
    outs[np.isinf(lses)] = np.nan
    weights = np.where(np.isinf(lses), 0, np.exp(lses))
    total = weights.sum(0)
    with np.errstate(divide="ignore"):
        expected_lse = np.log(total)
    expected = (
        np.einsum("n...,n...d->...d", weights, np.nan_to_num(outs)) / np.where(total, total, 1)[..., None]
    )
    assert_exact(reference.merge_states(jnp.float32(outs), jnp.float32(lses)), (expected, expected_lse))
    pair = jnp.float32(outs[3:]), jnp.float32(lses[3:])
    chex.assert_trees_all_equal(
        reference.merge_state(pair[0][0], pair[1][0], pair[0][1], pair[1][1]), reference.merge_states(*pair)
    )


def test_gradients_are_those_of_finite_differences():
    shapes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 8, "dtype": "float32"}
    case = testing.Case("gradient", (0, 5, 19), **shapes, kv_starts=(0, 5, 2), q_len=2, window_left=9)
    inputs = testing.make_inputs(case)
    table = inputs.args[3]

    @jax.jit
    def loss(q, k, v, *modifiers):
        options = inputs.options | dict(
            zip(("sm_scale", "soft_cap", "alibi_slopes", "sinks"), modifiers, strict=True)
        )
        out, lse = reference.paged_attention(q, k, v, table, return_lse=True, **options)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isinf(lse), 0.0, jnp.cos(lse)))

    slopes, sinks = jnp.array([0.1, 0.2, 0, 0.4]), jnp.array([1.0, -1.0, 0.0, 0.5])
    arguments = (*inputs.args[:3], jnp.float32(0.3), jnp.float32(2.0), slopes, sinks)
    gradients = jax.grad(loss, argnums=tuple(range(len(arguments))))(*arguments)
    chex.assert_tree_all_finite(gradients)
    rng = np.random.default_rng(1)
    for index, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape).astype(np.float32)

        def along(step, index=index, direction=direction):
            moved = list(arguments)
            moved[index] = moved[index] + jnp.float32(step) * direction
            return loss(*moved)

        slope = (along(1e-2) - along(-1e-2)) / 2e-2
        chex.assert_trees_all_close(slope, jnp.vdot(gradient, direction), atol=5e-3, rtol=5e-3)


def test_merge_gradients_are_finite():
    outs, lses = jnp.ones((2, 3, 4)), jnp.array([[-jnp.inf, 0.0, jnp.inf], [-jnp.inf, 1.0, 2.0]])

    def loss(outs, lses):
        out, lse = reference.merge_states(outs, lses)
        return jnp.sum(out) + jnp.sum(jnp.where(jnp.isinf(lse), 0.0, lse))

    chex.assert_tree_all_finite(jax.grad(loss, argnums=(0, 1))(outs, lses))
