"""Merging of partial attention states by their log-sum-exp."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_paged_attn import validation


def merge_state(
    out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Merge the attention states of two disjoint sets of keys into the state of their union.

    Parameters
    ----------
    out_a, out_b : float[..., head_dim]
        Normalized outputs, of one shape and dtype.
    lse_a, lse_b : float32[...]
        Natural log-sum-exp of each output's scores. -inf or +inf marks an empty state, whose output is
        ignored even if it is NaN.

    Returns
    -------
    out : float[..., head_dim]
        In the dtype of the inputs; computed in float32. 0 where both states are empty. Merging with an empty
        state returns the other state exactly.
    lse : float32[...]
        -inf where both states are empty.

    Raises
    ------
    ValueError
        If shapes or dtypes don't fit each other.

    Examples
    --------
    >>> out, lse = merge_state(jnp.array([1.0]), jnp.float32(0.0), jnp.array([3.0]), jnp.float32(0.0))
    >>> out.tolist(), round(float(lse), 4)
    ([2.0], 0.6931)
    """
    out_a, lse_a = as_state("out_a", out_a, "lse_a", lse_a)
    out_b, lse_b = as_state("out_b", out_b, "lse_b", lse_b)
    validation.check_shape("out_b", out_b, out_a.shape)
    validation.check(
        out_b.dtype == out_a.dtype, "out_b", f"the dtype of out_a, {out_a.dtype}", f"{out_b.dtype}"
    )
    return _merge(jnp.stack([out_a, out_b]), jnp.stack([lse_a, lse_b]))


def merge_states(outs: ArrayLike, lses: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Merge n attention states of disjoint sets of keys into the state of their union.

    Parameters
    ----------
    outs : float[n, ..., head_dim]
        Normalized outputs.
    lses : float32[n, ...]
        Natural log-sum-exp of each output's scores. -inf or +inf marks an empty state, whose output is
        ignored even if it is NaN.

    Returns
    -------
    out : float[..., head_dim]
        In the dtype of `outs`; computed in float32. 0 where all states are empty.
    lse : float32[...]
        -inf where all states are empty.

    Raises
    ------
    ValueError
        If the shapes don't fit each other.

    Examples
    --------
    >>> out, lse = merge_states(jnp.array([[1.0], [jnp.nan]]), jnp.array([0.5, -jnp.inf]))
    >>> out.tolist(), lse.tolist()
    ([1.0], 0.5)
    """
    outs, lses = as_state("outs", outs, "lses", lses)
    validation.check(lses.ndim >= 1, "lses", "shape [n, ...]", f"shape {lses.shape}")
    return _merge(outs, lses)


def as_state(out_name: str, out: ArrayLike, lse_name: str, lse: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Check a state's shapes and dtypes; its lse becomes float32."""
    out, lse = validation.as_array(out_name, out), validation.as_array(lse_name, lse)
    for name, array in ((out_name, out), (lse_name, lse)):
        validation.check(
            jnp.issubdtype(array.dtype, jnp.floating), name, "a floating dtype", f"dtype {array.dtype}"
        )
    validation.check(out.ndim >= 1, out_name, "shape [..., head_dim]", "a scalar")
    validation.check_shape(lse_name, lse, out.shape[:-1])
    return out, lse.astype(jnp.float32)


def _merge(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    empty = jnp.isinf(lses)
    lses = jnp.where(empty, -jnp.inf, lses)
    lse_max = jnp.max(lses, axis=0, initial=-jnp.inf)
    # Where every state is empty, subtracting -inf from -inf would make NaN.
    lse_shift = jnp.where(lse_max == -jnp.inf, 0.0, lse_max)
    weights = jnp.exp(lses - lse_shift[None])
    total = jnp.sum(weights, axis=0)
    weighted = weights[..., None] * jnp.where(empty[..., None], 0.0, outs.astype(jnp.float32))
    out = jnp.sum(weighted, axis=0) / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out.astype(outs.dtype), lse_shift + jnp.log(total)
