"""Rounding of values to the 1-byte types of a quantized cache: ``value = stored * scale``."""

import jax
import jax.numpy as jnp

from jax_paged_attn.validation import QUANTIZED_DTYPES


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
    largest = jnp.finfo(dtype).max.astype(jnp.float32)
    return jnp.minimum(jnp.maximum(x, -largest), largest).astype(dtype)
