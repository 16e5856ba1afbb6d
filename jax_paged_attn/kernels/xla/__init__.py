"""Plain jnp: runs on every platform."""
