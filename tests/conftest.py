"""Shared by all tests: no network, one thread, the fast marker, and the data folder."""

import atexit
import gc
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch or transformers is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# Triton reads this when it is first imported, by whatever imports it: interpret without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")
# Proofs and the like are kept for this run only; workers of pytest-xdist inherit the folder.
if "SPECDEC_CACHE" not in os.environ:
    os.environ["SPECDEC_CACHE"] = tempfile.mkdtemp(prefix="specdec-cache-")
    atexit.register(shutil.rmtree, os.environ["SPECDEC_CACHE"], ignore_errors=True)

NOT_FAST = ("slow", "gpu", "distributed", "exhaustive")
MOST_RANKS = 6  # that a test of the suite keeps


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as fast what is not marked otherwise; skips GPU tests where there is no GPU."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in NOT_FAST):
            item.add_marker(pytest.mark.fast)
    gc.freeze()  # modules live to the end: full collections need not visit them again
    for item in items:
        group = _group(item)
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _group(item: pytest.Item) -> str:
    """Which tests have to run on one worker of pytest-xdist; "" where any will do.

    Tests that start processes keep the machine busy and watch for hangs: one of them at a time.
    Tests that share a fixture of their module stay together, or it would be made twice.
    """
    if item.get_closest_marker("distributed"):
        return "processes"
    found = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    shared = any(f.scope in ("module", "class") for fs in found.values() for f in fs)
    return item.nodeid.partition("::")[0] if shared else ""


@pytest.fixture(scope="session", autouse=True)
def _files_of_the_package_are_parsed_once() -> Iterator[None]:
    """Hydra reads 24 files per composition, of this package and its own, which do not change."""
    from hydra._internal.config_repository import ConfigRepository
    from hydra.core.object_type import ObjectType

    from specdec.config.hydra import CONFIG_DIR

    load, kept = ConfigRepository.load_config, dict[tuple[str, str], bytes]()
    tree = str(CONFIG_DIR)

    def once(repository: Any, config_path: str) -> Any:
        source = repository._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or (source.path != tree and source.scheme() != "pkg"):
            return load(repository, config_path)
        key = source.path, config_path
        if key not in kept:
            kept[key] = pickle.dumps(load(repository, config_path))
        return pickle.loads(kept[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigRepository, "load_config", once)
        yield


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """Otherwise the outcome of a test would depend on those before it."""
    before, path = _process_state(), list(sys.path)
    yield
    sys.path[:] = path  # the command line appends the folder of --config-dir
    after = _process_state()
    for name, value in before.items():  # but what is imported first during the test
        assert after[name] == value, f"the test leaves another {name}"


# Set by libraries at their first use, for good.
_OF_LIBRARIES = ("PYTEST_CURRENT_TEST", "WANDB_SERVICE", "_TORCHINDUCTOR_", "TORCHINDUCTOR_")


def _process_state() -> dict[str, object]:
    """What the tests of a process share, other than caches."""
    found: dict[str, object] = {
        "working directory": os.getcwd(),
        "environment": {k: v for k, v in os.environ.items() if not k.startswith(_OF_LIBRARIES)},
        "handlers of signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
    }
    torch, hydra = sys.modules.get("torch"), sys.modules.get("hydra.core.global_hydra")
    if torch is not None:
        found["torch's settings"] = (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
        )
    if hydra is not None:
        found["GlobalHydra"] = hydra.GlobalHydra.instance().is_initialized()
    return found


@pytest.fixture
def data_dir() -> Path:
    """The folder of the data sets; tests that need it are skipped where there is none."""
    folder = os.environ.get("SPECDEC_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("SPECDEC_DATA names no folder")
    return Path(folder)


@pytest.fixture(scope="session")
def keep_ranks() -> Iterator[Callable[..., None]]:
    """Starts groups of ranks that serve all tests: starting one takes seconds of CPU time.

    ``keep_ranks()``: a group that has enough for every test, started anew if a test has broken it.
    ``number``: of a further group, of one rank; see ``GroupHandle``.
    """
    from specdec.distributed import GroupHandle

    handles: dict[int, GroupHandle] = {}

    def keep(number: int = 0) -> None:
        kept = handles.get(number)
        if kept is None or not kept.group.alive:
            num_ranks = 1 if number else MOST_RANKS
            handles[number] = GroupHandle(num_ranks, threads=1, number=number)

    yield keep
    for handle in handles.values():
        handle.release()


class FakeEngine(types.ModuleType):
    """Stands for ``specdec.runs.jobs``: records what crosses the door and writes result files.

    Attributes:
        runs: (config, folder) per ``run_job``.
        comparisons: (configs, folder, repeats) per ``compare_jobs``.
        failing: strategies whose run raises ``error``.
        summary: what ``run_job`` returns.
    """

    def __init__(self) -> None:
        super().__init__("specdec.runs.jobs")
        self.runs: list[tuple[dict[str, Any], Path]] = []
        self.comparisons: list[tuple[list[dict[str, Any]], Path, int]] = []
        self.failing: set[str] = set()
        self.error: BaseException = RuntimeError("planted")
        self.summary: dict[str, Any] = {}

    def run_job(self, config: dict[str, Any], output_dir: Path, progress: Any) -> dict[str, Any]:
        self.runs.append((config, output_dir))
        if config["strategy"]["name"] in self.failing:
            raise self.error
        progress.phase("decode", 1)
        progress.advance()
        (output_dir / "summary.json").write_text("{}", encoding="utf-8")
        return self.summary

    def compare_jobs(
        self, configs: list[dict[str, Any]], output_dir: Path, repeats: int, progress: Any
    ) -> dict[str, Any]:
        self.comparisons.append((configs, output_dir, repeats))
        (output_dir / "comparison.md").write_text("| the table |\n", encoding="utf-8")
        results = {"rows": [{}] * len(configs)}
        (output_dir / "comparison.json").write_text(json.dumps(results), encoding="utf-8")
        return results


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The command line with a fake engine behind it."""
    fake = FakeEngine()
    monkeypatch.setitem(sys.modules, "specdec.runs.jobs", fake)
    return fake
