"""Build a wheel from the checkout, install it in a fresh environment, run the demo from an empty folder.

Run by `make wheel-check`; not a unit test (it takes minutes and installs packages).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    print("$", *command, flush=True)
    return subprocess.run([str(part) for part in command], cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.rmtree(ROOT / "build", ignore_errors=True)  # a stale one would put deleted files into the wheel
        run(sys.executable, "-m", "build", "--wheel", "--outdir", place / "dist", ROOT, cwd=ROOT)
        wheel = next((place / "dist").glob("*.whl"))
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
        venv.create(place / "env", with_pip=True)
        python = place / "env" / "bin" / "python"
        run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints" / "cpu.txt", "torch", wheel, cwd=place)
        empty = place / "empty"
        empty.mkdir()
        started = time.monotonic()
        out = run(place / "env" / "bin" / "agentkv", "demo", "--json", cwd=empty)
        result = json.loads(out.strip().splitlines()[-1])
        print(json.dumps(result), f"in {time.monotonic() - started:.0f} s")
        if not (result["solved"] and result["resumed"]):
            sys.exit("the demo did not solve its task, or did not resume")
        if list(empty.iterdir()):
            sys.exit("the demo left files behind")


if __name__ == "__main__":
    main()
