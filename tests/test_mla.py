"""Decode of latent attention: every implementation, against the reference and against plain attention."""

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
    dispatch,
    explain,
    merge_state,
    mla_decode,
    reference,
    testing,
    testing_mla,
)
from jax_paged_attn.kernels.mosaic_gpu.mla import Config
from jax_paged_attn.testing_mla import MlaCase, make_mla_inputs, mla_case

SERVED_BY = [candidate.name for candidate in dispatch.IMPLEMENTATIONS]
RUNS = [
    pytest.param(name, case, id=f"{name}-{case.name}", marks=[pytest.mark.newest] if case.newest else [])
    for name, case in testing_mla.mla_runs()
]


@pytest.mark.parametrize(("implementation", "case"), RUNS)
def test_matches_the_reference(implementation, case):
    inputs = make_mla_inputs(case)
    if implementation in case.refused_by:
        with pytest.raises(NotImplementedError, match=rf"'{implementation}' can't run this call: .+"):
            inputs.call(jax_paged_attn, implementation=implementation)
        implementation = None
    result = inputs.call(jax_paged_attn, implementation=implementation)
    chex.assert_type(result[0], case.dtype)
    testing.assert_close(result, inputs.expected())


@pytest.mark.parametrize("name", ["plain", "heads_1"])
def test_few_heads_by_the_decode_kernel(name):
    inputs, config = make_mla_inputs(mla_case(name)), Config(num_parts=3, few_heads=True)
    result = inputs.call(jax_paged_attn, implementation="mosaic_gpu", config=config)
    testing.assert_close(result, inputs.expected())


@pytest.mark.parametrize("name", ["plain", "page_12", "q_len_2", "e4m3_token", "int8_tensor"])
def test_unused_slots_change_no_bit(name):
    zeroed, *others = (make_mla_inputs(mla_case(name), poison=x) for x in (0.0, np.nan, np.inf))
    expected = zeroed.call(jax_paged_attn)
    chex.assert_tree_all_finite(expected[0])
    for poisoned in others:
        chex.assert_trees_all_equal(poisoned.call(jax_paged_attn), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2**-6)])
