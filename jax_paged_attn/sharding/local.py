"""Pieces for use inside `jax.shard_map`: the part of each row that a device has, and merging of the parts."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_paged_attn import merge, validation
from jax_paged_attn.page_table import PageTable


def merge_across(
    out: ArrayLike, lse: ArrayLike, axis_name: str | tuple[str, ...], *, scatter_axis: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Merge the attention states that the devices along a mesh axis have, inside `jax.shard_map`.

    What `merge_states` does with states in one place: for keys that are spread over devices.

    Parameters
    ----------
    out : float[..., head_dim]
        This device's normalized output.
    lse : float32[...]
        Its natural log-sum-exp; -inf or +inf marks an empty state.
    axis_name : str or tuple[str, ...]
        The mesh axis, or axes.
    scatter_axis : int, optional
        An axis of `lse` (that of heads, say), a multiple of the devices: each gets its part of the merged
        state, by one exchange of the states (all-to-all). None gives all of it to every device, by two sums
        over them (all-reduce), of which the first takes the lse alone.

    Returns
    -------
    out : float[..., head_dim]
        In the dtype that came; computed in float32. 0 where all states are empty.
    lse : float32[...]
        -inf where all states are empty.

    Raises
    ------
    ValueError
        If the shapes don't fit each other, or `scatter_axis` doesn't divide.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from jax_paged_attn.sharding import merge_across
    >>> mesh = jax.make_mesh((1,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> merge = lambda out, lse: merge_across(out[0], lse[0], "cp")
    >>> merge = jax.shard_map(merge, mesh=mesh, in_specs=jax.P("cp"), out_specs=jax.P())
    >>> merge(jnp.array([[2.0, 3.0]]), jnp.array([0.5]))[0].tolist()
    [2.0, 3.0]
    """
    out, lse = merge.as_state("out", out, "lse", lse)
    devices = lax.axis_size(axis_name)
    if scatter_axis is None:
        empty = jnp.isinf(lse)
        lse = jnp.where(empty, -jnp.inf, lse)
        peak = lax.pmax(lse, axis_name)
        # Where every state is empty, subtracting -inf from -inf would make NaN.
        shift = jnp.where(peak == -jnp.inf, 0.0, peak)
        weight = jnp.exp(lse - shift)[..., None]
        weighted = weight * jnp.where(empty[..., None], 0.0, out.astype(jnp.float32))
        summed = lax.psum(jnp.concatenate([weighted, weight], axis=-1), axis_name)
        weighted, total = summed[..., :-1], summed[..., -1]
        merged = weighted / jnp.where(total == 0.0, 1.0, total)[..., None]
        return merged.astype(out.dtype), shift + jnp.log(total)
    validation.check_int("scatter_axis", scatter_axis, 0, lse.ndim - 1)
    size = lse.shape[scatter_axis]
    expected = f"an axis of a multiple of {devices} devices"
    validation.check(size % devices == 0, "scatter_axis", expected, f"one of {size}")
    # Bits side by side, so that one exchange takes both and rounds nothing.
    word = jnp.dtype(f"uint{8 * min(out.dtype.itemsize, 4)}")
    state = [lax.bitcast_convert_type(x, word) for x in (out, lse[..., None])]
    state = [x if x.ndim == out.ndim else x.reshape(*out.shape[:-1], -1) for x in state]
    parts = lax.all_to_all(jnp.concatenate(state, axis=-1)[None], axis_name, scatter_axis + 1, 0, tiled=True)
    columns = state[0].shape[-1]
    outs, lses = parts[..., :columns], parts[..., columns:]
    outs = lax.bitcast_convert_type(outs, out.dtype)
    lses = lax.bitcast_convert_type(lses, jnp.float32)
    return merge.merge_states(outs, lses.reshape(outs.shape[:-1]))


def local_lens(lens: jax.Array, axis_name: str | tuple[str, ...], *, page_size: int) -> jax.Array:
    """Count a row's first tokens that this device has, where pages are cut over devices.

    For use inside `jax.shard_map`. Device i along the axis has the i-th part of every page of ``page_size *
    devices`` tokens; of a contiguous cache, the page is the whole row.

    Parameters
    ----------
    lens : int32[...]
        How many first tokens of the row: its ``kv_lens``, or ``kv_starts``.
    axis_name : str or tuple[str, ...]
        The mesh axis, or axes.
    page_size : int
        Tokens of a page that one device has.

    Returns
    -------
    int32[...]

    Examples
    --------
    >>> mesh = jax.make_mesh((1,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> count = lambda lens: local_lens(lens, "cp", page_size=16)
    >>> jax.shard_map(count, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("cp"))(jnp.array([20])).tolist()
    [20]
    """
    devices, i = lax.axis_size(axis_name), lax.axis_index(axis_name)
    pages, rest = jnp.divmod(lens, page_size * devices)
    return pages * page_size + jnp.clip(rest - i * page_size, 0, page_size)


def local_table(page_table: PageTable, axis_name: str | tuple[str, ...], *, page_size: int) -> PageTable:
    """Return the page table of this device's part of every page, with its `local_lens`.

    Page ids stay what they are. The parameters are those of `local_lens`.
    """
    kv_lens = local_lens(page_table.kv_lens, axis_name, page_size=page_size)
    return dataclasses.replace(page_table, kv_lens=kv_lens)


def local_slots(slots: jax.Array, axis_name: str | tuple[str, ...], *, page_size: int) -> jax.Array:
    """Turn slots of whole pages into those of this device's part of every page; -1 where another has it.

    For use inside `jax.shard_map`; the parameters are those of `local_lens`.
    """
    devices, i = lax.axis_size(axis_name), lax.axis_index(axis_name)
    page, offset = jnp.divmod(slots, page_size * devices)
    offset = offset - i * page_size
    here = (slots >= 0) & (offset >= 0) & (offset < page_size)
    return jnp.where(here, page * page_size + offset, -1)
