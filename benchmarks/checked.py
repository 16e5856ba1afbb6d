"""A time for a right result only."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.timing import Timing
from jax_paged_attn.testing import assert_close

type Measure = Callable[..., tuple[list[Any], Timing | None]]
type Check = Callable[[Sequence[Any]], None]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A right result.

    Attributes
    ----------
    timing : Timing or None
        None in a dry run.
    workspace_bytes : int
        Temporary device memory of the compiled call.
    label : str
        The setting it was reached with, where several were tried.
    """

    timing: Timing | None
    workspace_bytes: int
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Failed:
    """Why there is no time; `wrong` if the result was not the reference's."""

    reason: str
    wrong: bool = False


def equal_to(expected: Sequence[jax.Array]) -> Check:
    """Make the check that each output is the expected one, within the tolerance of its dtype."""

    def check(outputs: Sequence[Any]) -> None:
        for out, want in zip(outputs, expected, strict=True):
            assert_close(out, want)

    return check


def check_then_time(
    fn: Callable[..., Any],
    args: Sequence[tuple],
    check: Check,
    measure: Measure,
    iterations: int,
    label: str = "",
) -> Measured:
    """Compile `fn`, check it on every tuple of `args`, time it, and check what was timed.

    Parameters
    ----------
    fn : callable
        Gives one array. The same function at the same shapes is compiled once, whatever the number of calls.
    args : sequence of tuple
        Arguments of equal shapes, for the calls to take in turn.
    check : callable
        Takes the outputs, one for each tuple of `args`; raises an AssertionError where one is wrong.
    measure : callable
        `timing.cupti`, or `timing.untimed` for a dry run.
    iterations : int
        Timed rounds over `args`.
    label : str
        Kept in the result.

    Returns
    -------
    Measured

    Raises
    ------
    AssertionError
        If `check` finds a wrong result.
    """
    compiled = jax.jit(fn).lower(*args[0]).compile()
    check([compiled(*each) for each in args])
    outputs, timing = measure(compiled, args, iterations=iterations)
    check(outputs)
    memory = compiled.memory_analysis()
    return Measured(timing, memory.temp_size_in_bytes if memory else 0, label)


def attempt[T](run: Callable[[], T]) -> T | Failed:
    """Run one measurement; a failure becomes an entry of the table, so that the others still run.

    Examples
    --------
    >>> attempt(lambda: 3)
    3
    """
    try:
        return run()
    except AssertionError as error:
        print(f"wrong result: {error}", file=sys.stderr, flush=True)
        return Failed("WRONG", wrong=True)
    except Exception as error:
        traceback.print_exc()
        return Failed(type(error).__name__)