def test_equals_unabsorbed_attention_in_float64(dtype, tolerance):
    """Heads' own keys and values, expanded from the latents, dense and unpaged."""
    heads, nope, rope, rank, v_dim, page_size = 4, 32, 16, 128, 24, 16
    kv_lens, rng = np.array([37, 150]), np.random.default_rng(0)
    w_uk, w_uv = rng.standard_normal((heads, nope, rank)) / 6, rng.standard_normal((heads, rank, v_dim)) / 11
    q_nope, q_pe = rng.standard_normal((2, heads, nope)), rng.standard_normal((2, heads, rope))
    latents, ropes = rng.standard_normal((2, 150, rank)), rng.standard_normal((2, 150, rope))
    # What the cache rounds is rounded for the plain computation too.
    latents, ropes, q_pe = (x.astype(dtype).astype(np.float64) for x in (latents, ropes, q_pe))
    absorbed = np.einsum("bhn,hnr->bhr", q_nope, w_uk)
    sm_scale = (nope + rope) ** -0.5
    plain = np.zeros((2, heads, v_dim))
    for b, kv_len in enumerate(kv_lens):
        for h in range(heads):
            keys = latents[b, :kv_len] @ w_uk[h].T
            scores = keys @ q_nope[b, h] + ropes[b, :kv_len] @ q_pe[b, h]
            weights = np.exp(sm_scale * (scores - scores.max()))
            values = latents[b, :kv_len] @ w_uv[h]
            plain[b, h] = weights @ values / weights.sum()
    pages = np.full((25, page_size, rank + rope), np.nan)
    tables = rng.permutation(25)[:20].reshape(2, 10)
    for b, kv_len in enumerate(kv_lens):
        for p in range(kv_len):
            pages[tables[b, p // page_size], p % page_size] = np.concatenate([latents[b, p], ropes[b, p]])
    out = mla_decode(
        absorbed.astype(dtype), q_pe.astype(dtype), pages.astype(dtype),
        PageTable.from_block_tables(tables, kv_lens), sm_scale=sm_scale,
    )  # fmt: skip
    ours = np.einsum("bhr,hrv->bhv", np.asarray(out).astype(np.float64), w_uv)
    rms = np.sqrt(np.mean(plain**2))
    chex.assert_trees_all_close(ours / rms, plain / rms, atol=tolerance)


CASE = st.builds(
    MlaCase,
    name=st.integers(0, 10**6).map(str),
    kv_lens=st.lists(st.integers(0, 300), min_size=1, max_size=3).map(tuple),
    num_heads=st.sampled_from([1, 3, 16]),
    rank=st.sampled_from([128, 256]),
    rope_dim=st.sampled_from([8, 32]),
    page_size=st.sampled_from([1, 7, 64]),
    q_len=st.sampled_from([None, 1, 5]),
    paired=st.booleans(),
    causal=st.booleans(),
    num_splits=st.sampled_from([None, 1, 3]),
)


@settings(max_examples=8)
@given(CASE)
def test_random_problems(case):
    inputs = make_mla_inputs(case)
    testing.assert_close(inputs.call(jax_paged_attn, implementation="xla"), inputs.expected())


@pytest.mark.parametrize("name", ["e4m3_token", "q_len_2", "pair"])
def test_a_row_alone_has_the_same_bits(name):
    inputs = make_mla_inputs(mla_case(name))
    q_nope, q_pe, pages, table = inputs.args
    together = mla_decode(*inputs.args, **inputs.options, return_lse=True, num_splits=2)
    row = q_nope.shape[0] - 1
    alone = PageTable(table.indices, table.row_starts[row:], table.row_pages[row:], table.kv_lens[row:])
    # A call of one shape: XLA may order sums by it.
    twice = jax.tree.map(lambda x: jnp.concatenate([x] * q_nope.shape[0]), alone)
    twice = PageTable(table.indices, twice.row_starts, twice.row_pages, twice.kv_lens)
    q_nope, q_pe = (jnp.broadcast_to(x[row:], x.shape) for x in (q_nope, q_pe))
    result = mla_decode(q_nope, q_pe, pages, twice, **inputs.options, return_lse=True, num_splits=2)
    chex.assert_trees_all_equal(
        jax.tree.map(lambda x: x[0], result), jax.tree.map(lambda x: x[row], together)
    )


def test_query_tokens_see_what_each_alone_would():
    inputs = make_mla_inputs(mla_case("q_len_2"))
    q_nope, q_pe, pages, table = inputs.args
    out, lse = mla_decode(*inputs.args, **inputs.options, return_lse=True)
    for token in range(2):
        earlier = PageTable(
            table.indices, table.row_starts, table.row_pages, jnp.maximum(table.kv_lens - 1 + token, 0)
        )
        alone = mla_decode(
            q_nope[:, token], q_pe[:, token], pages, earlier, **inputs.options, return_lse=True
        )
        testing.assert_close(
            (out[:, token], lse[:, token]), jax.tree.map(lambda x: x.astype(jnp.float32), alone)
        )


def test_disjoint_keys_merge():
    inputs = make_mla_inputs(MlaCase("halves", (64,), page_size=16, dtype="float32"))
    q_nope, q_pe, pages, table = inputs.args
    whole = mla_decode(*inputs.args, **inputs.options, return_lse=True)
    halves = [
        mla_decode(
            q_nope, q_pe, pages,
            PageTable(table.indices, table.row_starts + first, table.row_pages, jnp.array([32])),
            **inputs.options, return_lse=True,
        )
        for first in (0, 2)
    ]  # fmt: skip
    testing.assert_close(merge_state(*halves[0], *halves[1]), whole)


def test_unbatched_and_vmapped():
    inputs = make_mla_inputs(mla_case("plain"))
    q_nope, q_pe, pages, table = inputs.args
    call = functools.partial(mla_decode, **inputs.options, return_lse=True)
    expected = call(*inputs.args)
    row = PageTable(table.indices, table.row_starts[3], table.row_pages[3], table.kv_lens[3])
    alone = call(q_nope[3], q_pe[3], pages, row)
    chex.assert_trees_all_close(alone, jax.tree.map(lambda x: x[3], expected), atol=1e-2)
    rows = PageTable(table.indices, table.row_starts, table.row_pages, table.kv_lens)
    axes = PageTable(None, 0, 0, 0)  # pyright: ignore[reportArgumentType]
    mapped = jax.vmap(call, in_axes=(0, 0, None, axes))(q_nope, q_pe, pages, rows)
    chex.assert_trees_all_close(mapped, expected, atol=1e-2)
    # Pools of their own, in two levels.
    stacked = jax.tree.map(lambda x: jnp.stack([x, jnp.flip(x, 0)]), (q_nope, q_pe, pages, table))
    nested = jax.vmap(call)(*stacked)
    for i in range(2):
        each = call(*jax.tree.map(lambda x, i=i: x[i], stacked))
        chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: x[i], nested), each, atol=1e-2)


