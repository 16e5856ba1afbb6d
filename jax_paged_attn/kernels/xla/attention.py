"""Attention of rows over a cache, in plain `jnp`; `online_softmax.py` is its loop."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_paged_attn import validation
from jax_paged_attn.calls.attention import Operands, Problem
from jax_paged_attn.calls.modifiers import first_visible
from jax_paged_attn.dispatch import Target
from jax_paged_attn.kernels import Usage

from .online_softmax import Rows, attend

_MAX_BLOCK_KV = 2**20  # a tile of it is far past any use, and positions stay in int32


@dataclasses.dataclass(frozen=True)
class Config:
    """Choices of the XLA implementation.

    Attributes
    ----------
    block_kv : int
        Keys of each row that are gathered and multiplied at a time, whatever the page size; at most 2**20.
    """

    block_kv: int = 128

    def __post_init__(self):
        validation.check_positive_int("block_kv", self.block_kv, _MAX_BLOCK_KV)


def why_not(problem: Problem, target: Target) -> str | None:
    """None: it runs every problem everywhere."""
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """One tile size for all: a row's bits must not depend on capacities."""
    return Config()


def usage(problem: Problem, config: Config) -> Usage:
    """Estimate the bytes of a step's tiles and running state."""
    return usage_of_rows(problem, problem.batch, problem.q_len, config.block_kv)


def usage_of_rows(problem: Problem, rows: int, q_len: int, block_kv: int) -> Usage:
    """Estimate the bytes of a step of so many rows of so many queries."""
    runs = rows * num_splits(problem, block_kv)
    tile = problem.num_kv_heads * block_kv * (problem.head_dim + problem.v_head_dim)
    state = q_len * problem.num_q_heads * (problem.v_head_dim + 2 + block_kv)
    return Usage(smem_bytes=0, workspace_bytes=runs * (tile * problem.dtype.itemsize + 4 * state))


def run(problem: Problem, config: Config, operands: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Attend; see `jax_paged_attn.kernels` for the contract."""
    modifiers = operands.modifiers
    starts, kv_lens = operands.page_table.clipped(problem.page_size)
    of_window = modifiers.kv_starts, modifiers.window_left
    rows = Rows(
        q=operands.q,
        positions=kv_lens[:, None] + (jnp.arange(problem.q_len, dtype=jnp.int32) - problem.q_len)[None],
        is_query=None,
        starts=starts,
        kv_lens=kv_lens,
        first_key=first_visible(problem.q_len, problem.mask_len, kv_lens, *of_window),
        end_key=None,
    )
    out, lse = attend(
        problem,
        rows,
        operands,
        modifiers,
        causal=problem.causal and problem.q_len != 1,  # the only query of a row sits at its last key
        num_splits=num_splits(problem, config.block_kv),
        block_kv=config.block_kv,
    )
    return out.astype(problem.dtype), lse if problem.return_lse else None


def num_splits(problem: Problem, block_kv: int) -> int:
    """Runs of each row: no more than a row can have tiles, as the others would be empty."""
    wanted = problem.num_splits or 1
    if problem.is_symbolic:
        return wanted
    return max(1, min(wanted, -(-problem.num_entries * problem.page_size // block_kv)))
