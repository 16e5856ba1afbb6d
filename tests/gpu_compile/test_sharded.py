"""A decode step over 8 H200s exchanges outputs and lse, where it has to, and never a part of the cache."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from ways import WAYS


@pytest.mark.parametrize("way", WAYS)
def test_a_step_over_8_gpus(way):
    worker = pathlib.Path(__file__).with_name("compile_sharded.py")
    env = os.environ | {"PYTHONPATH": str(worker.parents[2])}
    done = subprocess.run([sys.executable, worker, way], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result, indent=1))

    assert result["collectives"] == dict(WAYS[way].collectives)
    assert result["pool_copies"] == result["torn_aliases"] == 0
    # Each GPU runs the kernels, not XLA's scatters and gathers, on its own part.
    assert any("append" in name for name in result["launches"])
    assert any("decode" in name for name in result["launches"])
    for report in result["compiled"].values():
        assert report["spilled"] == 0
