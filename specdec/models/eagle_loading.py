"""Reads and writes folders of EAGLE heads: config.json and safetensors, in both known layouts.

EAGLE's own layout names the first layer of EAGLE-3 ``midlayer.*`` and has a flat Llama config; that
of ``speculators`` names it ``layers.0.*`` and nests the config. Layer ids in configs count the
streams that *enter* layers, so id i is the output of layer i - 1. The module also makes untrained
heads, from which training starts.

Shape letters: B sequences, T tokens, E hidden size, S feature size, V vocabulary, U draft
vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from specdec.errors import UserError
from specdec.files import write_bytes, write_json
from specdec.models.config_values import config_value
from specdec.models.eagle import EagleConfig, EagleHead, default_layers
from specdec.models.inspection import read_config
from specdec.models.slicing import hidden_states

_LEGACY = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_UNUSED = ("verifier_", "rotary_emb.", "t2d")  # used in training only, or derived from others
_LAYER = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("rope_parameters", "hidden_act", "attention_bias", "mlp_bias", "vocab_size"),
)
"""Entries of transformers' config that describe the layers of a head."""
_CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file; w ='
    " torch.load('{bin}', map_location='cpu', weights_only=True); save_file({{k: v.contiguous()"
    " for k, v in w.items()}}, '{out}')\""
)
_RATE = 2e-2  # learning rate in ``fit_head``

M = TypeVar("M", bound=nn.Module)


