"""The plots of the sweep. matplotlib runs in processes of its own: its warnings are not ours to judge."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report, sweep

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"


def draw(results, hash_seed):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.plots", "--results", results],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(path) for path in sorted(results.glob("*.svg"))]
    return {path.name: path.read_bytes() for path in results.glob("*.svg")}


@pytest.fixture
def made_up(tmp_path):
    """A sweep by made-up times; one point lacks the peer's, and one is missing."""
    rows = []
    for point in sweep.POINTS[:-1]:
        times = {"ms": f"{point.num_bytes / 4e9 + 0.01:.5f}", "share": "0.5", "peer_ms": "0.02"}
        if point.name == "8x128":
            times["peer_ms"] = ""
        names = {"workload": point.name, "layout": "HND", "peer": "fa3-jax-0.2.3", "commit": "abc"}
        rows.append(dict.fromkeys(report.COLUMNS, "") | names | times)
    report.write_rows(tmp_path / "h200_sweep.csv", report.merge_rows([], rows))
    return tmp_path


def test_the_same_csv_gives_the_same_plots(made_up):
    first = draw(made_up, hash_seed=1)
    assert set(first) == {"h200_sweep_batch.svg", "h200_sweep_length.svg"}
    assert draw(made_up, hash_seed=2) == first
    text = {name: svg.decode() for name, svg in first.items()}
    for svg in text.values():
        for label in ("jax_paged_attn", "FlashAttention-3, flash-attn3-jax 0.2.3", "commit abc", "H200"):
            assert label in svg
        assert "<dc:date>" not in svg
    assert all(f">batch {n}<" in text["h200_sweep_length.svg"] for n in (1, 8, 64))
    assert ">128K<" in text["h200_sweep_length.svg"]
    assert ">256<" in text["h200_sweep_batch.svg"]
    assert ">512<" not in text["h200_sweep_batch.svg"]


def test_no_peer_and_few_points_are_drawn_too(made_up):
    path = made_up / "h200_sweep.csv"
    rows = [row | {"peer": "", "peer_ms": ""} for row in report.read_rows(path) if row["workload"] == "8x128"]
    report.write_rows(path, rows)
    drawn = draw(made_up, hash_seed=1)
    assert set(drawn) == {"h200_sweep_length.svg"}  # no point of the other one
    assert b"FlashAttention" not in drawn["h200_sweep_length.svg"]


def test_committed_plots_are_those_of_the_committed_sweeps(tmp_path):
    sweeps = list(RESULTS.glob("*_sweep.csv"))
    committed = {path.name: path.read_bytes() for path in RESULTS.glob("*_sweep_*.svg")}
    for path in sweeps:
        shutil.copy(path, tmp_path)
    drawn = draw(tmp_path, hash_seed=0) if sweeps else {}
    assert set(drawn) == set(committed)
    for name, svg in drawn.items():
        # Another release of matplotlib may place things differently.
        release = re.search(rb"Matplotlib v[^,]+,", svg)
        assert release is not None
        if release[0] in committed[name]:
            assert svg == committed[name], f"{name}: run python -m benchmarks.plots"
