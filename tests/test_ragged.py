"""`ragged_paged_attention`: rows that differ in their number of query tokens, of every implementation."""

import dataclasses
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
from jax_paged_attn import PageTable, explain, paged_attention, ragged_paged_attention, reference, testing
from jax_paged_attn.kernels.xla import ragged as xla_ragged

TOTAL_Q, WIDTH = 40, 9


def inputs(
    kv_lens=(3, 70, 131), q_lens=(1, 30, 5), dtype="bfloat16", seed=0
) -> tuple[jax.Array, jax.Array, jax.Array, PageTable, jax.Array]:
    """q of 40 tokens, k_pages, v_pages, a table of 9 pages a row, q_indptr."""
    rng = np.random.default_rng(seed)
    batch = len(kv_lens)
    q = rng.standard_normal((TOTAL_Q, 4, 64))
    k, v = rng.standard_normal((2, WIDTH * batch, 2, 16, 64))
    table = PageTable.from_block_tables(rng.permutation(WIDTH * batch).reshape(batch, WIDTH), kv_lens)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    return q, k, v, table, jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32)


def attend(*args, **options):
    return ragged_paged_attention(*args, return_lse=True, **options)


# Compiled once a shape.
expected = jax.jit(functools.partial(reference.ragged_paged_attention, return_lse=True))


@st.composite
def cases(draw):
    """Rows of any lengths with a random choice of options, at few shapes."""
    lens = tuple(draw(st.lists(st.integers(0, 150), min_size=3, max_size=3)))
    first = draw(st.integers(0, 40))
    second = draw(st.integers(0, 40 - first))
    cache = draw(st.sampled_from([None, "float8_e4m3fn", "int8"]))
    return testing.Case(
        name=f"random {draw(st.integers(0, 99))}",
        kv_lens=lens,
        q_lens=(first, second, 40 - first - second),
        kv_layout=draw(st.sampled_from(["HND", "NHD", "HPND"])),
        kv_starts=draw(st.none() | st.tuples(*(st.integers(0, n) for n in lens))),
        causal=draw(st.booleans()),
        soft_cap=draw(st.none() | st.just(0.7)),
        window_left=draw(st.none() | st.integers(0, 160)),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        mask_len=draw(st.none() | st.just(5)),
        cache_dtypes=None if cache is None else (cache, cache),
        scale=None if cache is None else draw(st.sampled_from(["head", "token"])),
        num_splits=draw(st.sampled_from([None, 2])),
    )


@settings(max_examples=4)
@given(cases())
def test_any_combination(case):
    made = testing.make_inputs(case)
    testing.assert_close(made.call(jax_paged_attn), made.expected())


@pytest.mark.parametrize("name", ["ragged_tree", "ragged_not_causal_e4m3_token"])
def test_unused_slots_change_no_bit(name):
    zeroed, *others = (testing.make_inputs(testing.case(name), poison=x) for x in (0.0, np.nan, np.inf))
    right = zeroed.call(jax_paged_attn)
    chex.assert_tree_all_finite(right[0])
    for poisoned in others:
        chex.assert_trees_all_equal(poisoned.call(jax_paged_attn), right)


@pytest.mark.parametrize("block_q", [1, 64])
def test_tiles_of_any_number_of_queries(block_q):
    args = inputs()
    config = xla_ragged.Config(block_q=block_q, block_kv=32)
    options: dict[str, Any] = {"window_left": 20, "sinks": jnp.ones(4), "num_splits": 2}
    result = attend(*args, implementation="xla", config=config, **options)
    options.pop("num_splits")
    testing.assert_close(result, expected(*args, **options))
    assert explain(ragged_paged_attention, *args, config=config, target="cpu").config == config


@pytest.mark.parametrize(
    ("rows", "total_q", "block_q"), [(3, 40, 8), (40, 40, 1), (64, 40, 1), (1, 40, 32), (1, 5000, 128)]
)
def test_tiles_follow_the_mean(rows, total_q, block_q):
    q, k, v, table, _ = inputs()
    fields: Any = [jax.ShapeDtypeStruct((rows,), "int32")] * 3
    table = PageTable(table.indices, *fields)
    q = jax.ShapeDtypeStruct((total_q, 4, 64), q.dtype)
    record = explain(
        ragged_paged_attention, q, k, v, table, jax.ShapeDtypeStruct((rows + 1,), "int32"), target="cpu"
    )
    assert record.config == xla_ragged.Config(block_q=block_q)


