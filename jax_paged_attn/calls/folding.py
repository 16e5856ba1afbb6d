"""Joining a mapped axis of calls into their rows, so that implementations see one larger batch."""

import jax
import jax.numpy as jnp

from jax_paged_attn.page_table import PageTable


def mapped(array: jax.Array, has_axis: bool, size: int) -> jax.Array:
    """Give an array the mapped axis, if it hasn't got it."""
    return array if has_axis else jnp.broadcast_to(array, (size, *array.shape))


def join(array: jax.Array) -> jax.Array:
    """Join the first two axes."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def fold_table(
    table: PageTable,
    batched: PageTable,
    size: int,
    *,
    page_size: int,
    num_pages: int,
    pools_mapped: bool,
) -> tuple[PageTable, int]:
    """Fold `size` page tables into one, whose row ``i * batch + b`` is row b of element i.

    A mapped pool becomes one pool, where element i's pages begin at ``i * num_pages``: page ids move along.

    Returns
    -------
    page_table : PageTable
    num_pages : int
        Of the pool that it points into.
    """
    shared, num_entries = table.indices, table.indices.shape[-1]
    table = jax.tree.map(lambda x, has_axis: mapped(x, has_axis, size), table, batched)
    # Clipped before they move, or a row could reach into another element's entries or pages.
    row_starts, kv_lens = jax.vmap(lambda row: row.clipped(page_size))(table)
    row_pages = jnp.clip(table.row_pages, 0, num_entries - row_starts)
    element = jnp.arange(size, dtype=jnp.int32)[:, None]
    indices = table.indices
    if pools_mapped:
        indices = jnp.clip(indices, 0, num_pages - 1) + element * num_pages
        num_pages = size * num_pages
    if pools_mapped or batched.indices:
        indices, row_starts = join(indices), row_starts + element * num_entries
    else:  # all rows share one list of entries
        indices = shared
    return PageTable(indices, join(row_starts), join(row_pages), join(kv_lens)), num_pages
