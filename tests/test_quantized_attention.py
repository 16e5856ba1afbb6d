"""Attention over quantized caches: what their scales mean, and which are refused."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_paged_attn
from jax_paged_attn import decode_attention, paged_attention, reference, testing
from jax_paged_attn.kernels.mosaic_gpu.attention import Config
from jax_paged_attn.testing import make_inputs


def inputs(**changes):
    case = dataclasses.replace(testing.case("e4m3_tensor"), **changes)
    made = make_inputs(case)
    return made.args, {name: x for name, x in made.options.items() if name != "sm_scale"}


def close(actual, expected):
    """Compare results whose weights may be rounded differently."""
    testing.assert_close(actual, jax.tree.map(lambda x: x.astype(jnp.float32), expected))


def test_linear_in_v_scale_and_k_scale_as_on_the_logits():
    """At page 1, 64/16 heads."""
    args, _ = inputs(num_q_heads=64, num_kv_heads=16, page_size=1)
    attend = functools.partial(paged_attention, *args, return_lse=True)
    out, lse = attend(sm_scale=0.1)
    chex.assert_trees_all_close(attend(sm_scale=0.1, v_scale=2.0), (2 * out, lse))
    close(attend(sm_scale=0.1, k_scale=0.5), attend(sm_scale=0.05))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("kv_layout", ["HND", "NHD", "HPND"])
def test_all_forms_of_one_scale_agree(dtype, kv_layout):
    args, _ = inputs(cache_dtypes=(dtype, dtype), kv_layout=kv_layout, scale=None)
    attend = functools.partial(paged_attention, *args, kv_layout=kv_layout, return_lse=True)
    tokens = jnp.full(args[1].shape[:-1], 0.25, jnp.float32)
    forms = (0.25, np.float64(0.25), jnp.bfloat16(0.25), np.full(2, 0.25, np.float32), tokens)
    expected = attend(k_scale=0.25, v_scale=0.25)
    for scale in forms:
        close(attend(k_scale=scale, v_scale=scale), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_of_tokens_of_very_different_sizes(dtype):
    """A token of much weight and small scale beside one of little weight and large scale."""
    k = jnp.array([8.0, -8.0]).reshape(1, 1, 2, 1) * jnp.ones((1, 1, 2, 64))
    k, v = k.astype("int8"), jnp.ones((1, 1, 2, 64), jnp.int8)
    q = jnp.full((1, 1, 64), 0.1, dtype)
    scales = jnp.array([1.0, 1e6]).reshape(1, 1, 2)
    for smaller in (1.0, 1e-8):
        options = {"sm_scale": 0.07, "v_scale": scales * smaller}
        out = decode_attention(q, k, v, 2, **options)
        expected = reference.decode_attention(q, k, v, 2, **options)
        out = jnp.asarray(out, jnp.float32)
        if smaller == 1.0:
            chex.assert_trees_all_close(out, expected, rtol=2 * float(jnp.finfo(dtype).eps))
        assert not jnp.isnan(out).any()


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_as_exact_as_a_bfloat16_cache_of_the_same_values(dtype, implementation):
    """Which it can hold: what differs is the way through the kernel."""
    scale = 1 / 30 if dtype == "int8" else None
    (q, k, v, table), _ = inputs(
        cache_dtypes=(dtype, dtype), scale=None, head_dim=128, num_q_heads=16, kv_lens=(200, 77, 400)
    )
    same_k, same_v = (x.astype(jnp.bfloat16) for x in (k, v))
    sm_scale = 128**-0.5
    attend = functools.partial(paged_attention, implementation=implementation)
    out = attend(q, k, v, table, sm_scale=sm_scale, k_scale=scale, v_scale=scale)
    plain = attend(q, same_k, same_v, table, sm_scale=sm_scale * (scale or 1))
    expected = reference.paged_attention(q, k, v, table, sm_scale=sm_scale, k_scale=scale, v_scale=scale)
    out, plain, expected = (jnp.asarray(x, jnp.float32) for x in (out, plain, expected))
    plain = plain * (scale or 1)  # a bfloat16 cache has no scale of its own
    error, others = (float(jnp.sqrt(jnp.mean((x - expected) ** 2))) for x in (out, plain))
    assert error <= 1.5 * others


@pytest.mark.parametrize("num_stages", [1, 3])
def test_scales_of_tokens_at_any_number_of_stages(num_stages):
    """With one, a tile's scales come while nothing else does."""
    case = dataclasses.replace(testing.case("e4m3_token"), kv_lens=(700, 0, 131))
    made = make_inputs(case)
    config = Config(block_kv=64, num_stages=num_stages, num_parts=2)
    actual = made.call(jax_paged_attn, implementation="mosaic_gpu", config=config)
    testing.assert_close(actual, made.expected())


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_scales_of_tokens_far_from_one(size):
    (q, k, v, table), options = inputs(scale="token", dtype="bfloat16")
    v_scale = options["v_scale"] * size
    out = paged_attention(q, k, v, table, v_scale=v_scale, implementation="mosaic_gpu")
    expected = reference.paged_attention(q, k, v, table, v_scale=v_scale)
    out, expected = (jnp.asarray(x, jnp.float32) / size for x in (out, expected))
    testing.assert_close(out.astype(q.dtype), expected)


