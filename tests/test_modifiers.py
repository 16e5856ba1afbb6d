"""Soft caps, windows, ALiBi, sinks, masks and several query tokens a row, of every implementation."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

import jax_paged_attn
from jax_paged_attn import (
    PageTable,
    decode_attention,
    dispatch,
    explain,
    merge_state,
    paged_attention,
    reference,
    testing,
)

NAMES = [implementation.name for implementation in dispatch.IMPLEMENTATIONS]
each_implementation = pytest.mark.parametrize("implementation", NAMES)
# Where a kernel would be interpreted, by another one: what these test lies before the implementations.
by_default = pytest.mark.parametrize("implementation", [None])


def inputs(
    kv_lens=(0, 3, 70, 131), lead=(4,), dtype="bfloat16", num_q_heads=4
) -> tuple[jax.Array, jax.Array, jax.Array, PageTable]:
    """q, k_pages, v_pages and a table of 9 pages a row."""
    rng = np.random.default_rng(0)
    batch = len(kv_lens)
    q = rng.standard_normal((*lead, num_q_heads, 64))
    k, v = rng.standard_normal((2, 9 * batch, 2, 16, 64))
    table = PageTable.from_block_tables(rng.permutation(9 * batch).reshape(batch, 9), kv_lens)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    return q, k, v, table


def check(implementation, *args, num_splits=None, **options):
    call = functools.partial(paged_attention, implementation=implementation, num_splits=num_splits)
    result = call(*args, return_lse=True, **options)
    testing.assert_close(result, reference.paged_attention(*args, return_lse=True, **options))
    return result


@st.composite
def cases(draw):
    """A problem with a random choice of everything that this file is about, at few shapes."""
    q_len = draw(st.sampled_from([None, 1, 3]))
    lens = tuple(draw(st.lists(st.integers(0, 150), min_size=3, max_size=3)))
    cache = draw(st.sampled_from([None, "float8_e4m3fn", "float8_e5m2", "int8"]))
    return testing.Case(
        name=f"random {draw(st.integers(0, 99))}",
        kv_lens=lens,
        kv_layout=draw(st.sampled_from(["HND", "NHD", "HPND"])),
        kv_starts=draw(st.none() | st.tuples(*(st.integers(0, n) for n in lens))),
        q_len=q_len,
        causal=draw(st.booleans()),
        soft_cap=draw(st.none() | st.sampled_from([0.7, 30.0])),
        window_left=draw(st.none() | st.integers(0, 160)),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        mask_len=draw(st.none() | st.sampled_from([2, 5])),
        cache_dtypes=None if cache is None else (cache, cache),
        scale=None if cache is None else draw(st.sampled_from(["head", "token"])),
        num_splits=draw(st.sampled_from([None, 1, 2])),
    )


@settings(max_examples=8)
@given(cases())
def test_any_combination(case):
    made = testing.make_inputs(case)
    testing.assert_close(made.call(jax_paged_attn), made.expected())


@each_implementation
@pytest.mark.newest
def test_traced_windows_and_caps_of_layers_under_scan(implementation):
    args = inputs()
    windows, caps = jnp.array([5, -1, 0, 2**31 - 1]), jnp.array([0.0, 2.0, 30.0, 0.5])
    options = {"window_left": windows[0], "soft_cap": caps[0]}

    def layer(carry, options):
        return carry, paged_attention(*args, return_lse=True, implementation=implementation, **options)

    options = {"window_left": windows, "soft_cap": caps}
    _, results = jax.jit(lambda: jax.lax.scan(layer, None, options))()
    for i in range(len(windows)):
        one: dict[str, Any] = {name: x[i] for name, x in options.items()}
        expected = reference.paged_attention(*args, return_lse=True, **one)
        testing.assert_close(jax.tree.map(lambda x: x[i], results), expected)  # noqa: B023


@each_implementation
def test_what_is_off_changes_no_bit(implementation):
    args = inputs()
    expected = paged_attention(*args, return_lse=True, implementation=implementation)
    off: dict[str, Any] = {"window_left": -1, "soft_cap": 0, "mask": jnp.ones((4, 0), bool), "sinks": None}
    chex.assert_trees_all_equal(
        paged_attention(*args, return_lse=True, implementation=implementation, **off), expected
    )
    assert not explain(paged_attention, *args, **off).problem.given


@each_implementation
def test_a_cap_of_very_large_scores(implementation):
    """Flashinfer PR 350 too: what is masked stays masked, whatever the cap."""
    q, k, v, table = inputs()
    q, k = jnp.ones_like(q), jnp.where(k > 0, 1, -1).astype(k.dtype)
    out, lse = check(implementation, q, k, v, table, sm_scale=5000 / 8, soft_cap=50.0, window_left=40)
    assert jnp.isfinite(out).all()
    assert (lse[1:] < 50 + np.log(131)).all()


@each_implementation
@pytest.mark.parametrize("window_left", [0, 127])
def test_a_window_counts_the_keys_before_the_querys_own(implementation, window_left):
    """Transformers 39408: of equal scores, the lse is the logarithm of their number."""
    q, k, v, table = inputs((144, 128, 129, 5))
    _, lse = check(implementation, jnp.zeros_like(q), k, v, table, window_left=window_left)
    counts = [min(n, window_left + 1) for n in (144, 128, 129, 5)]
    chex.assert_trees_all_close(lse, jnp.log(jnp.float32(counts))[:, None] * jnp.ones(4), atol=2e-6)


@each_implementation
def test_queries_before_the_first_key_are_empty(implementation):
    """Flashinfer 4452."""
    args = inputs((2, 0, 4, 131), lead=(4, 4))
    out, lse = check(implementation, *args)
    assert jnp.isneginf(lse[0, :2]).all()
    assert not out[0, :2].any()
    assert jnp.isfinite(lse[0, 2:]).all()
    _, lse = check(None, *args, sinks=jnp.arange(4.0))
    chex.assert_trees_all_equal(lse[1], jnp.broadcast_to(jnp.arange(4.0), (4, 4)))


@each_implementation
def test_sinks_count_once_whatever_the_split(implementation):
    args, sinks = inputs(), jnp.array([0.0, 3.0, -jnp.inf, 100.0])
    for num_splits in (None, 3):
        out, lse = check(implementation, *args, sinks=sinks, num_splits=num_splits)
        chex.assert_trees_all_equal(lse[0], sinks)
        assert not out[0].any()
    # A sink is the state of a key without value.
    plain_out, plain_lse = paged_attention(*args, return_lse=True)
    of_sink = jnp.zeros_like(plain_out), jnp.broadcast_to(sinks, plain_lse.shape)
    testing.assert_close(
        (out, lse), jax.tree.map(lambda x: x.astype(jnp.float32), merge_state(plain_out, plain_lse, *of_sink))
    )


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
@each_implementation
def test_sinks_weigh_the_same_in_every_cache(implementation, cache_dtype):
    """Imp 1345: they are not scaled."""
    q, k, v, table = inputs()
    k, v = (jnp.where(x > 0, 1, -1) for x in (k, v))
    args = q, k.astype(cache_dtype), v.astype(cache_dtype), table
    options: dict[str, Any] = {"sinks": jnp.array([2.0, -1.0, 0.0, 5.0])}
    scale: dict[str, Any] = {} if cache_dtype == "bfloat16" else {"k_scale": 0.5, "v_scale": 2.0}
    out, lse = check(implementation, *args, **options, **scale)
    same: dict[str, Any] = {"sm_scale": 1 / 16} if scale else {}
    expected = reference.paged_attention(q, k, v, table, return_lse=True, **options, **same)
    testing.assert_close((out, lse), ((2.0 if scale else 1.0) * expected[0], expected[1]))


@by_default
@pytest.mark.parametrize("options", [{}, {"window_left": 20}, {"window_left": 1, "causal": False}], ids=str)
def test_a_causal_tree_is_no_tree(implementation, options: dict[str, Any]):
    """A chain of drafts as a mask gives what causality gives, where the window lets all of it through."""
    args = inputs(lead=(4, 3))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((3, 3), bool)), (4, 3, 3))
    attend = functools.partial(paged_attention, *args, return_lse=True, implementation=implementation)
    if options.get("causal", True):
        testing.assert_close(
            attend(mask=causal, **options), jax.tree.map(lambda x: x.astype(jnp.float32), attend(**options))
        )
    check(implementation, *args, mask=causal, **options)


@each_implementation
def test_pages_before_every_window_may_be_gone(implementation):
    q, k, v, table = inputs((131, 144), lead=(2, 2))
    k, v = k.at[0].set(jnp.nan), v.at[0].set(jnp.nan)
    indices = jnp.where(table.indices == 0, 1, table.indices)
    table = PageTable.from_block_tables(indices.reshape(2, 9), table.kv_lens)
    # The first keys seen are 131 - 2 - 40 = 89 and 102, of pages 5 and 6.
    gone = indices.reshape(2, 9).at[0, :5].set(-1).at[1, :6].set(2**31 - 1)
    gone = PageTable.from_block_tables(gone, table.kv_lens)
    options: dict[str, Any] = {"window_left": 40, "validate_values": True, "return_lse": True}
    attend = functools.partial(paged_attention, q, k, v, implementation=implementation, **options)
    chex.assert_trees_all_equal(attend(gone), attend(table))
    with pytest.raises(ValueError, match=r"^page_table\.indices: expected used page ids"):
        paged_attention(q, k, v, gone, window_left=41 + 16, validate_values=True)


@each_implementation
def test_a_rows_bits_do_not_depend_on_batch_mates(implementation):
    q, k, v, table = inputs((131, 5, 144), lead=(3, 2))
    mask = jnp.asarray(np.random.default_rng(0).random((3, 2, 4)) < 0.5)
    options: dict[str, Any] = {
        "soft_cap": 5.0,
        "window_left": 70,
        "alibi_slopes": jnp.array([0.1, 0.2, 0.3, 0.4]),
        "sinks": jnp.ones(4),
        "num_splits": 2,
    }
    call = functools.partial(paged_attention, return_lse=True, implementation=implementation, **options)
    out, lse = call(q, k, v, table, mask=mask, kv_starts=[0, 1, 2])
    tables = table.indices.reshape(3, 9)
    turned = PageTable.from_block_tables(tables[::-1], jnp.array([1, 60, 131]))
    mates = call(q[::-1], k, v, turned, mask=mask[::-1], kv_starts=[0, 3, 0])
    chex.assert_trees_all_equal((mates[0][2], mates[1][2]), (out[0], lse[0]))
    if implementation == "mosaic_gpu":  # XLA compiles other shapes to other sums
        alone = PageTable.from_block_tables(tables[:1], table.kv_lens[:1])
        alone = call(q[:1], k, v, alone, mask=mask[:1], kv_starts=[0])
        chex.assert_trees_all_equal(alone, (out[:1], lse[:1]))


ALL_ARRAYS = {
    "soft_cap": (),
    "window_left": (),
    "alibi_slopes": (4,),
    "sinks": (4,),
    "mask": (4, 5),
    "kv_starts": (4,),
}


@pytest.mark.parametrize("mapped", [("mask", "kv_starts"), tuple(ALL_ARRAYS), ()], ids=str)
@by_default
def test_vmap(implementation, mapped):
    rng = np.random.default_rng(0)
    q, k, v, table = inputs()
    values = {
        "soft_cap": rng.uniform(1, 9, 2),
        "window_left": rng.integers(1, 90, 2),
        "alibi_slopes": rng.uniform(0, 0.3, (2, 4)),
        "sinks": rng.standard_normal((2, 4)),
        "mask": rng.random((2, 4, 5)) < 0.5,
        "kv_starts": rng.integers(0, 3, (2, 4)),
    }
    dtypes = {"window_left": "int32", "kv_starts": "int32", "mask": "bool"}
    values = {name: jnp.asarray(x, dtypes.get(name, "float32")) for name, x in values.items()}
    values = {name: x if name in mapped else x[0] for name, x in values.items()}
    both = jnp.stack([q, q[::-1]])

    def call(q, modifiers):
        return paged_attention(q, k, v, table, return_lse=True, implementation=implementation, **modifiers)

    results = jax.vmap(call, in_axes=(0, {name: 0 if name in mapped else None for name in values}))(
        both, values
    )
    for i in range(2):
        one: dict[str, Any] = {name: x[i] if name in mapped else x for name, x in values.items()}
        expected = reference.paged_attention(both[i], k, v, table, return_lse=True, **one)
        testing.assert_close(jax.tree.map(lambda x: x[i], results), expected)  # noqa: B023


@by_default
def test_unbatched(implementation):
    q, k, v, table = inputs()
    row = PageTable(table.indices, table.row_starts[2], table.row_pages[2], table.kv_lens[2])
    options: dict[str, Any] = {"window_left": 30, "sinks": jnp.ones(4)}
    mask = jnp.array([True, False, True])
    result = paged_attention(
        q[2], k, v, row, return_lse=True, mask=mask, kv_starts=50, implementation=implementation, **options
    )
    expected = reference.paged_attention(q[2], k, v, row, return_lse=True, mask=mask, kv_starts=50, **options)
    testing.assert_close(result, expected)
    chex.assert_shape(result[0], (4, 64))
    cache = k[:9].swapaxes(0, 1).reshape(2, 144, 64)
    result = decode_attention(q[2], cache, cache, 100, mask=mask, implementation=implementation, **options)
    expected = reference.decode_attention(q[2], cache, cache, 100, mask=mask, **options)
    testing.assert_close(result, expected)


def test_no_queries():
    q, k, v, table = inputs(lead=(4, 0))
    out, lse = paged_attention(q, k, v, table, return_lse=True, sinks=jnp.ones(4))
    chex.assert_shape((out, lse), [(4, 0, 4, 64), (4, 0, 4)])


def test_nothing_to_attend_to_but_sinks():
    q, k, v, table = inputs()
    sinks = jnp.arange(4.0)
    out, lse = paged_attention(q, k[:0], v[:0], table, return_lse=True, sinks=sinks)
    chex.assert_trees_all_equal((out, lse), (jnp.zeros_like(out), jnp.broadcast_to(sinks, lse.shape)))


def test_a_query_for_each_of_a_symbolic_number():
    n, m = jax.export.symbolic_shape("n, m")
    q, k, v, table = inputs(lead=(4, 3), dtype="float32")

    def call(q, mask):
        return paged_attention(q, k, v, table, return_lse=True, mask=mask, window_left=50, soft_cap=3.0)

    shapes = jax.ShapeDtypeStruct((4, n, 4, 64), "float32"), jax.ShapeDtypeStruct((4, n, m), "bool")
    exported = jax.export.export(jax.jit(call))(*shapes)
    mask = jnp.asarray(np.random.default_rng(0).random((4, 3, 6)) < 0.5)
    options: dict[str, Any] = {"mask": mask, "window_left": 50, "soft_cap": 3.0}
    expected = reference.paged_attention(q, k, v, table, return_lse=True, **options)
    testing.assert_close(tuple(exported.call(q, mask)), expected)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"soft_cap": -1.0}, "soft_cap"),
    ({"soft_cap": np.inf}, "soft_cap"),
    ({"soft_cap": np.nan}, "soft_cap"),
    ({"soft_cap": [1.0]}, "soft_cap"),
    ({"soft_cap": True}, "soft_cap"),
    ({"soft_cap": "x"}, "soft_cap"),
    ({"window_left": -2}, "window_left"),
    ({"window_left": 3.0}, "window_left"),
    ({"window_left": True}, "window_left"),
    ({"window_left": [3, 3, 3, 3]}, "window_left"),
    ({"window_left": (3, 0)}, "window_left"),
    ({"alibi_slopes": jnp.ones(2)}, "alibi_slopes"),
    ({"alibi_slopes": 0.5}, "alibi_slopes"),
    ({"alibi_slopes": jnp.ones(4, bool)}, "alibi_slopes"),
    ({"sinks": jnp.ones((4, 4))}, "sinks"),
    ({"sinks": jnp.ones(4, "complex64")}, "sinks"),
    ({"sinks": "x"}, "sinks"),
    ({"mask": jnp.ones((4, 5))}, "mask"),
    ({"mask": jnp.ones((4, 1, 5), bool)}, "mask"),
    ({"mask": jnp.ones(5, bool)}, "mask"),
    ({"mask": True}, "mask"),
    ({"causal": 1}, "causal"),
    ({"causal": jnp.array(True)}, "causal"),
    ({"causal": None}, "causal"),
]


@pytest.mark.parametrize(("change", "name"), MISTAKES, ids=str)
def test_mistakes_are_named(change, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        paged_attention(*inputs(), **change)


def test_a_mask_of_other_queries_is_named():
    with pytest.raises(ValueError, match=r"^mask: expected shape \[4, 3, mask_len\], got shape \(4, 2, 5\)"):
        paged_attention(*inputs(lead=(4, 3)), mask=jnp.ones((4, 2, 5), bool))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("soft_cap", jnp.float32(-1)),
        ("window_left", jnp.int32(-2)),
        ("alibi_slopes", jnp.array([0, 1, jnp.inf, 0])),
        ("sinks", jnp.array([0, 1, jnp.nan, 0])),
        ("sinks", jnp.array([0, 1, jnp.inf, 0])),
    ],
    ids=str,
)
def test_wrong_values(name, value):
    def call(value):
        return paged_attention(*inputs(), validate_values=True, implementation="xla", **{name: value})

    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got "):
        call(value)
    error, _ = jax.jit(checkify.checkify(call))(value)
    assert f"{name}: expected " in error.get()


def test_right_values():
    args = inputs()
    options = {"window_left": -1, "soft_cap": 0.0, "sinks": jnp.array([0.0, -jnp.inf, 1.0, 2.0])}
    on_device: dict[str, Any] = {name: jnp.asarray(x) for name, x in options.items()}
    result = paged_attention(*args, validate_values=True, return_lse=True, **on_device)
    testing.assert_close(result, reference.paged_attention(*args, return_lse=True, **on_device))


def test_no_transfer_that_was_not_asked_for():
    args = inputs()
    with jax.transfer_guard("disallow"):
        paged_attention(*args, window_left=3, soft_cap=5.0)


@pytest.mark.parametrize(
    ("q_len", "options", "reason"),
    [
        (3, {"mask": jnp.ones((4, 3, 129), bool)}, "a mask of 129 keys unsupported; supported: 128"),
        (257, {}, "514 queries a kv head, of 257 tokens, unsupported; supported: 512"),
    ],
)
def test_a_kernel_that_cannot_says_why(q_len, options, reason):
    record = explain(paged_attention, *inputs(lead=(4, q_len)), **options, target="sm_90")
    assert record.implementation == "xla"
    assert dict(record.passed_over)["mosaic_gpu"] == reason
