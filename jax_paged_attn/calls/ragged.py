"""The attention of rows that differ in their number of query tokens, which lie in one list."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged_attn import validation
from jax_paged_attn.calls import attention
from jax_paged_attn.calls.modifiers import Modifiers
from jax_paged_attn.dispatch import Operation
from jax_paged_attn.page_table import PageTable


@dataclasses.dataclass(frozen=True)
class Problem(attention.Problem):
    """What is static about one ragged call: as of `attention.Problem`, where `q_len` is the most of a row.

    Attributes
    ----------
    total_q : int
        Query tokens of all rows and of none.
    out_dtype : numpy.dtype or None
        Of the output; None is the query's. Outputs that are merged further are float32.
    """

    total_q: int = 0
    out_dtype: np.dtype | None = None

    def nonempty(self) -> Self:
        """Return the smallest problem of this kind that isn't empty."""
        return dataclasses.replace(super().nonempty(), total_q=max(self.total_q, 1))


class Operands(NamedTuple):
    """What an implementation computes with: row b's queries are ``q[q_starts[b]:q_starts[b] + q_lens[b]]``.

    Rows lie in any order, with tokens of no row between them. q is [total_q, num_q_heads, head_dim], and
    ``modifiers.mask`` [total_q, 1, mask_len].
    """

    q_starts: jax.Array
    q_lens: jax.Array
    attention: attention.Operands


def nothing(problem: Problem, operands: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Yield (out, lse) of queries that see no key."""
    tokens = (problem.total_q, problem.num_q_heads)
    sinks = operands.attention.modifiers.sinks
    lse = jnp.full(tokens, -jnp.inf, jnp.float32)
    if sinks is not None:
        owned = jnp.zeros(problem.total_q + 1, jnp.int32)
        ends = operands.q_starts + operands.q_lens
        owned = jnp.cumsum(owned.at[operands.q_starts].add(1).at[ends].add(-1))[:-1]
        lse = jnp.where(owned[:, None] > 0, sinks[None], lse)
    out = jnp.zeros((*tokens, problem.v_head_dim), problem.out_dtype or problem.dtype)
    return out, lse if problem.return_lse else None


def fold(
    problem: Problem, size: int, batched: Operands, operands: Operands
) -> tuple[Problem, Operands] | None:
    """Fold a mapped axis of `size` into the rows, where `attention.fold` can; see there."""
    folded = attention.fold(problem, size, batched.attention, operands.attention)
    if folded is None:
        return None
    rows = {
        name: x if mapped else jnp.broadcast_to(x, (size, *x.shape))
        for name, x, mapped in (
            ("q_starts", operands.q_starts, batched.q_starts),
            ("q_lens", operands.q_lens, batched.q_lens),
        )
    }
    rows["q_starts"] += problem.total_q * jnp.arange(size, dtype=jnp.int32)[:, None]
    rows = {name: x.reshape(size * x.shape[1]) for name, x in rows.items()}
    larger = dataclasses.replace(folded[0], total_q=size * problem.total_q)
    return larger, Operands(**rows, attention=folded[1])


RAGGED = Operation("ragged", ("ragged_paged_attention", "cascade_attention"), nothing, fold)


def describe(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: PageTable,
    modifiers: Modifiers,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    out_dtype: np.dtype | None = None,
    **flags: Any,
) -> Problem:
    """Check the shapes, dtypes and flags of a call, as `attention.describe` does, and describe it."""
    rows = jax.ShapeDtypeStruct((page_table.kv_lens.shape[0], *q.shape), q.dtype)
    problem = attention.describe(
        rows, k_pages, v_pages, page_table, modifiers, k_scale, v_scale, contiguous=False, **flags
    )
    return Problem(**vars(problem), total_q=q.shape[0], out_dtype=out_dtype)


def as_q_indptr(name: str, q_indptr: Any, page_table: PageTable) -> jax.Array:
    """Convert the bounds of rows' queries to int32 and check their shape."""
    q_indptr = validation.as_int32(name, q_indptr)
    validation.check_shape(name, q_indptr, (page_table.kv_lens.shape[0] + 1,))
    return q_indptr


def rows_of_queries(q_indptr: jax.Array, total_q: int) -> tuple[jax.Array, jax.Array]:
    """Where each row's queries begin, and how many they are, within those that there are."""
    starts = jnp.clip(q_indptr[:-1], 0, total_q)
    return starts, jnp.clip(q_indptr[1:], starts, total_q) - starts


def check_values(
    problem: Problem,
    page_table: PageTable,
    q_indptr: jax.Array,
    modifiers: Modifiers,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    table_name: str = "page_table",
    q_indptr_name: str = "q_indptr",
) -> None:
    """Check what `attention.check_values` does, and the bounds of rows' queries."""
    xp, (indptr,) = validation.value_module(q_indptr)
    expected = f"a rising array of values in [0, {problem.total_q}]"
    rises = xp.concatenate([indptr[:1] >= 0, indptr[1:] >= indptr[:-1]]) & (indptr <= problem.total_q)
    validation.check_values(rises, q_indptr_name, expected, indptr)
    attention.check_values(
        problem,
        page_table,
        modifiers,
        k_scale,
        v_scale,
        q_lens=indptr[1:] - indptr[:-1],
        table_name=table_name,
        lens_name=f"{table_name}.kv_lens",
    )


class Tiles(NamedTuple):
    """Some queries of one row each, as if they were a row: int32[num_tiles].

    Attributes
    ----------
    row : of the call
        Of tiles that no row needs, any.
    first : index of the first query, among the row's
    count : number of queries
        0 in tiles that no row needs.
    """

    row: jax.Array
    first: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, problem: Problem, q_lens: jax.Array, block_q: int) -> "Tiles":
        """Cut each row's queries into tiles of `block_q`, the last of which may have fewer."""
        tiles = -(-q_lens // block_q)
        ends = jnp.cumsum(tiles)
        tile = jnp.arange(num_tiles(problem, block_q), dtype=jnp.int32)
        row = jnp.sum(ends[None] <= tile[:, None], axis=1, dtype=jnp.int32)
        needed, row = row < problem.batch, jnp.minimum(row, problem.batch - 1)
        first = (tile - (ends - tiles)[row]) * block_q
        return cls(row, first, jnp.where(needed, jnp.minimum(q_lens[row] - first, block_q), 0))


def num_tiles(problem: Problem, block_q: int) -> int:
    """Tiles that the queries can need at most: each row's last one may be of one query."""
    most = problem.total_q // block_q + problem.batch
    return most if problem.is_symbolic else min(most, problem.total_q)


def from_tiles(
    problem: Problem, token: jax.Array, is_query: jax.Array, tiles: jax.Array, fill: float = 0.0
) -> jax.Array:
    """Put results [num_tiles, block_q, ..] where `is_query` to their tokens; the others hold `fill`."""
    to = jnp.where(is_query, token, problem.total_q)
    filled = jnp.full((problem.total_q, *tiles.shape[2:]), fill, tiles.dtype)
    return filled.at[to].set(tiles, mode="drop")
