"""Times of GPU kernels by CUPTI, and the read bandwidth by the same timer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler


@dataclasses.dataclass(frozen=True)
class Timing:
    """What the kernels of one call took.

    Attributes
    ----------
    ms : float
        Median over the calls of the summed durations of a call's kernels, in milliseconds.
    spread : float
        The 90th less the 10th percentile of that sum, as a share of the median.
    kernels : tuple of str
        Names of the kernels that one call launches, in order.
    """

    ms: float
    spread: float
    kernels: tuple[str, ...]


@dataclasses.dataclass
class Calls:
    """Equal calls of one function, which take their arguments in turn.

    Attributes
    ----------
    fn : callable
        Jittable, jitted or compiled.
    args : sequence of tuple
        One tuple of arguments a call, all of the same shapes.
    """

    fn: Callable[..., Any]
    args: Sequence[tuple]

    @property
    def first_arguments(self) -> tuple:
        """What the function takes at the first call."""
        return self.args[0]

    def compiled(self) -> Self:
        """Compile the function; the same one at the same shapes is compiled once, whatever the calls."""
        return dataclasses.replace(self, fn=jax.jit(self.fn).lower(*self.first_arguments).compile())

    def round(self) -> Any:
        """Make each call once; gives the list of their results."""
        return [self.fn(*args) for args in self.args]

    def why_not_timed(self) -> str | None:
        """Why the kernels' times are not all that the compiled calls take; None if they are."""
        return None


@dataclasses.dataclass
class UpdatingCalls(Calls):
    """Calls that each update in place what the one before left.

    Attributes
    ----------
    fn : callable
        ``fn(state, *args)`` gives the new state and a result.
    args : sequence of tuple
        Of each call, without the state.
    state
        A pytree of arrays, which the first call takes from the caller: it is donated.

    Examples
    --------
    >>> calls = UpdatingCalls(lambda total, x: (total + x, 10 * x), [(1.0,), (2.0,)], jnp.zeros(3))
    >>> total, results = calls.compiled().round()
    >>> total.tolist(), [float(result) for result in results]
    ([3.0, 3.0, 3.0], [10.0, 20.0])
    """

    state: Any

    @property
    def first_arguments(self) -> tuple:
        return self.state, *self.args[0]

    def compiled(self) -> Self:
        return dataclasses.replace(
            self, fn=jax.jit(self.fn, donate_argnums=0).lower(*self.first_arguments).compile()
        )

    def round(self) -> Any:
        """Make each call once; gives the state that the last one left, and the list of results."""
        results = []
        for args in self.args:
            self.state, result = self.fn(self.state, *args)
            results.append(result)
        return self.state, results

    def why_not_timed(self) -> str | None:
        # XLA copies an array by a memory copy, of which there is no kernel record. That needs the array's
        # room, in temporaries or in results, beside what the results take over from the donated state.
        memory = self.fn.memory_analysis()
        room = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        if room >= min(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.state)):
            return "the compiled call may copy what it should update in place"
        return None


def summarize(records: Sequence[tuple[str, float]], num_calls: int) -> Timing:
    """Fold the kernel records of `num_calls` equal calls into one `Timing`.

    Parameters
    ----------
    records : sequence of (str, float)
        Name and milliseconds of every kernel, in the order of launch.
    num_calls : int
        Calls that launched them.

    Raises
    ------
    RuntimeError
        If the records don't divide into calls that launch the same kernels.

    Examples
    --------
    >>> summarize([("decode", 2.0), ("merge", 0.5)] * 3, num_calls=3)
    Timing(ms=2.5, spread=0.0, kernels=('decode', 'merge'))
    """
    if not records or len(records) % num_calls:
        raise RuntimeError(f"{len(records)} kernel records do not divide into {num_calls} equal calls")
    per_call = len(records) // num_calls
    calls = [records[i : i + per_call] for i in range(0, len(records), per_call)]
    kernels = tuple(name for name, _ in calls[0])
    if any(tuple(name for name, _ in call) != kernels for call in calls):
        raise RuntimeError("the calls launched different kernels")
    sums = np.array([sum(ms for _, ms in call) for call in calls])
    low, median, high = np.percentile(sums, [10, 50, 90])
    return Timing(float(median), float((high - low) / median), kernels)


