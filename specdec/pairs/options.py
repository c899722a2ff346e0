import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.errors import UserError
from specdec.executors.models import ModelPair
from specdec.parts.build import build_part
from specdec.parts.fields import Count, expects, validated

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
OwnDtype = Annotated[
    Literal["auto", "float64", "float32", "bfloat16", "float16"],
    expects("it must be auto, float64, float32, bfloat16 or float16; model.quantization has int8"),
]
Device = Annotated[
    str,
    Field(pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$"),
    expects("it must be auto, cpu, mps, cuda or cuda:NUMBER"),
]

_PLAIN = {
    "attention": ("auto", "dense"),
    "graphs": ("off",),
    "kernels": ("torch",),
    "quantization": ("none",),
}
"""Option -> the values with which passes run in plain PyTorch with dense attention."""

_BITS = {"none": None, "int8": 8, "int4": 4}

_BUILDERS = {
    "pretrained": "specdec.pairs.pretrained.build_pretrained",
    "random": "specdec.pairs.random.build_random",
    "synthetic": "specdec.pairs.recorded.build_synthetic",
    "replay": "specdec.pairs.recorded.build_replay",
    "table": "specdec.pairs.table.TablePair",
}
"""``model.kind`` -> what builds the pair from the section's other keys; imported when used."""


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of all models of a pair; keys of ``conf/model/hf.yaml`` and ``random.yaml``.

    Attributes:
        dtype: type of the weights; auto: the checkpoint's on CUDA devices, float32 on others.
        device: a torch device; auto: the GPU if there is one.
        attention: kernel of tree attention; auto: triton on GPUs that can run it, else dense.
        graphs, kernels: CUDA graphs, fused or packed kernels (``models.execution.Execution``).
        quantization: quantisation of the weights in ONNX Runtime, for all models; values that begin
            with ``draft_`` leave the target as it is.
        head_bits: bits per weight of an EAGLE head's matrices in ONNX Runtime; None: float32.
        backend: eager (PyTorch), onnx (ONNX Runtime), or auto: onnx for all models if it can run
            each.
        exit_layer: number of layers before the early exit; None for no exit.
        exit_head: what precedes an exit's output matrix, a norm or a decoder layer and a norm.
        exact: whether each row must have the bits of plain decoding in any pass (docs/exact.md).
    """

    dtype: OwnDtype = "auto"
    device: Device = "auto"
    attention: Literal["auto", "dense", "triton", "flash"] = "auto"
    graphs: Literal["off", "auto", "cuda", "replay"] = "off"
    kernels: Literal["torch", "triton", "packed"] = "torch"
    quantization: Literal["none", "int8", "int4", "draft_int8", "draft_int4"] = "none"
    head_bits: Literal[4, 8] | None = None
    backend: Literal["eager", "onnx", "auto"] = "eager"
    exit_layer: Count | None = None
    exit_head: Literal["norm", "transformer"] = "transformer"
    exact: bool = False

    def __post_init__(self) -> None:
        special = self.special()
        special += [("backend", "onnx", "eager")] if self.backend == "onnx" else []
        for name, value, plain in special if self.exact else ():
            raise UserError(
                f"model.{name}={value} is not proved to give a row the same bits in every pass,"
                f" which model.exact=true needs: use model.{name}={plain}, or model.exact=false"
            )
        if self.quantization != "none" and self.backend == "eager":
            raise UserError(
                f"model.quantization={self.quantization} rounds the weights of ONNX Runtime's"
                f" sessions, and model.backend={self.backend}: use model.backend=onnx, or"
                " model.quantization=none"
            )

    def special(self) -> list[tuple[str, str, str]]:
        """Returns (name, value, plain value) of options by which a pass is not plain PyTorch."""
        return [
            (name, _yaml(value), _yaml(plain[0]))
            for name, plain in _PLAIN.items()
            if (value := getattr(self, name)) not in plain
        ]

    def bits_of(self, name: str) -> int | None:
        """Returns the bits of a model's weights in ONNX Runtime; None: float32."""
        only_drafts, _, kind = self.quantization.rpartition("_")
        # Heads of exits have weights of their own, which are not rounded.
        return None if name == "exit" or (only_drafts and name == "target") else _BITS[kind]

    def onnx_or_eager(self, reasons: Sequence[str | None]) -> str:
        """Returns what runs the passes, "onnx" or "eager". ``reasons`` has, for each model, why
        ONNX Runtime cannot run it, or None if it can.
        """
        options = [f"{n}={value}" for n, value, _ in self.special() if n != "quantization"]
        options += ["exact=true"] if self.exact else []
        problems = [*reasons, *(f"it has no model.{option}" for option in options)]
        reason = next(filter(None, problems), None)
        if reason is not None and self.quantization != "none":
            raise UserError(
                f"model.quantization={self.quantization} needs ONNX Runtime: {reason}; use"
                " model.quantization=none"
            )
        if reason is not None and self.backend == "onnx":
            raise UserError(f"model.backend=onnx cannot be used: {reason}; use model.backend=eager")
        return "onnx" if reason is None else "eager"


def _yaml(value: object) -> str:
    return str(value).lower()


def with_flat_options(cls: type[Any], into: str = "options", **narrower: Any) -> Callable[..., Any]:
    """Returns a function that constructs ``cls`` and takes the fields of its argument ``into``, a
    dataclass, as separate arguments. ``narrower``: field -> type that replaces the dataclass's.
    """
    own = dict(inspect.signature(cls, eval_str=True).parameters)
    default = own.pop(into).default
    fields = {
        name: field.replace(
            default=getattr(default, name), annotation=narrower.get(name, field.annotation)
        )
        for name, field in inspect.signature(type(default), eval_str=True).parameters.items()
    }

    def make(**keys: Any) -> Any:
        chosen = {name: keys.pop(name) for name in fields.keys() & keys.keys()}
        return cls(**keys, **{into: replace(default, **chosen)})

    make.__signature__ = inspect.Signature([*own.values(), *fields.values()])  # type: ignore[attr-defined]
    return make


def build_pair(cfg: Mapping[str, Any]) -> ModelPair:
    """Builds the pair of the section ``model``: a built-in kind, or the class in ``_target_``."""
    keys = {k: v for k, v in cfg.items() if k != "kind"}
    if "_target_" in cfg:
        return build_part(keys, {}, "model", ModelPair)  # type: ignore[no-any-return]
    if cfg["kind"] not in _BUILDERS:
        raise UserError(f"model.kind={cfg['kind']} is unknown; use {', '.join(_BUILDERS)}")
    try:
        return resolve_name(_BUILDERS[cfg["kind"]])(**keys)  # type: ignore[no-any-return]
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"model: {error}") from error
