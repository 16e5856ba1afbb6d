"""Attention of rows that differ in their number of query tokens: prefill and decode in one call."""

from typing import Any

import jax
from jax.typing import ArrayLike

from jax_paged_attn import dispatch, validation
from jax_paged_attn.calls import attention, ragged
from jax_paged_attn.calls.modifiers import Modifiers
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.validation import Ints


def ragged_paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: PageTable,
    q_indptr: Ints,
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
    """Attention of the last query tokens of each row, of any number, over a paged KV cache.

    Decode rows of one token, rows of some drafts, and chunks of prompts, whose keys are in the cache already,
    all in one list of query tokens. Row ``b`` owns ``q[q_indptr[b]:q_indptr[b + 1]]``, its last tokens: with
    ``q_len`` of them, query i of the row sits at position ``kv_len - q_len + i``. What `paged_attention` says
    of scores, heads and unused slots holds here. Bounds, lengths and tables are data: one compilation serves
    all of a shape, so that a batch of any mixture can be padded to a fixed number of tokens and rows.

    Parameters
    ----------
    q : float[total_q, num_q_heads, head_dim]
        bfloat16, float16 or float32: the query tokens of all rows, and padding.
    k_pages, v_pages : float or int8
        As in `paged_attention`.
    page_table : PageTable
        Of [batch] rows. Lengths count the row's query tokens, where their keys are in the cache.
    q_indptr : int[batch + 1]
        Rising, in ``[0, total_q]``; clipped to it. A row may have no query. Query tokens before the first or
        past the last bound belong to no row.
    sm_scale, soft_cap, window_left, alibi_slopes, sinks, causal, k_scale, v_scale, kv_layout
        As in `paged_attention`.
    mask : bool[total_q, mask_len], optional
        As in `paged_attention`: which of the last ``mask_len`` keys of its row each query sees.
    kv_starts : int[batch], optional
        As in `paged_attention`.
    return_lse, num_splits, implementation, config
        As in `paged_attention`.
    validate_values : bool
        As in `paged_attention`; also checks `q_indptr`. A row of more queries than keys is no mistake.

    Returns
    -------
    out : like q, with v's head_dim
        0 for query tokens of no row, and where a query sees no key, as where ``q_len > kv_len`` puts its
        position before key 0.
    lse : float32[total_q, num_q_heads]
        Natural logarithm, only with `return_lse`; -inf for query tokens of no row, and where a query sees no
        key -inf or its head's sink.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.
    NotImplementedError
        As in `paged_attention`.

    Examples
    --------
    A row that decodes, one with 3 drafts, and 12 tokens of a prompt, padded to 18 tokens:

    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import PageTable, ragged_paged_attention
    >>> page_table = PageTable.from_block_tables([[2, 0], [1, 4], [3, -1]], [20, 19, 12])
    >>> k_pages = v_pages = jnp.ones((5, 2, 16, 64))  # 5 pages, 2 kv heads, 16 tokens a page
    >>> out, lse = ragged_paged_attention(
    ...     jnp.ones((18, 8, 64)), k_pages, v_pages, page_table, [0, 1, 5, 17], return_lse=True
    ... )
    >>> out.shape, bool((out[:17] == 1).all()), lse[17].max().item()
    ((18, 8, 64), True, -inf)
    """
    q = as_query(q)
    page_table = as_page_table("page_table", page_table)
    q_indptr = ragged.as_q_indptr("q_indptr", q_indptr, page_table)
    validation.check_bool("validate_values", validate_values)
    k_pages, v_pages = validation.as_array("k_pages", k_pages), validation.as_array("v_pages", v_pages)
    k_scale = validation.as_optional_array("k_scale", k_scale)
    v_scale = validation.as_optional_array("v_scale", v_scale)
    modifiers = Modifiers(soft_cap, window_left, alibi_slopes, sinks, mask, kv_starts)
    modifiers = modifiers.checked(q.shape[:1], page_table.kv_lens.shape, q.shape[1])
    problem = ragged.describe(
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
    )
    if validate_values:
        ragged.check_values(problem, page_table, q_indptr, modifiers, k_scale, v_scale)
    of_rows = attention.as_operands(
        problem, q, k_pages, v_pages, page_table, modifiers, sm_scale, k_scale, v_scale
    )
    operands = ragged.Operands(*ragged.rows_of_queries(q_indptr, problem.total_q), of_rows)
    out, lse = dispatch.run(ragged.RAGGED, problem, operands, implementation=implementation, config=config)
    return out if lse is None else (out, lse)


def as_query(q: ArrayLike) -> jax.Array:
    """Convert query tokens of all rows and check their axes."""
    q = validation.as_array("q", q)
    validation.check(q.ndim == 3, "q", "shape [total_q, num_q_heads, head_dim]", f"shape {q.shape}")
    return q


def as_page_table(name: str, page_table: PageTable) -> PageTable:
    """Check a page table, which must have several rows."""
    page_table = validation.as_page_table(page_table, name)
    shape = page_table.kv_lens.shape
    validation.check(len(shape) == 1, name, "a table of [batch] rows", f"kv_lens of shape {shape}")
    return page_table
