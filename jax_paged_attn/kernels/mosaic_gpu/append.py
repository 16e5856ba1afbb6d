"""Writing new tokens into a cache, for Hopper GPUs (compute capability 9.0).

`append_kernel.py` is the kernel, `append_plan.py` says how it cuts its work.
"""

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.calls.append import Operands, Problem, Results
from jax_paged_attn.dispatch import Target
from jax_paged_attn.kernels import Usage

from .append_kernel import launch
from .append_plan import BLOCK_TOKENS, Config, Plan, min_block_tokens, smem_bytes, why_no_plan
from .integers import ceil_div

__all__ = ["Config", "default_config", "run", "usage", "why_not"]

# Each launch compares every token with all later ones; beyond, launches follow one another. Not measured yet,
# nor is the next: by a count of instructions the comparisons of 16384 tokens take 12 us of a whole H200.
MAX_TOKENS = 16384
# Blocks that a multiprocessor should have at a time, since each waits for its own copies.
BLOCKS_PER_CORE = 3


def tokens_per_launch(problem: Problem) -> int:
    """Tokens of each launch, equal but for the last."""
    tokens = ceil_div(problem.num_tokens, ceil_div(problem.num_tokens, MAX_TOKENS))
    step = max(BLOCK_TOKENS)  # also of what copies begin at
    return min(ceil_div(tokens, step) * step, problem.num_tokens)


def one_launch(problem: Problem, config: Config) -> Plan:
    """Plan the first launch, which takes as much as any."""
    return Plan(problem, config, 0, tokens_per_launch(problem))


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
    needed = smem_bytes(one_launch(problem, Config(min_block_tokens(problem))))
    if needed > target.smem_bytes:
        return f"needs {needed} bytes of shared memory, more than the {target.smem_bytes} of {target}"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """As many tokens a block as leave blocks for the whole GPU, and shared memory for several blocks."""
    least = min_block_tokens(problem)

    def fits(config: Config) -> bool:
        plan = one_launch(problem, config)
        return (
            plan.tiles >= BLOCKS_PER_CORE * target.core_count
            and smem_bytes(plan) <= target.smem_bytes // BLOCKS_PER_CORE
        )

    wide = [tokens for tokens in BLOCK_TOKENS if tokens > least and fits(Config(tokens))]
    return Config(max(wide, default=least))


def usage(problem: Problem, config: Config) -> Usage:
    """What a launch takes."""
    return Usage(smem_bytes=smem_bytes(one_launch(problem, config)), workspace_bytes=0)


def run(problem: Problem, config: Config, operands: Operands, *, interpret: bool = False) -> Results:
    """Launch the kernel on refs of the pools; `jax_paged_attn.kernels` has the contract."""
    params = plgpu.InterpretGPUParams(detect_races=True) if interpret else None
    # XLA fuses a kernel that updates in place with a slice that makes one of its operands, or with the slice
    # of a larger array (a loop's stacked results) that one of its results goes into; then it loses what the
    # kernel leaves alone (jax 0.11.2, 0.12.0). Barriers around it prevent that.
    operands = lax.optimization_barrier(operands)
    names = ("k_pages", "v_pages", "k_scale_pages", "v_scale_pages")
    given = {name: getattr(operands, name) for name in names}
    pools = {name: jax.new_ref(array) for name, array in given.items() if array is not None}
    step, q = tokens_per_launch(problem), None
    for start in range(0, problem.num_tokens, step):
        plan = Plan(problem, config, start, min(start + step, problem.num_tokens))
        q = launch(plan, operands, pools, q, interpret=params)
    updated, q = lax.optimization_barrier(({name: jax.freeze(ref) for name, ref in pools.items()}, q))
    return Results(**updated, q=q)
