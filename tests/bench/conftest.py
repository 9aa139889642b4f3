"""The helper of the kernels' tests, for benchmarks of kernels."""

import sys
from pathlib import Path

for folder in ("kernels", "engine"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
