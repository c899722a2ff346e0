"""What all recipes share: folders, seed, machine, and data-parallel processes.

Processes exchange gradients over gloo or NCCL. On a CPU that is shared with other work, processes
of one thread that synchronize once per step lose less time than one process of several threads,
which synchronize at every operation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from specdec.errors import UserError
from specdec.train.model import LanguageModel, load_hf

Report = Callable[[float, str], None]
"""Called with progress in [0, 1] and a line of text."""


def silent(_progress: float, _line: str) -> None: ...


def rank_and_size() -> tuple[int, int]:
    """Returns this process's rank and the number of processes; (0, 1) outside a group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def from_rank_0(value: float) -> float:
    values = [value]
    if rank_and_size()[1] > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def wait_for_all() -> None:
    if rank_and_size()[1] > 1:
        dist.barrier()


def check_rows(batch: int, name: str) -> None:
    size = rank_and_size()[1]
    if batch % size:
        raise UserError(f"{name}={batch} must be a multiple of num_processes={size}")


def own_rows(*batches_BS: Tensor, device: torch.device) -> list[Tensor]:
    rank, size = rank_and_size()
    return [batch_BS[rank::size].to(device) for batch_BS in batches_BS]


def average_gradients(weights: Iterable[torch.nn.Parameter]) -> None:
    """Replaces each gradient by its mean over processes that have gradients of the same weights."""
    size = rank_and_size()[1]
    if size > 1:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat)
        vector_to_parameters(flat / size, gradients)


_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The keys that recipes share; conf/train/NAME.yaml describes those that a recipe uses.

    ``device`` is a name; "auto" is a GPU if there is one (by rank in a group), else the CPU.
    """

    output_dir: str
    seed: int
    work_dir: str = ""
    precision: Literal["bf16", "fp32"] = "fp32"
    compiled: bool = False
    num_threads: int = 0
    num_processes: int = 1
    device: str = "cpu"
    report: Report = silent

    @property
    def work(self) -> Path:
        return Path(self.work_dir)

    @property
    def out(self) -> Path:
        return Path(self.output_dir)

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.precision]

    @property
    def place(self) -> torch.device:
        rank, size = rank_and_size()
        if self.device == "auto" and size == 1:
            return Accelerator().device
        own = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
        return torch.device(own if self.device == "auto" else self.device)

    def load(self, folder: Path) -> LanguageModel:
        model = load_hf(folder, compute_dtype=self.dtype, compiled=self.compiled)
        return model.to(self.place)


Recipe = Callable[..., None]  # called with a Session and the recipe's own keys


def start(recipe: Recipe, session: Session, values: Mapping[str, Any]) -> None:
    """Runs a module-level recipe in ``session.num_processes`` processes of one group.

    On GPUs there is at most one process per GPU, and only one if ``device`` names a single GPU; a
    line of the report then states their number. A single process is this one.
    """
    size, device = session.num_processes, session.device
    if size > 1 and device != "cpu" and torch.cuda.is_available():
        limit = 1 if ":" in device else torch.cuda.device_count()
        if limit < size:
            session.report(0.0, f"device={device}: {limit} of num_processes={size}, one per GPU")
        size = min(size, limit)
    (_run_in_processes if size > 1 else _run)(recipe, session, values, size)


def _run(recipe: Recipe, session: Session, values: Mapping[str, Any], _size: int = 1) -> None:
    if session.num_threads:
        torch.set_num_threads(session.num_threads)
    recipe(session, **values)


def _run_in_processes(
    recipe: Recipe, session: Session, values: Mapping[str, Any], size: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = (size, Path(folder), recipe, replace(session, report=silent), dict(values))
        try:
            mp.start_processes(_child, words, size, start_method="spawn")  # type: ignore[no-untyped-call]
        except mp.ProcessRaisedException as error:
            messages = sorted(Path(folder).glob("*.error"))
            raise UserError(messages[0].read_text()) if messages else error from None


def _child(
    rank: int, size: int, folder: Path, recipe: Recipe, session: Session, values: dict[str, Any]
) -> None:
    backend = "nccl" if torch.cuda.is_available() and session.device != "cpu" else "gloo"
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    try:
        _run(recipe, replace(session, report=silent if rank else _print), values)
    except UserError as error:
        (folder / f"{rank}.error").write_text(str(error))
        raise
    finally:
        dist.destroy_process_group()


def _print(progress: float, line: str) -> None:
    console = Console(stderr=True)
    console.print(f"{progress:4.0%} {line}", markup=False, highlight=False)
