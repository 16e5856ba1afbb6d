"""What `benchmarks.dispatch_overhead` measures, and that it can run."""

import doctest
import re
import types

from benchmarks import dispatch_overhead
from benchmarks.dispatch_overhead import ANNOTATION, Event, read_step


def test_dry_run_walks_through_everything(tmp_path, capsys, monkeypatch):
    assert dispatch_overhead.main(["--dry-run", "--out", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    first, second = re.findall(r"\d hits, \d misses", page)
    assert (first, second) == ("0 hits, 1 misses", "1 hits, 0 misses")  # the second process finds it compiled
    assert "nothing is written" in page
    assert list(tmp_path.iterdir()) == []


def test_what_it_says_of_a_profile():
    assert doctest.testmod(dispatch_overhead, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0
    host, gpu = ("/host:CUPTI", "thread"), ("/device:GPU:0", "Stream #1(Compute)")
    kernels = [Event(*gpu, "decode", 1.0, 2.0), Event(*gpu, "append", 2.0, 2.5)]
    launches = [Event(*host, "cuLaunchKernelEx", 0.1, 0.2), Event(*host, "cuLaunchKernelEx", 0.3, 0.4)]
    call = Event("/host:CPU", "main", ANNOTATION, 0.0, 0.5)
    before = Event(*host, "cuStreamSynchronize", -1.0, -0.5)
    after = Event(*host, "cuStreamSynchronize", 0.5, 3.0)
    profile = read_step([before, call, *launches, after, *kernels])
    assert profile.waits == ()
    assert (profile.kernels, profile.launches, profile.busy, profile.longest_gap_us) == (2, 2, 1.0, 0.0)
    copied = read_step([call, *launches, *kernels, Event(*gpu, "MemcpyD2H", 1.5, 1.6)])
    assert copied.waits == ("MemcpyD2H",)
    assert copied.kernels == 2


def test_it_needs_a_gpu_or_a_dry_run(capsys, monkeypatch):
    monkeypatch.setattr(dispatch_overhead, "current_device", lambda: types.SimpleNamespace(platform="cpu"))
    assert dispatch_overhead.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err
