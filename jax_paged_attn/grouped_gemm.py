"""Products of matrices that lie side by side."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_paged_attn import validation


def grouped_gemm(a: ArrayLike, b: ArrayLike, *, num_groups: int) -> jax.Array:
    """Multiply groups of columns of `a` with groups of rows of `b`: ``C_g = A_g @ B_g.T``.

    The product by which latent attention absorbs a projection into each head's query, and extracts each
    head's values. XLA's own dot, which reads and writes the groups where they lie, in one kernel.

    Parameters
    ----------
    a : float[m, num_groups * k]
        bfloat16, float16 or float32; A_g is ``a[:, g * k : (g + 1) * k]``.
    b : float[num_groups * n, k]
        Of a's dtype; B_g is ``b[g * n : (g + 1) * n]``.
    num_groups : int
        Static.

    Returns
    -------
    float[m, num_groups * n], of a's dtype
        C_g is ``c[:, g * n : (g + 1) * n]``. Accumulated in float32.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import grouped_gemm
    >>> a = jnp.array([[1.0, 2.0, 3.0, 4.0]])  # two groups of k = 2
    >>> b = jnp.array([[1.0, 0.0], [1.0, 1.0]])  # of n = 1
    >>> grouped_gemm(a, b, num_groups=2).tolist()
    [[1.0, 7.0]]
    """
    a, b = validation.as_array("a", a), validation.as_array("b", b)
    validation.check_positive_int("num_groups", num_groups)
    num_groups = int(num_groups)
    for name, x in (("a", a), ("b", b)):
        validation.check(x.ndim == 2, name, "two axes", f"shape {x.shape}")
    expected = f"a dtype of {validation.DTYPES}"
    validation.check(a.dtype.name in validation.DTYPES, "a", expected, f"dtype {a.dtype}")
    validation.check(b.dtype == a.dtype, "b", f"the dtype of a, {a.dtype}", f"dtype {b.dtype}")
    validation.check(
        a.shape[1] == num_groups * b.shape[1],
        "a",
        f"num_groups * k = {num_groups * b.shape[1]} columns, as b has k = {b.shape[1]}",
        f"shape {a.shape}",
    )
    expected = f"a multiple of {num_groups=} rows"
    validation.check(b.shape[0] % num_groups == 0, "b", expected, f"shape {b.shape}")
    return _multiply(a, b, num_groups)


@functools.partial(jax.jit, static_argnums=2)
def _multiply(a: jax.Array, b: jax.Array, num_groups: int) -> jax.Array:
    k, n = b.shape[1], b.shape[0] // num_groups
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    c = jnp.einsum(
        "mgk,gnk->mgn",
        a.reshape(a.shape[0], num_groups, k),
        b.reshape(num_groups, n, k),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return c.reshape(a.shape[0], num_groups * n).astype(a.dtype)