def cupti(calls: Calls, *, iterations: int = 50, warmup_s: float = 0.05) -> tuple[Any, Timing]:
    """Make some calls in turn and time every kernel they launch.

    `jax.experimental.mosaic.gpu.profiler.measure` gives all calls the same arguments; rotating over several
    caches needs the two calls beneath it.

    Parameters
    ----------
    calls : Calls
        Of a compiled or jitted function.
    iterations : int
        Rounds of the calls.
    warmup_s : float
        Untimed calls go on at least this long, for the clocks to rise.

    Returns
    -------
    outputs
        The results of the last timed round.
    timing : Timing

    Raises
    ------
    RuntimeError
        Without a CUDA plugin, if the calls launch different kernels, or if these are not all that they do.
    """
    if reason := calls.why_not_timed():
        raise RuntimeError(reason)
    library = profiler.mosaic_gpu_lib  # pyright: ignore[reportPrivateImportUsage]
    if library is None:
        raise RuntimeError("CUPTI needs jax's CUDA plugin: install jax[cuda12] or jax[cuda13]")
    ext = library._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
    end = time.perf_counter() + warmup_s
    while time.perf_counter() < end:
        jax.block_until_ready(calls.round())
    ext._cupti_init()
    try:
        # Kernels run in the order of their calls, so that the last round's results are the last of all.
        for _ in range(iterations - 1):
            calls.round()
        outputs = jax.block_until_ready(calls.round())
    finally:
        # False: CUPTI stays attached to the process, so that it can be started again.
        records = ext._cupti_get_timings(False)
    return outputs, summarize(records, iterations * len(calls.args))


def untimed(calls: Calls, *, iterations: int = 1) -> tuple[Any, None]:
    """Stand in for `cupti` in a dry run: make one round of calls and report no time."""
    del iterations
    return jax.block_until_ready(calls.round()), None


_REDUCTIONS: dict[str, tuple[str, Callable[[jax.Array], jax.Array]]] = {
    "sum of float32": ("float32", lambda x: jnp.sum(x)),
    "row maxima of float32": ("float32", lambda x: jnp.max(x, axis=1)),
    "sum of bfloat16": ("bfloat16", lambda x: jnp.sum(x, dtype=jnp.float32)),
    "row maxima of bfloat16": ("bfloat16", lambda x: jnp.max(x, axis=1)),
}


def read_bandwidths(measure: Callable[..., Any], *, num_bytes: int = 4 << 30) -> dict[str, float | None]:
    """Read one large array by each of a few reductions.

    The fastest of them is R, the ceiling that a read-only kernel is held against: it is measured in the same
    process and by the same timer as the kernels.

    Parameters
    ----------
    measure : callable
        `cupti`, or `untimed` for a dry run.
    num_bytes : int
        Size of the array, far above the L2 so that every read is cold.

    Returns
    -------
    dict of str to float or None
        TB/s (10**12 bytes a second) of each reduction; None where nothing was timed.
    """
    bandwidths: dict[str, float | None] = {}
    for dtype in ("float32", "bfloat16"):
        columns = 8192
        shape = (num_bytes // (columns * jnp.dtype(dtype).itemsize), columns)
        x = jax.jit(lambda s=shape, d=dtype: jax.random.normal(jax.random.key(0, impl="rbg"), s, d))()
        for name, (reduction_dtype, reduction) in _REDUCTIONS.items():
            if reduction_dtype == dtype:
                _, timing = measure(Calls(jax.jit(reduction), [(x,)]), iterations=20)
                bandwidths[name] = None if timing is None else num_bytes / timing.ms / 1e9
        # Freed before the next array is made: two of them and their temporaries are a third of the memory.
        x.delete()
    return bandwidths
