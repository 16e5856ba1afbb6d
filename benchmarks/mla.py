"""Time latent attention against the GPU's matrix units and memory: ``python -m benchmarks.mla``.

For each workload the output is first compared with the float32 reference; then every kernel of the call is
timed by CUPTI. A result that does not match gets no time. ``--dry-run`` walks the same path at tiny sizes on
any machine, times nothing and writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import report
from benchmarks.checked import attempt_ours, equal_to
from benchmarks.mla_workloads import (
    COUNTED,
    WORKLOADS,
    MlaWorkload,
    expected_output,
    make_cache,
    sm_scale,
)
from benchmarks.report import Result
from benchmarks.session import Session, Settings, add_options, add_workload_options
from benchmarks.timing import Calls
from jax_paged_attn import PageTable, mla_decode

NOTES = """\
- Every output is compared with the float32 reference before it is timed, and the timed outputs again.
- Inputs are random normal, pages in random order, caches far above the L2 (but for M1, which is 75 MB).
- **TFLOP/s** counts both products, of all heads over all valid tokens:
  `2 * sum(kv_lens) * q_len * num_heads * (2 * rank + rope_dim)`."""
LAYOUT = "latent"  # what the csv has where caches of keys and values have their layout


def run_workload(workload: MlaWorkload, session: Session, settings: Settings) -> Result:
    """Check and time one workload."""
    cache = make_cache(workload, seed=0)
    check = equal_to([expected_output(workload, cache)])
    page_table = PageTable.from_block_tables(cache.block_tables, cache.kv_lens)

    def attend(q_nope, q_pe, latent_pages, page_table):
        options = {"sm_scale": sm_scale(workload), "implementation": settings.implementation}
        return mla_decode(q_nope, q_pe, latent_pages, page_table, **options)

    calls = Calls(attend, [(*cache[:3], page_table)])
    implementation, ours = attempt_ours(
        calls, check, session.measure, settings.iterations, settings.implementation
    )
    return Result(workload.name, LAYOUT, workload.dtype, implementation, workload.num_bytes, ours)


def rates(workloads: Sequence[MlaWorkload], results: Sequence[Result]) -> str:
    """Lay out the rates of arithmetic, and what each workload is."""
    rows = []
    for workload, result in zip(workloads, results, strict=True):
        timing = result.timing
        rate = f"{workload.num_flops / timing.ms / 1e9:.0f}" if timing else ""
        rows.append([workload.name, workload.describe(), f"{workload.num_flops / 1e9:.4g}", rate])
    return report.markdown_table(["workload", "what", "GFLOP", "TFLOP/s"], rows)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; see ``--help``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mla",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_workload_options(parser, [w.name for w in WORKLOADS], layouts=False)
    add_options(parser, iterations="timed calls of a workload")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if every result of ours was right and, but for a dry run, timed."""
    arguments = parse_arguments(argv)
    command = f"python -m benchmarks.mla --iterations {arguments.iterations}"
    session = Session.start(command, dry_run=arguments.dry_run)
    if session is None:
        return 2
    settings = Settings((), arguments.implementation, arguments.iterations)

    ran: list[MlaWorkload] = []
    results: list[Result] = []
    for workload in WORKLOADS:
        if workload.name not in arguments.workloads:
            continue
        ran.append(workload.shrunk() if arguments.dry_run else workload)
        results.append(run_workload(ran[-1], session, settings))
        session.keep(results[-1:], arguments.out / f"{session.gpu}.csv")
        print(rates(ran[-1:], results[-1:]), flush=True)

    return session.finish(
        arguments.out / f"mla_{session.gpu}.md",
        results,
        rates(ran, results),
        title="Latent attention",
        counted=COUNTED,
        timed=f"{arguments.iterations} calls",
        notes=NOTES,
        whole=len(results) == len(WORKLOADS) and arguments.implementation is None,
    )


if __name__ == "__main__":
    sys.exit(main())
