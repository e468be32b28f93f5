"""Does a built wheel work where there is nothing but Python and pip: ``python packaging/check_wheel.py dist``.

The wheel must need no library that a manylinux system lacks (auditwheel), install into a fresh virtual environment,
and train, commit and read back a table there, with no compiler to be found and torch not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

FIRST_LOOKUP = """
import sys, shutil
import numpy as np
import bunkbed as bb

assert "torch" not in sys.modules
for tool in ("cc", "gcc", "c++", "g++", "clang", "cmake", "ninja"):
    assert shutil.which(tool) is None, tool
ids = np.array([3, 1, 3])
with bb.create(sys.argv[1], dim=8, num_rows=1000, optimizer=bb.Adam(0.01), ram="1MiB", seed=1) as table:
    before = table.lookup(ids)
    table.update(ids, np.ones((3, 8), np.float32))
    trained = table.get(ids)
with bb.open(sys.argv[1]) as table:
    again = table.get(ids)
assert not np.array_equal(before, trained)
assert np.array_equal(again, trained)
"""


def platform_tag(wheel: Path) -> str:
    """The manylinux tag that the wheel's libraries allow."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"auditwheel cannot judge {wheel.name}:\n{done.stderr}")
    tag = str(json.loads(done.stdout)["overall_tag"])
    if not tag.startswith("manylinux"):
        sys.exit(f"{wheel.name} would run on few systems: auditwheel gives it the tag {tag}")
    return tag


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where exactly one wheel lies")
    wheels = sorted(parser.parse_args().folder.glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"one wheel is wanted, there are {len(wheels)}: {', '.join(map(str, wheels))}")
    print(f"{wheels[0].name}: {platform_tag(wheels[0])}, {wheels[0].stat().st_size / 2**20:.1f} MiB")
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        venv.create(folder, with_pip=True)
        bin_folder = Path(folder, "bin")
        # pip's own settings stay; every folder with a compiler goes.
        environment = {**os.environ, "PATH": str(bin_folder)}
        environment.pop("PYTHONPATH", None)
        run = [str(bin_folder / "python")]
        pip = [*run, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", str(wheels[0].resolve())]
        subprocess.run(pip, env=environment, cwd=folder, check=True)
        subprocess.run([str(bin_folder / "bunkbed"), "--version", "--verbose"], env=environment, cwd=folder, check=True)
        script = [*run, "-c", FIRST_LOOKUP, str(Path(folder, "table"))]
        subprocess.run(script, env=environment, cwd=folder, check=True)
        print(f"from nothing to a table that was trained and read back: {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
