"""For every test: no deadlines of hypothesis, and no spinning threads (on busy cores they make torch many times slower)."""

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import HealthCheck, settings

SLOW_IS_FINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("developer", **SLOW_IS_FINE)
settings.register_profile("ci", derandomize=True, **SLOW_IS_FINE)  # a verdict on a commit must not depend on luck
settings.load_profile("ci" if os.environ.get("CI") else "developer")


@pytest.fixture(params=["compiled", "torch"])
def cpu_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The test runs twice on the CPU: with the compiled kernels, where they can be built, and without."""
    from agentkv.kernels.native import SWITCH, native

    native.cache_clear()
    if request.param == "torch":
        monkeypatch.setenv(SWITCH, "0")
    if (not native().functions) == (request.param == "compiled"):
        pytest.skip(native().note)
    yield request.param
    native.cache_clear()
