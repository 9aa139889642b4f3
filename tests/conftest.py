"""For every test: threads that wait must not spin, or two busy cores make torch many times slower."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
