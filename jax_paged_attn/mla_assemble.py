"""Moving the parts of latent attention's queries, keys and cache rows to where they belong.

Pure data movement in plain jnp, of which XLA makes one kernel for each array that a function yields
(`tests/gpu_compile` counts them).
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_paged_attn import validation
from jax_paged_attn.mla import check_new_tokens

V_FORMS = ("zeros", "rope")


def mla_q_rope_extract(q_full: ArrayLike, *, nope: int, rope: int | None = None) -> jax.Array:
    """Take the columns of queries that are to be rotated.

    Parameters
    ----------
    q_full : array[num_tokens, num_heads, nope + rope]
        Of any dtype; rows may be wider where `rope` is given.
    nope : int
        Columns before those.
    rope : int, optional
        How many columns. None takes all that are left.

    Returns
    -------
    array[num_tokens, num_heads, rope]

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import mla_q_rope_extract
    >>> mla_q_rope_extract(jnp.arange(6).reshape(1, 1, 6), nope=4).tolist()
    [[[4, 5]]]
    """
    q_full = _as_heads("q_full", q_full, "num_heads")
    nope = _as_columns("nope", nope, q_full, "q_full")
    left = q_full.shape[-1] - nope
    if rope is not None:
        validation.check_int("rope", rope, 0)
        got = f"shape {q_full.shape}"
        validation.check(rope <= left, "q_full", f"at least nope + rope = {nope + rope} columns", got)
    return _columns(q_full, nope, int(left if rope is None else rope))


def mla_q_rope_writeback(q_full: ArrayLike, q_rope: ArrayLike, *, nope: int) -> jax.Array:
    """Put rotated columns of queries back; in place where the caller's ``jax.jit`` donates `q_full`.

    Parameters
    ----------
    q_full : array[num_tokens, num_heads, nope + rope]
        Rows may be wider.
    q_rope : array[num_tokens, num_heads, rope]
        Of q_full's dtype.
    nope : int
        Columns before those.

    Returns
    -------
    array, of q_full's shape

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import mla_q_rope_writeback
    >>> mla_q_rope_writeback(jnp.zeros((1, 1, 3)), jnp.ones((1, 1, 2)), nope=1).tolist()
    [[[0.0, 1.0, 1.0]]]
    """
    q_full, q_rope = _as_heads("q_full", q_full, "num_heads"), _as_heads("q_rope", q_rope, "num_heads")
    nope = _as_columns("nope", nope, q_full, "q_full")
    expected = f"shape {(*q_full.shape[:2], 'rope')} with rope at most {q_full.shape[2] - nope}"
    ok = q_rope.shape[:2] == q_full.shape[:2] and q_rope.shape[2] <= q_full.shape[2] - nope
    validation.check(ok, "q_rope", expected, f"shape {q_rope.shape}")
    _check_dtype("q_rope", q_rope, "q_full", q_full)
    return _written(q_full, q_rope, nope)


def mla_q_final_assemble(q_absorbed: ArrayLike, q_rope: ArrayLike) -> jax.Array:
    """Join absorbed and rotated queries, in the order of a cache's rows.

    Parameters
    ----------
    q_absorbed : array[num_tokens, num_heads, kv_lora_rank]
        Of any dtype.
    q_rope : array[num_tokens, num_heads, rope]
        Of q_absorbed's dtype.

    Returns
    -------
    array[num_tokens, num_heads, kv_lora_rank + rope]

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import mla_q_final_assemble
    >>> mla_q_final_assemble(jnp.ones((7, 16, 512)), jnp.ones((7, 16, 64))).shape
    (7, 16, 576)
    """
    q_absorbed = _as_heads("q_absorbed", q_absorbed, "num_heads")
    q_rope = _as_heads("q_rope", q_rope, "num_heads")
    expected = f"shape {(*q_absorbed.shape[:2], 'rope')}"
    validation.check(q_rope.shape[:2] == q_absorbed.shape[:2], "q_rope", expected, f"shape {q_rope.shape}")
    _check_dtype("q_rope", q_rope, "q_absorbed", q_absorbed)
    return _joined(q_absorbed, q_rope)


def mla_kv_assemble(
    kv_expanded: ArrayLike, k_rope: ArrayLike, *, nope: int, v_dim: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Make the keys and values of prefill without absorption from expanded latents.

    Parameters
    ----------
    kv_expanded : array[num_tokens, num_kv_heads, nope + v_dim]
        ``[k_nope | v]`` of each head; rows may be wider where `v_dim` is given.
    k_rope : array[num_tokens, rope]
        Rotated keys, which all heads share; of kv_expanded's dtype.
    nope : int
        Columns of k_nope.
    v_dim : int, optional
        Columns of v. None takes all that are left.

    Returns
    -------
    k : array[num_tokens, num_kv_heads, nope + rope]
    v : array[num_tokens, num_kv_heads, v_dim]

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import mla_kv_assemble
    >>> k, v = mla_kv_assemble(jnp.ones((7, 16, 128 + 128)), jnp.ones((7, 64)), nope=128)
    >>> k.shape, v.shape
    ((7, 16, 192), (7, 16, 128))
    """
    kv_expanded = _as_heads("kv_expanded", kv_expanded, "num_kv_heads")
    k_rope = validation.as_array("k_rope", k_rope)
    nope = _as_columns("nope", nope, kv_expanded, "kv_expanded")
    left = kv_expanded.shape[2] - nope
    if v_dim is not None:
        validation.check_int("v_dim", v_dim, 0)
        expected = f"at least nope + v_dim = {nope + v_dim} columns"
        validation.check(v_dim <= left, "kv_expanded", expected, f"shape {kv_expanded.shape}")
    ok = k_rope.ndim == 2 and k_rope.shape[0] == kv_expanded.shape[0]
    validation.check(ok, "k_rope", f"shape [{kv_expanded.shape[0]}, rope]", f"shape {k_rope.shape}")
    _check_dtype("k_rope", k_rope, "kv_expanded", kv_expanded)
    return _kv_assembled(kv_expanded, k_rope, nope, int(left if v_dim is None else v_dim))


