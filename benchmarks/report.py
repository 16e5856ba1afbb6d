"""Where results go: Markdown tables, and the rows of ``results/<gpu>.csv``, which all benchmarks share."""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

from benchmarks.checked import Failed, Measured
from benchmarks.timing import Timing

COLUMNS = (
    "workload",
    "layout",
    "dtype",
    "implementation",
    "ms",
    "spread",
    "kernels",
    "bytes",
    "tbps",
    "share",
    "peer",
    "peer_ms",
    "commit",
    "jax",
)
KEY = COLUMNS[:4]

type Row = dict[str, str]


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[column] for column in KEY)


def _by_number(key: tuple[str, ...]) -> list[list[str | int]]:
    """Sort A2 before A16, and 8x4096 before 16x4096: the runs of digits in a name count as numbers."""
    return [[int(t) if t.isdigit() else t for t in re.split(r"(\d+)", part)] for part in key]


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a results file; none if it does not exist.

    Raises
    ------
    ValueError
        If its columns are not `COLUMNS`.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: expected the columns {COLUMNS}, got {reader.fieldnames}")
        return list(reader)


def merge_rows(
    old: Iterable[Row], new: Iterable[Row], withdrawn: Iterable[tuple[str, ...]] = ()
) -> list[Row]:
    """Replace rows by their key, keep all others, and sort.

    Parameters
    ----------
    old, new : iterable of dict
        Rows with `COLUMNS`; a new row replaces the old one of the same workload, layout, dtype and
        implementation.
    withdrawn : iterable of tuple of str
        Keys whose old row no longer holds, because this run's result was wrong.

    Returns
    -------
    list of dict

    Examples
    --------
    >>> row = dict.fromkeys(COLUMNS, "") | {"workload": "A", "ms": "2"}
    >>> [r["ms"] for r in merge_rows([row], [row | {"ms": "1"}, row | {"workload": "B", "ms": "3"}])]
    ['1', '3']
    """
    rows = {_key(row): row for row in old}
    for key in withdrawn:
        rows.pop(key, None)
    rows |= {_key(row): row for row in new}
    return [rows[key] for key in sorted(rows, key=_by_number)]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a results file, replacing it whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([row[column] for column in COLUMNS] for row in rows)
    partial.replace(path)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a Markdown table, padded to read well as plain text.

    Examples
    --------
    >>> print(markdown_table(["name", "ms"], [["A", "0.25"]]))
    | name | ms   |
    | ---- | ---- |
    | A    | 0.25 |
    """
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of a results table: a workload by one implementation, with a peer beside it.

    Attributes
    ----------
    workload, layout, dtype, implementation : str
        What ran; together the key of its csv row.
    num_bytes : int
        The fewest bytes the call must move.
    ours : Measured or Failed
        What came of it.
    peer : Measured, Failed or None
        What came of a peer's; None where there is none to compare with.
    setting : str
        What of several settings ran; not in the csv.
    """

    workload: str
    layout: str
    dtype: str
    implementation: str
    num_bytes: int
    ours: Measured | Failed
    peer: Measured | Failed | None = None
    setting: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return self.workload, self.layout, self.dtype, self.implementation

    @property
    def timing(self) -> Timing | None:
        """Our time, if there is one."""
        return _timing(self.ours)

    @property
    def peer_timing(self) -> Timing | None:
        """The peer's time, if there is one."""
        return _timing(self.peer)


def _timing(outcome: Measured | Failed | None) -> Timing | None:
    return outcome.timing if isinstance(outcome, Measured) else None


def csv_row(result: Result, read_tbps: float, peer_name: str, commit: str) -> Row | None:
    """Make the csv row of a result, or None without a time.

    Parameters
    ----------
    result : Result
        What was measured.
    read_tbps : float
        The read bandwidth of the same run.
    peer_name, commit : str
        Named in the row.

    Returns
    -------
    dict or None
    """
    if result.timing is None:
        return None
    rate = result.num_bytes / result.timing.ms / 1e9
    values = {
        "ms": f"{result.timing.ms:.5f}",
        "spread": f"{result.timing.spread:.4f}",
        "kernels": str(len(result.timing.kernels)),
        "bytes": str(result.num_bytes),
        "tbps": f"{rate:.3f}",
        "share": f"{rate / read_tbps:.3f}",
        "peer": peer_name if result.peer_timing else "",
        "peer_ms": f"{result.peer_timing.ms:.5f}" if result.peer_timing else "",
        "commit": commit,
        "jax": jax.__version__,
    }
    return dict(zip(KEY, result.key, strict=True)) | values


