"""A time for a right result only."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.timing import Calls, Timing
from jax_paged_attn import explain
from jax_paged_attn.testing import assert_close

type Measure = Callable[..., tuple[Any, Timing | None]]
type Check = Callable[[Any], None]


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
    calls: Calls, check: Check, measure: Measure, iterations: int, label: str = ""
) -> Measured:
    """Compile the calls' function, check a round of calls, time them, and check what was timed.

    Parameters
    ----------
    calls : Calls
        What to time.
    check : callable
        Takes the results of a round; raises an AssertionError where one is wrong.
    measure : callable
        `timing.cupti`, or `timing.untimed` for a dry run.
    iterations : int
        Timed rounds.
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
    calls = calls.compiled()
    check(calls.round())
    outputs, timing = measure(calls, iterations=iterations)
    check(outputs)
    memory = calls.fn.memory_analysis()
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


def attempt_ours(
    calls: Calls, check: Check, measure: Measure, iterations: int, asked_for: str | None = None
) -> tuple[str, Measured | Failed]:
    """Name the implementation that serves our calls, and what comes of `check_then_time`."""
    explained = attempt(lambda: explain(calls.fn, *calls.first_arguments))
    if isinstance(explained, Failed):
        return asked_for or "none", explained
    return explained.implementation, attempt(lambda: check_then_time(calls, check, measure, iterations))
