"""Latent attention of rows over a paged cache, for Hopper GPUs (compute capability 9.0).

`mla_kernel.py` is the kernel, `mla_merge.py` its second launch; `mla_plan.py` says how they cut their work.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.calls.mla import Operands, Problem
from jax_paged_attn.dispatch import Target, varying_axes
from jax_paged_attn.kernels import Usage

from .config import PARTS_GIVEN_UP, rows_per_launch
from .integers import ceil_div
from .mla_kernel import launch
from .mla_merge import merge
from .mla_plan import BLOCK_KV, Config, Plan, smem_bytes
from .plan import MAX_PARTS
from .rows import Table
from .schedule import even_parts
from .shared_tile import SWIZZLE_ROWS

__all__ = ["Config", "default_config", "run", "usage", "why_not"]

DTYPES = ("bfloat16", "float16")
RANKS = (128, 256, 384, 512)
ROPE_DIMS = (32, 64)
MIN_PAGE_SIZE = 16  # for smaller ones registers do not last


def one_launch(problem: Problem) -> Problem:
    """The part of a batch that one launch takes."""
    return dataclasses.replace(problem, batch=rows_per_launch(problem))


def why_not(problem: Problem, target: Target) -> str | None:
    """Why the kernel can't run `problem` on `target`; None if it can."""
    if target.compute_capability is None or target.compute_capability[0] != 9:
        return f"is made for Hopper (sm_90), not for {target}"
    if problem.is_symbolic:
        return "needs static shapes"
    if problem.dtype.name not in DTYPES:
        return f"dtype {problem.dtype.name} unsupported; supported: {', '.join(DTYPES)}"
    for dtype in (problem.latent_dtype, problem.rope_dtype):
        if dtype != problem.dtype:
            return f"a cache of {dtype.name} unsupported; supported: the dtype of the query, {problem.dtype}"
    for name, dim, supported in (
        ("kv_lora_rank", problem.rank, RANKS),
        ("rope_dim", problem.rope_dim, ROPE_DIMS),
    ):
        if dim not in supported:
            return f"{name} {dim} unsupported; supported: {', '.join(map(str, supported))}"
    if problem.page_size % SWIZZLE_ROWS or problem.page_size < MIN_PAGE_SIZE:
        supported = f"multiples of {SWIZZLE_ROWS} from {MIN_PAGE_SIZE} on"
        return f"page_size {problem.page_size} unsupported; supported: {supported}"
    if problem.num_entries * problem.page_size >= 2**31 - BLOCK_KV:
        return "positions would not fit in 32 bits: num_entries * page_size is 2**31 or more"
    if Plan(one_launch(problem), Config()).schedule.parts > MAX_PARTS:
        return f"num_splits {problem.num_splits} unsupported: a grid has at most {MAX_PARTS} parts"
    needed = usage(problem, Config()).smem_bytes
    if needed > target.smem_bytes:
        return f"needs {needed} bytes of shared memory, more than the {target.smem_bytes} of {target}"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """A thread block for each multiprocessor: shared memory and registers leave room for no more."""
    problem = one_launch(problem)
    parts = max(target.core_count // Plan(problem, Config()).blocks, 1)
    return Config(num_parts=even_parts(parts, problem.batch, PARTS_GIVEN_UP))


def usage(problem: Problem, config: Config) -> Usage:
    """What a launch takes."""
    plan = Plan(one_launch(problem), config)
    launches = ceil_div(problem.batch, plan.problem.batch)
    floats = sum(math.prod(shape) for shape in plan.partial_shapes().values())
    cut_rows = 3 * plan.schedule.num_cut_rows if plan.schedule.cuts_rows else 0
    return Usage(smem_bytes=smem_bytes(plan), workspace_bytes=4 * launches * (floats + cut_rows))


def run(
    problem: Problem, config: Config, operands: Operands, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Run the kernel, then the merge of the rows it cut; `jax_paged_attn.kernels` has the contract."""
    p, x = problem, operands
    params = plgpu.InterpretGPUParams(detect_races=True) if interpret else None
    rope_pages = x.latent_pages if x.rope_pages is None else x.rope_pages
    q_nope, q_pe = (q.reshape(p.batch, p.queries, q.shape[-1]) for q in (x.q_nope, x.q_pe))
    if padding := Plan(p, config).queries - p.queries:  # registers take whole blocks
        q_nope, q_pe = (jnp.pad(q, ((0, 0), (0, padding), (0, 0))) for q in (q_nope, q_pe))
    launches = []
    step = rows_per_launch(p)
    for start in range(0, p.batch, step):
        rows = slice(start, start + step)
        table = x.page_table
        table = Table(
            kv_lens=table.kv_lens[rows],
            indices=table.indices,
            row_starts=table.row_starts[rows],
            row_pages=table.row_pages[rows],
        )
        plan = Plan(dataclasses.replace(p, batch=table.kv_lens.shape[0]), config)
        results = launch(
            plan,
            q_nope[rows],
            q_pe[rows],
            x.latent_pages,
            rope_pages,
            table,
            x.sm_scale.reshape(1),
            interpret=params,
        )
        if plan.schedule.cuts_rows:
            results = merge(plan, results, interpret=params)
        launches.append((results["out"], results.get("lse")))
    out, lse = jax.tree.map(lambda *parts: jnp.concatenate(parts), *launches) if launches[1:] else launches[0]
    queries = (p.batch, p.q_len, p.num_heads)
    out = out.reshape(*queries, p.rank)
    if lse is not None:
        lse = (lse[:, : p.queries] if padding else lse).reshape(queries)
    # What a kernel makes counts as the same on all devices, which its operands may not be.
    axes = varying_axes(operands)
    joined = (out, lse)
    return jax.tree.map(lambda x: lax.pcast(x, axes, to="varying"), joined) if axes else joined
