"""`jax.experimental.pallas.ops.gpu.paged_attention`, by this library's kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_paged_attn import paged, validation
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.validation import Ints

DEFAULT_MASK_VALUE = -0.7 * float(np.finfo(np.float32).max)
_LARGEST_MASK_VALUE = -1e9  # scores that are masked by it weigh nothing


def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_tables: Ints,
    lengths: Ints | None,
    k_scales_pages: ArrayLike | None = None,
    v_scales_pages: ArrayLike | None = None,
    *,
    block_h: int = 16,
    pages_per_compute_block: int = 8,
    k_splits: int = 16,
    num_warps: int = 8,
    num_stages: int = 2,
    interpret: bool = False,
    debug: bool = False,
    mask_value: float = DEFAULT_MASK_VALUE,
    attn_logits_soft_cap: float | None = None,
) -> jax.Array:
    """Attention of one query token a row over a paged cache, with jax's deprecated signature.

    Scores are not scaled: multiply `q` by ``head_dim**-0.5`` first, or call `jax_paged_attn.paged_attention`,
    which does.

    Parameters
    ----------
    q : float[batch_size, num_heads, head_dim]
        bfloat16, float16 or float32.
    k_pages, v_pages : float or int8[num_kv_heads, total_num_pages, page_size, head_dim]
        Read in place, as the layout HPND.
    block_tables : int[batch_size, pages_per_sequence]
        Page ids; those past a row's length may be anything.
    lengths : int[batch_size] or None
        Valid tokens of each row; None is all that the pages hold.
    k_scales_pages, v_scales_pages : float[num_kv_heads, total_num_pages, page_size], optional
        A scale a token and head, of pages of float8_e4m3fn, float8_e5m2 or int8.
    block_h, pages_per_compute_block, k_splits, num_warps, num_stages, interpret, debug
        Ignored.
    mask_value : float
        Of masked scores, which weigh nothing here whatever it is; one above -1e9 is refused.
    attn_logits_soft_cap : float, optional
        ``cap * tanh(score / cap)`` instead of each score.

    Returns
    -------
    float[batch_size, num_heads, head_dim]
        Of q's dtype; 0 in a row of length 0.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.
    NotImplementedError
        If `mask_value` would let masked keys count.

    Examples
    --------
    >>> from jax_paged_attn.compat.pallas_ops.paged_attention import paged_attention
    >>> k_pages = v_pages = jnp.ones((2, 3, 16, 64))  # 2 kv heads, 3 pages
    >>> paged_attention(jnp.ones((1, 8, 64)), k_pages, v_pages, jnp.array([[2, 0]]), jnp.array([20])).shape
    (1, 8, 64)
    """
    if not mask_value <= _LARGEST_MASK_VALUE:
        raise NotImplementedError(f"mask_value: masked keys never count, got {mask_value!r}")
    q, k_pages = validation.as_array("q", q), validation.as_array("k_pages", k_pages)
    validation.check(q.ndim == 3, "q", "shape [batch_size, num_heads, head_dim]", f"shape {q.shape}")
    expected = "shape [num_kv_heads, total_num_pages, page_size, head_dim]"
    validation.check(k_pages.ndim == 4, "k_pages", expected, f"shape {k_pages.shape}")
    block_tables, rows = validation.as_int32("block_tables", block_tables), q.shape[:1]
    ok = block_tables.ndim == 2 and block_tables.shape[:1] == rows
    expected = f"shape [{rows[0]}, pages_per_sequence]"
    validation.check(ok, "block_tables", expected, f"shape {block_tables.shape}")
    if lengths is None:
        lens = jnp.full(rows, block_tables.shape[1] * k_pages.shape[2], jnp.int32)
    else:
        lens = validation.as_int32("lengths", lengths)
        validation.check_shape("lengths", lens, rows)
    scales = {"k_scales_pages": k_scales_pages, "v_scales_pages": v_scales_pages}
    for name, scale in scales.items():
        if scale is not None:
            validation.check_shape(name, validation.as_array(name, scale), k_pages.shape[:-1])
    options: dict[str, Any] = {"k_scale": k_scales_pages, "v_scale": v_scales_pages}
    if attn_logits_soft_cap is not None:
        options["soft_cap"] = attn_logits_soft_cap
    table = PageTable.from_block_tables(block_tables, lens)
    out = paged.paged_attention(q, k_pages, v_pages, table, sm_scale=1.0, kv_layout="HPND", **options)
    assert isinstance(out, jax.Array)
    return out