@pytest.mark.newest
def test_one_compile_for_all_mixtures():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def call(*args):
        return attend(*args)

    mixtures = (((3, 70, 131), (1, 30, 5)), ((40, 0, 9), (40, 0, 0)), ((1, 1, 144), (0, 1, 1)))
    for seed, (kv_lens, q_lens) in enumerate(mixtures):
        args = inputs(kv_lens, q_lens, seed=seed)
        testing.assert_close(call(*args), expected(*args))


def test_rows_of_equal_numbers_are_a_batch():
    q, k, v, table, _ = inputs()
    options: dict[str, Any] = {"window_left": 50, "alibi_slopes": 0.5 ** jnp.arange(4.0)}
    out, lse = attend(q[:9], k, v, table, [0, 3, 6, 9], **options)
    batch = paged_attention(q[:9].reshape(3, 3, 4, 64), k, v, table, return_lse=True, **options)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32).reshape(9, *x.shape[2:]), batch)
    testing.assert_close((out, lse), exact)


def test_a_prompt_in_chunks_is_the_prompt():
    """Each chunk attends to those before it, whose keys lie in the same pages."""
    q, k, v, table, _ = inputs((40,), (40,))
    whole = attend(q, k, v, table, [0, 40])
    chunks = [
        attend(q[a:b], k, v, dataclasses.replace(table, kv_lens=jnp.array([b])), [0, b - a])
        for a, b in ((0, 17), (17, 40))
    ]
    joined = jax.tree.map(lambda *x: jnp.concatenate(x), *chunks)
    testing.assert_close(joined, jax.tree.map(lambda x: x.astype(jnp.float32), whole))


def test_tokens_of_no_row_give_nothing():
    q, k, v, table, _ = inputs()
    for sinks in (None, jnp.arange(4.0)):
        out, lse = attend(q, k, v, table, [2, 3, 3, 36], sinks=sinks)
        for nobodys in (slice(0, 2), slice(36, None)):
            assert not out[nobodys].any()
            assert jnp.isneginf(lse[nobodys]).all()
        assert out[2:36].any(axis=(1, 2)).all()
    garbage = q.at[jnp.array([0, 1, 36, 39])].set(jnp.nan)
    chex.assert_trees_all_equal(attend(garbage, k, v, table, [2, 3, 3, 36], sinks=sinks), (out, lse))


@pytest.mark.parametrize("sizes", [(0, 3, 3), (5, 0, 3), (5, 3, 0)], ids=str)
def test_nothing_to_attend_to(sizes):
    total_q, batch, num_pages = sizes
    pages = jnp.ones((num_pages, 2, 16, 64))
    table = PageTable.from_block_tables(np.zeros((batch, 2), int), np.full(batch, 9))
    indptr = np.minimum(np.arange(batch + 1), total_q)
    args = jnp.ones((total_q, 4, 64)), pages, pages, table, indptr
    out, lse = attend(*args, sinks=jnp.arange(4.0))
    chex.assert_trees_all_equal((out, lse), expected(*args, sinks=jnp.arange(4.0)))
    chex.assert_shape((out, lse), [(total_q, 4, 64), (total_q, 4)])


def test_wild_bounds_disturb_no_other_row():
    q, k, v, table, _ = inputs()
    right, wild = (attend(q, k, v, table, bounds) for bounds in ([0, 7, 9, 40], [-5, 7, 9, 2**31 - 1]))
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[7:], right), jax.tree.map(lambda x: x[7:], wild))
    right, wild = (attend(q, k, v, table, bounds) for bounds in ([0, 7, 7, 7], [0, 7, -3, -9]))
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[:7], right), jax.tree.map(lambda x: x[:7], wild))


