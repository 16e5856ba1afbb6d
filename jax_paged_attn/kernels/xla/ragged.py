"""Attention of rows that differ in their number of query tokens: each row's are cut into tiles of queries."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_paged_attn import validation
from jax_paged_attn.calls.modifiers import first_visible
from jax_paged_attn.calls.ragged import Operands, Problem, Tiles, from_tiles, num_tiles
from jax_paged_attn.dispatch import Target
from jax_paged_attn.kernels import Usage

from . import attention
from .online_softmax import Rows, attend

_MAX_BLOCK_Q = 2**20
_MAX_DEFAULT_BLOCK_Q = 128


@dataclasses.dataclass(frozen=True)
class Config(attention.Config):
    """Choices of the XLA implementation.

    Attributes
    ----------
    block_q : int
        Queries of one row that share each tile of keys; at most 2**20.
    """

    block_q: int = 16

    def __post_init__(self):
        super().__post_init__()
        validation.check_positive_int("block_q", self.block_q, _MAX_BLOCK_Q)


def why_not(problem: Problem, target: Target) -> str | None:
    """None: it runs every problem everywhere."""
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """Choose tiles of about as many queries as rows have on average, so that most places are used."""
    if problem.is_symbolic:
        return Config()
    mean = max(problem.total_q // problem.batch, 1)
    return Config(block_q=min(2 ** (mean.bit_length() - 1), _MAX_DEFAULT_BLOCK_Q))


def usage(problem: Problem, config: Config) -> Usage:
    """Estimate the bytes of a step's tiles and running state."""
    return attention.usage_of_rows(
        problem, num_tiles(problem, config.block_q), config.block_q, config.block_kv
    )


def run(problem: Problem, config: Config, operands: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Attend with all tiles in step, as if each were a row; `jax_paged_attn.kernels` has the contract."""
    (q_starts, q_lens, of_rows), block_q = operands, config.block_q
    modifiers, total_q = of_rows.modifiers, problem.total_q
    row, first, count = Tiles.of(problem, q_lens, block_q)
    offset = first[:, None] + jnp.arange(block_q, dtype=jnp.int32)[None]
    is_query = offset < (first + count)[:, None]
    token = q_starts[row, None] + offset
    gathered = jnp.clip(token, 0, total_q - 1)

    starts, kv_lens = of_rows.page_table.clipped(problem.page_size)
    starts, kv_lens, q_lens = starts[row], jnp.where(count > 0, kv_lens[row], 0), q_lens[row]
    if modifiers.kv_starts is not None:
        modifiers = modifiers._replace(kv_starts=modifiers.kv_starts[row])
    if modifiers.mask is not None:
        modifiers = modifiers._replace(mask=modifiers.mask[gathered, 0])
    of_window = modifiers.kv_starts, modifiers.window_left
    rows = Rows(
        q=of_rows.q[gathered],
        positions=(kv_lens - q_lens)[:, None] + offset,
        is_query=is_query,
        starts=starts,
        kv_lens=kv_lens,
        first_key=first_visible(q_lens - first, problem.mask_len, kv_lens, *of_window),
        # A mask may show keys after a query.
        end_key=kv_lens - q_lens + first + count if problem.causal and modifiers.mask is None else None,
    )
    out, lse = attend(
        problem,
        rows,
        of_rows,
        modifiers,
        causal=problem.causal,
        num_splits=attention.num_splits(problem, config.block_kv),
        block_kv=config.block_kv,
    )
    out = from_tiles(problem, token, is_query, out.astype(problem.out_dtype or problem.dtype))
    return out, from_tiles(problem, token, is_query, lse, fill=-jnp.inf) if problem.return_lse else None
