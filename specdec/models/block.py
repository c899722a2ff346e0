"""Block drafters: DFlash and DSpark, which draft all tokens of a block in one pass.

DFlash (arXiv 2602.06036): the last known token is the anchor. The tokens before it, the context,
enter as keys and values only, computed from residual streams of several target layers (``fc``, then
``hidden_norm``; every layer projects the same result). The inputs of the block are the embedding of
the anchor and K - 1 times that of a mask token; these K rows see the context and each other in both
directions. Embedding and output matrix are the target's. Row k >= 1 drafts the k-th new token.

DSpark (arXiv 2607.05147): row k drafts the (k + 1)-th new token (``from_anchor``). A low-rank
term of the token before the draft, W2 W1[token], is added to the logits, and a confidence head
estimates from [row; W1[token]] whether the target accepts the draft.

Shape letters: B sequences, T positions of the context, N anchors, K rows of a block, M drafts, E
hidden size, S feature size, U draft vocabulary, G key/value heads, D head size, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    rotate_half,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.files import write_bytes, write_json
from specdec.models.config_values import config_value
from specdec.models.eagle import ATTENTION
from specdec.models.eagle_loading import (
    layer_shape,
    mapped_ids,
    refuse_other_tensors,
    sampled_text,
    stored_tensors,
    untrained,
)
from specdec.models.exits import spread
from specdec.models.inspection import read_config
from specdec.models.slicing import hidden_states
from specdec.types import HiddenName

Pair = tuple[Tensor, Tensor]
"""Keys and values, [B, G, T, D] each."""

Kind: TypeAlias = Literal["dflash", "dspark"]

_RANK = 32  # rank of the Markov term in a new drafter
_ARCHITECTURES: dict[str, Kind] = {
    "DFlashDraftModel": "dflash",
    "MuseGlimmerAssistantModel": "dflash",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
}
_QWEN3 = (Qwen3Config, Qwen3DecoderLayer)
_LAYERS = {
    "qwen3": _QWEN3,
    "llama": (LlamaConfig, LlamaDecoderLayer),
    "muse_glimmer_assistant": _QWEN3,
}
"""Maps model_type of a drafter's config to the config class and the module class of its layers."""

