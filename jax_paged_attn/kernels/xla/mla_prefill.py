"""Attention of many query tokens over one kv head, a block of them at a time over tiles of keys."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_paged_attn import validation
from jax_paged_attn.calls.mla_prefill import Operands, Problem
from jax_paged_attn.dispatch import Target, varying_axes
from jax_paged_attn.kernels import Usage

from .softmax_state import State


@dataclasses.dataclass(frozen=True)
class Config:
    """Choices of the XLA implementation.

    Attributes
    ----------
    block_q, block_kv : int
        Query tokens and keys of each batch entry that are multiplied at a time.
    """

    block_q: int = 64
    block_kv: int = 256

    def __post_init__(self):
        validation.check_positive_int("block_q", self.block_q)
        validation.check_positive_int("block_kv", self.block_kv)


def why_not(problem: Problem, target: Target) -> str | None:
    """Nothing but symbolic lengths, which can't be cut into blocks."""
    return "needs static shapes" if problem.is_symbolic else None


def default_config(problem: Problem, target: Target) -> Config:
    return Config()


def usage(problem: Problem, config: Config) -> Usage:
    """Estimate the bytes of a step's scores and running state."""
    queries = problem.batch * min(config.block_q, problem.q_len) * problem.num_heads
    return Usage(smem_bytes=0, workspace_bytes=4 * queries * (problem.v_head_dim + 2 + 2 * config.block_kv))


def run(problem: Problem, config: Config, operands: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Attend; see `jax_paged_attn.kernels` for the contract."""
    p, (q, k, v, sm_scale) = problem, operands
    block_q, block_kv = min(config.block_q, p.q_len), min(config.block_kv, p.kv_len)
    precision = jax.lax.Precision.HIGHEST if p.dtype == jnp.float32 else None
    axes = varying_axes(operands)  # a loop's state must vary as its operands do, from the start

    def multiply(equation, a, b):
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)

    def attend_block(block):
        # The last block ends with the last query, and so may compute some of the block before again.
        first = jnp.minimum(block * block_q, p.q_len - block_q)
        queries = jax.lax.dynamic_slice_in_dim(q, first, block_q, axis=1)
        token = first + jnp.arange(block_q, dtype=jnp.int32)
        ends = jnp.full(block_q, p.kv_len, jnp.int32)
        if p.causal:
            ends = p.kv_len - p.q_len + 1 + token

        def add_tile(tile, state):
            start = jnp.minimum(tile * block_kv, p.kv_len - block_kv)
            keys, values = (jax.lax.dynamic_slice_in_dim(x, start, block_kv, axis=1) for x in (k, v))
            positions = start + jnp.arange(block_kv, dtype=jnp.int32)
            # The last tile begins with keys that the one before has had.
            seen = (positions >= tile * block_kv)[None] & (positions[None] < ends[:, None])
            scores = multiply("bqhd,btd->bqht", queries, keys) * sm_scale
            state, weights = state.weigh(jnp.where(seen[None, :, None], scores, -jnp.inf))
            return state.add(multiply("bqht,bte->bqhe", weights.astype(p.dtype), values))

        state = State.empty((p.batch, block_q, p.num_heads), p.v_head_dim)
        state = jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), state)
        tiles = jnp.maximum(-(-ends[-1] // block_kv), 0)  # none of what no query of the block sees
        out, lse = jax.lax.fori_loop(0, tiles, add_tile, state).result()
        return out.astype(p.dtype), lse

    blocks = -(-p.q_len // block_q)
    if blocks == 1:
        out, lse = attend_block(jnp.int32(0))
    else:
        results = jax.lax.map(attend_block, jnp.arange(blocks, dtype=jnp.int32))
        out, lse = (_in_order(x, p.q_len) for x in results)
    return out, lse if p.return_lse else None


def _in_order(blocks: jax.Array, q_len: int) -> jax.Array:
    """[blocks, batch, block_q, ..] -> [batch, q_len, ..]; the last block ends with the last query."""
    count, batch, block_q, *rest = blocks.shape
    whole = jnp.moveaxis(blocks[:-1], 0, 1).reshape(batch, (count - 1) * block_q, *rest)
    left = q_len - (count - 1) * block_q
    return jnp.concatenate([whole, blocks[-1][:, block_q - left :]], axis=1)
