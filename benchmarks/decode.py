"""Time decode attention over a paged cache against the GPU's read bandwidth: ``python -m benchmarks.decode``.

For each workload and layout, all outputs are first compared with the float32 reference; then every kernel of
the call is timed by CUPTI. A result that does not match gets no time. FlashAttention-3 stands beside it, in
the same run, where it is installed. ``--dry-run`` walks the same path at tiny sizes on any machine, times
nothing and writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import report, timing
from benchmarks.checked import Failed, Measure, Measured, attempt, check_then_time
from benchmarks.peers import Peer, flash_attention_3
from benchmarks.report import Result
from benchmarks.workloads import WORKLOADS, Cache, Workload, make_cache, to_layout
from jax_paged_attn import PageTable, explain, paged_attention, reference

LAYOUTS = ("HND", "NHD")

NOTES = """\
- **GB, TB/s**: `bytes = sum(kv_lens) * num_kv_heads * (d_k + d_v) * itemsize`, each valid K and V element
  once; decimal.
- **ms**: the summed durations of all kernels that one call launches (CUPTI), the median over {iterations}
  rounds; **spread**: the 90th less the 10th percentile, over the median; **kernels**: how many one call
  launches. Gaps between kernels and the time of the host are not in it.
- **share of R**: TB/s over R, the fastest read by a large reduction, by the same timer in the same run.
- Every output is compared with the float32 reference before it is timed, and the timed outputs again.
- Inputs are random normal, pages in random order. Caches are cold: far above the L2, or several in turn
  ("rotating"); D alone is warm on purpose. The call's arguments include a ready-made page table.
- **workspace**: the temporary device memory of the compiled call.
- The peer reads NHD pages only: its one time, at the best of its split counts, stands beside both layouts."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How workloads are run.

    Attributes
    ----------
    layouts : tuple of str
        Of "HND", "NHD".
    implementation : str or None
        As `paged_attention` takes it; None lets it choose.
    measure : callable
        `timing.cupti`, or `timing.untimed` for a dry run.
    iterations : int
        Timed rounds over a workload's caches.
    peer : Peer or None
        What stands beside.
    """

    layouts: tuple[str, ...]
    implementation: str | None
    measure: Measure
    iterations: int
    peer: Peer | None


@jax.jit
def expected_output(cache: Cache) -> jax.Array:
    """Compute the float32 reference of one call, a row at a time: its memory is that of the longest row.

    Parameters
    ----------
    cache : Cache
        The inputs.

    Returns
    -------
    jax.Array
        float32 [batch, num_q_heads, v_head_dim].
    """

    def one_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array | tuple[jax.Array, jax.Array]:
        q, block_table, kv_len = row
        page_table = PageTable.from_block_tables(block_table, kv_len)
        return reference.paged_attention(q, cache.k_pages, cache.v_pages, page_table, kv_layout="NHD")

    return jax.lax.map(one_row, (cache.q, cache.block_tables, cache.kv_lens))


def run_peer(
    peer: Peer | None,
    workload: Workload,
    caches: Sequence[Cache],
    expected: Sequence[jax.Array],
    settings: Settings,
) -> Measured | Failed:
    """Measure the peer at its best setting: each is tried briefly, and the best is measured like ours."""
    if peer is None:
        return Failed("not installed")
    if (reason := peer.why_not(workload)) is not None:
        return Failed(f"cannot run: {reason}")
    args = [(cache,) for cache in caches]
    tried = []
    for label, fn in peer.variants(workload):
        trial = attempt(functools.partial(check_then_time, fn, args, expected, settings.measure, 10, label))
        if isinstance(trial, Measured):
            tried.append((trial.timing.ms if trial.timing else 0.0, label, fn))
    if not tried:
        return Failed("WRONG or failed at every setting")
    _, label, fn = min(tried, key=lambda trial: trial[0])
    return attempt(
        functools.partial(check_then_time, fn, args, expected, settings.measure, settings.iterations, label)
    )


def run_layout(
    workload: Workload,
    layout: str,
    caches: Sequence[Cache],
    expected: Sequence[jax.Array],
    settings: Settings,
) -> tuple[str, Measured | Failed]:
    """Check and time `paged_attention` in one layout; also names the implementation that ran."""
    args = []
    for cache in caches:
        page_table = PageTable.from_block_tables(cache.block_tables, cache.kv_lens)
        args.append((cache.q, to_layout(cache.k_pages, layout), to_layout(cache.v_pages, layout), page_table))
    attend = functools.partial(paged_attention, kv_layout=layout, implementation=settings.implementation)
    explained = attempt(lambda: explain(attend, *args[0]))
    if isinstance(explained, Failed):
        return settings.implementation or "none", explained
    outcome = attempt(lambda: check_then_time(attend, args, expected, settings.measure, settings.iterations))
    return explained.implementation, outcome


def run_workload(workload: Workload, settings: Settings) -> list[Result]:
    """Check and time one workload in each layout, with the peer beside it.

    Parameters
    ----------
    workload : Workload
        What to run.
    settings : Settings
        How.

    Returns
    -------
    list of Result
        One for each layout.
    """
    caches = [make_cache(workload, seed) for seed in range(workload.num_caches)]
    expected = [expected_output(cache) for cache in caches]
    beside = run_peer(settings.peer, workload, caches, expected, settings)
    results = []
    for layout in settings.layouts:
        implementation, ours = run_layout(workload, layout, caches, expected, settings)
        results.append(
            Result(workload.name, layout, workload.dtype, implementation, workload.num_bytes, ours, beside)
        )
    return results


def results_page(
    results: Sequence[Result],
    bandwidths: dict[str, float | None],
    peer_name: str,
    commit: str,
    device_kind: str,
    iterations: int,
) -> str:
    """Write the page kept beside the csv: what was run, on what, how it was measured, and the tables."""
    reads = [f"{name} {_tbps_or_not(rate)}" for name, rate in bandwidths.items()]
    ran = {result.workload for result in results}
    return "\n".join(
        [
            f"# Decode over a paged cache, {device_kind}",
            "",
            f"- command: `python -m benchmarks.decode --iterations {iterations}`",
            f"- commit: {commit}",
            "- versions: " + ", ".join(f"{name} {version}" for name, version in report.versions().items()),
            NOTES.format(iterations=iterations),
            "",
            report.results_table(results, _fastest(bandwidths), peer_name),
            "",
            f"R, by reading 4 GiB: {'; '.join(reads)}.",
            "",
            report.markdown_table(
                ["workload", "what"], [[w.name, w.describe()] for w in WORKLOADS if w.name in ran]
            ),
            "",
        ]
    )


def _fastest(bandwidths: dict[str, float | None]) -> float | None:
    return max((rate for rate in bandwidths.values() if rate is not None), default=None)


def _tbps_or_not(rate: float | None) -> str:
    return "not measured" if rate is None else f"{rate:.3f} TB/s"


def _choices(known: Sequence[str], what: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; see ``--help``."""
    names = [w.name for w in WORKLOADS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--workloads",
        type=functools.partial(_choices, names, "workload"),
        default=names,
        help=",".join(names),
    )
    add("--layouts", type=functools.partial(_choices, LAYOUTS, "layout"), default=LAYOUTS, help="HND,NHD")
    add("--implementation", help="mosaic_gpu, xla, ...; left out: the default choice")
    add("--iterations", type=int, default=50, help="timed rounds (default 50)")
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results files")
    add("--dry-run", action="store_true", help="tiny sizes, nothing timed, nothing written")
    return parser.parse_args(argv)


