"""Draw what `benchmarks.sweep` measured: ``python -m benchmarks.plots``.

Of each ``*_sweep.csv`` among the results it draws the time and the share of the read bandwidth, against batch
and against length, ours beside the peer's, into two svg files next to it. The same csv gives the same bytes
with the same release of matplotlib, which the ``bench`` extra brings.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, sweep

# One of each a curve. The palette is Okabe and Ito's, and the markers alone tell the curves apart.
MARKERS = ("o", "s", "^")
COLORS = ("#0072b2", "#d55e00", "#009e73")
OURS: dict[str, Any] = {"linestyle": "-"}
PEERS: dict[str, Any] = {"linestyle": "--", "markerfacecolor": "white"}
STYLE = {
    "svg.hashsalt": "jax_paged_attn",  # the ids in the file are random without it
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 5,
    "legend.frameon": False,
}


@dataclasses.dataclass(frozen=True)
class Point:
    """A row of a sweep's csv.

    Attributes
    ----------
    batch, kv_len : int
        Rows, and keys of each.
    us, share : float
        Our microseconds, and our share of the read bandwidth.
    peer_us, peer_share : float
        The peer's; NaN where it has no time.
    """

    batch: int
    kv_len: int
    us: float
    share: float
    peer_us: float
    peer_share: float

    @classmethod
    def of_row(cls, row: report.Row) -> Point:
        """Parse a row.

        Examples
        --------
        >>> Point.of_row({"workload": "8x128", "ms": "0.010", "share": "0.40", "peer_ms": "0.020"})
        Point(batch=8, kv_len=128, us=10.0, share=0.4, peer_us=20.0, peer_share=0.2)
        """
        batch, kv_len = row["workload"].split("x")
        ms, share, peer_ms = float(row["ms"]), float(row["share"]), float(row["peer_ms"] or "nan")
        return cls(int(batch), int(kv_len), 1e3 * ms, share, 1e3 * peer_ms, share * ms / peer_ms)


def draw(
    title: str,
    x_label: str,
    x: Callable[[Point], int],
    curves: dict[str, list[Point]],
    peer: str,
    footer: str,
) -> bytes:
    """Draw one figure: the time above, the share of the read bandwidth below.

    Parameters
    ----------
    title, x_label, footer : str
        Texts.
    x : callable
        Where a point lies.
    curves : dict of str to list of Point
        By name, each in the order of `x`.
    peer : str
        The peer's name, or "" without one.

    Returns
    -------
    bytes
        The svg.
    """
    from matplotlib import style  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    from matplotlib.lines import Line2D  # pyright: ignore[reportMissingImports]

    # Reset, so that no configuration of the machine shows in the file.
    with style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(7, 6.4))
        times, shares = figure.subplots(2, 1, sharex=True)
        figure.subplots_adjust(left=0.1, right=0.98, top=0.86, bottom=0.13, hspace=0.08)
        for (name, points), marker, color in zip(curves.items(), MARKERS, COLORS, strict=False):
            look: dict[str, Any] = {"color": color, "marker": marker}
            at = [x(point) for point in points]
            times.plot(at, [point.us for point in points], label=name, **look, **OURS)
            shares.plot(at, [point.share for point in points], **look, **OURS)
            if peer:
                times.plot(at, [point.peer_us for point in points], **look, **PEERS)
                shares.plot(at, [point.peer_share for point in points], **look, **PEERS)
        ticks = sorted({x(point) for points in curves.values() for point in points})
        shares.set_xscale("log", base=2)
        shares.set_xticks(ticks, [f"{n // 1024}K" if n >= 1024 else str(n) for n in ticks])
        shares.minorticks_off()
        times.set_yscale("log")
        times.yaxis.set_major_formatter(lambda us, _: f"{us:g}")
        times.set_ylabel("one call, all its kernels (us)")
        shares.set_ylim(0, 1)
        shares.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        shares.set_ylabel("share of the read bandwidth")
        shares.set_xlabel(x_label)
        if len(curves) > 1:
            times.legend(loc="upper left")
        kinds = {"jax_paged_attn": OURS, peer: PEERS} if peer else {"jax_paged_attn": OURS}
        keys = [Line2D([], [], color="black", marker="o", label=name, **kind) for name, kind in kinds.items()]
        figure.legend(handles=keys, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 0.95))
        figure.suptitle(title)
        figure.text(0.01, 0.01, footer, fontsize=7)
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        return svg.getvalue()


def figures(rows: Sequence[report.Row], gpu: str) -> dict[str, bytes]:
    """Draw a sweep's figures.

    Parameters
    ----------
    rows : sequence of dict
        Of the csv, some at least.
    gpu : str
        Named below the figures.

    Returns
    -------
    dict of str to bytes
        The svg files "batch" and "length", as far as there are points for them.
    """
    points = sorted((Point.of_row(row) for row in rows), key=lambda point: (point.batch, point.kv_len))

    def every(column: str) -> str:
        return ", ".join(sorted({row[column] for row in rows} - {""}))

    footer = (
        f"{gpu}; {every('dtype')}, 32/8 heads, head_dim 128, page 16, {every('layout')}; cold reads; CUPTI; "
        f"commit {every('commit')}, jax {every('jax')}"
    )
    peer = every("peer").replace("fa3-jax-", "FlashAttention-3, flash-attn3-jax ")
    at_length = {"": [point for point in points if point.kv_len == sweep.LENGTH]}
    at_batches = {f"batch {n}": [point for point in points if point.batch == n] for n in sweep.SWEPT_BATCHES}
    drawn = {}
    if any(at_length.values()):
        title = f"One decode call against batch, {sweep.LENGTH} keys a row"
        drawn["batch"] = draw(title, "rows of the batch", lambda point: point.batch, at_length, peer, footer)
    if any(at_batches.values()):
        title = "One decode call against length"
        drawn["length"] = draw(
            title, "keys of each row", lambda point: point.kv_len, at_batches, peer, footer
        )
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    """Draw all sweeps; 1 if there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="their folder")
    results = parser.parse_args(argv).results
    sweeps = sorted(results.glob("*_sweep.csv"))
    if not sweeps:
        print(f"no sweep in {results}; run python -m benchmarks.sweep on a GPU", file=sys.stderr)
    for path in sweeps:
        gpu = path.stem.removesuffix("_sweep").upper()
        for name, svg in figures(report.read_rows(path), gpu).items():
            target = path.with_name(f"{path.stem}_{name}.svg")
            target.write_bytes(svg)
            print(target)
    return int(not sweeps)


if __name__ == "__main__":
    sys.exit(main())
