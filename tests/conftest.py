"""Settings for every test. They leave JAX's choice of platform alone: the suite runs on a GPU as well."""

import importlib.util
import os

import hypothesis
import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

# Collected only when named: the first need the CUDA plugin and its compilers (`make gpu-compile`), the others
# 8 devices (`test_sharding.py` runs them).
collect_ignore = ["gpu_compile", "multi_device"]
# What not every environment has: matplotlib is in the extra `dev` alone, a GPU machine may lack the others.
for module, file in (
    ("matplotlib", "test_plots.py"),
    ("flatbuffers", "test_export_serialized.py"),
    ("flax", "examples/test_flax_nnx.py"),
    ("equinox", "examples/test_equinox.py"),
):
    if importlib.util.find_spec(module) is None:
        collect_ignore.append(file)

# Read when XLA starts, for its pool of threads: the interpreter needs one for each warpgroup of a block and
# one more, however small the machine.
os.environ.setdefault("NPROC", "8")

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Unused cache slots hold NaN on purpose, and an empty row's lse is -inf.
jax.config.update("jax_debug_nans", False)
jax.config.update("jax_debug_infs", False)

# The same examples on every machine, and no deadline: a first example compiles.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def gpu_interpreter(monkeypatch):
    """Fails a test in which the interpreter of GPU kernels saw a data race, and cleans up after it.

    jax 0.11 only prints a race, and its `get_races` knows the last kernel alone, while a call of ours can run
    several: so this keeps the state of each. The interpreter also keeps its state when a kernel raises, and
    would fail in the next test. Both need private names; should they go, every test says so.
    """
    states = []
    make_state = gpu_callbacks.GPURaceDetectionState

    def recorded(*args, **kwargs):
        states.append(make_state(*args, **kwargs))
        return states[-1]

    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", recorded)
    yield states
    gpu_callbacks.reset_gpu_interpret_mode_state()
    assert not any(state.races_found for state in states), "a data race in an interpreted kernel"