def mla_cache_assemble(
    kv_latent: ArrayLike, k_rope: ArrayLike, *, v_form: str = "zeros"
) -> tuple[jax.Array, jax.Array]:
    """Make the rows of a cache of keys and of one of values, for attention that wants both of one width.

    `mla_decode` needs the rows of keys alone, and `append_paged_mla_kv` makes them on the way.

    Parameters
    ----------
    kv_latent : array[num_tokens, kv_lora_rank]
        Of any dtype.
    k_rope : array[num_tokens, rope]
        Rotated keys, of kv_latent's dtype.
    v_form : str
        What follows the latent in rows of values: "zeros", or "rope" for the rotated key: then both caches
        have the same rows and can be one.

    Returns
    -------
    k_rows : array[num_tokens, kv_lora_rank + rope]
        ``[kv_latent | k_rope]``.
    v_rows : array[num_tokens, kv_lora_rank + rope]
        ``[kv_latent | 0]`` or ``[kv_latent | k_rope]``.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import mla_cache_assemble
    >>> k_rows, v_rows = mla_cache_assemble(jnp.ones((1, 3)), jnp.full((1, 2), 2.0))
    >>> k_rows.tolist(), v_rows.tolist()
    ([[1.0, 1.0, 1.0, 2.0, 2.0]], [[1.0, 1.0, 1.0, 0.0, 0.0]])
    """
    kv_latent, k_rope = validation.as_array("kv_latent", kv_latent), validation.as_array("k_rope", k_rope)
    check_new_tokens(kv_latent, k_rope)
    check_v_form(v_form)
    return _cache_rows(kv_latent, k_rope, v_form)


def check_v_form(v_form: str) -> None:
    """Check the form of a cache's rows of values."""
    ok = isinstance(v_form, str) and v_form in V_FORMS
    validation.check(ok, "v_form", f"one of {V_FORMS}", repr(v_form))


def _as_heads(name: str, x: ArrayLike, heads: str) -> jax.Array:
    array = validation.as_array(name, x)
    expected = f"shape [num_tokens, {heads}, columns]"
    validation.check(array.ndim == 3, name, expected, f"shape {array.shape}")
    return array


def _as_columns(name: str, columns: int, array: jax.Array, of: str) -> int:
    """Check a number of leading columns of an array."""
    validation.check_int(name, columns, 0)
    got = f"shape {array.shape}"
    validation.check(columns <= array.shape[-1], of, f"at least {name} = {columns} columns", got)
    return int(columns)


def _check_dtype(name: str, x: jax.Array, of_name: str, of: jax.Array) -> None:
    validation.check(x.dtype == of.dtype, name, f"the dtype of {of_name}, {of.dtype}", f"dtype {x.dtype}")


# Jitted, so that an eager call is one program.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _columns(x: jax.Array, first: int, count: int) -> jax.Array:
    return x[..., first : first + count]


@functools.partial(jax.jit, static_argnums=2)
def _written(x: jax.Array, columns: jax.Array, first: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, columns, first, axis=2)


@jax.jit
def _joined(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.concatenate([first, second], axis=-1)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _kv_assembled(
    kv_expanded: jax.Array, k_rope: jax.Array, nope: int, v_dim: int
) -> tuple[jax.Array, jax.Array]:
    tokens, heads, _ = kv_expanded.shape
    k_nope, v = kv_expanded[..., :nope], kv_expanded[..., nope : nope + v_dim]
    shared = jnp.broadcast_to(k_rope[:, None], (tokens, heads, k_rope.shape[1]))
    return jnp.concatenate([k_nope, shared], axis=-1), v


@functools.partial(jax.jit, static_argnums=2)
def _cache_rows(kv_latent: jax.Array, k_rope: jax.Array, v_form: str) -> tuple[jax.Array, jax.Array]:
    behind = k_rope if v_form == "rope" else jnp.zeros_like(k_rope)
    k_rows, v_rows = (jnp.concatenate([kv_latent, x], axis=1) for x in (k_rope, behind))
    return k_rows, v_rows
