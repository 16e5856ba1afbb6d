"""Rotary position embedding: its frequencies, and its application to queries and keys."""

import dataclasses
import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_paged_attn import validation
from jax_paged_attn.validation import Ints


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 and later stretch the frequencies: slow ones by `factor`, fast ones not at all.

    Attributes
    ----------
    factor : float
        By how much the slow frequencies are divided.
    low_freq_factor, high_freq_factor : float
        Frequencies that turn fewer than `low_freq_factor` times in the original context are slow, those that
        turn more than `high_freq_factor` times fast; between the two the division fades in.
    original_max_position : int
        Tokens of the context that the model was first trained with.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_position")
        validation.check(
            self.high_freq_factor > self.low_freq_factor,
            "high_freq_factor",
            f"more than low_freq_factor={self.low_freq_factor}",
            repr(self.high_freq_factor),
        )

    def apply(self, inv_freq: np.ndarray, base: float) -> np.ndarray:
        """Scale frequencies."""
        turns = self.original_max_position * inv_freq / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blend(inv_freq, inv_freq / self.factor, np.clip(kept, 0, 1))


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """How YaRN (arXiv:2309.00071) stretches the frequencies: slow ones by `factor`, fast ones not at all.

    Attributes
    ----------
    factor : float
        By how much the slow frequencies are divided.
    original_max_position : int
        Tokens of the context that the model was first trained with.
    beta_fast, beta_slow : float
        Frequencies that turn more than `beta_fast` times in the original context are fast, those that turn
        fewer than `beta_slow` times slow; between the two the division fades in.
    truncate : bool
        Whether the ends of that fade are moved outwards to whole dimensions.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self):
        _check_positive(self, "factor", "original_max_position", "beta_fast", "beta_slow")
        expected = f"at least beta_slow={self.beta_slow}"
        validation.check(self.beta_fast >= self.beta_slow, "beta_fast", expected, repr(self.beta_fast))
        validation.check_bool("truncate", self.truncate)

    @property
    def attention_factor(self) -> float:
        """What YaRN multiplies cosines and sines by: ``0.1 * ln(factor) + 1``, at least 1.

        Pass it to `rope_cos_sin`, or multiply ``sm_scale`` by its square.
        """
        return 0.1 * math.log(max(self.factor, 1.0)) + 1.0

    def apply(self, inv_freq: np.ndarray, base: float) -> np.ndarray:
        """Scale frequencies."""
        pairs = len(inv_freq)

        def pair_that_turns(times):
            return pairs * math.log(self.original_max_position / (times * 2 * math.pi)) / math.log(base)

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        stretched = (np.arange(pairs) - low) / (high - low if high != low else 0.001)
        return _blend(inv_freq, inv_freq / self.factor, 1 - np.clip(stretched, 0, 1))


def rope_frequencies(
    rotary_dim: int, *, base: float = 10000.0, scaling: Llama3Scaling | YarnScaling | None = None
) -> jax.Array:
    """Compute the angle that each pair of columns turns by from one position to the next.

    Parameters
    ----------
    rotary_dim : int
        Columns that are rotated, an even number.
    base : float
        ``rope_theta``: frequency i is ``base ** (-2 * i / rotary_dim)``.
    scaling : Llama3Scaling or YarnScaling, optional
        How a model with a stretched context scales them.

    Returns
    -------
    float32[rotary_dim / 2]
        In radians a token: the ``inv_freq`` of `apply_rope`.

    Raises
    ------
    ValueError
        If `rotary_dim` isn't a positive even int, `base` isn't a number above 1, or `scaling` is of another
        type.

    Examples
    --------
    >>> rope_frequencies(4, base=100.0).round(3).tolist()
    [1.0, 0.10000000149011612]
    """
    validation.check_positive_int("rotary_dim", rotary_dim)
    validation.check(rotary_dim % 2 == 0, "rotary_dim", "an even int", repr(rotary_dim))
    validation.check(_is_number(base) and base > 1, "base", "a number above 1", repr(base))
    ok = scaling is None or isinstance(scaling, Llama3Scaling | YarnScaling)
    validation.check(ok, "scaling", "Llama3Scaling, YarnScaling or None", repr(scaling))
    inv_freq = float(base) ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    if scaling is not None:
        inv_freq = scaling.apply(inv_freq, float(base))
    return jax.device_put(inv_freq.astype(np.float32))


def rope_cos_sin(inv_freq: ArrayLike, num_positions: int, *, attention_factor: float = 1.0) -> jax.Array:
    """Tabulate the cosines and sines of every position, as vLLM and FlashInfer keep them.

    Parameters
    ----------
    inv_freq : float[rotary_dim / 2]
        Radians a token, from `rope_frequencies`.
    num_positions : int
        Rows of the table.
    attention_factor : float
        Factor of all values (`YarnScaling.attention_factor`).

    Returns
    -------
    float32[num_positions, rotary_dim]
        Cosines in the first half of the columns, sines in the other: the ``cos_sin`` of `apply_rope`.

    Raises
    ------
    ValueError
        If an argument is of a wrong shape, dtype or range.

    Examples
    --------
    >>> rope_cos_sin(rope_frequencies(4, base=100.0), 2).round(3).tolist()[0]
    [1.0, 1.0, 0.0, 0.0]
    """
    inv_freq = validation.as_array("inv_freq", inv_freq)
    ok = inv_freq.ndim == 1 and inv_freq.dtype.name in validation.DTYPES
    got = f"{inv_freq.dtype} of shape {inv_freq.shape}"
    validation.check(ok, "inv_freq", f"a dtype of {validation.DTYPES}, shape [rotary_dim / 2]", got)
    validation.check_positive_int("num_positions", num_positions, 2**31 - 1)
    factor = validation.as_real_scalar("attention_factor", attention_factor)
    factor = factor if isinstance(factor, jax.Array) else jax.device_put(np.float32(factor))
    return _tabulate(inv_freq, factor, int(num_positions))


@functools.partial(jax.jit, static_argnums=2)
def _tabulate(inv_freq: jax.Array, factor: jax.Array, num_positions: int) -> jax.Array:
    positions = jnp.arange(num_positions, dtype=jnp.int32)
    return factor * jnp.concatenate(cos_sin_at(positions, inv_freq.astype(jnp.float32)), axis=-1)


def apply_rope(
    x: ArrayLike,
    positions: Ints,
    *,
    inv_freq: ArrayLike | None = None,
    cos_sin: ArrayLike | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    validate_values: bool = False,
) -> jax.Array:
    """Rotate queries or keys by their positions (RoPE, arXiv:2104.09864), in float32.

    Parameters
    ----------
    x : float[num_tokens, num_heads, head_dim]
        bfloat16, float16 or float32.
    positions : int[num_tokens]
        Of each token in its sequence.
    inv_freq : float[rotary_dim / 2], optional
        Radians a token, from `rope_frequencies`. Exactly one of `inv_freq` and `cos_sin` is given.
    cos_sin : float[num_positions, rotary_dim], optional
        Cosines, then sines, of each position, from `rope_cos_sin`. A position outside it gives NaN.
    rotary_dim : int, optional
        Leading columns that are rotated, at most head_dim; the others stay as they are. None takes what
        `inv_freq` or `cos_sin` say, which any other value must agree with.
    interleaved : bool
        Which columns make a pair: ``i`` and ``i + rotary_dim / 2`` (Llama, GPT-NeoX), or with True ``2 * i``
        and ``2 * i + 1`` (GPT-J).
    validate_values : bool
        Also check that positions lie in the table: ValueError for concrete arrays,
        `jax.experimental.checkify` checks for traced ones.

    Returns
    -------
    float[num_tokens, num_heads, head_dim], of x's dtype

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.

    Examples
    --------
    >>> inv_freq = rope_frequencies(64, base=500_000.0, scaling=Llama3Scaling())
    >>> q = apply_rope(jnp.ones((3, 8, 128)), [0, 1, 2], inv_freq=inv_freq)  # the first 64 of 128 columns
    >>> q.shape, bool((q[0] == 1).all()), bool((q[..., 64:] == 1).all())
    ((3, 8, 128), True, True)
    """
    x = validation.as_array("x", x)
    validation.check(x.ndim == 3, "x", "shape [num_tokens, num_heads, head_dim]", f"shape {x.shape}")
    validation.check(
        x.dtype.name in validation.DTYPES, "x", f"a dtype of {validation.DTYPES}", f"dtype {x.dtype}"
    )
    positions = validation.as_int32("positions", positions)
    validation.check_shape("positions", positions, x.shape[:1])
    frequencies = as_frequencies(inv_freq, cos_sin, rotary_dim, x.shape[-1])
    validation.check_bool("interleaved", interleaved)
    validation.check_bool("validate_values", validate_values)
    if validate_values:
        check_positions(positions, frequencies)
    return _apply(x, positions, frequencies, interleaved)


# Jitted, so that an eager call is one program.
@functools.partial(jax.jit, static_argnums=3)
def _apply(x: jax.Array, positions: jax.Array, frequencies: jax.Array, interleaved: bool) -> jax.Array:
    return rotate(x, *cos_sin_at(positions, frequencies), interleaved=interleaved)


def as_frequencies(
    inv_freq: ArrayLike | None, cos_sin: ArrayLike | None, rotary_dim: int | None, head_dim: int
) -> jax.Array:
    """Check what a caller gives of the frequencies; return [rotary_dim / 2] or the table [.., rotary_dim]."""
    validation.check(
        (inv_freq is None) != (cos_sin is None),
        "inv_freq, cos_sin",
        "exactly one of them",
        "neither" if inv_freq is None else "both",
    )
    name, value, expected = (
        ("inv_freq", inv_freq, "shape [rotary_dim / 2]")
        if cos_sin is None
        else ("cos_sin", cos_sin, "shape [num_positions, rotary_dim]")
    )
    array = validation.as_array(name, value)
    ok = array.ndim == (1 if cos_sin is None else 2)
    validation.check(ok, name, expected, f"shape {array.shape}")
    ok = array.dtype.name in validation.DTYPES
    validation.check(ok, name, f"a dtype of {validation.DTYPES}", f"dtype {array.dtype}")
    if cos_sin is not None:
        validation.check(array.shape[0] != 0, name, "at least one position", f"shape {array.shape}")
    columns = array.shape[-1] * (2 if cos_sin is None else 1)
    if not jax.export.is_symbolic_dim(columns):
        ok = columns != 0 and columns % 2 == 0
        validation.check(ok, name, "an even rotary_dim, not 0", f"rotary_dim {columns}")
        if not jax.export.is_symbolic_dim(head_dim):
            expected = f"a rotary_dim of at most {head_dim=}"
            validation.check(columns <= head_dim, name, expected, f"rotary_dim {columns}")
    if rotary_dim is not None:
        validation.check_positive_int("rotary_dim", rotary_dim)
        validation.check(rotary_dim == columns, "rotary_dim", f"{columns}, as {name} says", repr(rotary_dim))
    return array.astype(jnp.float32) if cos_sin is None else array


def check_positions(positions: jax.Array, frequencies: jax.Array) -> None:
    """Check that positions lie in the table, if there is one."""
    if frequencies.ndim == 2:
        _, (values,) = validation.value_module(positions)
        inside = (values >= 0) & (values < frequencies.shape[0])
        expected = f"values in [0, {frequencies.shape[0]}), the rows of cos_sin"
        validation.check_values(inside, "positions", expected, values)


def cos_sin_at(positions: jax.Array, frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [num_tokens, rotary_dim / 2] at positions, of what `as_frequencies` returns."""
    if frequencies.ndim == 1:
        angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
        return jnp.cos(angles), jnp.sin(angles)
    # Negative positions would count from the end.
    rows = jnp.where(positions < 0, frequencies.shape[0], positions)
    table = frequencies.at[rows].get(mode="fill", fill_value=jnp.nan).astype(jnp.float32)
    cos, sin = jnp.split(table, 2, axis=-1)
    return cos, sin


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotate x [num_tokens, num_heads, head_dim] by cosines and sines [num_tokens, rotary_dim / 2]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    rotated, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    if interleaved:
        rotated = rotated.reshape(*x.shape[:-1], half, 2)
        a, b = rotated[..., 0], rotated[..., 1]
    else:
        a, b = rotated[..., :half], rotated[..., half:]
    pair = (a * cos - b * sin, b * cos + a * sin)
    rotated = jnp.stack(pair, axis=-1) if interleaved else jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([rotated.reshape(*x.shape[:-1], 2 * half).astype(x.dtype), rest], axis=-1)


def _blend(kept: np.ndarray, stretched: np.ndarray, share: Any) -> np.ndarray:
    return share * kept + (1 - share) * stretched


def _check_positive(scaling: Any, *names: str) -> None:
    for name in names:
        value = getattr(scaling, name)
        validation.check(_is_number(value) and value > 0, name, "a positive number", repr(value))


def _is_number(value: Any) -> bool:
    """Whether it is a finite Python or numpy number that a float holds."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool | np.timedelta64):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
