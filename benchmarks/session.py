"""What a run of any benchmark has: a GPU, its read bandwidth by the same timer, a peer, files for results."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import report, timing
from benchmarks.checked import Failed, Measure
from benchmarks.peers import Peer, flash_attention_3
from benchmarks.report import Result

LAYOUTS = ("HND", "NHD")

NOTES = """\
- **GB, TB/s**: {counted}; decimal.
- **ms**: the summed durations of all kernels that one call launches (CUPTI), the median over {timed};
  **spread**: the 90th less the 10th percentile, over the median; **kernels**: how many one call launches.
  Gaps between kernels and the time of the host are not in it.
- **share of R**: TB/s over R, the fastest read by a large reduction, by the same timer in the same run.
- **workspace**: the temporary device memory of the compiled call."""


@dataclasses.dataclass(frozen=True)
class Session:
    """One run of a benchmark.

    Attributes
    ----------
    command : str
        What was run, for the head of the page of results.
    device_kind : str
        The GPU's name.
    commit : str
        Of the code under test.
    peer : Peer or None
        What stands beside.
    measure : callable
        `timing.cupti`, or `timing.untimed` for a dry run.
    bandwidths : dict of str to float or None
        As `timing.read_bandwidths` gives them.
    """

    command: str
    device_kind: str
    commit: str
    peer: Peer | None
    measure: Measure
    bandwidths: dict[str, float | None]

    @classmethod
    def start(cls, command: str, *, dry_run: bool) -> Session | None:
        """Measure and print the read bandwidth; None, with the reason printed, without a GPU to measure."""
        device = current_device()
        if device.platform != "gpu" and not dry_run:
            print(f"this needs a GPU, and JAX's default is {device.platform}; try --dry-run", file=sys.stderr)
            return None
        measure = timing.untimed if dry_run else timing.cupti
        bandwidths = timing.read_bandwidths(measure, num_bytes=1 << 20 if dry_run else 4 << 30)
        for name, rate in bandwidths.items():
            print(f"read bandwidth, {name}: {_tbps_or_not(rate)}", flush=True)
        peer = flash_attention_3() if device.platform == "gpu" else None
        return cls(command, device.device_kind, report.commit(), peer, measure, bandwidths)

    @property
    def gpu(self) -> str:
        """The GPU's name as files carry it."""
        return report.gpu_slug(self.device_kind)

    @property
    def read_tbps(self) -> float | None:
        """R, the fastest read; None in a dry run."""
        return max((rate for rate in self.bandwidths.values() if rate is not None), default=None)

    @property
    def peer_name(self) -> str:
        return "peer" if self.peer is None else self.peer.name

    def table(self, results: Sequence[Result]) -> str:
        return report.results_table(results, self.read_tbps, self.peer_name)

    def keep(self, results: Sequence[Result], path: Path) -> None:
        """Print the results; and where they were timed, put them into the csv at `path`.

        Called after each workload, so that an interrupted run keeps what it measured.
        """
        print(self.table(results), flush=True)
        if self.read_tbps is None:
            return
        rows = [report.csv_row(result, self.read_tbps, self.peer_name, self.commit) for result in results]
        wrong = [result.key for result in results if isinstance(result.ours, Failed) and result.ours.wrong]
        kept = report.merge_rows(report.read_rows(path), [row for row in rows if row is not None], wrong)
        report.write_rows(path, kept)

    def finish(
        self,
        path: Path,
        results: Sequence[Result],
        *more: str,
        title: str,
        counted: str,
        timed: str,
        notes: str,
        whole: bool,
    ) -> int:
        """Print the page that is kept beside a csv, and write it where nothing is missing.

        Parameters
        ----------
        path : Path
            Of the page.
        results : sequence of Result
            All of the run.
        *more : str
            Further paragraphs.
        title, counted, timed, notes : str
            What was run, which bytes count, what a time is the median of, and what else is to know, as a
            Markdown list.
        whole : bool
            Whether the run left nothing out.

        Returns
        -------
        int
            The exit status: 0 if every result of ours was right and, but for a dry run, timed.
        """
        if self.read_tbps is None:
            print("dry run: tiny sizes, nothing was timed, nothing is written")
        else:
            head = report.head(self.command, self.commit, report.versions())
            head = "\n".join([head, NOTES.format(counted=counted, timed=timed), notes])
            reads = "; ".join(f"{name} {_tbps_or_not(rate)}" for name, rate in self.bandwidths.items())
            reads = f"R, by reading 4 GiB: {reads}."
            page = "\n\n".join([f"# {title}, {self.device_kind}", head, self.table(results), reads, *more])
            print(f"\n{page}")
            if whole:
                path.write_text(f"{page}\n")
            else:
                print(
                    "Only a part was run: its rows are in the csv; the page of the whole is left as it was."
                )
        return exit_status(results)


def exit_status(results: Sequence[Result]) -> int:
    """0 if every result of ours was right and, but for a dry run, timed."""
    return int(any(isinstance(result.ours, Failed) for result in results))


def _tbps_or_not(rate: float | None) -> str:
    return "not measured" if rate is None else f"{rate:.3f} TB/s"


def current_device() -> Any:
    """Get the device that everything here runs on."""
    return jax.devices()[0]


def chosen(known: Sequence[str], what: str, text: str) -> list[str]:
    """Parse an option that names some of `known`, separated by commas; ``*`` stands for any characters.

    Examples
    --------
    >>> chosen(["1x128", "1x256", "8x128"], "point", "8x128,1x*")
    ['1x128', '1x256', '8x128']
    """
    patterns = [pattern.strip() for pattern in text.split(",") if pattern.strip()]
    if unknown := [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in known)]:
        raise argparse.ArgumentTypeError(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}")
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How named workloads are run.

    Attributes
    ----------
    layouts : tuple of str
        Of "HND", "NHD".
    implementation : str or None
        As the public functions take it; None lets them choose.
    iterations : int
        As ``--iterations`` gives them.
    """

    layouts: tuple[str, ...]
    implementation: str | None
    iterations: int

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Settings:
        """From the options that `add_workload_options` adds."""
        return cls(tuple(arguments.layouts), arguments.implementation, arguments.iterations)


def add_workload_options(
    parser: argparse.ArgumentParser, names: Sequence[str], *, layouts: bool = True
) -> None:
    """Add the options of a benchmark of named workloads, whose caches have `layouts` or not."""
    add = parser.add_argument
    add(
        "--workloads",
        type=functools.partial(chosen, names, "workload"),
        default=names,
        help=f"some of {','.join(names)}; * stands for any characters",
    )
    if layouts:
        add("--layouts", type=functools.partial(chosen, LAYOUTS, "layout"), default=LAYOUTS, help="HND,NHD")
    add("--implementation", help="mosaic_gpu, xla, ...; left out: the default choice")


def add_options(parser: argparse.ArgumentParser, iterations: str) -> None:
    """Add the options that every timing has; `iterations` says what they are of."""
    parser.add_argument("--iterations", type=int, default=50, help=f"{iterations} (default 50)")
    add_output_options(parser)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where results go, if anywhere."""
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder of the results files"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, nothing timed, nothing written")