_NOT_OF_LAYERS = ("model_type", "layer_types", "use_sliding_window")  # layers attend to all
_OWN_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_UNUSED = ("verifier_", "rotary_emb.", "t2d", "embed_tokens.", "lm_head.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Sizes and variants of a block drafter.

    Attributes:
        layer: config of its layers: Qwen3Config (queries and keys are normed) or LlamaConfig.
        layers: indices of target layers whose outputs ``fc`` reads, in the order of its inputs.
        num_target_layers: layers of the target; the last one's output is read after the final norm.
        block_size: K, rows of a block.
        mask_token: token of all rows but the first.
        from_anchor: whether row 0 predicts the token after the anchor; if not, row 1 does.
        draft_vocab_size: U, the number of tokens that can be drafted.
        markov_rank: R, rank of the term of the token before a draft (DSpark); 0: no such term.
        confidence: number of inputs of the confidence head (DSpark); 0: no such head.
    """

    layer: Any
    layers: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    block_size: int
    mask_token: int
    draft_vocab_size: int
    from_anchor: bool = False
    markov_rank: int = 0
    confidence: int = 0

    @property
    def names(self) -> tuple[HiddenName, ...]:
        last = self.num_target_layers - 1
        return tuple(HiddenName(layer, normed=layer == last) for layer in self.layers)

    @property
    def num_drafts(self) -> int:
        return self.block_size - (not self.from_anchor)


class BlockHead(nn.Module):
    """A DFlash or DSpark drafter; its parameters are named as in the published checkpoints.

    ``target_ids``, int64[U]: the target's id of each draft token; None if all ids are the same.
    """

    target_ids: Tensor | None

    def __init__(self, config: BlockConfig, *, embedding: Tensor, output: nn.Module) -> None:
        """``embedding`` [V, E] and ``output`` ([.., E] -> [.., V]) belong to the target."""
        super().__init__()
        self.config, layer = config, config.layer
        size, eps = layer.hidden_size, layer.rms_norm_eps
        layer._attn_implementation = ATTENTION
        make = _LAYERS[layer.model_type][1]
        self._target = (embedding, output)  # in a tuple: they are not stored with the drafter
        width = len(config.layers) * config.target_hidden_size
        self.fc = nn.Linear(width, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(make(layer, i) for i in range(layer.num_hidden_layers))
        self.norm = nn.RMSNorm(size, eps=eps)
        if config.draft_vocab_size < embedding.shape[0]:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if rank := config.markov_rank:
            self.markov_head = nn.ModuleDict(
                {
                    "markov_w1": nn.Embedding(embedding.shape[0], rank),
                    "markov_w2": nn.Linear(rank, config.draft_vocab_size, bias=False),
                }
            )
        if config.confidence:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(config.confidence, 1)})
        self.rotary = LlamaRotaryEmbedding(layer)
        self.register_buffer("target_ids", None)

    @property
    def embedding(self) -> Tensor:
        return self._target[0]

    def context(self, features: Tensor, positions: Tensor) -> list[Pair]:
        """Returns keys, values of each layer for features [B, T, S] at ``positions``, int64[T]."""
        fused = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary(fused, positions[None])
        pairs = []
        for layer in self.layers:
            attention: Any = layer.self_attn
            key, value = (
                projection(fused).unflatten(-1, (-1, attention.head_dim))
                for projection in (attention.k_proj, attention.v_proj)
            )
            key = (attention.k_norm(key) if hasattr(attention, "k_norm") else key).transpose(1, 2)
            key = key * cos[:, None] + rotate_half(key) * sin[:, None]
            pairs.append((key, value.transpose(1, 2)))
        return pairs

    def forward(self, anchors: Tensor, positions: Tensor, context: Sequence[Pair]) -> Tensor:
        """Returns the hidden states of those M rows per block that predict a token, [B, N, M, E].

        Args:
            anchors: int64[B, N], the token of each block's first row.
            positions: int64[N], position of each anchor; its block sees the context before that.
            context: result of ``context`` for positions from 0 on.
        """
        config, num = self.config, len(positions)
        tokens = anchors.new_full((*anchors.shape, config.block_size), config.mask_token)
        tokens[..., 0] = anchors
        hidden = F.embedding(tokens.flatten(1), self.embedding)
        steps = torch.arange(config.block_size, device=positions.device)
        rotation = self.rotary(hidden, (positions[:, None] + steps).flatten()[None])
        known = context[0][0].shape[2]
        before = torch.arange(known, device=positions.device) < positions[:, None]
        same = torch.eye(num, dtype=torch.bool, device=positions.device)
        sees = torch.cat([before, same.repeat_interleave(config.block_size, 1)], 1)
        sees = sees.repeat_interleave(config.block_size, 0)

        def attend(index: int, query: Tensor, *own: Tensor) -> Tensor:
            key, value = (torch.cat(parts, 2) for parts in zip(context[index], own, strict=True))
            found = F.scaled_dot_product_attention(query, key, value, sees, enable_gqa=True)
            return found.transpose(1, 2)

        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotation, attention_mask=None, attend=attend)
        rows: Tensor = self.norm(hidden).unflatten(1, (num, config.block_size))
        return rows[:, :, config.block_size - config.num_drafts :]

    def logits(self, rows: Tensor, before: Tensor) -> Tensor:
        """Returns draft logits [.., U] for rows [.., E]. ``before``, int64[..], has the token
        before each predicted one; only a drafter with ``markov_rank`` > 0 (DSpark) reads it.
        """
        own = self.config.draft_vocab_size < self.embedding.shape[0]
        logits: Tensor = self.lm_head(rows) if own else self._target[1](rows)
        if self.config.markov_rank:
            head = self.markov_head
            logits = logits + head["markov_w2"](head["markov_w1"](before))
        return logits

    def confidence(self, rows: Tensor, before: Tensor) -> Tensor:
        """Returns estimates [..] of the probability that the target accepts the rows' drafts."""
        if self.config.confidence > rows.shape[-1]:
            rows = torch.cat([rows, self.markov_head["markov_w1"](before)], -1)
        return torch.sigmoid(self.confidence_head["proj"](rows)[..., 0])

    def target_logits(self, logits: Tensor) -> Tensor:
        """Maps draft logits [.., U] to the target's vocabulary [.., V]; other tokens get -inf."""
        return spread(logits, self.target_ids, self.embedding.shape[0])


@dataclass(slots=True)
class Context:
    """Keys and values of one request's positions 0 .. ``length`` - 1, by layer."""

    pairs: list[Pair]
    length: int = 0


class BlockRunner:
    """Runs a block drafter, one request at a time.

    Attributes:
        weight_bytes: bytes of weights that a pass reads, including the output matrix.
        trained: False if the drafter's weights are random.
    """

    def __init__(self, head: BlockHead, *, meter: Meter, trained: bool = True) -> None:
        self.head, self.trained, self._meter = head, trained, meter
        self.names, self.num_drafts = head.config.names, head.config.num_drafts
        self.vocab_size, self.target_ids = head.embedding.shape[0], head.target_ids
        self.has_confidence = head.config.confidence > 0
        self.conditional = head.config.markov_rank > 0
        self.weight_bytes = sum(p.nbytes for p in head.parameters())
        if head.config.draft_vocab_size == self.vocab_size:
            self.weight_bytes += head.embedding.nbytes

    @classmethod
    def from_pair(
        cls, pair: Any, *, folder: str | None, untrained: Kind, meter: Meter
    ) -> BlockRunner:
        """Loads the drafter in ``folder``; None: makes one of kind ``untrained`` for ``pair``."""
        last = pair.part(pair.num_layers - 1, pair.num_layers)
        target = {"embedding": pair.input_embedding(), "output": last.get_output_embeddings()}
        if folder is not None:
            return cls(load_block(Path(folder), last.config, **target), meter=meter)
        head, trained = pair.fitted(
            untrained, lambda: untrained_block(untrained, last.config, **target), fit_block
        )
        return cls(head, meter=meter, trained=trained)

    def new_context(self) -> Context:
        return Context([])

    def read(self, context: Context, features: Tensor) -> None:
        """Adds keys and values of the next T positions, with features [T, S], to ``context``."""
        weight = self.head.fc.weight
        with torch.inference_mode(), self._meter.model("block", weight.device):
            positions = torch.arange(len(features), device=weight.device) + context.length
            features = features.to(weight.device, weight.dtype)
            new = self.head.context(features[None], positions)
        old = context.pairs or [(key[:, :, :0], value[:, :, :0]) for key, value in new]
        context.pairs = [
            (torch.cat([a[0], b[0]], 2), torch.cat([a[1], b[1]], 2))
            for a, b in zip(old, new, strict=True)
        ]
        context.length += len(features)

    def rows(self, context: Context, anchor: int) -> Tensor:
        """Runs a block after the token ``anchor``; returns states [M, E] of the predicting rows."""
        device = self.head.fc.weight.device
        with torch.inference_mode(), self._meter.model("block", device):
            token = torch.tensor([[anchor]], device=device)
            found: Tensor = self.head(
                token, torch.tensor([context.length], device=device), context.pairs
            )
        return found[0, 0]

    def logits(self, rows: Tensor, before: Tensor) -> Tensor:
        """Returns logits [W, U] for rows [W, E]; ``before``, int64[W]: token before each draft."""
        with torch.inference_mode():
            return self.head.logits(rows, before.to(rows.device))

    def confidence(self, rows: Tensor, before: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.head.confidence(rows, before.to(rows.device))

    def target_logits(self, logits: Tensor) -> Tensor:
        return self.head.target_logits(logits)


# Files.


def load_block(folder: Path, target: Any, *, embedding: Tensor, output: nn.Module) -> BlockHead:
    """Loads a drafter from a folder in its authors' layout, that of speculators or transformers.

    ``target`` is the target's config. UserError unless the folder has a drafter of a known kind
    for this target.
    """
    label = f"block drafter {folder}"
    if not folder.is_dir():
        raise UserError(f"{label} is not a folder: give a local one")
    raw = read_config(folder / "config.json", "give the folder of a block drafter")
    tensors = stored_tensors(folder, "block drafter", _OWN_NAMES)
    config = _config(label, raw, tensors, target.get_text_config())
    ids = mapped_ids(label, tensors.pop("d2t", None), config.draft_vocab_size, embedding.shape[0])
    kept = () if config.draft_vocab_size == embedding.shape[0] else ("lm_head.",)
    tensors = {n: t for n, t in tensors.items() if not n.startswith(_UNUSED) or n.startswith(kept)}
    head = BlockHead(config, embedding=embedding, output=output)
    refuse_other_tensors(label, dict(head.named_parameters()), tensors)
    head.load_state_dict(tensors, strict=False)
    head.target_ids = ids
    return head.to(embedding.device, embedding.dtype).requires_grad_(False).eval()


def _config(
    label: str, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any
) -> BlockConfig:
    def refuse(what: str, remedy: str = "use a DFlash or DSpark drafter of this target") -> None:
        raise UserError(f"{label} {what}; {remedy}")

    names = raw.get("architectures") or []
    found = (_ARCHITECTURES.get(name) for name in names)
    kind = raw.get("speculators_model_type") or next(filter(None, found), None)
    if kind not in ("dflash", "dspark"):
        refuse(f"is of kind {kind or names or 'unknown'}, which is not read")
    flat = {**raw, **(raw.get("dflash_config") or {})}
    given = flat.get("target_layer_ids")
    if given is None and (entering := flat.get("aux_hidden_state_layer_ids")):
        given = [int(i) - 1 for i in entering]  # of the streams that enter layers
    flat["target_layer_ids"] = given
    for key in ("target_layer_ids", "mask_token_id", "block_size"):
        if flat.get(key) is None:
            refuse(f"has no {key} in config.json", "add it as its authors state it")
    layer = raw.get("transformer_layer_config") or raw
    if (family := layer.get("model_type", "qwen3")) not in _LAYERS:
        refuse(f"has layers of model_type {family!r}", "qwen3 and llama can be read")
    if set(layer.get("layer_types") or []) - {"full_attention"}:
        refuse(f"has layer_types {sorted(set(layer['layer_types']))}", "full_attention can be read")
    if flat.get("markov_head_type", "vanilla") != "vanilla":
        refuse(f"has markov_head_type {flat['markov_head_type']!r}", "vanilla can be read")
    fields = {k: v for k, v in layer.items() if v is not None and k not in _NOT_OF_LAYERS}
    layers, num = tuple(int(i) for i in given or ()), int(target.num_hidden_layers)
    outside = [i for i in layers if not 0 <= i < num]
    if outside:
        refuse(f"reads the outputs of layers {outside}, but the target has layers 0 .. {num - 1}")
    size, vocab = int(target.hidden_size), int(target.vocab_size)
    width = tuple(tensors["fc.weight"].shape) if "fc.weight" in tensors else ()
    if len(width) != 2 or width[1] != len(layers) * size:
        refuse(f"has fc.weight of shape {width}; {len(layers)} states of {size} are read")
    markov, conf = tensors.get("markov_head.markov_w1.weight"), "confidence_head.proj.weight"
    if conf in tensors and "confidence_head.proj.bias" not in tensors:
        refuse("has a confidence_head without a bias")
    return BlockConfig(
        layer=_LAYERS[family][0](**fields),
        layers=layers,
        num_target_layers=num,
        target_hidden_size=size,
        block_size=int(flat["block_size"]),
        mask_token=int(flat["mask_token_id"]),
        from_anchor=bool(flat.get("sample_from_anchor", kind == "dspark")),
        draft_vocab_size=int(flat.get("draft_vocab_size") or vocab),
        markov_rank=0 if markov is None else markov.shape[1],
        confidence=tensors[conf].shape[1] if conf in tensors else 0,
    )


def save_block(head: BlockHead, folder: Path) -> None:
    """Writes a drafter to ``folder`` in the layout of the published checkpoints, in bfloat16."""
    config = head.config
    tensors = {
        name: p.detach().to("cpu", torch.bfloat16).contiguous()
        for name, p in head.named_parameters()
    }
    if head.target_ids is not None:
        ids = head.target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
    raw = config.layer.to_dict() | {
        "architectures": ["DSparkDraftModel" if config.from_anchor else "DFlashDraftModel"],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "sample_from_anchor": config.from_anchor,
        "markov_rank": config.markov_rank,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "target_layer_ids": list(config.layers),
            "mask_token_id": config.mask_token,
        },
    }
    write_bytes(folder / "model.safetensors", save(tensors))
    write_json(folder / "config.json", raw)


# New drafters.


def block_config(kind: Kind, target: Any, **variants: Any) -> BlockConfig:
    """Returns the config of a drafter of Qwen3 layers with the sizes of ``target``, a config.

    The drafter reads up to five target layers from the second to the third last. ``variants`` may
    have its ``num_layers`` and ``feed_forward`` size, and fields of ``BlockConfig``.
    """
    text = target.get_text_config()
    shape, num = layer_shape(target), int(text.num_hidden_layers)
    size, vocab = shape["hidden_size"], shape["vocab_size"]
    rope = config_value(text, "rope_parameters", {})
    own = {
        "intermediate_size": variants.pop("feed_forward", None) or shape["intermediate_size"],
        "num_hidden_layers": variants.pop("num_layers", 1),
        **({"rope_parameters": rope} if "rope_theta" in rope else {}),
    }
    layer = Qwen3Config(**{**shape, **own})
    low, high = min(1, num - 1), max(num - 3, min(2, num - 1))
    spaced = torch.linspace(low, high, 5).round().int().tolist()
    fields: dict[str, Any] = {
        "layers": tuple(sorted(set(spaced))),
        "block_size": 5,
        "mask_token": vocab - 1,
    }
    if kind == "dspark":
        fields |= {"from_anchor": True, "markov_rank": _RANK, "confidence": size + _RANK}
    fields |= {"draft_vocab_size": vocab, "num_target_layers": num, "target_hidden_size": size}
    return BlockConfig(layer=layer, **{**fields, **variants})


def untrained_block(
    kind: Kind, target: Any, *, embedding: Tensor, output: nn.Module, **variants: Any
) -> BlockHead:
    """Returns a drafter with random weights, the same at every call."""
    config = block_config(kind, target, **variants)
    if embedding.shape[1] != config.target_hidden_size:
        raise UserError(
            f"the target's embeddings have width {embedding.shape[1]}, its hidden states"
            f" {config.target_hidden_size}: a block drafter needs equal widths"
        )
    return untrained(lambda: BlockHead(config, embedding=embedding, output=output), embedding)


def fit_block(head: BlockHead, target: PreTrainedModel) -> BlockHead:
    """Trains a drafter in place by 60 steps of Adam on text sampled from a small ``target``."""
    with torch.inference_mode(False), torch.enable_grad():
        text = sampled_text(target, 128, 16, seed=0)
        features, logits = hidden_states(target, text, head.config.names)
        drafts = head.config.num_drafts
        places = torch.arange(text.shape[1], device=text.device)
        optimizer = torch.optim.Adam(head.requires_grad_(True).parameters(), lr=1e-2)
        for step in range(60):
            part = slice(step % 4, None, 4)  # a quarter of the texts, for speed
            anchor = places[1 + step % (text.shape[1] - drafts - 1)][None]
            ahead = anchor[:, None] + places[:drafts]
            before, goal = text[part, ahead], logits[part, ahead].softmax(-1)
            context = head.context(features[part], places)
            rows = head(text[part, anchor], anchor, context)
            drafted = head.logits(rows, before).log_softmax(-1)
            loss = -(goal * drafted).sum(-1).mean()
            if head.config.confidence:
                loss = loss + confidence_loss(head, rows, before, goal, drafted.exp())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return head.requires_grad_(False).eval()


def confidence_loss(
    head: BlockHead, rows: Tensor, before: Tensor, target: Tensor, drafted: Tensor
) -> Tensor:
    """Returns the mean cross-entropy of the confidence head to the probability of acceptance.

    That probability is the sum of min(``target``, ``drafted``), which are distributions [.., U].
    """
    share = torch.minimum(target, drafted).sum(-1).detach().clamp(0.0, 1.0)
    return F.binary_cross_entropy(head.confidence(rows.detach(), before), share)
