"""`jax.experimental.pallas.ops.gpu.decode_attention`, by this library's kernels."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_paged_attn import decode, validation
from jax_paged_attn.validation import Ints

type Residuals = tuple[jax.Array, tuple[jax.Array, jax.Array]]


def mqa(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    start_idx: Ints | None = None,
    kv_seq_len: Ints | None = None,
    sm_scale: ArrayLike | None = None,
    block_h: int = 16,
    block_k: int = 256,
    k_splits: int = 16,
    num_warps: int | None = None,
    num_stages: int = 2,
    grid: tuple[int, ...] | None = None,
    interpret: bool = False,
    debug: bool = False,
    return_residuals: bool = False,
    normalize_output: bool = True,
) -> jax.Array | Residuals:
    """Attention of one query token a row over a cache of one head, with jax's deprecated signature.

    Parameters
    ----------
    q : float[batch_size, num_heads, head_dim]
        bfloat16, float16 or float32.
    k, v : float[batch_size, k_seq_len, head_dim]
        Read in place.
    start_idx, kv_seq_len, sm_scale, return_residuals, normalize_output
        As in `gqa`, but the output without normalization may also come without residuals.
    block_h, block_k, k_splits, num_warps, num_stages, grid, interpret, debug
        Ignored.

    Returns
    -------
    out, or (out, (l, m))
        As in `gqa`.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.

    Examples
    --------
    >>> from jax_paged_attn.compat.pallas_ops import decode_attention
    >>> k = v = jnp.ones((2, 48, 64))
    >>> decode_attention.mqa(jnp.ones((2, 8, 64)), k, v, kv_seq_len=jnp.array([48, 7])).shape
    (2, 8, 64)
    """
    k, v = validation.as_array("k", k), validation.as_array("v", v)
    for name, x in (("k", k), ("v", v)):
        expected = "shape [batch_size, k_seq_len, head_dim]"
        validation.check(x.ndim == 3, name, expected, f"shape {x.shape}")
    return _attend(q, k[:, :, None], v[:, :, None], start_idx, kv_seq_len, sm_scale, return_residuals)


def gqa(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    start_idx: Ints | None = None,
    kv_seq_len: Ints | None = None,
    sm_scale: ArrayLike | None = None,
    block_h: int = 16,
    block_k: int = 128,
    k_splits: int = 16,
    num_warps: int | None = None,
    num_stages: int = 2,
    grid: tuple[int, ...] | None = None,
    interpret: bool = False,
    debug: bool = False,
    return_residuals: bool = False,
    normalize_output: bool = True,
) -> jax.Array | Residuals:
    """Attention of one query token a row over a contiguous cache, with jax's deprecated signature.

    Parameters
    ----------
    q : float[batch_size, num_q_heads, head_dim]
        bfloat16, float16 or float32.
    k, v : float[batch_size, k_seq_len, num_kv_heads, head_dim]
        Read in place, as the layout NHD.
    start_idx : int[batch_size] or int, optional
        Keys before it are masked.
    kv_seq_len : int[batch_size] or int, optional
        Valid tokens of each row; None is `k_seq_len`.
    sm_scale : float, optional
        None is ``head_dim**-0.5``.
    block_h, block_k, k_splits, num_warps, num_stages, grid, interpret, debug
        Ignored.
    return_residuals : bool
        Whether to return (l, m) too.
    normalize_output : bool
        With False, the output is multiplied by l, as jax leaves it; then residuals must be returned.

    Returns
    -------
    out : float[batch_size, num_q_heads, head_dim]
        Of q's dtype; 0 in a row without keys.
    l, m : float32[batch_size, num_q_heads]
        Such that ``l * exp(m)`` is the sum of the exponentials of the scores, as merging needs it. jax has
        the largest score as m; here m is the log-sum-exp and l is 1, by which the output need not be divided.
        In a row without keys, l is 0 and m the least float32, as in jax.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.
    NotImplementedError
        If the output is to stay without normalization, and residuals aren't returned.

    Examples
    --------
    >>> from jax_paged_attn.compat.pallas_ops import decode_attention
    >>> k = v = jnp.ones((2, 48, 2, 64))
    >>> out, (l, m) = decode_attention.gqa(jnp.zeros((2, 8, 64)), k, v, return_residuals=True)
    >>> out.shape, round(float(l[0, 0] * jnp.exp(m[0, 0])))
    ((2, 8, 64), 48)
    """
    if not normalize_output and not return_residuals:
        raise NotImplementedError("normalize_output=False: needs return_residuals=True")
    return _attend(q, k, v, start_idx, kv_seq_len, sm_scale, return_residuals)


def _attend(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    start_idx: Ints | None,
    kv_seq_len: Ints | None,
    sm_scale: ArrayLike | None,
    return_residuals: bool,
) -> jax.Array | Residuals:
    """Attend over k, v [batch_size, k_seq_len, num_kv_heads, head_dim]."""
    q, k, v = (validation.as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    validation.check(q.ndim == 3, "q", "shape [batch_size, num_q_heads, head_dim]", f"shape {q.shape}")
    rows = q.shape[:1]
    for name, x in (("k", k), ("v", v)):
        expected = f"shape [{rows[0]}, k_seq_len, num_kv_heads, head_dim], of q's batch"
        validation.check(x.ndim == 4 and x.shape[:1] == rows, name, expected, f"shape {x.shape}")
    validation.check_bool("return_residuals", return_residuals)
    options: dict[str, Any] = {"sm_scale": sm_scale, "kv_layout": "NHD", "return_lse": return_residuals}
    lens = validation.as_int32("kv_seq_len", k.shape[1] if kv_seq_len is None else kv_seq_len)
    validation.check(lens.shape in ((), rows), "kv_seq_len", f"shape {rows} or ()", f"shape {lens.shape}")
    if start_idx is not None:
        starts = validation.as_int32("start_idx", start_idx)
        ok = starts.shape in ((), rows)
        validation.check(ok, "start_idx", f"shape {rows} or ()", f"shape {starts.shape}")
        options["kv_starts"] = jnp.broadcast_to(starts, rows)
    result = decode.decode_attention(q, k, v, lens, **options)
    if isinstance(result, jax.Array):
        return result
    out, lse = result
    empty = lse == -jnp.inf
    m = jnp.where(empty, jnp.finfo(jnp.float32).min, lse)
    return out, (jnp.where(empty, 0.0, jnp.ones_like(lse)), m)
