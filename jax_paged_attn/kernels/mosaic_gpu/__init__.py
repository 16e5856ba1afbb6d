"""Decode attention as Pallas Mosaic GPU kernels, for Hopper GPUs (compute capability 9.0).

`decode_kernel.py` is the kernel, `merge_kernel.py` its second launch; `config.py` chooses their tiles.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.page_table import PageTable
from jax_paged_attn.validation import Problem

from .config import default_config, usage, why_not
from .decode_kernel import launch
from .merge_kernel import merge
from .plan import Config, Plan
from .rows import TableRefs

__all__ = ["Config", "decode", "default_config", "usage", "why_not"]


def decode(
    problem: Problem,
    config: Config,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: PageTable,
    kv_starts: jax.Array | None,
    sm_scale: Any,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Run the kernel, then the merge of the rows it cut; `jax_paged_attn.kernels` has the contract."""
    plan = Plan(problem, config)
    params = plgpu.InterpretGPUParams(detect_races=True) if interpret else None
    table = TableRefs(
        page_table.indices, page_table.row_starts, page_table.row_pages, page_table.kv_lens, kv_starts
    )
    results = launch(plan, q, k_pages, v_pages, table, sm_scale, interpret=params)
    if plan.schedule.num_splits != 1:  # else no row is ever cut
        results = merge(plan, results, interpret=params)
    return results["out"], results.get("lse")