def test_mapped_scales_of_tokens_move_with_their_pools():
    inputs = make_mla_inputs(mla_case("e4m3_token"))
    queries_and_pages: Any = inputs.args[:3]
    stacked: Any = jax.tree.map(lambda x: jnp.stack([x, x]), queries_and_pages)
    scales = jnp.stack([inputs.options["kv_scale"], 2 * inputs.options["kv_scale"]])

    def call(queries_and_pages: Any, kv_scale) -> Any:
        q_nope, q_pe, pages = queries_and_pages
        return mla_decode(q_nope, q_pe, pages, inputs.args[3], sm_scale=0.01, kv_scale=kv_scale)

    mapped = jax.vmap(call)(stacked, scales)
    expected = jnp.stack([call(queries_and_pages, scales[i]) for i in range(2)])
    chex.assert_trees_all_close(mapped, expected, atol=1e-2)


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"q_len": 0}, {"num_pages": 0}, {"width": 0}, {"page": 0}], ids=str
)
def test_nothing_to_attend_to(sizes):
    sizes = {"batch": 2, "q_len": 3, "num_pages": 3, "width": 2, "page": 16} | sizes
    lead = (sizes["batch"], sizes["q_len"], 4)
    q_nope, q_pe = jnp.ones((*lead, 128), jnp.bfloat16), jnp.ones((*lead, 64), jnp.bfloat16)
    pages = jnp.ones((sizes["num_pages"], sizes["page"], 192), jnp.bfloat16)
    table = PageTable.from_block_tables(
        np.zeros((sizes["batch"], sizes["width"]), int), np.full(sizes["batch"], 9)
    )
    expected = jnp.zeros(q_nope.shape, q_nope.dtype), jnp.full(lead, -jnp.inf)
    for function in (mla_decode, reference.mla_decode):
        out, lse = function(q_nope, q_pe, pages, table, sm_scale=1.0, return_lse=True)
        chex.assert_trees_all_equal((out.astype(q_nope.dtype), lse), expected)


def test_one_compile_serves_all_lengths():
    inputs = make_mla_inputs(mla_case("plain"))
    q_nope, q_pe, pages, table = inputs.args

    @jax.jit
    @chex.assert_max_traces(n=1)
    def call(q_nope, q_pe, pages, table, sm_scale):
        return mla_decode(q_nope, q_pe, pages, table, sm_scale=sm_scale)

    for lens in ([0, 5, 64, 131], [1, 1, 1, 1]):
        shorter = PageTable(table.indices, table.row_starts, table.row_pages, jnp.array(lens, jnp.int32))
        expected = reference.mla_decode(q_nope, q_pe, pages, shorter, sm_scale=0.3)
        pages_clean = jnp.where(jnp.isnan(pages), 0, pages)
        testing.assert_close(call(q_nope, q_pe, pages_clean, shorter, 0.3), expected)


def test_grad_raises_and_the_reference_differentiates():
    q_nope, q_pe, pages, table = make_mla_inputs(mla_case("float32")).args

    def loss(function: Any, q_nope):
        return function(q_nope, q_pe, pages, table, sm_scale=0.1).sum()

    with pytest.raises(NotImplementedError, match=r"mla_decode: no derivative; .*reference\.mla_decode"):
        jax.grad(functools.partial(loss, mla_decode))(q_nope)
    gradient = jax.grad(functools.partial(loss, reference.mla_decode))(q_nope)
    chex.assert_tree_all_finite(gradient)
    assert jnp.abs(gradient[1:]).max() > 0


def valid_call():
    q_nope, q_pe = jnp.ones((2, 4, 128), jnp.bfloat16), jnp.ones((2, 4, 64), jnp.bfloat16)
    pages = jnp.ones((3, 16, 192), jnp.bfloat16)
    table = PageTable.from_block_tables([[2, 0], [1, -1]], [20, 3])
    return {"q_nope": q_nope, "q_pe": q_pe, "latent_pages": pages, "page_table": table, "sm_scale": 0.1}


