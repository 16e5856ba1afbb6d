"""Rounding to the 1-byte types of a quantized cache, ``value = stored * scale``, and scales from data."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_paged_attn import validation
from jax_paged_attn.validation import LAYOUT_AXES, QUANTIZED_DTYPES

GRANULARITIES = ("tensor", "head", "token")


def kv_scale(
    x: ArrayLike,
    dtype: jax.typing.DTypeLike,
    *,
    granularity: str = "tensor",
    kv_layout: str = "HND",
) -> jax.Array:
    """Compute the scale that lets keys or values just fit a 1-byte dtype: ``max(abs(x)) / largest(dtype)``.

    The usual scaling of FP8 (arXiv:2209.05433), by the largest value of the tensor, of each head or of each
    token. NaN and infinities are left out of the maximum. The scale is positive, finite and never subnormal;
    where there is nothing but zeros it is 1.

    Parameters
    ----------
    x : float[num_tokens, num_kv_heads, head_dim], or a cache
        New keys or values, or a paged or contiguous cache of four axes, in bfloat16, float16 or float32. Of a
        cache every slot counts: unused ones must be small, 0 or NaN. (New tokens of `append_kv`,
        [batch, num_new, num_kv_heads, head_dim], are like a cache of layout "NHD".)
    dtype : dtype
        float8_e4m3fn (its largest value is 448), float8_e5m2 (57344) or int8 (127). Static under jit.
    granularity : str
        What gets a scale of its own: "tensor", "head" or "token" (which is each head of each token). Static.
    kv_layout : str
        Order of a cache's axes, as in `paged_attention`: "HND", "NHD" or "HPND". Static.

    Returns
    -------
    float32
        In the form in which `append_paged_kv`, `append_kv`, `paged_attention` and `decode_attention` take
        k_scale and v_scale: a scalar, [num_kv_heads], or x's shape without head_dim.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import append_paged_kv, kv_scale
    >>> k_new = v_new = jnp.array([[[1.0, -4.0], [0.0, 2.0]]])  # one token, 2 kv heads, head_dim 2
    >>> pages, scale_pages = jnp.zeros((3, 2, 16, 2), jnp.int8), jnp.zeros((3, 2, 16))  # 16 tokens a page
    >>> scale = kv_scale(k_new, jnp.int8, granularity="token")
    >>> k_pages, _, k_scale_pages, _ = append_paged_kv(
    ...     pages, pages, k_new, v_new, [37],
    ...     k_scale=scale, v_scale=scale, k_scale_pages=scale_pages, v_scale_pages=scale_pages,
    ... )
    >>> k_pages[2, :, 5].tolist()  # slot 37 is slot 5 of page 2
    [[32, -127], [0, 127]]
    >>> k_scale_pages[2, :, 5].tolist()  # 4 / 127, 2 / 127
    [0.0314..., 0.0157...]
    """
    x, dtype, axes = _describe(x, dtype, granularity, kv_layout)
    return jnp.squeeze(_scale(x, dtype, axes), axes)


def kv_quantize(
    x: ArrayLike,
    dtype: jax.typing.DTypeLike,
    *,
    granularity: str = "tensor",
    kv_layout: str = "HND",
) -> tuple[jax.Array, jax.Array]:
    """Quantize keys or values, new ones or a whole cache, with the scale that `kv_scale` finds for them.

    Values are rounded as `append_paged_kv` does it: ``round(x * (1 / scale))`` in float32, to nearest even;
    infinities become the largest value, NaN stays NaN, but becomes 0 in int8.

    Parameters
    ----------
    x, dtype, granularity, kv_layout
        As in `kv_scale`.

    Returns
    -------
    quantized : dtype, in x's shape
        What stands for ``quantized * scale``.
    scale : float32
        As `kv_scale` returns it.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.

    Examples
    --------
    A cache is quantized whole:

    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import decode_attention, kv_quantize
    >>> k_cache = v_cache = jnp.ones((1, 2, 32, 64))  # 2 kv heads, room for 32 tokens
    >>> k_cache, k_scale = kv_quantize(k_cache, jnp.float8_e4m3fn, granularity="head")
    >>> v_cache, v_scale = kv_quantize(v_cache, jnp.float8_e4m3fn, granularity="head")
    >>> k_cache.dtype, k_scale.shape
    (dtype(float8_e4m3fn), (2,))
    >>> q = jnp.ones((1, 8, 64))
    >>> decode_attention(q, k_cache, v_cache, [20], k_scale=k_scale, v_scale=v_scale).round(3).max().item()
    1.0
    """
    x, dtype, axes = _describe(x, dtype, granularity, kv_layout)
    scale = _scale(x, dtype, axes)
    return _quantize_jitted(x, scale, dtype), jnp.squeeze(scale, axes)


def stored(x: jax.Array, scale: jax.Array | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Turn x into what a pool of `dtype` keeps: quantized to a 1-byte type, else cast."""
    return quantize(x, scale, dtype) if jnp.dtype(dtype).name in QUANTIZED_DTYPES else x.astype(dtype)


