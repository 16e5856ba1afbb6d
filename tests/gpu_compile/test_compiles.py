"""Every kernel that we would pick compiles for an H200, in registers and within its estimate."""

import json
import pathlib
import subprocess
import sys

import pytest
from calls import CALLS, DemoStep

SMEM_LIMIT = 232448  # what one block can have on sm_90
SLACK = 4096  # an estimate further above the truth than this makes tiles smaller for nothing


@pytest.mark.parametrize("group", CALLS)
def test_compiles_without_spills_and_within_the_estimate(group):
    worker = pathlib.Path(__file__).with_name("compile_calls.py")
    done = subprocess.run([sys.executable, worker, group], capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for call, result in zip(CALLS[group], results, strict=False):
        print(call, json.dumps(result, indent=1))
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(results) == len(CALLS[group])

    for call, result in zip(CALLS[group], results, strict=True):
        assert "error" not in result, f"{call}\n{result['error']}"
        assert result["implementation"] == "mosaic_gpu", call
        assert result["smem_bytes"], f"{call}: no kernel of ours was launched"
        assert result["torn_aliases"] == 0, call
        assert result["pool_copies"] == 0, call
        programs = ("stacked", "steps", "sliced", "tokens_sliced", "scanned", "padded")
        in_a_program = any(getattr(call, how, None) for how in programs)
        if not (isinstance(call, DemoStep) or in_a_program):
            # Several tokens' queries are brought together and their outputs apart again; masks become bits.
            several = getattr(call, "q_len", None) or getattr(call, "total_q", None)
            packs = several or "mask" in getattr(call, "modifiers", ())
            assert {*result["other_kernels"]} <= ({"fusion"} if packs else set()), call
        for kernel, report in result["compiled"].items():
            assert report["spilled"] <= getattr(call, "spilled", 0), (call, kernel, report)
        if isinstance(call, DemoStep):  # of several kernels, `explain` tells about the first
            assert any("append" in name for name in result["smem_bytes"])
            assert any("decode" in name for name in result["smem_bytes"])
            continue
        used = max(result["smem_bytes"].values())  # of the decode kernel and of the merge
        assert used <= result["estimate"] <= SMEM_LIMIT, (call, used)
        assert result["estimate"] - used <= SLACK, (call, used)
    assert any(result["compiled"] for result in results)