@pytest.mark.parametrize("mapped", ["everything", "window"])
def test_vmap(mapped):
    each = [inputs(seed=0), inputs((9, 144, 0), (9, 20, 3), seed=1)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    shared = each[0]
    sinks, windows = jnp.ones(4), jnp.array([3, 30])
    if mapped == "everything":
        results = jax.vmap(functools.partial(attend, sinks=sinks))(*stacked)
        right = [expected(*args, sinks=sinks) for args in each]
    else:
        results = jax.vmap(lambda window_left: attend(*shared, window_left=window_left))(windows)
        right = [expected(*shared, window_left=window_left) for window_left in windows]
    for i in range(2):
        testing.assert_close(jax.tree.map(lambda x: x[i], results), right[i])  # noqa: B023


def test_symbolic_tokens_and_rows():
    t, b, p = jax.export.symbolic_shape("t, b, p")

    def call(q, k, v, tables, lens, indptr):
        table = PageTable.from_block_tables(tables, lens)
        return attend(q, k, v, table, indptr, sinks=jnp.ones(4))

    of = jax.ShapeDtypeStruct
    exported = jax.export.export(jax.jit(call))(
        of((t, 4, 64), "float32"),
        *[of((p, 2, 16, 64), "float32")] * 2,
        of((b, WIDTH), "int32"),
        of((b,), "int32"),
        of((b + 1,), "int32"),
    )
    q, k, v, table, indptr = inputs(dtype="float32")
    tables = table.indices.reshape(-1, WIDTH)
    result = tuple(exported.call(q, k, v, tables, table.kv_lens, indptr))
    testing.assert_close(result, expected(q, k, v, table, indptr, sinks=jnp.ones(4)))


def test_memory_does_not_follow_the_cache():
    def temp_bytes(num_pages):
        rows: Any = [jax.ShapeDtypeStruct((4,), jnp.int32)] * 3
        table = PageTable(jax.ShapeDtypeStruct((4 * num_pages,), jnp.int32), *rows)  # pyright: ignore[reportArgumentType]
        pages = jax.ShapeDtypeStruct((num_pages, 2, 16, 64), jnp.float32)
        q, indptr = jax.ShapeDtypeStruct((100, 8, 64), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.int32)
        call = functools.partial(ragged_paged_attention, implementation="xla")
        analysis = jax.jit(call).lower(q, pages, pages, table, indptr).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temp_bytes(16384) <= temp_bytes(64) + 4096


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"q": jnp.ones((3, 5, 4, 64))}, "q"),
    ({"q": jnp.ones((4, 64))}, "q"),
    ({"q": jnp.ones((40, 3, 64), "bfloat16")}, "q"),
    ({"k_pages": jnp.ones((27, 2, 16, 32), "bfloat16")}, "k_pages"),
    ({"page_table": PageTable.from_block_tables([0, 1], 20)}, "page_table"),
    ({"page_table": [[0, 1]]}, "page_table"),
    ({"q_indptr": [0, 1, 2]}, "q_indptr"),
    ({"q_indptr": [0.0, 1, 2, 3]}, "q_indptr"),
    ({"q_indptr": None}, "q_indptr"),
    ({"mask": jnp.ones((3, 5), bool)}, "mask"),
    ({"kv_starts": jnp.zeros(40, int)}, "kv_starts"),
    ({"sinks": jnp.ones(3)}, "sinks"),
    ({"causal": 1}, "causal"),
    ({"validate_values": 1}, "validate_values"),
    ({"num_splits": 0}, "num_splits"),
    ({"config": 3}, "config"),
    ({"implementation": "cuda"}, "implementation"),
]


@pytest.mark.parametrize(("change", "name"), MISTAKES, ids=str)
def test_mistakes_are_named(change, name):
    names = ("q", "k_pages", "v_pages", "page_table", "q_indptr")
    arguments: dict[str, Any] = dict(zip(names, inputs(), strict=True))
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        ragged_paged_attention(**(arguments | change))


@pytest.mark.parametrize("q_indptr", [(0, 5, 4, 40), (-1, 5, 6, 40), (0, 5, 6, 41)], ids=str)
def test_wrong_bounds(q_indptr):
    args = inputs()[:4]

    def call(q_indptr):
        return ragged_paged_attention(*args, q_indptr, validate_values=True)

    with pytest.raises(ValueError, match=r"^q_indptr: expected a rising array of values in \[0, 40\], got "):
        call(jnp.array(q_indptr))
    error, _ = jax.jit(checkify.checkify(call))(jnp.array(q_indptr))
    assert "q_indptr: expected " in error.get()


