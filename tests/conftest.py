"""Emulates a pod on the CPU and finds the real data, where it lies beside the checkout."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FAST_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Tests compile many tiny programs and run each a few times."""

_flags = f"{os.environ.get('XLA_FLAGS', '')} {_FAST_COMPILES}"
if "xla_force_host_platform_device_count" not in _flags:
    _flags += " --xla_force_host_platform_device_count=8"
    # Eight devices take turns on few cores: give their collectives more than the usual 40 s.
    _flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    os.environ["XLA_FLAGS"] = _flags.strip()

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """Folder of real questions and passages; the test is skipped where it is absent."""
    path = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"real data not found at {path}")
    return path
