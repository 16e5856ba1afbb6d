"""Runs what needs several devices: those can't be added once JAX runs, hence other processes."""

import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]

pytestmark = pytest.mark.newest


def environment(devices):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def test_on_8_devices():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/multi_device"]
    done = subprocess.run(command, cwd=ROOT, env=environment(8), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_on_the_devices_of_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.multi_device.process", address, "2"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen([*command, str(i)], cwd=ROOT, env=environment(2), **options) for i in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
