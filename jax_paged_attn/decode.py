"""Attention over a contiguous KV cache."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_paged_attn import paged, validation
from jax_paged_attn.calls.modifiers import Modifiers
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.validation import Ints


def decode_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    kv_lens: Ints,
    *,
    sm_scale: ArrayLike | None = None,
    soft_cap: ArrayLike | None = None,
    window_left: Ints | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    causal: bool = True,
    kv_starts: Ints | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    kv_layout: str = "HND",
    return_lse: bool = False,
    num_splits: int | None = None,
    validate_values: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of the last query tokens of each row over a contiguous KV cache.

    The cost follows the lengths: a capacity (``max_kv_len``) far above them costs nothing. Slots at or past a
    row's length may hold anything.

    Parameters
    ----------
    q : float[batch, num_q_heads, head_dim], [batch, q_len, num_q_heads, head_dim] or [num_q_heads, head_dim]
        bfloat16, float16 or float32. Without the batch axis, the caches have none either.
    k_cache, v_cache : float, of q's dtype
        v may have its own head_dim. By `kv_layout`:
        "HND" [batch, num_kv_heads, max_kv_len, head_dim],
        "NHD" [batch, max_kv_len, num_kv_heads, head_dim].
    kv_lens : int[batch] or an int scalar
        Valid tokens of each row, clipped to ``[0, max_kv_len]``. A scalar is every row's length.
    sm_scale, soft_cap, window_left, alibi_slopes, sinks, mask, causal, kv_starts
        As in `paged_attention`.
    return_lse, num_splits, validate_values, implementation, config
        As in `paged_attention`.
    k_scale, v_scale : float, optional
        Of a quantized cache, as in `paged_attention`: a scalar, one a head [num_kv_heads], or one a token, in
        the cache's shape without head_dim. None is 1.
    kv_layout : str
        "HND" or "NHD".

    Returns
    -------
    out : like q, with v's head_dim
        0 where a query sees no key.
    lse : float32, like q without head_dim
        Natural logarithm, only with `return_lse`; where a query sees no key, -inf or its head's sink.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.
    NotImplementedError
        As in `paged_attention`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import decode_attention
    >>> k_cache = v_cache = jnp.ones((2, 2, 128, 64))  # 2 rows, 2 kv heads, room for 128 tokens
    >>> decode_attention(jnp.ones((2, 8, 64)), k_cache, v_cache, [20, 3]).shape
    (2, 8, 64)
    """
    q = paged.as_query(q)
    k_cache = validation.as_array("k_cache", k_cache)
    v_cache = validation.as_array("v_cache", v_cache)
    kv_lens = validation.as_int32("kv_lens", kv_lens)
    validation.check_layout(kv_layout, ("HND", "NHD"))
    rows = q.shape[:1] if q.ndim > 2 else ()
    axes = validation.LAYOUT_AXES[kv_layout]
    axes = ("batch" if rows else None, *("max_kv_len" if a == "page_size" else a for a in axes[1:]))
    expected = f"shape [{', '.join(axis for axis in axes if axis)}]"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        validation.check(cache.ndim == len(rows) + 3, name, expected, f"shape {cache.shape}")
        if rows:
            validation.check(
                cache.shape[0] == rows[0], name, f"the batch of q, {rows[0]}", f"batch {cache.shape[0]}"
            )
    validation.check(kv_lens.shape in ((), rows), "kv_lens", f"shape {rows} or ()", f"shape {kv_lens.shape}")
    if not rows:
        k_cache, v_cache = k_cache[None], v_cache[None]
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        scales = {name: validation.as_optional_array(name, x) for name, x in scales.items()}
        k_scale, v_scale = (x if x is None or x.ndim != 2 else x[None] for x in scales.values())
    # Row b is page b: a contiguous cache is a paged one whose page is the whole row.
    pages = jnp.arange(k_cache.shape[0], dtype=jnp.int32)
    page_table = PageTable(
        indices=pages,
        row_starts=pages.reshape(rows),
        row_pages=jnp.ones(rows, jnp.int32),
        kv_lens=jnp.broadcast_to(kv_lens, rows),
    )
    return paged.attend(
        q,
        k_cache,
        v_cache,
        page_table,
        Modifiers(soft_cap, window_left, alibi_slopes, sinks, mask, kv_starts),
        sm_scale=sm_scale,
        causal=causal,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_layout=kv_layout,
        return_lse=return_lse,
        num_splits=num_splits,
        validate_values=validate_values,
        implementation=implementation,
        config=config,
        contiguous=True,
        cache_names=("k_cache", "v_cache"),
        lens_name="kv_lens",
    )
