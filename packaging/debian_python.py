"""A CPython of another version or processor, out of Debian's packages.

Nothing is installed: apt downloads the packages, dpkg unpacks them into a folder. What that folder holds runs here
through its own loader, or through QEMU's user mode where the processor is another one (``qemu-user-static``).
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

#: Which release of Debian has which Python.
RELEASES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
#: Debian's names of the processors.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
#: The minor version of the C library of the oldest of them.
_GLIBC = 36
MIRROR = "http://deb.debian.org/debian"


@dataclass(frozen=True)
class DebianPython:
    """An unpacked Python: its version ("3.13"), its processor ("aarch64") and the folder it lies in."""

    version: str
    machine: str
    root: Path

    @property
    def executable(self) -> Path:
        return self.root / "usr/bin" / f"python{self.version}"

    @property
    def include(self) -> Path:
        return self.root / "usr/include" / f"python{self.version}"

    @property
    def emulator(self) -> list[str]:
        """What a program of that folder is started with."""
        if self.machine != platform.machine():
            return [f"qemu-{self.machine}-static", "-L", str(self.root)]
        folders = [self.root / name / f"{self.machine}-linux-gnu" for name in ("lib", "usr/lib")]
        return [str(folders[0] / LOADERS[self.machine]), "--library-path", ":".join(map(str, folders))]

    @property
    def command(self) -> list[str]:
        return [*self.emulator, str(self.executable)]

    def install(self, requirements: list[str], folder: Path) -> None:
        """Puts wheels of this Python and what they need into a folder for PYTHONPATH; pip of this process does it."""
        platforms = [f"manylinux_2_{minor}_{self.machine}" for minor in range(17, _GLIBC + 1)]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(folder)]
        pip += ["--only-binary", ":all:", "--python-version", self.version, "--implementation", "cp"]
        pip += [argument for name in platforms for argument in ("--platform", name)]
        subprocess.run([*pip, *requirements], check=True)


def fetch(version: str, machine: str, folder: Path) -> DebianPython:
    """Downloads and unpacks a Python with its headers into ``folder``, unless it lies there already."""
    python = DebianPython(version, machine, folder.resolve() / "root")
    needed = ["apt-get", "dpkg"] + ([python.emulator[0]] if machine != platform.machine() else [])
    missing = [tool for tool in needed if shutil.which(tool) is None]
    if missing:
        sys.exit(f"needs {', '.join(missing)}: apt-get install qemu-user-static, on Debian or Ubuntu")
    done = folder / ".unpacked"
    if done.exists():
        return python
    state = folder.resolve() / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    sources = state / "sources.list"
    sources.write_text(f"deb {MIRROR} {RELEASES[version]} main\n", encoding="utf-8")
    settings = {
        "APT::Architecture": ARCHITECTURES[machine],
        "APT::Architectures": ARCHITECTURES[machine],
        "APT::Sandbox::User": "",
        "Dir::State": state,
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
    }
    apt = ["apt-get", "-qq", *(part for key, value in settings.items() for part in ("-o", f"{key}={value}"))]
    subprocess.run([*apt, "update"], check=True)
    packages = [f"python{version}", f"libpython{version}-dev", "libstdc++6"]
    subprocess.run([*apt, "install", "-y", "--no-install-recommends", "--download-only", *packages], check=True)
    for package in sorted((state / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(python.root)], check=True)
    for name in ("lib", "lib64"):  # Debian's package base-files makes these links
        if not (python.root / name).exists():
            (python.root / name).symlink_to(f"usr/{name}")
    # Debian's pyconfig.h includes that of the processor, which lies among the headers of the C library.
    of_machine = python.include.parent / f"{machine}-linux-gnu" / python.include.name / "pyconfig.h"
    shutil.copy(of_machine, python.include / "pyconfig.h")
    shutil.rmtree(state)
    done.touch()
    return python