def test_right_values():
    """Pages before every query's window may be gone: of row 2, those before key 131 - 5 - 40."""
    q, k, v, table, indptr = inputs()
    gone = dataclasses.replace(table, indices=table.indices.at[2 * WIDTH : 2 * WIDTH + 5].set(-1))
    options: dict[str, Any] = {"window_left": 40, "validate_values": True}
    chex.assert_trees_all_equal(
        attend(q, k, v, gone, indptr, **options), attend(q, k, v, table, indptr, **options)
    )
    with pytest.raises(ValueError, match=r"^page_table\.indices: expected used page ids"):
        attend(q, k, v, gone, indptr + jnp.array([0, 0, 0, 4]) - jnp.array([0, 0, 8, 0]), **options)


@pytest.mark.parametrize(
    ("rows", "total_q", "block_q"), [(3, 40, 13), (40, 40, 1), (3, 400, 32), (122, 4216, 32)]
)
def test_kernels_take_tiles_for_rows(rows, total_q, block_q):
    """Of as many queries as rows have on average, and as one reading of the keys can serve."""
    q, k, v, table, _ = inputs()
    fields: Any = [jax.ShapeDtypeStruct((rows,), "int32")] * 3
    args = jax.ShapeDtypeStruct((total_q, 4, 64), q.dtype), k, v, PageTable(table.indices, *fields)
    indptr = jax.ShapeDtypeStruct((rows + 1,), "int32")
    record = explain(ragged_paged_attention, *args, indptr, target="sm_90", window_left=5)
    assert record.implementation == "mosaic_gpu"
    assert record.config.block_q == block_q


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": jnp.ones((TOTAL_Q, 5), bool)}, "mask"),
        ({"causal": False, "window_left": 3}, "causal"),
        ({"causal": False, "alibi_slopes": jnp.ones(4)}, "causal"),
    ],
    ids=["mask", "window", "alibi"],
)
def test_kernels_say_what_they_cannot(options, reason):
    record = explain(ragged_paged_attention, *inputs(), target="sm_90", **options)
    assert record.implementation == "xla"
    assert reason in dict(record.passed_over)["mosaic_gpu"]
    with pytest.raises(NotImplementedError, match=rf"'mosaic_gpu' can't run this call: .*{reason}"):
        ragged_paged_attention(*inputs(), implementation="mosaic_gpu", **options)


def test_a_derivative_is_the_references():
    with pytest.raises(NotImplementedError, match=r"jax_paged_attn\.reference\.ragged_paged_attention"):
        jax.vjp(lambda q: ragged_paged_attention(q, *inputs()[1:]), inputs()[0])


def test_kernels_read_no_page_that_no_query_sees():
    """A tile's places before its first query would see keys before every window."""
    q, k, v, table, _ = inputs((131, 70), (2, 5))
    args = q[:8], k[:, :1], v[:, :1], table, jnp.array([0, 2, 7])
    unseen = jnp.arange(16) < (131 - 2 - 20) % 16  # of the page in which the window of row 0 begins
    page = table.indices[(131 - 2 - 20) // 16]
    sick = [x.at[page].set(jnp.where(unseen[None, :, None], jnp.nan, x[page])) for x in args[1:3]]
    options: dict[str, Any] = {"window_left": 20, "num_splits": 2, "implementation": "mosaic_gpu"}
    healthy = attend(*args, **options)
    chex.assert_trees_all_equal(attend(args[0], *sick, *args[3:], **options), healthy)
    testing.assert_close(healthy, expected(*args, window_left=20))


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_a_rows_bits_do_not_depend_on_batch_mates(implementation):
    q, k, v, table, _ = inputs((131, 70), (2, 5))
    call = functools.partial(attend, num_splits=2, window_left=20, implementation=implementation)
    k, v = k[:, :1], v[:, :1]
    out, lse = call(q[:8], k, v, table, [0, 2, 7])
    mates = dataclasses.replace(table, kv_lens=jnp.array([131, 3]))
    other = call(q[:8].at[2:].set(1.0), k, v, mates, [0, 2, 8])
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[:2], other), (out[:2], lse[:2]))
