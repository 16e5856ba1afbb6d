"""Attention over a paged KV cache."""

from typing import Any

import jax
from jax.typing import ArrayLike

from jax_paged_attn import dispatch, validation
from jax_paged_attn.calls import attention
from jax_paged_attn.calls.modifiers import Modifiers
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.validation import Ints


def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: PageTable,
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
    """Attention of the last query tokens of each row over a paged KV cache.

    With ``cap(x) = soft_cap * tanh(x / soft_cap)``, query token i of a row sits at position
    ``kv_len - q_len + i``, and scores are::

        cap(q . k * sm_scale * k_scale) + alibi_slopes[head] * (key_position - query_position)

    Query head ``h`` attends to kv head ``h // (num_q_heads // num_kv_heads)``. Only the valid tokens of the
    pages that a row points to are used; whatever the other slots, pages and table entries hold (NaN too)
    changes no bit of the result. Lengths and tables are data: one compilation serves all of a shape.

    Parameters
    ----------
    q : float[batch, num_q_heads, head_dim], [batch, q_len, num_q_heads, head_dim] or [num_q_heads, head_dim]
        bfloat16, float16 or float32. One token a row, or the last `q_len` tokens of each, such as a draft's.
        Without the batch axis, `page_table` must be unbatched too.
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
    soft_cap : real scalar, optional
        Caps scores before anything is masked (Gemma 2, Grok); may be traced. None or 0 is off.
    window_left : int scalar, optional
        How many keys before its own a query sees (sliding window); may be traced, so that layers under
        `jax.lax.scan` can differ. A peer's ``sliding_window=n`` is ``window_left=n - 1``. None or -1 is all.
        Pages before every query's window are not read, and their table entries may hold anything.
    alibi_slopes : float[num_q_heads], optional
        Slopes of ALiBi [1]_: a bias of each score that is linear in the distance of the key.
    sinks : float[num_q_heads], optional
        Attention sinks (gpt-oss): logits, neither scaled nor capped, that take part in each softmax once but
        have no value. They are in `lse`, so merge states that lack them, or have them in one state alone.
    mask : bool[batch, q_len, mask_len], optional
        Decides by itself which of the last ``mask_len`` keys of a row each query sees (a tree of drafts), in
        place of `causal` and `window_left`, which earlier keys follow. Columns before key 0 are ignored.
        [batch, mask_len] where q has one token a row, [mask_len] in the unbatched form.
    causal : bool
        Whether a query sees no key after its own position. False also lifts the right bound of windows.
    kv_starts : int[batch], optional
        Keys before it are masked (left padding), whatever `mask` says. A scalar in the unbatched form.
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
        Also check page ids, lengths, `kv_starts`, and that scales (but of tokens) are positive and finite,
        caps, windows, slopes and sinks in range: ValueError for concrete arrays,
        `jax.experimental.checkify` checks for traced ones.
    implementation : str, optional
        "mosaic_gpu" (Pallas kernels; interpreted on CPU) or "xla"; None takes the first that can run.
    config : optional
        The chosen implementation's own ``Config``; None takes its default.

    Returns
    -------
    out : like q, with v's head_dim
        0 where a query sees no key, as where ``q_len > kv_len`` puts its position before key 0.
    lse : float32, like q without head_dim
        Natural logarithm, only with `return_lse`; where a query sees no key, -inf or its head's sink.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.
    NotImplementedError
        If the `implementation` asked for can't run this call, with the reason; or on differentiation:
        `jax_paged_attn.reference.paged_attention` is differentiable.

    References
    ----------
    .. [1] O. Press, N. Smith and M. Lewis, "Train Short, Test Long: Attention with Linear Biases Enables
       Input Length Extrapolation", 2021 (arXiv 2108.12409).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import PageTable, paged_attention
    >>> page_table = PageTable.from_block_tables([[2, 0], [1, -1]], [20, 3])
    >>> k_pages = v_pages = jnp.ones((3, 2, 16, 64))  # 3 pages, 2 kv heads, 16 tokens a page
    >>> paged_attention(jnp.ones((2, 8, 64)), k_pages, v_pages, page_table).shape
    (2, 8, 64)

    Three draft tokens a row, each of which sees at most 8 keys:

    >>> drafts = jnp.ones((2, 3, 8, 64))
    >>> paged_attention(drafts, k_pages, v_pages, page_table, window_left=7).shape
    (2, 3, 8, 64)
    """
    q = as_query(q)
    page_table = validation.as_page_table(page_table)
    return attend(
        q,
        validation.as_array("k_pages", k_pages),
        validation.as_array("v_pages", v_pages),
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
    )


def as_query(q: ArrayLike) -> jax.Array:
    """Convert a query and check its number of axes."""
    q = validation.as_array("q", q)
    forms = "[batch, num_q_heads, head_dim], [batch, q_len, num_q_heads, head_dim] or [num_q_heads, head_dim]"
    validation.check(q.ndim in (2, 3, 4), "q", f"shape {forms}", f"shape {q.shape}")
    return q


def attend(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: PageTable,
    modifiers: Modifiers,
    *,
    sm_scale: ArrayLike | None,
    causal: bool,
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
    """Do what `paged_attention` and `decode_attention` share, in any form of q; modifiers are as given."""
    validation.check_bool("validate_values", validate_values)
    k_scale = validation.as_optional_array("k_scale", k_scale)
    v_scale = validation.as_optional_array("v_scale", v_scale)
    lead, (num_q_heads, head_dim) = q.shape[:-2], q.shape[-2:]
    modifiers = modifiers.checked(lead, lead[:1], num_q_heads)
    if not lead:
        validation.check(
            page_table.kv_lens.ndim == 0,
            "page_table",
            "an unbatched table, as q has no batch axis",
            f"kv_lens of shape {page_table.kv_lens.shape}",
        )
        page_table = page_table.as_batched()
    q = q.reshape(*(*lead, 1, 1)[:2], num_q_heads, head_dim)
    problem = attention.describe(
        q,
        k_pages,
        v_pages,
        page_table,
        modifiers,
        k_scale,
        v_scale,
        causal=causal,
        kv_layout=kv_layout,
        return_lse=return_lse,
        num_splits=num_splits,
        contiguous=contiguous,
        cache_names=cache_names,
    )
    operands = attention.as_operands(
        problem, q, k_pages, v_pages, page_table, modifiers, sm_scale, k_scale, v_scale
    )
    if validate_values:
        attention.check_values(
            problem, page_table, modifiers, k_scale, v_scale, q_lens=problem.q_len, lens_name=lens_name
        )
    out, lse = dispatch.run(
        attention.ATTENTION, problem, operands, implementation=implementation, config=config
    )
    out = out.reshape(*lead, *out.shape[2:])
    return out if lse is None else (out, lse.reshape(*lead, num_q_heads))
