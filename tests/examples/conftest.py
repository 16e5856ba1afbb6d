"""Settings for the examples."""

import jax
import pytest


@pytest.fixture(autouse=True)
def exact_products():
    """A GPU would multiply float32 in fewer bits, in the dense layers that results are held against."""
    with jax.default_matmul_precision("highest"):
        yield
