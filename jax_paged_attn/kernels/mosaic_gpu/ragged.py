"""Rows that differ in their number of query tokens, by the decode kernel: it takes tiles of them for rows.

A tile's queries are the last ones of a row that ends where they do, so that causality needs nothing new.
Where there are fewer than the tile has places for, those before them are taken along, and dropped.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_paged_attn.calls.attention import Problem as RowsProblem
from jax_paged_attn.calls.modifiers import Modifiers, window_size
from jax_paged_attn.calls.ragged import Operands, Problem, Tiles, from_tiles, num_tiles
from jax_paged_attn.dispatch import Target
from jax_paged_attn.kernels import Usage
from jax_paged_attn.page_table import PageTable

from . import attention
from .plan import Plan

MAX_BLOCK_Q = 64


@dataclasses.dataclass(frozen=True)
class Config(attention.Config):
    """How the decode kernel cuts its work, and how rows are cut into tiles for it.

    Attributes
    ----------
    block_q : int
        Query tokens of one row that share each tile of keys.
    """

    block_q: int = 1


def why_not(problem: Problem, target: Target) -> str | None:
    """Why the kernel can't run `problem` on `target`; None if it can."""
    if problem.is_symbolic:
        return "needs static shapes"
    if problem.out_dtype not in (None, problem.dtype):
        return f"an output of {problem.out_dtype} for a query of {problem.dtype}, to be merged, unsupported"
    # A tile's row ends with its queries.
    if problem.mask_len:
        return "mask unsupported where rows differ in their number of queries"
    if not problem.causal and {"window_left", "alibi_slopes"} & {*problem.given}:
        return "window_left and alibi_slopes without causal unsupported where rows differ in queries"
    return attention.why_not(of_tiles(problem, _block_q(problem)), target)


def default_config(problem: Problem, target: Target) -> Config:
    """Choose the largest tile that no row is much smaller than and that needs one reading of the keys."""
    block_q = _block_q(problem)
    return Config(block_q=block_q, **vars(attention.default_config(of_tiles(problem, block_q), target)))


def usage(problem: Problem, config: Config) -> Usage:
    """What a launch takes."""
    return attention.usage(of_tiles(problem, config.block_q), config)


def run(
    problem: Problem, config: Config, operands: Operands, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Run the decode kernel over tiles; `jax_paged_attn.kernels` has the contract."""
    (q_starts, q_lens, of_rows), block_q = operands, config.block_q
    modifiers, table = of_rows.modifiers, of_rows.page_table
    row, first, count = Tiles.of(problem, q_lens, block_q)
    place = jnp.arange(block_q, dtype=jnp.int32)[None] - (block_q - count)[:, None]
    is_query, token = place >= 0, (q_starts[row] + first)[:, None] + place

    row_starts, kv_lens = table.clipped(problem.page_size)
    first_position = kv_lens[row] - q_lens[row] + first
    ends = first_position + count if problem.causal else kv_lens[row]
    kv_starts = modifiers.kv_starts
    if kv_starts is not None or "window_left" in problem.given:
        # Places before the first query see nothing that no query sees, which may be NaN.
        kv_starts = jnp.zeros_like(row) if kv_starts is None else kv_starts[row]
        if modifiers.window_left is not None:
            in_window = jnp.maximum(first_position, 0) - window_size(modifiers.window_left)
            kv_starts = jnp.maximum(kv_starts, in_window)
    tiles = of_rows._replace(
        q=of_rows.q[jnp.clip(token, 0, problem.total_q - 1)],
        page_table=PageTable(
            indices=table.indices,
            row_starts=row_starts[row],
            row_pages=table.row_pages[row],
            kv_lens=jnp.where(count > 0, jnp.maximum(ends, 0), 0),
        ),
        modifiers=modifiers._replace(kv_starts=kv_starts),
    )
    out, lse = attention.run(of_tiles(problem, block_q), config, tiles, interpret=interpret)
    out = from_tiles(problem, token, is_query, out)
    return out, None if lse is None else from_tiles(problem, token, is_query, lse, fill=-jnp.inf)


def of_tiles(problem: Problem, block_q: int) -> RowsProblem:
    """Describe the call whose rows are the tiles."""
    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(RowsProblem)}
    given = {*problem.given} | ({"kv_starts"} if "window_left" in problem.given else set())
    fields |= {
        "batch": num_tiles(problem, block_q),
        "q_len": block_q,
        "given": tuple(name for name in Modifiers._fields if name in given),
    }
    return RowsProblem(**fields)


def _block_q(problem: Problem) -> int:
    mean = max(problem.total_q // problem.batch, 1)
    sizes = range(min(mean, MAX_BLOCK_Q), 1, -1)
    fits = (size for size in sizes if Plan(of_tiles(problem, size), attention.Config()).head_groups == 1)
    return next(fits, 1)
