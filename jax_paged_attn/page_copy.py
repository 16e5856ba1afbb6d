"""Copying whole pages within a pool, as copy-on-write needs it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_paged_attn import validation
from jax_paged_attn.validation import Ints

_NOWHERE = np.int32(2**31 - 1)  # past the end of any pool; a negative id would count from its end


def copy_pages(
    k_pages: ArrayLike, v_pages: ArrayLike, sources: Ints, targets: Ints, *, kv_layout: str = "HND"
) -> tuple[jax.Array, jax.Array]:
    """Copy pages of a paged KV cache within their pool.

    All sources are read before any target is written. Under a jit that donates the pools it works in place.
    To copy the pages of all layers at once, map it with `jax.vmap` over stacked pools.

    Parameters
    ----------
    k_pages, v_pages : array
        The pool, of any dtype; v may have its own head_dim. By `kv_layout`:
        "HND" [num_pages, num_kv_heads, page_size, head_dim],
        "NHD" [num_pages, page_size, num_kv_heads, head_dim],
        "HPND" [num_kv_heads, num_pages, page_size, head_dim].
    sources, targets : int[num_copies]
        Page ``sources[i]`` is copied to page ``targets[i]``; a pair with an id outside the pool, such as -1,
        is skipped. Targets are distinct.
    kv_layout : str
        Order of the pool's axes.

    Returns
    -------
    k_pages, v_pages : array
        The pool with the copies.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.

    Examples
    --------
    >>> from jax_paged_attn import PagePool
    >>> pool = PagePool(num_pages=8, page_size=4)
    >>> parent = pool.allocate([3, 1, 4, 1, 5]).seq_id
    >>> child = pool.fork(parent)
    >>> slots, copies = pool.append(child, [9])
    >>> copies.tolist()
    [[1, 2]]
    >>> k_pages = v_pages = jnp.arange(8.0)[:, None, None, None] * jnp.ones((8, 2, 4, 64))
    >>> k_pages, v_pages = copy_pages(k_pages, v_pages, *copies.T)
    >>> k_pages[:, 0, 0, 0].tolist()
    [0.0, 1.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    validation.check_layout(kv_layout)
    k_pages, v_pages = validation.as_array("k_pages", k_pages), validation.as_array("v_pages", v_pages)
    validation.check_cache_shapes(k_pages, v_pages, kv_layout)
    sources, targets = validation.as_int32("sources", sources), validation.as_int32("targets", targets)
    validation.check(sources.ndim == 1, "sources", "shape [num_copies]", f"shape {sources.shape}")
    validation.check_shape("targets", targets, sources.shape)

    axis = validation.LAYOUT_AXES[kv_layout].index("num_pages")
    inside = (sources >= 0) & (sources < k_pages.shape[axis]) & (targets >= 0)
    targets = jnp.where(inside, targets, _NOWHERE)

    def copy(pages: jax.Array) -> jax.Array:
        copied = jnp.take(pages, sources, axis, mode="clip")
        return pages.at[(slice(None),) * axis + (targets,)].set(copied, mode="drop")

    return copy(k_pages), copy(v_pages)