def test_an_empty_row_is_zero_whatever_its_scale():
    (q, k, v, table), _ = inputs(scale=None)
    out = paged_attention(q, k, v, table, v_scale=jnp.nan)
    chex.assert_trees_all_equal(out[0], jnp.zeros_like(out[0]))


def test_value_checks_of_scales():
    args, _ = inputs(scale=None, kv_lens=(5, 9))
    paged_attention(*args, k_scale=0.5, v_scale=jnp.ones(2), validate_values=True)
    for scale in (0.0, -1.0, np.nan, np.array([1, np.inf], np.float32)):
        with pytest.raises(ValueError, match=r"^k_scale: expected positive finite values"):
            paged_attention(*args, k_scale=scale, validate_values=True)


@pytest.mark.parametrize("scale", ["tensor", "head", "token"])
@pytest.mark.parametrize("mapped", ["rows", "everything", "scales"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HPND"])
def test_vmap(scale, mapped, kv_layout):
    (q, k, v, table), options = inputs(scale=scale, kv_layout=kv_layout)
    scales = [options["k_scale"], options["v_scale"]]

    def call(q, k, v, table, k_scale, v_scale):
        return paged_attention(
            q, k, v, table, k_scale=k_scale, v_scale=v_scale, kv_layout=kv_layout, return_lse=True
        )

    axes = {"rows": (0, None, None, 0, None, None), "everything": (0,) * 6, "scales": (None,) * 4 + (0, 0)}[
        mapped
    ]
    many = []
    for arg, axis in zip((q, k, v, table, *scales), axes, strict=True):
        many.append(arg if axis is None else jax.tree.map(lambda x: jnp.stack([x, x]), arg))
    if axes[4] == 0:
        many[4:] = [x.at[1].multiply(2) for x in many[4:]]
    actual = jax.vmap(call, in_axes=axes)(*many)
    for i in range(2):
        each = [
            arg if axis is None else jax.tree.map(lambda x: x[i], arg)  # noqa: B023
            for arg, axis in zip(many, axes, strict=True)
        ]
        one = jax.tree.map(lambda x: x[i], actual)  # noqa: B023
        close(one, call(*each))


def test_wrong_scales_of_an_unbatched_call():
    cache = jnp.zeros((2, 16, 64), jnp.int8)
    scales: list[Any] = [[["a", "b"]], np.array([[None]], object), [[1.0], [1.0, 2.0]]]
    for scale in scales:
        with pytest.raises(ValueError, match=r"^k_scale: expected .+, got .+"):
            decode_attention(jnp.ones((8, 64)), cache, cache, 5, k_scale=scale)


@pytest.mark.parametrize("power", [22, 23, 24, 30])
def test_scores_whose_ulp_is_large(power):
    """Of weights at most 2**15 none may become 2**16, which float16 doesn't hold."""
    cache = jnp.ones((1, 1, 64, 64), jnp.float8_e4m3fn)
    q = jnp.full((1, 1, 64), 2.0**power, jnp.bfloat16)
    out = decode_attention(q, cache, cache, 1, implementation="mosaic_gpu")
    chex.assert_trees_all_equal(out, jnp.ones((1, 1, 64), jnp.bfloat16))


@pytest.mark.parametrize("largest", [1e2, 1e5])
def test_columns_of_a_query_far_below_its_largest(largest):
    q = jnp.full((1, 1, 64), 1e-3, jnp.bfloat16).at[..., 0].set(largest)
    k = jnp.full((1, 1, 64, 64), 448.0).at[..., 0].set(0).astype(jnp.float8_e4m3fn)
    call = functools.partial(decode_attention, q, k, k, 1, return_lse=True)
    testing.assert_close(
        call(implementation="mosaic_gpu"), reference.decode_attention(q, k, k, 1, return_lse=True)
    )


def test_unbatched_contiguous():
    (q, k, v, lens), options = inputs(contiguous=True, page_size=200, kv_lens=(3, 150), scale="token")
    out = decode_attention(q, k, v, lens, **options)
    scales = {name: options[name][1] for name in ("k_scale", "v_scale")}
    one = decode_attention(q[1], k[1], v[1], lens[1], **scales)
    close(one, out[1])
    testing.assert_close(one, reference.decode_attention(q[1], k[1], v[1], lens[1], **scales))


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("k_scale", {"cache_dtypes": None}, {"k_scale": 1.0}),
        ("v_scale", {"cache_dtypes": ("int8", "bfloat16")}, {"v_scale": 1.0}),
        ("k_scale", {}, {"k_scale": np.ones(3, np.float32)}),
        ("v_scale", {}, {"v_scale": np.ones((2, 2), np.float32)}),
        ("k_scale", {"kv_layout": "NHD"}, {"k_scale": np.ones((19, 2, 16), np.float32), "kv_layout": "NHD"}),
        ("k_scale", {}, {"k_scale": "1"}),
        ("k_scale", {}, {"k_scale": 1j}),
        ("k_scale", {}, {"k_scale": True}),
        ("k_pages", {"cache_dtypes": ("float32", "bfloat16")}, {}),
        ("v_pages", {"cache_dtypes": ("bfloat16", "float16")}, {}),
    ],
)
def test_wrong_scales_and_dtypes(name, changes, options):
    args, _ = inputs(**({"scale": None} | changes))
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        paged_attention(*args, **options)