def quantize(x: jax.Array, scale: jax.Array | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Round ``x * (1 / scale)`` to `dtype`, to nearest even; too large values saturate, infinite ones too.

    NaN stays NaN; int8, which has none, takes 0 for it. Computed in float32. A plain cast would turn values
    past float8_e4m3fn's largest into NaN. Elementwise, so kernels use it as well.
    """
    x = x.astype(jnp.float32)
    if scale is not None:
        # XLA makes the same of a division by a broadcast, unless it doesn't: so results would differ in ties.
        # Held finite, as 0 * inf is NaN.
        x = x * jnp.minimum(1.0 / scale, jnp.finfo(jnp.float32).max)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        x = jnp.where(x == x, x, jnp.zeros_like(x))
        x = jnp.minimum(jnp.maximum(x, jnp.float32(limits.min)), jnp.float32(limits.max))
        return jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN).astype(dtype)
    largest = _largest(dtype)
    return jnp.minimum(jnp.maximum(x, -largest), largest).astype(dtype)


def _largest(dtype: jax.typing.DTypeLike) -> np.float32:
    integer = jnp.issubdtype(dtype, np.integer)
    return np.float32(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)


def _describe(
    x: Any, dtype: Any, granularity: Any, kv_layout: Any
) -> tuple[jax.Array, np.dtype, tuple[int, ...]]:
    """Check the arguments; return x, the dtype, and the axes that share a scale."""
    x = validation.as_array("x", x)
    validation.check_layout(kv_layout)
    expected = f"shape [num_tokens, num_kv_heads, head_dim] or [{', '.join(LAYOUT_AXES[kv_layout])}]"
    validation.check(x.ndim in (3, 4), "x", expected, f"shape {x.shape}")
    expected = f"a dtype of {validation.DTYPES}"
    validation.check(x.dtype.name in validation.DTYPES, "x", expected, f"dtype {x.dtype}")
    expected = f"one of {QUANTIZED_DTYPES}"
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype: expected {expected}, got {dtype!r}") from error
    # None is numpy's name for float64.
    validation.check(found.name in QUANTIZED_DTYPES, "dtype", expected, repr(dtype))
    ok = isinstance(granularity, str) and granularity in GRANULARITIES
    validation.check(ok, "granularity", f"one of {GRANULARITIES}", repr(granularity))
    heads_axis = 1 if x.ndim == 3 else LAYOUT_AXES[kv_layout].index("num_kv_heads")
    own = {"tensor": (), "head": (heads_axis,), "token": range(x.ndim - 1)}[granularity]
    return x, found, tuple(axis for axis in range(x.ndim) if axis not in own)


# Jitted, so that an eager call makes no float32 copy of a whole cache.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _scale(x: jax.Array, dtype: np.dtype, axes: tuple[int, ...]) -> jax.Array:
    """The scale of all values along `axes`, which stay as axes of size 1."""
    size = jnp.abs(x.astype(jnp.float32))
    # `initial` for empty axes.
    amax = jnp.max(jnp.where(size < jnp.inf, size, 0.0), axis=axes, keepdims=True, initial=0.0)
    # By the rounded reciprocal, as in `quantize`. A subnormal scale would have no finite reciprocal.
    scale = jnp.maximum(amax * (1 / _largest(dtype)), jnp.finfo(jnp.float32).tiny)
    return jnp.where(amax > 0, scale, 1.0)


_quantize_jitted = jax.jit(quantize, static_argnums=2)
