"""Time cache writes against the GPU's read bandwidth: ``python -m benchmarks.append``.

For each workload and layout, pools and rotated queries are first compared with the reference; then every
kernel of the call is timed by CUPTI, while the calls update one pool in place, each what the last one left. A
result that does not match gets no time. ``--configs`` times the kernel at each of its configurations, to
choose defaults by. ``--dry-run`` walks the same path at tiny sizes on any machine, times nothing and writes
nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report
from benchmarks.append_workloads import (
    COUNTED,
    WORKLOADS,
    AppendWorkload,
    append,
    calls_arguments,
    expect,
    make_check,
    make_inputs,
    make_pools,
)
from benchmarks.checked import attempt_ours
from benchmarks.report import Result
from benchmarks.session import LAYOUTS, Session, Settings, add_options, add_workload_options, exit_status
from benchmarks.timing import UpdatingCalls
from jax_paged_attn import explain
from jax_paged_attn.kernels.mosaic_gpu.append import BLOCK_TOKENS, STAGES, WARPGROUPS, Config

NOTES = """\
- Every result is compared with the reference before it is timed, and the timed results again: what is not
  rotated to the bit, what is within the rounding of its dtype; all other slots have to keep their bits.
- Tokens are random normal, pages in random order, a sequence's tokens in order. The calls update one pool of
  a million tokens in place: it is donated, and the compiled call makes no copy of it. Each call has tokens
  and slots of its own until together they have moved 256 MB: all that they read and write is cold.
- R is a rate of reading, and about half of these bytes are written."""


def at_each_config(call: Callable[..., Any], arguments: tuple) -> Iterator[tuple[str, Callable[..., Any]]]:
    """List the kernel's configurations that can run a call, of as many warpgroups in all as the default."""
    call = functools.partial(call, implementation="mosaic_gpu")
    default = explain(call, *arguments).config
    warpgroups_in_all = default.warpgroups * default.blocks
    for stages, warpgroups, block_tokens in itertools.product(STAGES, WARPGROUPS, BLOCK_TOKENS):
        config = Config(block_tokens, warpgroups, -(-warpgroups_in_all // warpgroups), stages)
        configured = functools.partial(call, config=config)
        try:
            explain(configured, *arguments)
        except ValueError as error:
            print(f"left out: {error}")
            continue
        yield f"{config}{', the default' * (config == default)}", configured


def run_workload(
    workload: AppendWorkload, session: Session, settings: Settings, *, configs: bool = False
) -> list[Result]:
    """Check and time one workload in each layout.

    Parameters
    ----------
    workload : AppendWorkload
        What to run.
    session : Session
        With what.
    settings : Settings
        How.
    configs : bool
        At each configuration of the kernel that can run it, rather than at the default.

    Returns
    -------
    list of Result
        One for each layout and configuration.
    """
    inputs = make_inputs(workload, seed=0)
    expected = expect(workload, inputs)
    args = [(new,) for new in calls_arguments(workload, inputs)]
    rounds = -(-settings.iterations // workload.num_calls)
    results = []
    for layout in settings.layouts:
        pools = make_pools(workload, layout, seed=0)
        check = make_check(workload, layout, pools, inputs, expected)
        call = functools.partial(append, kv_layout=layout, implementation=settings.implementation)
        variants = at_each_config(call, (pools, *args[0])) if configs else [("", call)]
        for setting, fn in variants:
            calls = UpdatingCalls(fn, args, jax.tree.map(jnp.copy, pools))
            implementation, ours = attempt_ours(
                calls, check, session.measure, rounds, settings.implementation
            )
            results.append(
                Result(
                    workload.name,
                    layout,
                    workload.pool_dtype,
                    implementation,
                    workload.num_bytes,
                    ours,
                    setting=setting,
                )
            )
    return results


def against(name: str, results: Sequence[Result]) -> list[str]:
    """Hold each time against that of its bytes at the rate of workload `name`: a table, if that was timed."""
    rates = {r.layout: r.num_bytes / r.timing.ms for r in results if r.workload == name and r.timing}
    rows = [
        [r.workload, r.layout, f"{r.timing.ms * rates[r.layout] / r.num_bytes:.3f}"]
        for r in results
        if r.timing and r.layout in rates
    ]
    header = ["workload", "layout", f"time / that of its bytes at {name}'s rate"]
    return [report.markdown_table(header, rows)] if rows else []


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; see ``--help``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.append",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_workload_options(parser, [w.name for w in WORKLOADS])
    add_options(parser, iterations="timed calls of a workload, at least")
    parser.add_argument(
        "--configs",
        action="store_true",
        help="each configuration of the mosaic_gpu kernel; printed, not written",
    )
    arguments = parser.parse_args(argv)
    if arguments.configs and arguments.implementation not in (None, "mosaic_gpu"):
        parser.error("--configs are of mosaic_gpu")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if every result of ours was right and, but for a dry run, timed."""
    arguments = parse_arguments(argv)
    command = f"python -m benchmarks.append --iterations {arguments.iterations}"
    session = Session.start(command, dry_run=arguments.dry_run)
    if session is None:
        return 2
    settings = Settings.of(arguments)

    results: list[Result] = []
    for workload in WORKLOADS:
        if workload.name not in arguments.workloads:
            continue
        run = workload.shrunk() if arguments.dry_run else workload
        new = run_workload(run, session, settings, configs=arguments.configs)
        if arguments.configs:
            print(session.table(new), flush=True)
        else:
            session.keep(new, arguments.out / f"{session.gpu}.csv")
        results += new

    if arguments.configs:
        return exit_status(results)
    ran = {result.workload for result in results}
    workloads = [[w.name, w.describe()] for w in WORKLOADS if w.name in ran]
    return session.finish(
        arguments.out / f"append_{session.gpu}.md",
        results,
        *against("W2", results),
        report.markdown_table(["workload", "what"], workloads),
        title="Cache writes",
        counted=COUNTED,
        timed=f"{arguments.iterations} calls or more",
        notes=NOTES,
        whole=len(results) == len(WORKLOADS) * len(LAYOUTS) and arguments.implementation is None,
    )


if __name__ == "__main__":
    sys.exit(main())
