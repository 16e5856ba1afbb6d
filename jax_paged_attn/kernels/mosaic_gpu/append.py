"""Writing new tokens into a cache, for Hopper GPUs (compute capability 9.0).

`append_kernel.py` is the kernel, `append_plan.py` says how it cuts its work.
"""

import dataclasses
import os

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.calls.append import Operands, Problem, Results
from jax_paged_attn.dispatch import Target
from jax_paged_attn.kernels import Usage

from .append_kernel import launch
from .append_plan import (
    BLOCK_TOKENS,
    STAGES,
    WARPGROUPS,
    Config,
    Plan,
    min_block_tokens,
    smem_bytes,
    why_no_plan,
)
from .integers import ceil_div, round_up

__all__ = ["Config", "default_config", "run", "usage", "why_not"]

# Each block looks at all later slots of a launch: at so many that costs a twentieth of the whole.
MAX_TOKENS = 65536
TOKENS_STEP = 16  # a launch's tokens begin where vectors may
# While so many blocks of a tile each run on a multiprocessor at a time, none waits for another.
MAX_SMALL_BLOCKS = 8


def tokens_per_launch(problem: Problem) -> int:
    """Tokens of each launch, equal but for the last."""
    launches = ceil_div(problem.num_tokens, MAX_TOKENS)
    return min(round_up(ceil_div(problem.num_tokens, launches), TOKENS_STEP), problem.num_tokens)


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
    """The smallest tiles, a block each, while all run at a time; else a block of many warpgroups a core."""
    least = min_block_tokens(problem)
    small = one_launch(problem, Config(least))
    at_a_time = min(target.smem_bytes // smem_bytes(small), MAX_SMALL_BLOCKS)
    if small.tiles <= target.core_count * at_a_time:
        return dataclasses.replace(small.config, blocks=small.tiles)

    def fits(config: Config) -> bool:
        plan = one_launch(problem, config)
        workers = config.blocks * config.warpgroups
        return plan.tiles >= workers and smem_bytes(plan) <= target.smem_bytes

    # Warpgroups before stages before tokens: what is rotated or converted needs threads.
    choices = [
        Config(tokens, warpgroups, target.core_count, stages)
        for warpgroups in sorted(WARPGROUPS, reverse=True)
        for stages in sorted(STAGES, reverse=True)
        for tokens in sorted(BLOCK_TOKENS, reverse=True)
        if tokens >= least
    ]
    fallback = Config(least, 1, target.core_count)
    return next(filter(fits, choices), fallback)


def usage(problem: Problem, config: Config) -> Usage:
    """What a launch takes."""
    return Usage(smem_bytes=smem_bytes(one_launch(problem, config)), workspace_bytes=0)


def run(problem: Problem, config: Config, operands: Operands, *, interpret: bool = False) -> Results:
    """Launch the kernel on refs of the pools; `jax_paged_attn.kernels` has the contract."""
    params = plgpu.InterpretGPUParams(detect_races=True) if interpret else None
    # The interpreter runs a block's warpgroups in threads of XLA's pool, and hangs where those that wait for
    # one another take all of it (jax 0.11.2, 0.12.0).
    if interpret and _host_threads() <= config.warpgroups:
        config = dataclasses.replace(config, warpgroups=1)
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


def _host_threads() -> int:
    """Threads of the pool that XLA has for a CPU."""
    if threads := os.environ.get("NPROC"):
        return int(threads)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