class HeadFiles:
    """The files of an EAGLE head: ``config`` is the content of config.json, ``version`` is 1 or 3.
    ``tensors``, by parameter name of ``EagleHead`` (and ``d2t``), are read from disk when used.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise UserError(
                f"EAGLE head {folder} is not a folder: give a local one with config.json and"
                " model.safetensors"
            )
        self.config = read_config(self.folder / "config.json", "give the folder of an EAGLE head")
        stored = stored_tensors(self.folder, "EAGLE head", _LEGACY)
        self.tensors = {n: tensor for n, tensor in stored.items() if not n.startswith(_UNUSED)}
        self.version: Literal[1, 3] = _version(self.folder, self.config, self.tensors)

    @property
    def num_weights(self) -> int:
        return sum(tensor.numel() for name, tensor in self.tensors.items() if name != "d2t")

    def num_shared(self, vocab_size: int) -> int:
        names = ("embed_tokens.weight", "lm_head.weight")
        missing = sum(name not in self.tensors for name in names)
        return missing * vocab_size * len(self.tensors["fc.weight"])

    def head_config(self, target: Any) -> EagleConfig:
        """Returns the head's sizes and variants; UserError if the head cannot belong to a target
        with the transformers config ``target``.
        """
        text, raw, tensors = target.get_text_config(), self.config, self.tensors
        llama = _llama(self.folder, raw.get("transformer_layer_config") or raw).to_dict()
        hidden, width = tensors["fc.weight"].shape
        target_size = int(text.hidden_size)
        layers: tuple[int, ...] = (int(text.num_hidden_layers) - 1,)
        if self.version == 3:
            layers = self._layers(int(text.num_hidden_layers), width, target_size)
        elif (hidden, width) != (target_size, 2 * target_size):
            self._refuse_size(width // 2, target_size)
        own_output = "lm_head.weight" in tensors
        draft_vocab = int(raw.get("draft_vocab_size") or text.vocab_size)
        own_embedding = "embed_tokens.weight" in tensors
        if not own_embedding and hidden != target_size:
            self._refuse_size(hidden, target_size)
        own = {
            "hidden_size": hidden,
            "vocab_size": int(text.vocab_size),
            "max_position_embeddings": max(
                llama["max_position_embeddings"], int(text.max_position_embeddings)
            ),
            "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
            "mlp_bias": "layers.0.mlp.gate_proj.bias" in tensors,
        }
        return EagleConfig(
            version=self.version,
            layers=layers,
            layer=LlamaConfig(**{**{key: llama[key] for key in _LAYER}, **own}),
            target_hidden_size=target_size,
            draft_vocab_size=len(tensors["lm_head.weight"]) if own_output else draft_vocab,
            fc_bias="fc.bias" in tensors,
            norm_before_residual=bool(raw.get("norm_before_residual", False)),
            norm_before_fc="input_norm.weight" in tensors,
            fc_norm="fc_norm.0.weight" in tensors,
            norm_output=bool(raw.get("norm_output", False)),
            own_embedding=own_embedding,
            own_output=own_output,
        )

    def _layers(self, num_layers: int, width: int, target_size: int) -> tuple[int, ...]:
        nested = self.config.get("eagle_config") or {}
        key = "eagle_aux_hidden_state_layer_ids"
        ids = self.config.get(key) or nested.get(key)
        layers = default_layers(num_layers) if ids is None else tuple(int(i) - 1 for i in ids)
        if ids is not None and len(ids) > 1 and width == (len(ids) - 1) * target_size:
            layers = layers[:-1]  # the last one is the training target, not an input
        if width != len(layers) * target_size:
            self._refuse_size(width // max(len(layers), 1), target_size)
        outside = [layer + 1 for layer in layers if not 0 <= layer < num_layers]
        if outside:
            raise UserError(
                f"EAGLE head {self.folder} reads the streams that enter layers {outside}, but the"
                f" target has layers 1 .. {num_layers}; use the head of this target"
            )
        return layers

    def _refuse_size(self, size: int, target_size: int) -> None:
        raise UserError(
            f"EAGLE head {self.folder} was trained for a target with hidden states of size"
            f" {size}, but model.target has {target_size}; use the head of this target"
        )


def load_head(
    files: HeadFiles,
    config: EagleConfig,
    *,
    embedding: Tensor,
    output: nn.Module | None,
) -> EagleHead:
    """Loads a head in evaluation mode and without gradients; if its embedding equals the target's,
    both share one tensor.

    ``config`` is ``files.head_config(target)`` or a variant of it; ``embedding`` [V, E], the
    target's, determines dtype and device.
    """
    tensors = dict(files.tensors)
    offsets = tensors.pop("d2t", None)
    tensors = {n: t.to(embedding.device, embedding.dtype) for n, t in tensors.items()}
    stored = tensors.get("embed_tokens.weight")
    if stored is not None and stored.shape == embedding.shape and torch.equal(stored, embedding):
        del tensors["embed_tokens.weight"]
        config = replace(config, own_embedding=False)
    with init_empty_weights(include_buffers=False):
        head = EagleHead(config, embedding=embedding, output=output)
    label = f"EAGLE head {files.folder}"
    refuse_other_tensors(label, dict(head.named_parameters()), tensors)
    head.load_state_dict(tensors, strict=True, assign=True)
    vocab_size = config.layer.vocab_size
    head.target_ids = mapped_ids(label, offsets, config.draft_vocab_size, vocab_size)
    return head.requires_grad_(False).to(embedding.device).eval()


def save_head(head: EagleHead, folder: str | Path) -> Path:
    """Writes a head in EAGLE's own layout, without the weights that belong to the target; returns
    ``folder``.
    """
    folder, config = Path(folder), head.config
    tensors = {name: p.detach().cpu() for name, p in head.named_parameters()}
    layer = config.layer.to_dict()
    raw: dict[str, Any] = {key: layer[key] for key in _LAYER} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": config.fc_bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(next(head.parameters()).dtype).removeprefix("torch."),
    }
    if config.version == 3:
        tensors = {n.replace("layers.0.", "midlayer.", 1): t for n, t in tensors.items()}
        raw |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.layers]},
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": config.norm_output,
        }
    if head.target_ids is not None:
        ids = head.target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        is_drafted = torch.zeros(config.layer.vocab_size, dtype=torch.bool)
        tensors["t2d"] = is_drafted.index_fill(0, ids, True)
    write_bytes(folder / "model.safetensors", save({n: t.contiguous() for n, t in tensors.items()}))
    write_json(folder / "config.json", raw)
    return folder


def stored_tensors(folder: Path, what: str, renamed: Mapping[str, str]) -> dict[str, Tensor]:
    """Reads the tensors in a folder's safetensors files, which stay mapped: unused tensors take no
    memory. ``what`` names the folder's kind in messages; ``renamed`` maps stored prefixes to new.
    """
    found = {}
    for path in weight_files(folder, what):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    name = key.removeprefix("model.")
                    start = next((start for start in renamed if name.startswith(start)), "")
                    name = renamed.get(start, "") + name.removeprefix(start)
                    found[name] = file.get_tensor(key)
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error}); copy or download it again") from error
    return found


def weight_files(folder: Path, what: str) -> list[Path]:
    """Returns a folder's safetensors files; UserError, naming its kind ``what``, if it has none."""
    paths = sorted(folder.glob("*.safetensors"))
    if paths:
        return paths
    pickles = sorted(p for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth"})
    if not pickles:
        raise UserError(f"{what} {folder} has no *.safetensors; give the folder of one")
    command = _CONVERT.format(bin=pickles[0], out=folder / "model.safetensors")
    raise UserError(
        f"{what} {folder} has its weights in {pickles[0].name} only, a pickle, which can"
        f" run code and is not read; convert it where you trust it: {command}"
    )


def _version(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Literal[1, 3]:
    stated = config.get("speculators_model_type")
    if stated is not None and stated not in {"eagle", "eagle3"}:
        raise UserError(
            f"EAGLE head {folder} is a head of kind {stated!r} (speculators_model_type), which is"
            " not supported; use an EAGLE-1 or EAGLE-3 head"
        )
    names = config.get("architectures") or []
    if "fc.weight" not in tensors or "layers.0.self_attn.q_proj.weight" not in tensors:
        raise UserError(
            f"EAGLE head {folder} has no EAGLE head: fc.weight and the projections of a Llama"
            f" layer are missing (architectures: {names or 'none'}); give the folder of a head"
        )
    if stated == "eagle3" or any("eagle3" in str(name).lower() for name in names):
        return 3
    fc = tuple(tensors["fc.weight"].shape)
    is_third = "d2t" in tensors or "layers.0.hidden_norm.weight" in tensors
    if stated is None and (is_third or fc[1] == 3 * fc[0]):
        return 3
    if fc[1] != 2 * fc[0] or "layers.0.input_layernorm.weight" in tensors:
        raise UserError(
            f"EAGLE head {folder} is no known EAGLE head: fc.weight has shape {fc}; version"
            " 1 has [E, 2 E] and no norm before its first layer, version 3 has d2t or hidden_norm"
        )
    return 1


def _llama(folder: Path, layer: Mapping[str, Any]) -> LlamaConfig:
    kind = layer.get("model_type", "llama")
    if kind != "llama":
        raise UserError(
            f"EAGLE head {folder} has layers of model_type {kind!r}; only Llama layers are"
            " supported"
        )
    known = {key: value for key, value in layer.items() if value is not None}
    try:
        return LlamaConfig(**known)
    except Exception as error:  # transformers validates in several ways
        raise UserError(
            f"{folder / 'config.json'} is not accepted by transformers ({error}); correct it"
        ) from error


def refuse_other_tensors(
    label: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> None:
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected)
    if missing or unknown:
        raise UserError(
            f"{label}: tensors {missing or 'none'} are missing and {unknown or 'none'}"
            " unknown; config.json and weights must belong to one head"
        )
    for name, parameter in expected.items():
        if parameter.shape != found[name].shape:
            raise UserError(
                f"{label}: tensor {name} has shape {tuple(found[name].shape)}, but its"
                f" config.json and the target need {tuple(parameter.shape)}"
            )


def mapped_ids(label: str, offsets: Tensor | None, size: int, vocab_size: int) -> Tensor | None:
    """Returns target ids, int64[U], of the draft ids: id + ``offsets`` (d2t); None without them."""
    if offsets is None:
        if size == vocab_size:
            return None
        raise UserError(
            f"{label} has {size} draft tokens, the target {vocab_size}, and no tensor d2t that maps"
            " them; use the head of this target"
        )
    ids = offsets.long() + torch.arange(len(offsets))
    in_range = len(ids) and int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    if len(ids) != size or not in_range or len(ids.unique()) < len(ids):
        raise UserError(
            f"{label}: d2t does not map {size} draft tokens to different ones of the target's"
            f" {vocab_size}; use the head of this target"
        )
    return ids


def layer_shape(target: Any) -> dict[str, Any]:
    """Returns config entries for one Llama-like layer with the sizes of a target's layers."""
    text = target.get_text_config()
    try:
        hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
        vocab_size, positions = int(text.vocab_size), int(text.max_position_embeddings)
    except AttributeError as error:
        raise UserError(
            f"a head for a target of model_type {target.model_type!r} cannot be made: its config"
            f" has no {error.name}; use another family, such as llama or qwen3"
        ) from error
    return {
        "hidden_size": hidden,
        "intermediate_size": int(config_value(text, "intermediate_size", 4 * hidden)),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": int(config_value(text, "num_key_value_heads", heads)),
        "head_dim": int(config_value(text, "head_dim", hidden // heads)),
        "vocab_size": vocab_size,
        "rms_norm_eps": float(config_value(text, "rms_norm_eps", 1e-6)),
        "max_position_embeddings": positions,
    }


def untrained_config(
    version: Literal[1, 3],
    target: Any,
    *,
    layer: Mapping[str, Any] | None = None,
    **variants: Any,
) -> EagleConfig:
    """Returns the config of a one-layer head with layer sizes and vocabulary as in ``target``, the
    target's config. ``layer`` overrides entries of the layer's config, ``variants`` result fields.
    """
    shape, num_layers = layer_shape(target), int(target.get_text_config().num_hidden_layers)
    fields: dict[str, Any] = {
        "version": version,
        "layers": default_layers(num_layers) if version == 3 else (num_layers - 1,),
        "target_hidden_size": shape["hidden_size"],
        "draft_vocab_size": shape["vocab_size"],
        "own_output": version == 3,
    }
    return EagleConfig(layer=LlamaConfig(**{**shape, **(layer or {})}), **{**fields, **variants})


def untrained_head(
    version: Literal[1, 3], target: Any, *, embedding: Tensor, output: nn.Module
) -> EagleHead:
    """Returns a head with random weights, the same at every call, in dtype and on device of
    ``embedding`` [V, E].
    """
    size = int(target.get_text_config().hidden_size)
    own_embedding = embedding.shape[1] != size
    config = untrained_config(version, target, own_embedding=own_embedding)
    return untrained(lambda: EagleHead(config, embedding=embedding, output=output), embedding)


def untrained(make: Callable[[], M], like: Tensor) -> M:
    """Makes a module with the same random weights at every call, in dtype and on device of
    ``like``, and freezes it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make()
    return module.to(like.device, like.dtype).requires_grad_(False).eval()


def fit_head(
    head: EagleHead,
    target: PreTrainedModel,
    *,
    sequences: int = 64,
    length: int = 16,
) -> EagleHead:
    """Trains a head for a small target, in place, on text sampled from the target at temperature
    1, then freezes the head. ``specdec train eagle3`` trains heads for real models.

    40 steps of Adam over the whole text minimise the teacher-forced cross-entropy to the target's
    distribution. The head must have the target's whole vocabulary.
    """
    with torch.inference_mode(False):
        text = sampled_text(target, sequences, length, seed=0)
        states, logits = hidden_states(target, text, head.config.names)
        goal, given = logits[:, 1:].softmax(-1), states[:, :-1]
        positions = torch.arange(length - 1, device=text.device)[None]
        head.requires_grad_(True)
        optimizer = torch.optim.Adam(head.parameters(), lr=_RATE)
        with torch.enable_grad():
            for _ in range(40):
                outputs = head(text[:, 1:], head.states(given), positions)
                loss = -(goal * head.logits(outputs).log_softmax(-1)).sum(-1).mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return head.requires_grad_(False).eval()


def sampled_text(target: PreTrainedModel, sequences: int, length: int, *, seed: int) -> Tensor:
    """Samples B texts of T tokens, int64[B, T], at temperature 1 from random first tokens."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = int(target.config.get_text_config().vocab_size)
    tokens = torch.randint(vocab_size, (sequences, 1), generator=generator)
    with torch.no_grad():
        while tokens.shape[1] < length:
            logits = target(tokens.to(target.device), use_cache=False).logits[:, -1]
            probs = logits.softmax(-1).cpu()
            tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=generator)], 1)
    return tokens.to(target.device)