def results_table(results: Sequence[Result], read_tbps: float | None, peer_name: str) -> str:
    """Lay out results as Markdown; what has no time says why in its place."""
    rows = [_cells(result, read_tbps, peer_name) for result in results]
    # All results of a run have a peer, or none has; the same for settings.
    return markdown_table(list(rows[0]) if rows else ["workload"], [list(row.values()) for row in rows])


def _cells(result: Result, read_tbps: float | None, peer_name: str) -> Row:
    """Lay out a line of the table, by column."""
    cells = {"workload": result.workload, "layout": result.layout, "implementation": result.implementation}
    if result.setting:
        cells["setting"] = result.setting
    gigabytes = f"{result.num_bytes / 1e9:.4g}"
    if result.timing is None or read_tbps is None:
        ours = [_without_time(result.ours), "", gigabytes, "", "", ""]
    else:
        time, rate = result.timing, result.num_bytes / result.timing.ms / 1e9
        ours = [_ms(time), f"{time.spread:.1%}", gigabytes, f"{rate:.2f}", f"{rate / read_tbps:.1%}"]
        ours.append(str(len(time.kernels)))
    cells |= zip(("ms", "spread", "GB", "TB/s", "share of R", "kernels"), ours, strict=True)
    workspace = result.ours.workspace_bytes if isinstance(result.ours, Measured) else None
    cells["workspace MB"] = "" if workspace is None else f"{workspace / 1e6:.1f}"
    if result.peer is not None:
        theirs, ratio = _without_time(result.peer), ""
        if result.peer_timing is not None:
            theirs = _ms(result.peer_timing)
            ratio = f"{result.timing.ms / result.peer_timing.ms:.3f}" if result.timing else ""
        setting = result.peer.label if isinstance(result.peer, Measured) else ""
        cells |= {f"{peer_name} ms": theirs, "its setting": setting, "ours / peer": ratio}
    return cells


def _ms(timing: Timing) -> str:
    return f"{timing.ms:#.4g}"


def _without_time(outcome: Measured | Failed) -> str:
    return outcome.reason if isinstance(outcome, Failed) else "not measured"


def gpu_slug(device_kind: str) -> str:
    """Shorten the GPU's name to what results files carry.

    Examples
    --------
    >>> gpu_slug("NVIDIA H200"), gpu_slug("NVIDIA H100 80GB HBM3")
    ('h200', 'h100-80gb-hbm3')
    """
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower().removeprefix("nvidia ")).strip("-")


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> str:
    """Name the commit under test, with "-dirty" where the tree differs from it.

    On a machine that holds a copy of the tree without git, the variable GPU_CHECK_COMMIT names it, "-dirty"
    included. Changed results alone don't count: a run writes them.
    """
    if from_caller := os.environ.get("GPU_CHECK_COMMIT"):
        return from_caller
    head = _output_of("git", "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    changes = _output_of("git", "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return head if changes == "" else f"{head}-dirty"


def installed(*packages: str) -> dict[str, str]:
    """List the versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def versions() -> dict[str, str]:
    """List the versions of what decides a time, for the head of a results table."""
    packages = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flash-attn3-jax")
    found = {"jax": jax.__version__} | installed(*packages)
    found["driver"] = (
        _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
    )
    return found


def head(command: str, commit: str, versions: dict[str, str]) -> str:
    """Begin a page of results: what was run, of which commit, with what.

    Examples
    --------
    >>> print(head("python -m benchmarks.decode", "abc", {"jax": "0.11.2", "driver": "580"}))
    - command: `python -m benchmarks.decode`
    - commit: abc
    - versions: jax 0.11.2, driver 580
    """
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"- command: `{command}`\n- commit: {commit}\n- versions: {listed}"
