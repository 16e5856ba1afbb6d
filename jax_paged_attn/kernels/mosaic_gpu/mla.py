"""Latent attention of rows over a paged cache, for Hopper GPUs (compute capability 9.0).

`mla_kernel.py` is the kernel, `mla_merge.py` its second launch; `mla_plan.py` says how they cut their work.
With `Config.few_heads` the decode kernel serves few heads, by one kv head whose values are the first columns
of its keys.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.calls import attention
from jax_paged_attn.calls.mla import Operands, Problem
from jax_paged_attn.dispatch import Target, varying_axes
from jax_paged_attn.kernels import Usage

from . import decode_kernel, merge_kernel, shared_memory
from . import plan as decode_plan
from .config import PARTS_GIVEN_UP, rows_per_launch
from .integers import ceil_div
from .layouts import MMA_ROWS
from .mla_kernel import launch
from .mla_merge import merge
from .mla_plan import BLOCK_KV, Config, Plan
from .mla_plan import smem_bytes as mla_smem_bytes
from .plan import MAX_PARTS
from .rows import Table
from .schedule import even_parts
from .shared_tile import SWIZZLE_ROWS

__all__ = ["Config", "default_config", "run", "usage", "why_not"]

DTYPES = ("bfloat16", "float16")
RANKS = (128, 256, 384, 512)
ROPE_DIMS = (32, 64)
FEW_STAGES = 2
SMEM_BYTES = 232_448  # of a block on Hopper
MIN_PAGE_SIZE = 16  # for smaller ones registers do not last


def as_one_head(problem: Problem) -> attention.Problem | None:
    """The attention of few query heads over one kv head that a problem is, if the decode kernel can serve it.

    Blocks of 64 queries would be mostly padding, and a tile of a few waits for nothing but memory.
    """
    p = problem
    columns = p.rank + p.rope_dim
    few = p.num_heads <= decode_plan.MAX_WIDE_TILE_HEADS[p.rank]
    if p.paired or p.q_len != 1 or not few or columns % MMA_ROWS:
        return None
    return attention.Problem(
        batch=p.batch,
        num_q_heads=p.num_heads,
        num_kv_heads=1,
        head_dim=columns,
        v_head_dim=p.rank,
        page_size=p.page_size,
        num_pages=p.num_pages,
        num_entries=p.num_entries,
        dtype=p.dtype,
        k_dtype=p.latent_dtype,
        v_dtype=p.latent_dtype,
        return_lse=p.return_lse,
        num_splits=p.num_splits,
        values_in_keys=True,
    )


def few_plan(problem: Problem, config: Config) -> decode_plan.Plan | None:
    """The decode kernel's plan for few heads, with as many tiles in flight as fit; None for more heads."""
    of_one_head = as_one_head(problem) if config.few_heads else None
    if of_one_head is None:
        return None
    plans = (
        decode_plan.Plan(of_one_head, decode_plan.Config(BLOCK_KV, stages, config.num_parts))
        for stages in (FEW_STAGES, 1)
    )
    return next((plan for plan in plans if shared_memory.smem_bytes(plan) <= SMEM_BYTES), None)


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
    """As many thread blocks as shared memory leaves room for: one a multiprocessor."""
    problem = one_launch(problem)
    parts = target.core_count // Plan(problem, Config()).blocks
    return Config(num_parts=even_parts(max(parts, 1), problem.batch, PARTS_GIVEN_UP))


def usage(problem: Problem, config: Config) -> Usage:
    """What a launch takes."""
    few, plan = few_plan(one_launch(problem), config), Plan(one_launch(problem), config)
    launches = ceil_div(problem.batch, plan.problem.batch)
    schedule, partials = (few or plan).schedule, (few or plan).partial_shapes()
    floats = sum(math.prod(shape) for shape in partials.values())
    cut_rows = 3 * schedule.num_cut_rows if schedule.cuts_rows else 0
    smem_bytes = shared_memory.smem_bytes(few) if few else mla_smem_bytes(plan)
    return Usage(smem_bytes=smem_bytes, workspace_bytes=4 * launches * (floats + cut_rows))


def run(
    problem: Problem, config: Config, operands: Operands, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Run the kernel, then the merge of the rows it cut; `jax_paged_attn.kernels` has the contract."""
    p, x = problem, operands
    params = plgpu.InterpretGPUParams(detect_races=True) if interpret else None
    rope_pages = x.latent_pages if x.rope_pages is None else x.rope_pages
    q_nope, q_pe = (q.reshape(p.batch, p.queries, q.shape[-1]) for q in (x.q_nope, x.q_pe))
    padding = 0 if few_plan(p, config) else Plan(p, config).queries - p.queries
    if padding:  # registers take whole blocks
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
        part = dataclasses.replace(p, batch=table.kv_lens.shape[0])
        if few := few_plan(part, config):
            scales = {"sm_scale": x.sm_scale.reshape(1)}
            # With an axis of one kv head.
            pages, q, q_rope = x.latent_pages[:, None], q_nope[rows, None], q_pe[rows, None]
            results = decode_kernel.launch(few, q, pages, pages, table, scales, q_rope, interpret=params)
            if few.cuts_rows:
                results = merge_kernel.merge(few, results, scales, interpret=params)
            launches.append((results["out"], results.get("lse")))
            continue
        plan = Plan(part, config)
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
    out = (out if out.shape[1] == p.queries else out[:, : p.queries]).reshape(*queries, p.rank)
    if lse is not None:
        lse = (lse[:, : p.queries] if padding else lse).reshape(queries)
    # What a kernel makes counts as the same on all devices, which its operands may not be.
    axes = varying_axes(operands)
    joined = (out, lse)
    return jax.tree.map(lambda x: lax.pcast(x, axes, to="varying"), joined) if axes else joined
