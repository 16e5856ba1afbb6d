"""Attention over prefixes that several rows share, each read once for all of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_paged_attn import dispatch, merge, validation
from jax_paged_attn.calls import attention, ragged
from jax_paged_attn.calls.modifiers import Modifiers
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.ragged import as_page_table, as_query
from jax_paged_attn.validation import Ints


def cascade_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    levels: Sequence[tuple[PageTable, Ints]],
    *,
    sm_scale: ArrayLike | None = None,
    soft_cap: ArrayLike | None = None,
    window_left: Ints | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    causal: bool = True,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    kv_layout: str = "HND",
    return_lse: bool = False,
    num_splits: int | None = None,
    validate_values: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention over a cache whose rows share prefixes, at one or several levels.

    A sequence is cut into levels: first what many sequences share, such as a system prompt, last what is its
    own. At each level a row of keys serves all query tokens of the sequences that share it, by one reading,
    and the levels' states are merged by their log-sum-exp. The result is that of `ragged_paged_attention`
    over tables that list each sequence's pages of all levels in order, but for windows, which don't reach
    into shared levels.

    Query tokens are the last ones of the last level: with ``q_len`` of them in a row there, query i sits at
    position ``kv_len - q_len + i`` of that level, which follows all keys of the outer ones. So each row of
    the last level must hold at least its query tokens' own keys (``kv_len >= q_len``), or a query before its
    first key would see keys of shared levels that come after it. Of outer levels every query sees all keys.

    Parameters
    ----------
    q : float[total_q, num_q_heads, head_dim]
        As in `ragged_paged_attention`.
    k_pages, v_pages : float or int8
        The pool, which holds the pages of all levels.
    levels : sequence of (PageTable, int[batch + 1])
        Outermost first, at least one: a table, and bounds of the query tokens that each of its rows serves,
        as ``q_indptr`` of `ragged_paged_attention`. Batches differ: one row may serve the tokens of many rows
        of the next level. A query token that an outer level leaves out has no keys there, one that the last
        level leaves out belongs to no sequence. Rows may end in the middle of a page.
    sm_scale, soft_cap, alibi_slopes, k_scale, v_scale, kv_layout
        As in `paged_attention`; biases of ALiBi count distances in the whole sequence.
    window_left, mask, causal
        As in `ragged_paged_attention`, of the last level only.
    sinks : float[num_q_heads], optional
        As in `paged_attention`; added once, after the levels are merged.
    return_lse, num_splits, implementation
        As in `ragged_paged_attention`; `num_splits` cuts the rows of each level.
    validate_values : bool
        As in `ragged_paged_attention`, of each level; with `causal` also that the last level's rows hold
        their query tokens.
    config : optional
        The chosen implementation's ``Config`` of ragged calls, for all levels.

    Returns
    -------
    out : like q, with v's head_dim
        0 for query tokens of no sequence, and where a query sees no key.
    lse : float32[total_q, num_q_heads]
        As in `ragged_paged_attention`.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, as ``levels[0][1]`` for the bounds of the outermost
        level, what was expected and what came.
    NotImplementedError
        As in `paged_attention`.

    References
    ----------
    .. [1] L. Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2023 (arXiv
       2312.07104), of shared prefixes; Z. Ye et al., "FlashInfer: Efficient and Customizable Attention Engine
       for LLM Inference Serving", 2025 (arXiv 2501.01005), of merging states of a prefix and of suffixes.

    Examples
    --------
    Three sequences of one new token each share 32 tokens, in pages 4 and 5:

    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import PageTable, cascade_attention
    >>> shared = PageTable.from_block_tables([[4, 5]], [32]), [0, 3]
    >>> own = PageTable.from_block_tables([[0, -1], [2, 1], [3, -1]], [7, 20, 1]), [0, 1, 2, 3]
    >>> k_pages = v_pages = jnp.ones((6, 2, 16, 64))  # 6 pages, 2 kv heads, 16 tokens a page
    >>> cascade_attention(jnp.ones((3, 8, 64)), k_pages, v_pages, [shared, own]).shape
    (3, 8, 64)
    """
    q = as_query(q)
    levels = _as_levels(levels)
    for name, flag in (("causal", causal), ("return_lse", return_lse), ("validate_values", validate_values)):
        validation.check_bool(name, flag)
    k_pages, v_pages = validation.as_array("k_pages", k_pages), validation.as_array("v_pages", v_pages)
    k_scale = validation.as_optional_array("k_scale", k_scale)
    v_scale = validation.as_optional_array("v_scale", v_scale)
    modifiers = Modifiers(soft_cap, window_left, alibi_slopes, sinks, mask)
    modifiers = modifiers.checked(q.shape[:1], (), q.shape[1])
    of_last = modifiers._replace(sinks=None)
    of_outer = of_last._replace(window_left=None, mask=None)
    problems, calls = [], []
    for level, (page_table, q_indptr) in enumerate(levels, start=1 - len(levels)):
        of_level = of_outer if level else of_last
        problem = ragged.describe(
            q,
            k_pages,
            v_pages,
            page_table,
            of_level,
            k_scale,
            v_scale,
            causal=causal and level == 0,
            kv_layout=kv_layout,
            return_lse=True,
            num_splits=num_splits,
            out_dtype=np.dtype(np.float32),  # rounded once, after the merge
        )
        of_rows = attention.as_operands(
            problem, q, k_pages, v_pages, page_table, of_level, sm_scale, k_scale, v_scale
        )
        rows = ragged.rows_of_queries(q_indptr, problem.total_q)
        problems.append(problem)
        calls.append(ragged.Operands(*rows, of_rows))
    if validate_values:
        sinks_alone = Modifiers(sinks=modifiers.sinks)
        sinks_alone.check_values(levels[-1].page_table.kv_lens, "")
        for index, (level, problem, call) in enumerate(zip(levels, problems, calls, strict=True)):
            ragged.check_values(
                problem,
                *level,
                call.attention.modifiers,
                k_scale,
                v_scale,
                table_name=f"levels[{index}][0]",
                q_indptr_name=f"levels[{index}][1]",
            )
        if causal:
            _check_own_keys(len(levels) - 1, levels[-1])
    states = [
        dispatch.run(ragged.RAGGED, problem, call, implementation=implementation, config=config)
        for problem, call in zip(problems, calls, strict=True)
    ]
    outs, lses = (jnp.stack(x) for x in zip(*states, strict=True))
    places = [_place(level, problems[0]) for level in levels]
    if modifiers.alibi_slopes is not None:
        # Each level's biases count from where its own call puts the query: they differ by one constant.
        shifts = _shifts(places).astype(jnp.float32)
        lses += shifts[..., None] * modifiers.alibi_slopes[None, None]
    out, lse = merge.merge_states(outs, lses)
    if modifiers.sinks is not None:  # a sink is a state of its own, whose output is 0
        out, lse = merge.merge_state(
            out, lse, jnp.zeros_like(out), jnp.broadcast_to(modifiers.sinks, lse.shape)
        )
    owned = places[-1].owned[:, None]
    out = jnp.where(owned[..., None], out, 0.0).astype(q.dtype)
    return (out, jnp.where(owned, lse, -jnp.inf)) if return_lse else out


