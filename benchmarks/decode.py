"""Time decode attention against the GPU's read bandwidth: ``python -m benchmarks.decode``.

For each workload and layout, all outputs are first compared with the float32 reference; then every kernel of
the call is timed by CUPTI. A result that does not match gets no time. FlashAttention-3 stands beside it, in
the same run, where it is installed. ``--dry-run`` walks the same path at tiny sizes on any machine, times
nothing and writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import jax

from benchmarks import report
from benchmarks.checked import Check, Failed, Measured, attempt_ours, equal_to
from benchmarks.peers import run_peer
from benchmarks.report import Result
from benchmarks.session import LAYOUTS, Session, Settings, add_options, add_workload_options
from benchmarks.timing import Calls
from benchmarks.workloads import (
    COUNTED,
    WORKLOADS,
    Cache,
    Workload,
    expected_output,
    make_cache,
    to_layout,
)
from jax_paged_attn import PageTable, decode_attention, paged_attention

NOTES = """\
- Every output is compared with the float32 reference before it is timed, and the timed outputs again.
- Inputs are random normal, pages in random order. Caches are cold: far above the L2, or several in turn
  ("rotating"); D alone is warm on purpose. The call's arguments include a ready-made page table; "contiguous"
  is a call of `decode_attention`, which takes none.
- The peer reads the layout NHD only: its one time, at the best of its split counts, stands beside both
  layouts."""


def run_layout(
    workload: Workload,
    layout: str,
    caches: Sequence[Cache],
    check: Check,
    session: Session,
    settings: Settings,
) -> tuple[str, Measured | Failed]:
    """Check and time our call in one layout; also names the implementation that ran."""
    args = []
    for cache in caches:
        pools = to_layout(cache.k_pages, layout), to_layout(cache.v_pages, layout)
        page_table = PageTable.from_block_tables(cache.block_tables, cache.kv_lens)
        scales = cache.k_scale, cache.v_scale
        if workload.scale == "token":
            scales = jax.tree.map(lambda scale: to_layout(scale, layout), scales)
        where = cache.kv_lens if workload.contiguous else page_table
        args.append((cache.q, *pools, where, *scales, cache.modifiers or {}))
    function = decode_attention if workload.contiguous else paged_attention

    def attend(q, k, v, where, k_scale, v_scale, modifiers):
        options = modifiers | {"kv_layout": layout, "implementation": settings.implementation}
        return function(q, k, v, where, k_scale=k_scale, v_scale=v_scale, **options)

    return attempt_ours(
        Calls(attend, args), check, session.measure, settings.iterations, settings.implementation
    )


def run_workload(workload: Workload, session: Session, settings: Settings) -> list[Result]:
    """Check and time one workload in each layout, with the peer beside it.

    Parameters
    ----------
    workload : Workload
        What to run.
    session : Session
        With what.
    settings : Settings
        How.

    Returns
    -------
    list of Result
        One for each layout.
    """
    caches = [make_cache(workload, seed) for seed in range(workload.num_caches)]
    check = equal_to([expected_output(cache) for cache in caches])
    beside = run_peer(session.peer, workload, caches, check, session.measure, settings.iterations)
    results = []
    for layout in settings.layouts:
        implementation, ours = run_layout(workload, layout, caches, check, session, settings)
        results.append(
            Result(
                workload.name, layout, workload.stored_dtype, implementation, workload.num_bytes, ours, beside
            )
        )
    return results


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; see ``--help``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_workload_options(parser, [w.name for w in WORKLOADS])
    add_options(parser, iterations="timed rounds over a workload's caches")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if every result of ours was right and, but for a dry run, timed."""
    arguments = parse_arguments(argv)
    command = f"python -m benchmarks.decode --iterations {arguments.iterations}"
    session = Session.start(command, dry_run=arguments.dry_run)
    if session is None:
        return 2
    settings = Settings.of(arguments)

    results: list[Result] = []
    for workload in WORKLOADS:
        if workload.name not in arguments.workloads:
            continue
        new = run_workload(workload.shrunk() if arguments.dry_run else workload, session, settings)
        session.keep(new, arguments.out / f"{session.gpu}.csv")
        results += new

    ran = {result.workload for result in results}
    workloads = [[w.name, w.describe()] for w in WORKLOADS if w.name in ran]
    return session.finish(
        arguments.out / f"decode_{session.gpu}.md",
        results,
        report.markdown_table(["workload", "what"], workloads),
        title="Decode attention",
        counted=COUNTED,
        timed=f"{arguments.iterations} rounds",
        notes=NOTES,
        whole=len(results) == len(WORKLOADS) * len(LAYOUTS) and arguments.implementation is None,
    )


if __name__ == "__main__":
    sys.exit(main())
