"""What each rank of a 70B model holds and reads, from modules on the meta device.

    python -m experiments.scale.shards [--shape llama3-70b] [--ranks 8] [--context 32768]

Prints, for pipeline stages and for tensor parallelism over ``--ranks`` ranks, the bytes of weights
and of the cache of one request of ``--context`` tokens in bfloat16, and the safetensors files (of
5 GB each, filled in the order of the layers) that the rank opens, with the bytes it reads of them.
Nothing is loaded.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from experiments.gpu.shapes import Shape, llama_config
from experiments.scale.checkpoints import SHAPES
from specdec.executors.stage import split_layers
from specdec.tensor_parallel import Collective, HeadSplit, shard_modules

_FILE_BYTES = 5_000_000_000
_ITEM = 2  # bytes of bfloat16
_GB = 1e9


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part of a model.

    Attributes:
        what: its layers, or its share of them.
        weights: bytes of its weights, which are the bytes that it reads.
        cache: bytes of its cache of one request.
        files: numbers of the files that it opens.
    """

    what: str
    weights: int
    cache: int
    files: list[int]


def meta_model(shape: Shape) -> PreTrainedModel:
    """A Llama model of this shape without memory."""
    with torch.device("meta"):
        return LlamaForCausalLM(llama_config(shape)).to(torch.bfloat16)


def files_of(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Tensor name -> number of its file; each file is filled up to 5 GB."""
    numbers, number, filled = {}, 1, 0
    for name, tensor in weights.items():
        size = tensor.numel() * _ITEM
        if filled and filled + size > _FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + size
    return numbers


def _share(
    what: str, weights: Mapping[str, Tensor], cache: int, files: Mapping[str, int]
) -> RankShare:
    size = sum(tensor.numel() * _ITEM for tensor in weights.values())
    return RankShare(what, size, cache, sorted({files[name] for name in weights}))


def stages(model: PreTrainedModel, shape: Shape, ranks: int, context: int) -> list[RankShare]:
    """Whole layers per rank; embeddings on the first, norm and output head on the last."""
    weights = dict(model.named_parameters())
    files, found = files_of(weights), []
    for first, last in split_layers(shape.layers, ranks):
        inside = tuple(f"model.layers.{layer}." for layer in range(first, last))
        own = {
            name: tensor
            for name, tensor in weights.items()
            if name.startswith(inside)
            or (first == 0 and "embed_tokens" in name)
            or (last == shape.layers and name.startswith(("model.norm", "lm_head")))
        }
        cache = shape.cache_bytes(context, _ITEM) * (last - first) // shape.layers
        found.append(_share(f"layers {first} to {last - 1}", own, cache, files))
    return found


def shares(model: PreTrainedModel, shape: Shape, ranks: int, context: int) -> list[RankShare]:
    """A share of every layer and of the output head per rank; whole embeddings and norms."""
    files, found = files_of(dict(model.named_parameters())), []
    for rank in range(ranks):
        share = copy.deepcopy(model)
        shard_modules(share, Collective(rank=rank, size=ranks))
        heads = HeadSplit.of(shape.heads, shape.kv_heads, rank=rank, size=ranks)
        num = len(heads.key_value)
        cache = shape.cache_bytes(context, _ITEM) * num // shape.kv_heads
        what = f"{len(heads.query) * heads.group_size} query and {num} key/value heads"
        found.append(_share(what, dict(share.named_parameters()), cache, files))
    return found


LAYOUTS: dict[str, Callable[[PreTrainedModel, Shape, int, int], list[RankShare]]] = {
    "pipeline": stages,
    "tensor parallel": shares,
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-70b")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--context", type=int, default=32_768)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    model = meta_model(shape)
    print("| layout | rank | share | weights, GB | cache, GB | files |")
    print("| --- | --- | --- | --- | --- | --- |")
    for layout, of in LAYOUTS.items():
        for rank, share in enumerate(of(model, shape, args.ranks, args.context), 1):
            sizes = f"{share.weights / _GB:.1f} | {share.cache / _GB:.2f}"
            files = ", ".join(map(str, share.files)) if len(share.files) < 8 else "all"
            print(f"| {layout} | {rank} | {share.what} | {sizes} | {files} |")


if __name__ == "__main__":
    main()
