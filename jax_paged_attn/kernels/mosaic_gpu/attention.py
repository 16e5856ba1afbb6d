"""Attention of rows over a cache, for Hopper GPUs (compute capability 9.0).

`decode_kernel.py` is the kernel, `merge_kernel.py` its second launch; `config.py` chooses their tiles.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.calls.attention import Operands, Problem
from jax_paged_attn.dispatch import varying_axes

from . import mask_words
from .config import default_config, rows_per_launch, usage, why_not
from .decode_kernel import launch
from .merge_kernel import merge
from .plan import Config, Plan
from .rows import Table

__all__ = ["Config", "default_config", "run", "usage", "why_not"]


def run(
    problem: Problem, config: Config, operands: Operands, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Run the kernel, then the merge of the rows it cut; `jax_paged_attn.kernels` has the contract."""
    q, k_pages, v_pages, page_table, sm_scale, k_scale, v_scale, modifiers = operands
    q, kv_starts = _by_kv_head(problem, q), modifiers.kv_starts
    values = {"sm_scale": sm_scale, "k_scale": k_scale, "v_scale": v_scale, **modifiers.of_the_call}
    values = {name: value.reshape(-1) for name, value in values.items() if value is not None}
    params = plgpu.InterpretGPUParams(detect_races=True) if interpret else None
    launches = []
    step = rows_per_launch(problem)
    for start in range(0, problem.batch, step):
        rows = slice(start, start + step)
        table = Table(
            kv_lens=page_table.kv_lens[rows],
            kv_starts=None if kv_starts is None else kv_starts[rows],
            first_row=start,
        )
        if not problem.contiguous:
            table = table._replace(
                indices=page_table.indices,
                row_starts=page_table.row_starts[rows],
                row_pages=page_table.row_pages[rows],
            )
        plan = Plan(dataclasses.replace(problem, batch=table.kv_lens.shape[0]), config)
        of_mask = {} if modifiers.mask is None else mask_words.pack(plan, modifiers.mask[rows])
        results = launch(plan, q[rows], k_pages, v_pages, table, values | of_mask, interpret=params)
        if plan.cuts_rows:
            results = merge(plan, results, values, interpret=params)
        launches.append((results["out"], results.get("lse")))
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *launches) if launches[1:] else launches[0]
    joined = jax.tree.map(functools.partial(_by_token, problem), joined)
    # What a kernel makes counts as the same on all devices, which its operands may not be.
    axes = varying_axes(operands)
    return jax.tree.map(lambda x: lax.pcast(x, axes, to="varying"), joined) if axes else joined


def _by_kv_head(problem: Problem, q: jax.Array) -> jax.Array:
    """[batch, q_len, num_q_heads, head_dim] -> [batch, num_kv_heads, queries of a kv head, head_dim]."""
    q = q.reshape(*q.shape[:2], problem.num_kv_heads, problem.group_size, problem.head_dim)
    q = q.swapaxes(1, 2) if problem.q_len > 1 else q
    return q.reshape(problem.batch, problem.num_kv_heads, -1, problem.head_dim)


def _by_token(problem: Problem, result: jax.Array) -> jax.Array:
    """[batch, queries of all kv heads, ..] -> [batch, q_len, num_q_heads, ..]."""
    of_heads = result.shape[2:]
    if problem.q_len > 1:
        by_kv_head = (problem.batch, problem.num_kv_heads, problem.q_len, problem.group_size)
        result = result.reshape(*by_kv_head, *of_heads).swapaxes(1, 2)
    return result.reshape(problem.batch, problem.q_len, problem.num_q_heads, *of_heads)
