"""Division of non-negative integers that are Python ints, traced int32 scalars or vectors.

`//` and `%` on traced values handle signs, which costs instructions in a kernel and isn't needed here.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax


def div(a: Any, b: int) -> Any:
    """a // b."""
    return a // b if isinstance(a, int) else lax.div(a, jnp.full_like(a, b))


def rem(a: Any, b: int) -> Any:
    """a % b."""
    return a % b if isinstance(a, int) else lax.rem(a, jnp.full_like(a, b))


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below a / b."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple of `multiple` not below `a`."""
    return ceil_div(a, multiple) * multiple
