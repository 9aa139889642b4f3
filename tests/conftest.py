"""For every test: no deadlines of hypothesis, and no spinning threads (on busy cores they make torch many times slower)."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from hypothesis import HealthCheck, settings  # noqa: E402 - the variable must be set before anything imports torch

settings.register_profile("agentkv", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("agentkv")
