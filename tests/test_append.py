"""Writing tokens into a cache: every implementation on every named problem, against the references."""

import numpy as np
import pytest

import jax_paged_attn
from jax_paged_attn import (
    dispatch,
    reference,
)
from jax_paged_attn.testing_append import append_runs, assert_appended, make_append_inputs

NAMES = [implementation.name for implementation in dispatch.IMPLEMENTATIONS]
RUNS = [
    pytest.param(name, case, id=f"{name}-{case.name}", marks=[pytest.mark.newest] if case.newest else [])
    for name, case in append_runs()
]


@pytest.mark.parametrize(("implementation", "case"), RUNS)
def test_matches_the_reference(implementation, case):
    inputs = make_append_inputs(case)
    if implementation in case.refused_by:
        with pytest.raises(NotImplementedError, match=rf"'{implementation}' can't run this call: .+"):
            inputs.call(jax_paged_attn, implementation=implementation)
        implementation = None  # which falls to one that can
    before = [np.array(x) for x in inputs.args]
    actual = inputs.call(jax_paged_attn, implementation=implementation)
    assert_appended(inputs, actual, inputs.call(reference))
    for array, copy in zip(inputs.args, before, strict=True):  # not donated: the caller's are as they were
        assert (np.asarray(array).view(np.uint8) == copy.view(np.uint8)).all()
