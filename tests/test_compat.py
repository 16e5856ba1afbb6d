"""The deprecated functions of jax beside `jax_paged_attn.compat`, and both beside the reference."""

import functools
import importlib
import inspect
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged_attn import PageTable, paged_attention, reference, testing
from jax_paged_attn.compat import pallas_ops

ON_CPU = jax.default_backend() == "cpu"


def deprecated(module, name):
    """One of jax's functions; only here, and by message, may its module say that it is deprecated."""
    with warnings.catch_warnings():
        message = rf"jax\.experimental\.pallas\.ops\.gpu\.{module} is deprecated\."
        warnings.filterwarnings("ignore", message, DeprecationWarning)
        function = getattr(importlib.import_module(f"jax.experimental.pallas.ops.gpu.{module}"), name)
    # It multiplies bools by floats.
    return jax.numpy_dtype_promotion("standard")(functools.wraps(function)(lambda *a, **k: function(*a, **k)))


def close(actual, original, expected):
    """Both are as near to the reference as their dtype has it."""
    testing.assert_close(actual, expected)
    # jax rounds parts of the sum to the output's dtype, and on a GPU multiplies float32 in fewer bits.
    tolerance = 2e-5 if ON_CPU and actual.dtype == jnp.float32 else 0.03
    actual, original = (x.astype(jnp.float32) for x in (actual, original))
    chex.assert_trees_all_close(actual, original, atol=tolerance, rtol=tolerance)


def pages(dtype, cache_dtype=None, seed=0):
    """q, pools of 3 kv heads, tables of 4 pages a row, lengths."""
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.standard_normal((3, 12, 64)) / 8, dtype)
    k, v = rng.standard_normal((2, 3, 14, 16, 64)) * (30 if cache_dtype == "int8" else 1)
    tables = jnp.asarray(rng.permutation(14)[:12].reshape(3, 4), jnp.int32)
    return q, *(jnp.asarray(x).astype(cache_dtype or dtype) for x in (k, v)), tables, jnp.array([0, 33, 64])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("with_lengths", [True, False])
def test_paged_attention(dtype, with_lengths):
    q, k, v, tables, lengths = pages(dtype)
    lengths = lengths if with_lengths else None
    original = deprecated("paged_attention", "paged_attention")
    theirs = original(q, k, v, tables, lengths, k_splits=2, pages_per_compute_block=1, interpret=ON_CPU)
    table = PageTable.from_block_tables(tables, jnp.full(3, 64) if lengths is None else lengths)
    expected = reference.paged_attention(q, k, v, table, sm_scale=1.0, kv_layout="HPND")
    close(pallas_ops.paged_attention(q, k, v, tables, lengths, k_splits=2), theirs, expected)


def test_paged_attention_with_scales():
    q, k, v, tables, lengths = pages("float32", "int8")
    rng = np.random.default_rng(1)
    scales = jnp.asarray(rng.uniform(0.01, 0.05, (2, *k.shape[:-1])), jnp.float32)
    original = deprecated("paged_attention", "paged_attention")
    options = {"k_splits": 2, "pages_per_compute_block": 2, "interpret": ON_CPU}
    theirs = original(q, k, v, tables, lengths, *scales, **options)
    table = PageTable.from_block_tables(tables, lengths)
    options = {"sm_scale": 1.0, "kv_layout": "HPND", "k_scale": scales[0], "v_scale": scales[1]}
    expected = reference.paged_attention(q, k, v, table, **options)
    close(pallas_ops.paged_attention(q, k, v, tables, lengths, *scales), theirs, expected)


@pytest.mark.skipif(
    "soft_cap" not in inspect.signature(paged_attention).parameters, reason="paged_attention has no soft cap"
)
def test_paged_attention_with_a_soft_cap():
    q, k, v, tables, lengths = pages("float32")
    original = deprecated("paged_attention", "paged_attention")
    options: dict[str, Any] = {"attn_logits_soft_cap": 0.5}
    theirs = original(q, k, v, tables, lengths, **options, k_splits=1, interpret=ON_CPU)
    ours = pallas_ops.paged_attention(q, k, v, tables, lengths, **options)
    chex.assert_trees_all_close(ours, theirs, atol=2e-5 if ON_CPU else 0.03)


def cache(dtype, kv_heads):
    rng = np.random.default_rng(2)
    shape = (3, 64, *kv_heads, 64)
    return jnp.asarray(rng.standard_normal((3, 6, 64)), dtype), *jnp.asarray(
        rng.standard_normal((2, *shape)), dtype
    )


