"""The movement of parts of queries, keys and cache rows, and products of groups."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_paged_attn
from jax_paged_attn import reference, testing


def numbers(*shape, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype))


CALLS = {
    "extract": ("mla_q_rope_extract", (numbers(7, 5, 24),), {"nope": 16}),
    "extract_of_wider": ("mla_q_rope_extract", (numbers(7, 5, 24),), {"nope": 10, "rope": 6}),
    "extract_all": ("mla_q_rope_extract", (numbers(7, 5, 24),), {"nope": 0}),
    "writeback": ("mla_q_rope_writeback", (numbers(7, 5, 24), numbers(7, 5, 8)), {"nope": 16}),
    "writeback_to_wider": ("mla_q_rope_writeback", (numbers(7, 5, 24), numbers(7, 5, 6)), {"nope": 10}),
    "final": ("mla_q_final_assemble", (numbers(7, 5, 32), numbers(7, 5, 8)), {}),
    "kv": ("mla_kv_assemble", (numbers(7, 5, 24), numbers(7, 4)), {"nope": 16}),
    "kv_of_wider": ("mla_kv_assemble", (numbers(7, 5, 24), numbers(7, 4)), {"nope": 9, "v_dim": 12}),
    "cache": ("mla_cache_assemble", (numbers(7, 32), numbers(7, 4)), {}),
    "cache_rope": ("mla_cache_assemble", (numbers(7, 32), numbers(7, 4)), {"v_form": "rope"}),
    "cache_int8": (
        "mla_cache_assemble",
        (jnp.arange(14, dtype=jnp.int8).reshape(7, 2), jnp.ones((7, 4), jnp.int8)),
        {},
    ),
    "no_tokens": ("mla_kv_assemble", (numbers(0, 5, 24), numbers(0, 4)), {"nope": 16}),
}


@pytest.mark.parametrize("name", CALLS)
def test_moves_bits(name):
    function, args, options = CALLS[name]
    expected = getattr(reference, function)(*args, **options)
    chex.assert_trees_all_equal(getattr(jax_paged_attn, function)(*args, **options), expected)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x + x]), args)
    mapped = jax.vmap(lambda *args: getattr(jax_paged_attn, function)(*args, **options))(*stacked)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[0], mapped), expected)


def test_extracted_columns_go_back():
    q = numbers(7, 5, 24)
    rope = jax_paged_attn.mla_q_rope_extract(q, nope=16)
    chex.assert_trees_all_equal(jax_paged_attn.mla_q_rope_writeback(q, rope, nope=16), q)


def test_writeback_is_in_place_when_donated():
    q, rope = numbers(64, 16, 192), numbers(64, 16, 64)
    call = jax.jit(lambda q, rope: jax_paged_attn.mla_q_rope_writeback(q, rope, nope=128), donate_argnums=0)
    memory: Any = call.lower(q, rope).compile().memory_analysis()
    assert memory.alias_size_in_bytes == q.size * 2


ERRORS = {
    "extract": [({"nope": 25}, "q_full: expected at least"), ({"nope": -1}, "nope: expected an int"),
                ({"rope": 9}, "q_full: expected at least nope \\+ rope = 25")],
    "writeback": [({"nope": 17}, "q_rope: expected shape"), ({"nope": 1.5}, "nope: expected an int")],
    "kv": [({"v_dim": 9}, "kv_expanded: expected at least"), ({"v_dim": True}, "v_dim: expected")],
    "cache": [({"v_form": "none"}, "v_form: expected one of")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "message"), [(name, *error) for name, errors in ERRORS.items() for error in errors]
)
def test_errors_name_the_option(name, change, message):
    function, args, options = CALLS[name]
    with pytest.raises(ValueError, match=message):
        getattr(jax_paged_attn, function)(*args, **(options | change))


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("extract", (numbers(7, 24),), "q_full: expected shape"),
        ("writeback", (numbers(7, 5, 24), numbers(7, 4, 8)), "q_rope: expected shape"),
        ("writeback", (numbers(7, 5, 24), numbers(7, 5, 8, dtype="float32")), "q_rope: expected the dtype"),
        ("final", (numbers(7, 5, 32), numbers(6, 5, 8)), "q_rope: expected shape"),
        ("kv", (numbers(7, 5, 24), numbers(6, 4)), "k_rope: expected shape"),
        ("cache", (numbers(7, 5, 24), numbers(7, 4)), "kv_latent: expected shape"),
    ],
)
def test_errors_name_the_array(name, args, message):
    function, _, options = CALLS[name]
    with pytest.raises(ValueError, match=message):
        getattr(jax_paged_attn, function)(*args, **options)


@pytest.mark.parametrize("dtype", testing.TOLERANCES)
@pytest.mark.parametrize("sizes", [(9, 4, 24, 40), (1, 1, 128, 1), (0, 3, 8, 8)], ids=str)
def test_grouped_gemm(sizes, dtype):
    m, groups, k, n = sizes
    a, b = numbers(m, groups * k, dtype=dtype), numbers(groups * n, k, dtype=dtype)
    c = jax_paged_attn.grouped_gemm(a, b, num_groups=groups)
    chex.assert_type(c, dtype)
    testing.assert_close(c, reference.grouped_gemm(a, b, num_groups=groups))


def test_grouped_gemm_accumulates_in_float32():
    a, b = jnp.full((1, 4096), 1.0, jnp.bfloat16), jnp.full((1, 4096), 1.0, jnp.bfloat16)
    assert float(jax_paged_attn.grouped_gemm(a, b, num_groups=1)[0, 0]) == 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": jnp.ones((3, 7))}, "a: expected num_groups"),
        ({"a": jnp.ones(8)}, "a: expected two axes"),
        ({"a": jnp.ones((3, 8), int)}, "a: expected a dtype"),
        ({"b": jnp.ones((5, 4))}, "b: expected a multiple"),
        ({"b": jnp.ones((6, 4), jnp.bfloat16)}, "b: expected the dtype of a"),
        ({"num_groups": 0}, "num_groups: expected an int"),
    ],
)
def test_grouped_gemm_errors(change, message):
    with pytest.raises(ValueError, match=message):
        jax_paged_attn.grouped_gemm(
            **({"a": jnp.ones((3, 8)), "b": jnp.ones((6, 4)), "num_groups": 2} | change)
        )
