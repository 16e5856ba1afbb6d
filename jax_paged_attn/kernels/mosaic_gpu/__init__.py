"""Pallas Mosaic GPU kernels."""
