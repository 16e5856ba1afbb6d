"""Every call that `benchmarks.append` times is one kernel on an H200, with no copy of the pools beside it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks.append_workloads import WORKLOADS
from benchmarks.session import LAYOUTS


@pytest.mark.parametrize("name", [workload.name for workload in WORKLOADS])
def test_a_timed_call_is_one_kernel(name):
    worker = pathlib.Path(__file__).with_name("compile_append_benchmark.py")
    env = os.environ | {"PYTHONPATH": str(worker.parents[2])}
    done = subprocess.run([sys.executable, worker, name], env=env, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(json.dumps(results, indent=1))
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(results) == len(LAYOUTS)

    for result in results:
        assert "error" not in result, result["error"]
        assert result["operations"] == ["custom-call"]
        assert result["launches"] == 1
        assert result["why_not_timed"] is None
        for report in result["compiled"].values():
            assert report["spilled"] == 0
