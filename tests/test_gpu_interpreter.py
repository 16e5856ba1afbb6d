"""The guard of conftest.py, against a kernel that races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

pytestmark = pytest.mark.newest


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def copy_twice(x, *, wait):
    """Copies `x` through shared memory; without `wait`, reads it while the copy may still be running."""

    def body(x_gmem, out_gmem, x_smem, x_ready):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, x_ready)
        if wait:
            plgpu.barrier_wait(x_ready)
        out_gmem[...] = x_smem[...]
        if not wait:
            plgpu.barrier_wait(x_ready)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )(x)


def test_no_race_in_a_kernel_that_waits(gpu_interpreter):
    x = jnp.arange(128, dtype=jnp.float32)
    np.testing.assert_array_equal(copy_twice(x, wait=True), x)
    assert [state.races_found for state in gpu_interpreter] == [False]


def test_race_is_seen_though_a_clean_kernel_follows(gpu_interpreter):
    x = jnp.arange(128, dtype=jnp.float32)
    try:
        jax.block_until_ready(copy_twice(x, wait=False))
    except jax.errors.JaxRuntimeError as error:  # jax 0.12 raises; 0.11 prints
        raised = "RACE DETECTED" in str(error)
    else:
        raised = False
        jax.block_until_ready(copy_twice(x, wait=True))
    assert raised or [state.races_found for state in gpu_interpreter] == [True, False]
    gpu_interpreter.clear()  # this race is wanted