FP8_PAIR = (jnp.ones((3, 16, 128), jnp.float8_e4m3fn), jnp.ones((3, 16, 64), jnp.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_nope": jnp.ones(128)}, "q_nope: expected shape .*, got shape"),
        ({"q_nope": jnp.ones((2, 4, 128), int)}, "q_nope: expected a dtype"),
        ({"q_nope": jnp.ones((2, 0, 128)), "q_pe": jnp.ones((2, 0, 64))}, "q_nope: expected at least one"),
        ({"q_pe": jnp.ones((2, 3, 64))}, "q_pe: expected shape"),
        ({"q_pe": jnp.ones((2, 4, 64))}, "q_pe: expected the dtype of q_nope"),
        ({"latent_pages": jnp.ones((3, 16, 191), jnp.bfloat16)}, r"latent_pages: expected .* 192\], got"),
        ({"latent_pages": jnp.ones((3, 16, 192))}, "latent_pages: expected the dtype of q_nope"),
        ({"latent_pages": FP8_PAIR[:1]}, "latent_pages: expected one array or a pair"),
        ({"latent_pages": (FP8_PAIR[0], FP8_PAIR[1][:2])}, r"latent_pages\[1\]: expected shape"),
        ({"latent_pages": (FP8_PAIR[0], FP8_PAIR[1].astype(float))}, r"\[1\]: expected the dtype"),
        ({"kv_scale": 1.0}, "kv_scale: expected None"),
        ({"latent_pages": FP8_PAIR, "kv_scale": jnp.ones(3)}, r"kv_scale: expected shape \(\) for one"),
        (
            {"latent_pages": jnp.ones((3, 16, 192), jnp.int8), "kv_scale": jnp.ones((3, 16, 1))},
            "latent_pages: expected a pair",
        ),
        ({"page_table": PageTable.from_block_tables([[0]], [1])}, "page_table: expected 2 rows"),
        ({"q_nope": jnp.ones((4, 128)), "q_pe": jnp.ones((4, 64))}, "page_table: expected an unbatched"),
        ({"sm_scale": "x"}, "sm_scale: expected a real scalar"),
        ({"sm_scale": None}, "sm_scale: expected a real scalar"),
        ({"causal": 1}, "causal: expected a bool"),
        ({"num_splits": 0}, "num_splits: expected an int"),
        ({"implementation": "magic"}, "implementation: expected None or one of"),
        (
            {"page_table": PageTable.from_block_tables([[3], [0]], [1, 1]), "validate_values": True},
            r"page_table.indices: expected used page ids in \[0, 2\]",
        ),
        ({"latent_pages": FP8_PAIR, "kv_scale": -1.0, "validate_values": True}, "kv_scale: expected pos"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change, message):
    with pytest.raises(ValueError, match=message):
        mla_decode(**(valid_call() | change))


def test_value_checks_under_jit():
    options = valid_call()
    table = options.pop("page_table")
    call = checkify.checkify(
        jax.jit(lambda table: mla_decode(**options, page_table=table, validate_values=True))
    )
    assert call(table)[0].get() is None
    wrong = PageTable(table.indices, table.row_starts, table.row_pages, table.kv_lens + 40)
    assert "page_table.kv_lens" in (call(wrong)[0].get() or "")


def test_explain_names_what_runs():
    options = valid_call()
    record = explain(mla_decode, **options, target="cpu")
    assert record.implementation == "xla"
    assert dict(record.passed_over)["mosaic_gpu"].startswith("runs on cuda")


def test_symbolic_export():
    batch, width = jax.export.symbolic_shape("b, w")
    shape = jax.ShapeDtypeStruct
    tables, lens = shape((batch, width), jnp.int32), shape((batch,), jnp.int32)
    q_nope, q_pe = shape((batch, 4, 128), jnp.float32), shape((batch, 4, 64), jnp.float32)

    @jax.jit
    def call(q_nope, q_pe, pages, tables, lens):
        table = PageTable.from_block_tables(tables, lens)
        return mla_decode(q_nope, q_pe, pages, table, sm_scale=0.1, implementation="xla")

    exported = jax.export.export(call)(q_nope, q_pe, shape((3, 16, 192), jnp.float32), tables, lens)
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s).astype(np.float32) for s in ((2, 4, 128), (2, 4, 64), (3, 16, 192))]
    args += [np.array([[2, 0], [1, 1]], np.int32), np.array([20, 3], np.int32)]
    chex.assert_trees_all_close(exported.call(*args), call(*args), atol=1e-6)