def current_device() -> Any:
    """Get the device that everything here runs on."""
    return jax.devices()[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if every result of ours was right and, but for a dry run, timed."""
    arguments = parse_arguments(argv)
    device = current_device()
    if device.platform != "gpu" and not arguments.dry_run:
        print(f"this needs a GPU, and JAX's default is {device.platform}; try --dry-run", file=sys.stderr)
        return 2
    commit = report.commit()
    peer = flash_attention_3() if device.platform == "gpu" else None
    peer_name = "peer" if peer is None else peer.name
    measure = timing.untimed if arguments.dry_run else timing.cupti
    settings = Settings(
        tuple(arguments.layouts), arguments.implementation, measure, arguments.iterations, peer
    )

    bandwidths = timing.read_bandwidths(measure, num_bytes=1 << 20 if arguments.dry_run else 4 << 30)
    for name, rate in bandwidths.items():
        print(f"read bandwidth, {name}: {_tbps_or_not(rate)}", flush=True)
    read_tbps = _fastest(bandwidths)

    csv_path = arguments.out / f"{report.gpu_slug(device.device_kind)}.csv"
    results: list[Result] = []
    for workload in WORKLOADS:
        if workload.name not in arguments.workloads:
            continue
        new = run_workload(workload.shrunk() if arguments.dry_run else workload, settings)
        results += new
        print(report.results_table(new, read_tbps, peer_name), flush=True)
        # After each workload, so that an interrupted run keeps what it measured.
        if read_tbps is not None and not arguments.dry_run:
            rows = [row for r in new if (row := report.csv_row(r, read_tbps, peer_name, commit)) is not None]
            wrong = [r.key for r in new if isinstance(r.ours, Failed) and r.ours.wrong]
            report.write_rows(csv_path, report.merge_rows(report.read_rows(csv_path), rows, wrong))

    if arguments.dry_run:
        print("dry run: tiny sizes, nothing was timed, nothing is written")
    else:
        page = results_page(results, bandwidths, peer_name, commit, device.device_kind, arguments.iterations)
        print(f"\n{page}")
        if len(results) == len(WORKLOADS) * len(LAYOUTS) and arguments.implementation is None:
            (arguments.out / f"decode_{report.gpu_slug(device.device_kind)}.md").write_text(page)
        else:
            print("Only a part was run: its rows are in the csv; the page of the whole is left as it was.")
    return int(any(isinstance(result.ours, Failed) for result in results))


if __name__ == "__main__":
    sys.exit(main())
