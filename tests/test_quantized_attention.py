"""Attention over quantized caches: what their scales mean, and which are refused."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import decode_attention, paged_attention, reference, testing
from jax_paged_attn.testing import make_inputs


def inputs(**changes):
    case = dataclasses.replace(testing.case("e4m3_tensor"), **changes)
    made = make_inputs(case)
    return made.args, {name: x for name, x in made.options.items() if name != "sm_scale"}


def test_linear_in_v_scale_and_k_scale_as_on_the_logits():
    """At page 1, 64/16 heads."""
    args, _ = inputs(num_q_heads=64, num_kv_heads=16, page_size=1)
    attend = functools.partial(paged_attention, *args, return_lse=True)
    out, lse = attend(sm_scale=0.1)
    chex.assert_trees_all_close(attend(sm_scale=0.1, v_scale=2.0), (2 * out, lse))
    chex.assert_trees_all_close(
        attend(sm_scale=0.1, k_scale=0.5), attend(sm_scale=0.05), rtol=1e-2, atol=1e-6
    )


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("kv_layout", ["HND", "NHD", "HPND"])
def test_all_forms_of_one_scale_agree(dtype, kv_layout):
    args, _ = inputs(cache_dtypes=(dtype, dtype), kv_layout=kv_layout, scale=None)
    attend = functools.partial(paged_attention, *args, kv_layout=kv_layout, return_lse=True)
    tokens = jnp.full(args[1].shape[:-1], 0.25, jnp.float32)
    forms = (0.25, np.float64(0.25), jnp.bfloat16(0.25), np.full(2, 0.25, np.float32), tokens)
    expected = attend(k_scale=0.25, v_scale=0.25)
    for scale in forms:
        chex.assert_trees_all_close(attend(k_scale=scale, v_scale=scale), expected, rtol=1e-2, atol=1e-6)


def test_small_scales_of_tokens_lose_nothing_in_float16():
    """Weights times scales would fall below what float16 holds; float32 scales of 1e-4 are no matter."""
    args, options = inputs(dtype="float16", scale="token")
    outs = []
    for factor in (1.0, 2.0**-13):
        options["v_scale"] = options["v_scale"] * factor
        outs.append(jnp.asarray(paged_attention(*args, **options), jnp.float32))
    chex.assert_trees_all_close(outs[1] * 2.0**13, outs[0], rtol=1e-3, atol=1e-3)


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
        chex.assert_trees_all_close(one, call(*each), rtol=1e-2, atol=1e-5)


def test_unbatched_contiguous():
    (q, k, v, lens), options = inputs(contiguous=True, page_size=200, kv_lens=(3, 150), scale="token")
    out = decode_attention(q, k, v, lens, **options)
    scales = {name: options[name][1] for name in ("k_scale", "v_scale")}
    one = decode_attention(q[1], k[1], v[1], lens[1], **scales)
    chex.assert_trees_all_close(one, out[1], rtol=1e-2, atol=1e-5)
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
