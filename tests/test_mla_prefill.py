"""Prefill of latent attention, against the reference."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import mla_fused_prefill, mla_prefill_attention, reference, testing
from jax_paged_attn.kernels.xla.mla_prefill import Config


def make_qkv(q_len, kv_len, heads=3, dims=(40, 24), dtype="bfloat16", batch=2):
    rng = np.random.default_rng(q_len)
    shapes = ((batch, q_len, heads, dims[0]), (batch, kv_len, 1, dims[0]), (batch, kv_len, 1, dims[1]))
    return [jnp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lens", [(1, 1), (100, 100), (70, 300), (5, 2), (33, 64)], ids=str)
def test_matches_the_reference(lens, causal):
    qkv = make_qkv(*lens)
    call = functools.partial(mla_prefill_attention, sm_scale=0.2, causal=causal, return_lse=True)
    result = call(*qkv, config=Config(block_q=32, block_kv=64))
    expected = reference.mla_prefill_attention(*qkv, sm_scale=0.2, causal=causal, return_lse=True)
    testing.assert_close(result, expected)
    # Blocks of queries change nothing but the order of sums.
    testing.assert_close(call(*qkv), expected)


@pytest.mark.parametrize("dims", [(320, 256), (576, 512)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dims_of_models(dims, dtype):
    qkv, sm_scale = make_qkv(20, 20, 4, dims, dtype, batch=1), dims[0] ** -0.5
    expected = reference.mla_prefill_attention(*qkv, sm_scale=sm_scale)
    testing.assert_close(mla_prefill_attention(*qkv, sm_scale=sm_scale), expected)


def test_vmap_and_nothing():
    q, k, v = make_qkv(9, 9)
    call = functools.partial(mla_prefill_attention, sm_scale=0.2, return_lse=True)
    stacked = jnp.stack([q, 2 * q])
    mapped = jax.vmap(call, in_axes=(0, None, None))(stacked, k, v)
    for i in range(2):
        chex.assert_trees_all_close(
            jax.tree.map(lambda x, i=i: x[i], mapped), call(stacked[i], k, v), atol=1e-2
        )
    for empty in ((q[:0], k[:0], v[:0]), (q[:, :0], k, v)):
        out, lse = call(*empty)
        assert (out.size, lse.size) == (0, 0)
    out, lse = call(q, k[:, :0], v[:, :0])
    chex.assert_trees_all_equal((out, lse), (jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)))


def test_memory_is_of_a_tile():
    """Of 4096 x 4096 scores of 8 heads, 512 MB in float32, a small part is held."""
    shapes = (1, 4096, 8, 72), (1, 4096, 1, 72), (1, 4096, 1, 64)
    qkv = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    compiled = jax.jit(functools.partial(mla_prefill_attention, sm_scale=0.1)).lower(*qkv).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 64e6


def make_layer(dtype, tokens=17, heads=3, nope=16, rope=8, rank=32, v_dim=12) -> Any:
    rng = np.random.default_rng(0)
    shapes = ((tokens, heads, nope + rope), (tokens, heads, rope), (tokens, rank), (tokens, rope),
              (heads, nope, rank), (heads, rank, v_dim))  # fmt: skip
    sizes = (1, 1, 1, 1, nope**0.5, rank**0.5)
    scaled = zip(shapes, sizes, strict=True)
    return [jnp.asarray((rng.standard_normal(shape) / size).astype(dtype)) for shape, size in scaled]


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-5), ("bfloat16", 2**-4)])
@pytest.mark.parametrize("v_form", ["zeros", "rope"])
def test_fused_equals_unabsorbed(dtype, atol, v_form):
    layer = make_layer(dtype)
    layer[0] = layer[0].at[..., 16:].set(jnp.nan)  # q_full's own rope columns are ignored
    out, *rows = mla_fused_prefill(*layer, sm_scale=24**-0.5, v_form=v_form)
    expected, *expected_rows = reference.mla_fused_prefill(*layer, sm_scale=24**-0.5, v_form=v_form)
    chex.assert_type(out, dtype)
    rms = jnp.sqrt(jnp.mean(expected**2))
    chex.assert_trees_all_close(out.astype(jnp.float32) / rms, expected / rms, atol=atol)
    chex.assert_trees_all_equal(rows, expected_rows)


def test_fused_of_no_tokens_and_vmapped():
    layer = make_layer("float32")
    none = [x[:0] for x in layer[:4]] + layer[4:]
    assert [x.shape for x in mla_fused_prefill(*none, sm_scale=1.0)] == [(0, 3, 12), (0, 40), (0, 40)]
    axes = (0, 0, 0, 0, None, None)
    stacked = [jnp.stack([x, x[::-1]]) for x in layer[:4]] + layer[4:]
    mapped = jax.vmap(functools.partial(mla_fused_prefill, sm_scale=0.2), in_axes=axes)(*stacked)
    expected = mla_fused_prefill(*layer, sm_scale=0.2)
    chex.assert_trees_all_close([x[0] for x in mapped], list(expected), atol=1e-6)


def test_grad_raises_and_the_references_differentiate():
    q, k, v = make_qkv(5, 5, dtype="float32")

    def loss(function: Any, q):
        return function(q, k, v, sm_scale=0.1).sum()

    with pytest.raises(NotImplementedError, match=r"no derivative; .*reference\.mla_prefill_attention"):
        jax.grad(functools.partial(loss, mla_prefill_attention))(q)
    gradient = jax.grad(functools.partial(loss, reference.mla_prefill_attention))(q)
    layer = make_layer("float32")

    def fused_loss(layer):
        return reference.mla_fused_prefill(*layer, sm_scale=0.1)[0].sum()

    of_weights = jax.grad(lambda w: fused_loss([*layer[:5], w]))(layer[5])
    for each in (gradient, of_weights):
        chex.assert_tree_all_finite(each)
        assert jnp.abs(each).max() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.ones((2, 9, 40))}, "q: expected shape"),
        ({"k": jnp.ones((2, 9, 2, 40))}, r"k: expected shape \[2, kv_len, 1, 40\]"),
        ({"v": jnp.ones((2, 8, 1, 24))}, r"v: expected shape"),
        ({"v": jnp.ones((2, 9, 1, 24), jnp.bfloat16)}, "v: expected the dtype of q"),
        ({"causal": None}, "causal: expected a bool"),
        ({"sm_scale": "1"}, "sm_scale: expected a real scalar"),
        ({"implementation": "mosaic_gpu"}, None),
    ],
)
def test_errors_name_the_argument(change, message):
    q, k, v = make_qkv(9, 9, dtype="float32")
    options = {"q": q, "k": k, "v": v, "sm_scale": 0.1} | change
    error = ValueError if message else NotImplementedError
    with pytest.raises(error, match=message or "can't run this call"):
        mla_prefill_attention(**options)


@pytest.mark.parametrize(
    ("index", "message"),
    [(0, "q_full: expected shape"), (1, "q_rope: expected shape"), (2, "kv_latent: expected shape"),
     (3, "k_rope: expected shape"), (4, "w_uk: expected shape"), (5, "w_uv: expected shape")],
)  # fmt: skip
def test_fused_errors_name_the_argument(index, message):
    layer = make_layer("float32")
    layer[index] = layer[index][..., None]
    with pytest.raises(ValueError, match=message):
        mla_fused_prefill(*layer, sm_scale=0.1)
