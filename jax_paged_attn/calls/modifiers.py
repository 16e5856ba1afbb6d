"""What changes scores, or which keys count, beyond lengths: carried as one thing from the call to the kernel.

A modifier that is added here reaches every implementation as a field of `Operands.modifiers`, and its name in
`Problem.given`; public functions list it in their signature, and an implementation that can't do it says so.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged_attn import validation

_BY_ROW = ("kv_starts", "mask")  # the others belong to the whole call


class Modifiers(NamedTuple):
    """A public function's arguments or, once `checked`, arrays; None where the call goes without.

    Attributes
    ----------
    soft_cap : float32[]
        Scores become ``soft_cap * tanh(score / soft_cap)``; 0 is off.
    window_left : int32[]
        Keys that a query sees before its own; negative is off.
    alibi_slopes : float32[num_q_heads]
        Added to the scores, times key position less query position.
    sinks : float32[num_q_heads]
        Logits of keys without value.
    mask : bool[batch, q_len, mask_len]
        Which of a row's last keys each query sees, whatever causality and the window say.
    kv_starts : int32[batch]
        The first key that counts.
    """

    soft_cap: Any = None
    window_left: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    mask: Any = None
    kv_starts: Any = None

    @property
    def given(self) -> tuple[str, ...]:
        """Names of those that there are."""
        return tuple(name for name, value in self._asdict().items() if value is not None)

    @property
    def of_rows(self) -> dict[str, Any]:
        """Those that have an entry a row."""
        return {
            name: value for name, value in self._asdict().items() if name in _BY_ROW and name in self.given
        }

    @property
    def of_the_call(self) -> dict[str, Any]:
        """The others."""
        return {name: value for name, value in self._asdict().items() if name in set(self.given) - {*_BY_ROW}}

    def checked(self, lead: tuple[int, ...], rows: tuple[int, ...], num_q_heads: int) -> "Modifiers":
        """Check each and convert it to an array of the batched form; values that do nothing become None.

        `lead` is the shape of q before its heads, (), [batch], [batch, q_len] or [total_q], and `rows` that
        of the rows, () or [batch].
        """
        kv_starts = None
        if self.kv_starts is not None:
            kv_starts = validation.as_int32("kv_starts", self.kv_starts)
            validation.check_shape("kv_starts", kv_starts, rows)
            kv_starts = kv_starts.reshape(rows or (1,))
        return Modifiers(
            soft_cap=_soft_cap(self.soft_cap),
            window_left=_window_left(self.window_left),
            alibi_slopes=_of_heads("alibi_slopes", self.alibi_slopes, num_q_heads),
            sinks=_of_heads("sinks", self.sinks, num_q_heads),
            mask=_mask(self.mask, lead),
            kv_starts=kv_starts,
        )

    def check_values(self, kv_lens: jax.Array, lens_name: str) -> None:
        """Check values of the batched form."""
        if self.kv_starts is not None:
            _, (starts, lens) = validation.value_module(self.kv_starts, kv_lens)
            inside = (starts >= 0) & (starts <= lens)
            validation.check_values(inside, "kv_starts", f"values in [0, {lens_name}]", starts)
        if self.soft_cap is not None:
            xp, (soft_cap,) = validation.value_module(self.soft_cap)
            soft_cap = xp.reshape(soft_cap, (1,))
            inside = (soft_cap >= 0) & (soft_cap < math.inf)
            validation.check_values(inside, "soft_cap", _SOFT_CAPS, soft_cap)
        if self.window_left is not None:
            xp, (window_left,) = validation.value_module(self.window_left)
            window_left = xp.reshape(window_left, (1,))
            validation.check_values(window_left >= -1, "window_left", _WINDOWS, window_left)
        if self.alibi_slopes is not None:
            xp, (slopes,) = validation.value_module(self.alibi_slopes)
            validation.check_values(xp.isfinite(slopes), "alibi_slopes", "finite values", slopes)
        if self.sinks is not None:
            xp, (sinks,) = validation.value_module(self.sinks)
            validation.check_values(sinks < math.inf, "sinks", "values below infinity", sinks)


_SOFT_CAPS = "a finite value of at least 0"
_WINDOWS = "a value of at least -1"


def _soft_cap(value: Any) -> Any:
    if value is None:
        return None
    scalar = validation.as_real_scalar("soft_cap", value, "a real scalar or None")
    if isinstance(scalar, jax.Array):
        return scalar
    validation.check(0 <= scalar < math.inf, "soft_cap", _SOFT_CAPS, repr(value))
    return validation.on_device(np.float32(scalar)) if scalar else None


def _window_left(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, int | np.integer) or isinstance(value, bool | np.timedelta64):
        window_left = validation.as_int32("window_left", value)
        validation.check_shape("window_left", window_left, ())
        return window_left
    validation.check(bool(value >= -1), "window_left", _WINDOWS, repr(value))
    most = np.iinfo(np.int32).max
    return validation.on_device(np.int32(min(int(value), most))) if value >= 0 else None


def _of_heads(name: str, value: Any, num_q_heads: int) -> Any:
    if value is None:
        return None
    array = validation.as_array(name, value)
    real = jnp.issubdtype(array.dtype, np.floating) or jnp.issubdtype(array.dtype, np.integer)
    validation.check(real, name, "real numbers", f"dtype {array.dtype}")
    validation.check_shape(name, array, (num_q_heads,))
    return array.astype(jnp.float32)


def _mask(value: Any, lead: tuple[int, ...]) -> Any:
    if value is None:
        return None
    mask = validation.as_array("mask", value)
    validation.check(mask.dtype == np.bool_, "mask", "dtype bool", f"dtype {mask.dtype}")
    expected = f"shape [{', '.join([*map(str, lead), 'mask_len'])}]"
    fits = mask.ndim > 0 and mask.shape[:-1] == lead
    validation.check(fits, "mask", expected, f"shape {mask.shape}")
    return None if mask.shape[-1] == 0 else mask.reshape(*(*lead, 1, 1)[:2], mask.shape[-1])


def window_size(window_left: jax.Array) -> jax.Array:
    """Replace a window that is off by the largest, which may be taken from any position of at least 0."""
    return jnp.where(window_left < 0, jnp.int32(np.iinfo(np.int32).max), window_left)


def first_visible(
    q_len: int | jax.Array,
    mask_len: int,
    kv_lens: jax.Array,
    kv_starts: jax.Array | None,
    window_left: jax.Array | None,
) -> jax.Array | None:
    """Find the first key of each row that any query may see, None being the first of all.

    Parameters
    ----------
    q_len, mask_len : int
        Queries a row, or of each row; keys that a mask decides about, 0 without one.
    kv_lens, kv_starts, window_left
        Of one row or of several, within what the rows hold. Tiles of keys before it need not be read.
    """
    if window_left is None:
        return kv_starts
    first = jnp.maximum(jnp.maximum(kv_lens - q_len, 0) - window_size(window_left), 0)
    if mask_len:
        first = jnp.minimum(first, jnp.maximum(kv_lens - mask_len, 0))
    return first if kv_starts is None else jnp.maximum(first, kv_starts)
