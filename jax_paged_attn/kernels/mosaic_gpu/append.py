"""Writing new tokens into a cache, for Hopper GPUs (compute capability 9.0).

`append_kernel.py` is the kernel, `append_plan.py` says how it cuts its work.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.calls.append import Operands, Problem, Results
from jax_paged_attn.dispatch import Target
from jax_paged_attn.kernels import Usage

from .append_kernel import launch
from .append_plan import BLOCK_TOKENS, Config, Plan, min_block_tokens, smem_bytes, why_no_plan
from .integers import ceil_div

__all__ = ["Config", "default_config", "run", "usage", "why_not"]

# Each launch compares every token with all later ones; beyond, launches follow one another.
MAX_TOKENS = 16384
# Blocks that a multiprocessor should have at a time, since each waits for its own copies.
BLOCKS_PER_CORE = 3


def tokens_per_launch(problem: Problem) -> int:
    """Tokens of each launch, equal but for the last."""
    tokens = ceil_div(problem.num_tokens, ceil_div(problem.num_tokens, MAX_TOKENS))
    step = max(BLOCK_TOKENS)  # also of what copies begin at
    return min(ceil_div(tokens, step) * step, problem.num_tokens)


def one_launch(problem: Problem) -> Problem:
    """The part of an append that one launch takes."""
    return dataclasses.replace(problem, num_tokens=tokens_per_launch(problem))


def why_not(problem: Problem, target: Target) -> str | None:
    """Why the kernel can't run `problem` on `target`; None if it can."""
    if target.compute_capability is None or target.compute_capability[0] != 9:
        return f"is made for Hopper (sm_90), not for {target}"
    if problem.is_symbolic:
        return "needs static shapes"
    if problem.num_slots == 0:
        return "needs a pool with pages"
    if reason := why_no_plan(problem):
        return reason
    needed = smem_bytes(Plan(one_launch(problem), Config(min_block_tokens(problem))))
    if needed > target.smem_bytes:
        return f"needs {needed} bytes of shared memory, more than the {target.smem_bytes} of {target}"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """As many tokens a block as leave blocks for the whole GPU, and shared memory for several blocks."""
    least = min_block_tokens(problem)
    problem = one_launch(problem)

    def fits(config: Config) -> bool:
        plan = Plan(problem, config)
        return (
            plan.tiles >= BLOCKS_PER_CORE * target.core_count
            and smem_bytes(plan) <= target.smem_bytes // BLOCKS_PER_CORE
        )

    wide = [tokens for tokens in BLOCK_TOKENS if tokens > least and fits(Config(tokens))]
    return Config(max(wide, default=least))


def usage(problem: Problem, config: Config) -> Usage:
    """What a launch takes."""
    return Usage(smem_bytes=smem_bytes(Plan(one_launch(problem), config)), workspace_bytes=0)


def run(problem: Problem, config: Config, operands: Operands, *, interpret: bool = False) -> Results:
    """Launch the kernel on refs of the pools; `jax_paged_attn.kernels` has the contract."""
    params = plgpu.InterpretGPUParams(detect_races=True) if interpret else None
    names = ("k_pages", "v_pages", "k_scale_pages", "v_scale_pages")
    arrays = {name: getattr(operands, name) for name in names}
    pools = {name: jax.new_ref(array) for name, array in arrays.items() if array is not None}
    step, queries = tokens_per_launch(problem), []
    for start in range(0, problem.num_tokens, step):
        part = (
            operands if step == problem.num_tokens else _tokens(problem, operands, slice(start, start + step))
        )
        plan = Plan(dataclasses.replace(problem, num_tokens=part.slots.shape[0]), config)
        queries.append(launch(plan, part, pools, interpret=params))
    # As in the merge of attention: fused with a loop's stacking of results, a kernel that updates in place
    # would lose what it leaves alone (XLA of jax 0.11.2, 0.12.0).
    updated = lax.optimization_barrier({name: jax.freeze(ref) for name, ref in pools.items()})
    q = None
    if problem.rotation is not None:
        q = queries[0] if len(queries) == 1 else jnp.concatenate(queries)
    return Results(**updated, q=q)


def _tokens(problem: Problem, operands: Operands, tokens: slice) -> Operands:
    """Operands of some of the tokens."""
    x = operands
    rotation = x.rotation
    if rotation is not None:
        rotation = rotation._replace(q=rotation.q[tokens], positions=rotation.positions[tokens])
    return x._replace(
        k_new=x.k_new[tokens],
        v_new=x.v_new[tokens],
        slots=x.slots[tokens],
        k_scale=x.k_scale[tokens] if problem.k_scale == "token" and x.k_scale is not None else x.k_scale,
        v_scale=x.v_scale[tokens] if problem.v_scale == "token" and x.v_scale is not None else x.v_scale,
        rotation=rotation,
    )