class _Level(NamedTuple):
    page_table: PageTable
    q_indptr: jax.Array


class _Place(NamedTuple):
    """Where a level's calls put each query token: whether it has a row, the row's keys, and its position."""

    owned: jax.Array
    kv_lens: jax.Array
    positions: jax.Array


def _as_levels(levels: Any) -> list[_Level]:
    expected = "a sequence of at least one pair (PageTable, q_indptr)"
    validation.check(isinstance(levels, Sequence), "levels", expected, type(levels).__name__)
    validation.check(len(levels) > 0, "levels", expected, "none")
    checked = []
    for index, level in enumerate(levels):
        name = f"levels[{index}]"
        is_pair = isinstance(level, tuple | list) and len(level) == 2
        got = f"{len(level)} values" if isinstance(level, tuple | list) else type(level).__name__
        validation.check(is_pair, name, "a pair (PageTable, q_indptr)", got)
        page_table = as_page_table(f"{name}[0]", level[0])
        checked.append(_Level(page_table, ragged.as_q_indptr(f"{name}[1]", level[1], page_table)))
    return checked


def _check_own_keys(index: int, level: _Level) -> None:
    _, (kv_lens, q_indptr) = validation.value_module(level.page_table.kv_lens, level.q_indptr)
    expected = f"at least each row's query tokens in levels[{index}][1]"
    holds = kv_lens >= q_indptr[1:] - q_indptr[:-1]
    validation.check_values(holds, f"levels[{index}][0].kv_lens", expected, kv_lens)


def _place(level: _Level, problem: ragged.Problem) -> _Place:
    tokens = jnp.arange(problem.total_q, dtype=jnp.int32)
    _, kv_lens = level.page_table.clipped(max(problem.page_size, 1))
    batch = kv_lens.shape[0]
    if batch == 0:
        return _Place(tokens < 0, *[jnp.zeros_like(tokens)] * 2)
    starts, q_lens = ragged.rows_of_queries(level.q_indptr, problem.total_q)
    row = jnp.sum((starts + q_lens)[None] <= tokens[:, None], axis=1, dtype=jnp.int32)
    owned, row = (row < batch) & (tokens >= starts[0]), jnp.minimum(row, batch - 1)
    lens = jnp.where(owned, kv_lens[row], 0)
    return _Place(owned, lens, lens - q_lens[row] + tokens - starts[row])


def _shifts(places: list[_Place]) -> jax.Array:
    """How far a level's keys lie after where its call sees them from a query: int32[levels, total_q]."""
    shifts, before = [], jnp.zeros_like(places[0].kv_lens)
    for place in places:
        shifts.append(before + place.positions)
        before += place.kv_lens
    return jnp.stack(shifts) - shifts[-1][None]
