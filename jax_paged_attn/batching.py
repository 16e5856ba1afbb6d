"""How `jax.vmap` of a call becomes one call of a larger batch.

The mapped axis is folded into the rows: kernels then see one batch to balance, read a shared cache once, and
need no batching of their own.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_paged_attn.page_table import PageTable
from jax_paged_attn.validation import LAYOUT_AXES, Problem


class Operands(NamedTuple):
    """What an implementation computes with; of one batched call, `kv_starts` may be None."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: PageTable
    kv_starts: jax.Array | None
    sm_scale: jax.Array


def can_fold(problem: Problem, batched: Operands) -> bool:
    """Whether the mapped axis can join the rows without moving a pool; `batched` holds what has it."""
    pools_lead = LAYOUT_AXES[problem.kv_layout][0] == "num_pages"
    return not batched.sm_scale and (pools_lead or not (batched.k_pages or batched.v_pages))


def fold(problem: Problem, size: int, batched: Operands, operands: Operands) -> tuple[Problem, Operands]:
    """Fold a leading axis of `size`, of the leaves that have it, into the rows.

    Row b of element i becomes row ``i * batch + b``. A mapped pool becomes one pool, where element i's pages
    begin at ``i * num_pages``, and page ids move along. Where only one of K and V is mapped, the other is
    repeated.
    """

    def mapped(array, has_axis):
        return array if has_axis else jnp.broadcast_to(array, (size, *array.shape))

    def join(array):
        return array.reshape(-1, *array.shape[2:])

    table = jax.tree.map(mapped, operands.page_table, batched.page_table)
    kv_starts = None if operands.kv_starts is None else join(mapped(operands.kv_starts, batched.kv_starts))
    # Clipped before they move, or a row could reach into another element's entries or pages.
    row_starts, kv_lens = jax.vmap(lambda row: row.clipped(problem.page_size))(table)
    row_pages = jnp.clip(table.row_pages, 0, problem.num_entries - row_starts)
    element = jnp.arange(size, dtype=jnp.int32)[:, None]
    k_pages, v_pages, num_pages = operands.k_pages, operands.v_pages, problem.num_pages
    pools_mapped = batched.k_pages or batched.v_pages
    if pools_mapped:
        k_pages, v_pages = join(mapped(k_pages, batched.k_pages)), join(mapped(v_pages, batched.v_pages))
        indices = jnp.clip(table.indices, 0, num_pages - 1) + element * num_pages
        num_pages = size * num_pages
    else:
        indices = table.indices
    if pools_mapped or batched.page_table.indices:
        indices, row_starts = join(indices), row_starts + element * problem.num_entries
    else:  # all rows share one list of entries
        indices = operands.page_table.indices
    folded = dataclasses.replace(
        problem, batch=size * problem.batch, num_pages=num_pages, num_entries=indices.shape[0]
    )
    return folded, Operands(
        join(mapped(operands.q, batched.q)),
        k_pages,
        v_pages,
        PageTable(indices, join(row_starts), join(row_pages), join(kv_lens)),
        kv_starts,
        operands.sm_scale,
    )
