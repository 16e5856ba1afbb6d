"""From products of queries and keys to scores in base 2: scales, soft cap, linear bias."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import softmax
from .layouts import f32

# A cap so large that nothing changes: a score divided by it and multiplied again keeps all its bits.
NO_CAP = 2.0**64
# tanh(x) / x in powers of x * x, exact to 2**-26 below NEAR_0.
SERIES = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835)
NEAR_0 = 0.25


@dataclasses.dataclass(frozen=True)
class SoftCap:
    """A traced soft cap: scores come divided by `size`, and leave in base 2."""

    size: Any

    @classmethod
    def of(cls, soft_cap: Any) -> "SoftCap":
        """Of a cap that may be 0, which is off."""
        return cls(jnp.where(soft_cap == 0, f32(NO_CAP), soft_cap))

    def apply(self, scores: jax.Array) -> jax.Array:
        return tanh(scores) * (self.size * f32(softmax.LOG2_E))


def tanh(x: jax.Array) -> jax.Array:
    """Tanh to a few units in the last place: the hardware's own instruction knows 11 bits."""
    magnitude = jnp.abs(x)
    small = jnp.exp2(magnitude * f32(-2 * softmax.LOG2_E))
    divisor = small + 1
    inverse = lax.rsqrt(divisor)
    inverse *= inverse
    inverse *= 2 - divisor * inverse  # a step of Newton's
    far = (1 - small) * inverse
    square, near = x * x, f32(SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        near = near * square + f32(coefficient)
    return jnp.where(magnitude < f32(NEAR_0), x * near, jnp.where(x < 0, -far, far))
