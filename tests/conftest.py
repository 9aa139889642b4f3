"""For every test: no deadlines of hypothesis, and no spinning threads (on busy cores they make torch many times slower)."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from hypothesis import HealthCheck, settings

SLOW_IS_FINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("developer", **SLOW_IS_FINE)
settings.register_profile("ci", derandomize=True, **SLOW_IS_FINE)  # a verdict on a commit must not depend on luck
settings.load_profile("ci" if os.environ.get("CI") else "developer")