@pytest.mark.parametrize("name", ["gqa", "mqa"])
@pytest.mark.parametrize(
    ("dtype", "start_idx", "kv_seq_len", "sm_scale"),
    [
        ("float32", None, None, None),
        ("float32", jnp.array([3, 20, 40]), jnp.array([64, 33, 40]), 0.2),
        ("bfloat16", None, jnp.array([64, 1, 0]), None),
        ("float32", jnp.int32(5), jnp.int32(50), None),
    ],
)
def test_decode_attention(name, dtype, start_idx, kv_seq_len, sm_scale):
    q, k, v = cache(dtype, (2,) if name == "gqa" else ())
    arguments = (q, k, v, start_idx, kv_seq_len, sm_scale)
    original = deprecated("decode_attention", name)
    options: dict[str, Any] = {"k_splits": 2, "block_k": 16, "interpret": ON_CPU}
    theirs, (their_l, their_m) = original(*arguments, **options, return_residuals=True)
    ours, (l, m) = getattr(pallas_ops.decode_attention, name)(*arguments, return_residuals=True)
    k, v = (x if x.ndim == 4 else x[:, :, None] for x in (k, v))
    lens = 64 if kv_seq_len is None else kv_seq_len
    starts = None if start_idx is None else jnp.broadcast_to(start_idx, (3,))
    options = {"sm_scale": sm_scale, "kv_starts": starts, "kv_layout": "NHD", "return_lse": True}
    expected, lse = reference.decode_attention(q, k, v, lens, **options)
    close(ours, theirs, expected)
    # What merging uses of residuals is the same, though jax's m is the largest score.
    chex.assert_trees_all_close(jnp.log(l) + m, lse, atol=1e-5)
    tolerance = 1e-5 if ON_CPU and dtype == "float32" else 0.02
    chex.assert_trees_all_close(jnp.log(their_l) + their_m, jnp.log(l) + m, atol=tolerance)
    if kv_seq_len is not None and kv_seq_len.ndim:
        chex.assert_trees_all_equal((l[-1], m[-1]), (their_l[-1], their_m[-1]))  # a row without keys


@pytest.mark.parametrize("name", ["gqa", "mqa"])
def test_output_without_normalization(name):
    """Two halves of the keys merge to the whole, by jax's formula, with either's parts."""
    q, k, v = cache("float32", (2,) if name == "gqa" else ())
    options = {"return_residuals": True, "normalize_output": False}
    ours = getattr(pallas_ops.decode_attention, name)
    theirs = deprecated("decode_attention", name)

    def whole(call, **more):
        (a, (l_a, m_a)), (b, (l_b, m_b)) = (
            call(q, k[:, half], v[:, half], **options, **more) for half in (slice(0, 32), slice(32, 64))
        )
        m = jnp.maximum(m_a, m_b)
        w_a, w_b = jnp.exp(m_a - m), jnp.exp(m_b - m)
        return (a * w_a[..., None] + b * w_b[..., None]) / (l_a * w_a + l_b * w_b)[..., None]

    merged = whole(ours)
    chex.assert_trees_all_close(merged, ours(q, k, v), atol=1e-5)
    their_merged = whole(theirs, k_splits=1, block_k=16, interpret=ON_CPU)
    chex.assert_trees_all_close(merged, their_merged, atol=1e-5 if ON_CPU else 0.03)
    if name == "gqa":
        with pytest.raises(NotImplementedError, match="normalize_output"):
            ours(q, k, v, normalize_output=False)


def test_signatures_are_the_deprecated_ones():
    for module, names in (("paged_attention", ["paged_attention"]), ("decode_attention", ["mqa", "gqa"])):
        ours = importlib.import_module(f"jax_paged_attn.compat.pallas_ops.{module}")
        for name in names:
            functions = getattr(ours, name), deprecated(module, name)
            ours_and_jaxs = [
                [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
                for f in functions
            ]
            assert ours_and_jaxs[0] == ours_and_jaxs[1]
    # However jax's function was imported.
    from jax_paged_attn.compat.pallas_ops import paged_attention as as_module
    from jax_paged_attn.compat.pallas_ops.paged_attention import paged_attention as function

    assert as_module.paged_attention is function  # pyright: ignore[reportFunctionMemberAccess]
    assert as_module is function


def test_pools_are_read_in_place():
    q, k, v, tables, lengths = pages("bfloat16")
    text = jax.jit(pallas_ops.paged_attention).lower(q, k, v, tables, lengths).compile().as_text() or ""
    shape = ",".join(map(str, k.shape))
    transposed = ",".join(map(str, (k.shape[1], k.shape[0], *k.shape[2:])))
    assert f"[{shape}]" in text
    assert f"[{transposed}]" not in text


def test_mistakes_are_named():
    q, k, v, tables, lengths = pages("float32")
    call = pallas_ops.paged_attention
    for name, arguments, options in (
        ("q", (q[0], k, v, tables, lengths), {}),
        ("k_pages", (q, k[0], v, tables, lengths), {}),
        ("v_pages", (q, k, v[:, :3], tables, lengths), {}),
        ("block_tables", (q, k, v, tables[:2], lengths), {}),
        ("lengths", (q, k, v, tables, lengths[:2]), {}),
        ("k_scales_pages", (q, k, v, tables, lengths, jnp.ones((3, 14))), {}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            call(*arguments, **options)
    with pytest.raises(NotImplementedError, match=r"^mask_value"):
        call(q, k, v, tables, lengths, mask_value=-1.0)
    q, k, v = cache("float32", (2,))
    gqa, mqa = pallas_ops.decode_attention.gqa, pallas_ops.decode_attention.mqa
    for name, call in (
        ("q", lambda: gqa(q[0], k, v)),
        ("k", lambda: gqa(q, k[:2], v)),
        ("v", lambda: mqa(q, k[:, :, 0], v)),
        ("start_idx", lambda: gqa(q, k, v, start_idx=jnp.ones(2, jnp.int32))),
        ("kv_seq_len", lambda: gqa(q, k, v, kv_seq_len=jnp.ones(2, jnp.int32))),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            call()
