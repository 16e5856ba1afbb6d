"""Attention over a paged KV cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_paged_attn import dispatch, validation
from jax_paged_attn.calls import attention
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.validation import Ints


def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: PageTable,
    *,
    sm_scale: ArrayLike | None = None,
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
    """Attention of one query token a row over a paged KV cache.

    Query head ``h`` attends to kv head ``h // (num_q_heads // num_kv_heads)``. Only the valid tokens of the
    pages that a row points to are used; whatever the other slots, pages and table entries hold (NaN too)
    changes no bit of the result. Lengths and tables are data: one compilation serves all of a shape.

    Parameters
    ----------
    q : float[batch, num_q_heads, head_dim] or float[num_q_heads, head_dim]
        bfloat16, float16 or float32. Without the batch axis, `page_table` must be unbatched too.
    k_pages, v_pages : float or int8
        The pool, of q's dtype, or quantized as float8_e4m3fn, float8_e5m2 or int8; v may have its own
        head_dim and dtype. By `kv_layout`:
        "HND" [num_pages, num_kv_heads, page_size, head_dim],
        "NHD" [num_pages, page_size, num_kv_heads, head_dim],
        "HPND" [num_kv_heads, num_pages, page_size, head_dim].
    page_table : PageTable
        Lengths outside ``[0, row_pages * page_size]`` and page ids outside the pool are clipped.
    sm_scale : real scalar, optional
        Scale of the scores, may be traced. None is ``head_dim**-0.5``; 0 and negative values are valid.
    kv_starts : int[batch], optional
        Keys before it are masked (left padding). A scalar in the unbatched form.
    k_scale, v_scale : float, optional
        Of a quantized pool: a stored value counts as itself times the scale. A scalar, one a head
        [num_kv_heads], or one a token, in the pool's shape without head_dim. None is 1. Applied to scores and
        weights in float32; no copy of the pool is made.
    kv_layout : str
        Order of the pool's axes; every order is read in place.
    return_lse : bool
        Whether to return the log-sum-exp of the scores too.
    num_splits : int, optional
        Cuts each row into this many runs of tiles, from position 0 and merged in order: then a row's bits
        don't depend on its batch mates or on any capacity ("xla": among calls of one shape, as XLA may order
        sums by the shape). None lets the implementation cut.
    validate_values : bool
        Also check page ids, lengths, `kv_starts`, and that scales (but of tokens) are positive and finite:
        ValueError for concrete arrays,
        `jax.experimental.checkify` checks for traced ones.
    implementation : str, optional
        "mosaic_gpu" (Pallas kernels; interpreted on CPU) or "xla"; None takes the first that can run.
    config : optional
        The chosen implementation's own ``Config``; None takes its default.

    Returns
    -------
    out : float[batch, num_q_heads, v_head_dim], of q's dtype
        0 in a row without keys.
    lse : float32[batch, num_q_heads]
        Natural logarithm, only with `return_lse`; -inf in a row without keys.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.
    NotImplementedError
        If the `implementation` asked for can't run this call, with the reason; or on differentiation:
        `jax_paged_attn.reference.paged_attention` is differentiable.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import PageTable, paged_attention
    >>> page_table = PageTable.from_block_tables([[2, 0], [1, -1]], [20, 3])
    >>> k_pages = v_pages = jnp.ones((3, 2, 16, 64))  # 3 pages, 2 kv heads, 16 tokens a page
    >>> paged_attention(jnp.ones((2, 8, 64)), k_pages, v_pages, page_table).shape
    (2, 8, 64)
    """
    q = validation.as_array("q", q)
    page_table = validation.as_page_table(page_table)
    validation.check(
        q.ndim in (2, 3),
        "q",
        "shape [batch, num_q_heads, head_dim] or [num_q_heads, head_dim]",
        f"shape {q.shape}",
    )
    return attend(
        q,
        validation.as_array("k_pages", k_pages),
        validation.as_array("v_pages", v_pages),
        page_table,
        sm_scale=sm_scale,
        kv_starts=kv_starts,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_layout=kv_layout,
        return_lse=return_lse,
        num_splits=num_splits,
        validate_values=validate_values,
        implementation=implementation,
        config=config,
    )


def attend(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: PageTable,
    *,
    sm_scale: ArrayLike | None,
    kv_starts: Ints | None,
    k_scale: ArrayLike | None,
    v_scale: ArrayLike | None,
    kv_layout: str,
    return_lse: bool,
    num_splits: int | None,
    validate_values: bool,
    implementation: str | None,
    config: Any,
    contiguous: bool = False,
    cache_names: tuple[str, str] = ("k_pages", "v_pages"),
    lens_name: str = "page_table.kv_lens",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Do what `paged_attention` and `decode_attention` share, in batched or unbatched form."""
    validation.check_bool("validate_values", validate_values)
    if kv_starts is not None:
        kv_starts = validation.as_int32("kv_starts", kv_starts)
    k_scale = validation.as_optional_array("k_scale", k_scale)
    v_scale = validation.as_optional_array("v_scale", v_scale)
    unbatched = q.ndim == 2
    if unbatched:
        validation.check(
            page_table.kv_lens.ndim == 0,
            "page_table",
            "an unbatched table, as q has no batch axis",
            f"kv_lens of shape {page_table.kv_lens.shape}",
        )
        if kv_starts is not None:
            validation.check_shape("kv_starts", kv_starts, ())
            kv_starts = kv_starts[None]
        q = q[None]
        page_table = page_table.as_batched()
    problem = attention.describe(
        q,
        k_pages,
        v_pages,
        page_table,
        kv_starts,
        k_scale,
        v_scale,
        kv_layout=kv_layout,
        return_lse=return_lse,
        num_splits=num_splits,
        contiguous=contiguous,
        cache_names=cache_names,
    )
    scale = validation.as_sm_scale(sm_scale, problem.head_dim)
    if validate_values:
        # Scales of tokens may be anything where no token is.
        wholes = {"k_scale": k_scale, "v_scale": v_scale}
        validation.check_scales(**{n: x for n, x in wholes.items() if x is not None and x.ndim < 2})
        attention.check_table(
            page_table,
            kv_starts,
            lens_name,
            page_size=problem.page_size,
            num_pages=problem.num_pages,
            contiguous=contiguous,
        )
    # Put on the device by request: a scalar that JAX had to move there by itself would trip a transfer guard.
    scale = scale if isinstance(scale, jax.Array) else jax.device_put(np.float32(scale))
    k_scale, v_scale = (
        None if x is None else jnp.broadcast_to(x, x.shape or (problem.num_kv_heads,)).astype(jnp.float32)
        for x in (k_scale, v_scale)
    )
    operands = attention.Operands(q, k_pages, v_pages, page_table, kv_starts, scale, k_scale, v_scale)
    out, lse = dispatch.run(
        attention.ATTENTION, problem, operands, implementation=implementation, config=config
    )
    if unbatched:
        out, lse = jax.tree.map(lambda x: x[0], (out, lse))
    return out if lse is None else (out, lse)
