"""``specdec train``: trains a drafter on a target's answers and tests it on held-out answers."""

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from specdec.data import Request, load_prompts
from specdec.data.prompt import fit_prompt, prompt_tokens
from specdec.errors import UserError
from specdec.files import read_json, write_json
from specdec.models.config_values import config_value
from specdec.models.frozen import FrozenModel
from specdec.parts.build import check_values
from specdec.parts.fields import Count, Index, NotNegative, Text, Threads, signature_of, validated
from specdec.sampling.transform import SamplingParams
from specdec.train.agreement import Agreement, measure
from specdec.train.block import BlockDrafter, BlockSpec
from specdec.train.draft import DraftModel, DraftSpec
from specdec.train.drafter import Drafter, OutputOptions, as_stored, draft_ids
from specdec.train.eagle import EagleDrafter, EagleSpec
from specdec.train.fit import Fit, TrainPlan, keep_settings, memory_bytes
from specdec.train.heads import STATED, ExitDrafter, ExitSpec, MedusaDrafter, MedusaSpec
from specdec.train.losses import LossOptions
from specdec.train.progress import Report, silent
from specdec.train.texts import AnsweredText, Windows, check_answers, read_answers, write_answers

SPECS: Mapping[str, type] = {
    "eagle3": EagleSpec,
    "block": BlockSpec,
    "medusa": MedusaSpec,
    "exit": ExitSpec,
    "draft": DraftSpec,
}
"""Kind of drafter -> dataclass of the configuration keys that only this kind has."""


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Top-level keys that all kinds of drafters share; ``SPECS`` has those of one kind."""

    output_dir: Text
    work_dir: Text | None = None
    # JSON lines of the target's answers (``texts.read_answers``); None: the target answers the
    # prompts of ``data`` into WORK_DIR/answers.jsonl.
    answers: Text | None = None
    max_new_tokens: Count = 256  # of answers that the target writes
    answer_batch: Count = 16
    # Texts that are not trained on, but on which drafts are measured. None: 32, at most a fifth.
    held_out: Count | None = None
    seed: Index = 0
    threads: Threads | None = None
    keep_gb: NotNegative = 0.0  # memory for the target's states, which later epochs then only read
    shard: bool = False  # whether accelerate spreads the target's layers over all devices
    estimate_only: bool = False  # whether to end after the estimate of time and memory


SECTIONS: Mapping[str, type] = {"plan": TrainPlan, "loss": LossOptions, "output": OutputOptions}
GROUPS = ("model", "data", "sampling")


def check(kind: str, config: Mapping[str, Any]) -> None:
    """Raises UserError for an unusable value in a configuration; skips the keys in ``GROUPS``."""
    if config.get("output_dir") is None:
        raise UserError("output_dir has no value: add output_dir=DIR, for what is trained")
    sections = {name: config.get(name) for name in SECTIONS if name in config}
    own = {k: v for k, v in config.items() if k not in {*sections, *GROUPS}}
    shared, names = signature_of(TrainOptions).plain, signature_of(SPECS[kind]).plain
    check_values(SPECS[kind], own, also=shared)
    check_values(TrainOptions, own, also=names)
    for name, values in sections.items():
        if not isinstance(values, dict):
            raise UserError(f"{name} is not a section: give its keys, as in {name}.KEY=VALUE")
        if name == "plan":
            values = _plan_values(kind, config)
        check_values(SECTIONS[name], values, name)
    _check_folder(kind, Path(config["output_dir"]), config)


def _check_folder(kind: str, out: Path, config: Mapping[str, Any]) -> None:
    """Refuses an output_dir in which files that are no work of this command would be replaced."""
    read = {f"model.{key}": value for key, value in (config.get("model") or {}).items()}
    for key, value in {**read, "initial": config.get("initial")}.items():
        if isinstance(value, str) and Path(value).expanduser().resolve() == out.resolve():
            raise UserError(f"output_dir={out} is the folder of {key}: name another")
    work = Path(config.get("work_dir") or out / "work")
    files = work / "answers.json", *work.glob("*/settings.json"), *out.glob("training*.json")
    ours = any(path.is_file() and path.is_relative_to(out) for path in files)
    other = (read_json(out / "training.json") or {}).get("kind", kind) != kind
    if out.exists() and any(out.iterdir()) and (other or not ours):
        raise UserError(f"output_dir={out} has files of something else: name a new folder")


def check_texts(config: Mapping[str, Any]) -> None:
    """Raises UserError if prompts or answers are missing or too few, before a model is loaded."""
    if config["answers"] is not None:
        check_answers(Path(config["answers"]))
        return
    count = len(load_prompts(Request.of(**config["data"])))
    if (held := _num_held_out(config["held_out"], count)) >= count:
        more = "data.limit=null" if count == config["data"].get("limit") else "more prompts"
        raise UserError(
            f"held_out={held} of {count} prompts leaves none to train on: give {more}, or"
            f" held_out={count // 5 or 1}"
        )


def _num_held_out(chosen: int | None, count: int) -> int:
    return chosen or min(32, count // 5 or 1)


def _plan_values(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``config["plan"]``; for exit heads, the PPSD paper's values replace None."""
    values = dict(config["plan"])
    head = config.get("head", "transformer")
    if kind == "exit" and head in STATED:
        for key, stated in STATED[head]._asdict().items():
            values[key] = stated if values.get(key) is None else values[key]
    return values


def train(
    kind: str,
    config: Mapping[str, Any],
    target: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ends: Sequence[int] = (),
    report: Report = silent,
) -> dict[str, Agreement] | None:
    """Trains a drafter for a loaded target, which is not changed; ``ends`` are its EOS token ids.

    ``config`` has the keys of conf/train/KIND.yaml. Returns drafter name -> how its drafts match
    held-out answers; None if the run ended before that (``plan.stop_minutes``, ``estimate_only``).
    """
    check(kind, config)
    plan, options = TrainPlan(**_plan_values(kind, config)), config.get("output") or {}
    names = signature_of(TrainOptions).plain
    shared = TrainOptions(**{key: value for key, value in config.items() if key in names})
    spec = SPECS[kind](**{k: config[k] for k in signature_of(SPECS[kind]).plain if k in config})
    loss, output = LossOptions(**config["loss"]), OutputOptions(**options)
    out = Path(shared.output_dir)
    work = Path(shared.work_dir) if shared.work_dir else out / "work"
    if target.dtype not in (torch.float32, torch.bfloat16):
        raise UserError(
            f"model.dtype={str(target.dtype).removeprefix('torch.')} cannot be trained with: use"
            " float32 or bfloat16"
        )
    frozen = FrozenModel(target, compute_dtype=target.dtype, keep_bytes=1e9 * shared.keep_gb)
    texts = _texts(shared, config, frozen, tokenizer, ends, work, report)
    num_held = _num_held_out(shared.held_out, len(texts))
    held = set(np.linspace(0, len(texts) - 1, num_held).round().astype(int).tolist())
    kept = [text for number, text in enumerate(texts) if number not in held]
    if not kept:
        raise UserError(f"held_out={num_held} of {len(texts)} answers leaves none to train on")
    windows = Windows(kept, plan.length, plan.batch, shared.seed)
    if not len(windows):
        raise UserError(f"no answer has a token within plan.length={plan.length}")
    ids = draft_ids(windows.counts(), output, frozen.vocab_size)
    ids = None if ids is None else ids.to(frozen.device)
    torch.manual_seed(shared.seed)
    made: dict[str, Callable[[], Drafter]] = {
        "eagle3": lambda: EagleDrafter(frozen, spec, output, ids, shared.seed),
        "block": lambda: BlockDrafter(frozen, spec, output, ids),
        "medusa": lambda: MedusaDrafter(frozen, spec, output, ids),
        "exit": lambda: ExitDrafter(frozen, spec, output, ids),
        "draft": lambda: DraftModel(frozen, spec, tokenizer),
    }
    drafter = made[kind]().to(frozen.device)
    about = {"kind": kind, "target": _fingerprint(target), "seed": shared.seed}
    about |= {"output": options, "spec": asdict(spec)}
    folder = work / (drafter.name or kind)
    fit = Fit(
        drafter, frozen, windows, plan=plan, loss=loss, folder=folder, settings=about, report=report
    )
    report(0.0, f"{len(kept)} answers, {windows.num_tokens} tokens; {len(held)} held out")
    if fit.state.step:
        report(0.0, f"continues from the checkpoint of step {fit.state.step} of {fit.steps}")
    if not fit.finished:
        report(0.0, f"{fit.estimate()} of {memory_bytes() / 1e9:.0f}")
    if shared.estimate_only:
        return None
    if not fit.run():
        report(fit.state.step / fit.steps, f"stopped at step {fit.state.step} of {fit.steps}")
        return None
    as_stored(drafter)
    drafter.save(out)
    found = measure(frozen, drafter, [texts[number] for number in sorted(held)])
    record = {
        **about,
        "parameters": sum(weight.numel() for weight in drafter.parameters()),
        "steps": fit.state.step,
        "tokens": fit.state.tokens,
        "minutes": round(fit.state.seconds / 60, 1),
        "machine": f"{platform.machine()}, {frozen.device.type}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "held_out": {"texts": len(held), **{k: each.to_json() for k, each in found.items()}},
        "curve": fit.state.curve,
    }
    write_json(out / f"training{drafter.name and f'-{drafter.name}'}.json", record)
    for name, agreement in found.items():
        report(1.0, f"{out}, {name}: {agreement}")
    return found


def _texts(
    shared: TrainOptions,
    config: Mapping[str, Any],
    target: FrozenModel,
    tokenizer: PreTrainedTokenizerBase | None,
    ends: Sequence[int],
    work: Path,
    report: Report,
) -> list[AnsweredText]:
    limit = int(config_value(target.config, "max_position_embeddings", 1 << 30))
    prompts: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
    if shared.answers is None or Path(shared.answers).name == "requests.jsonl":
        prompts = _prompts(config["data"], tokenizer, limit - shared.max_new_tokens)
    path = Path(shared.answers or work / "answers.jsonl")
    if shared.answers is None:
        rules = {"sampling": config["sampling"], "max_new_tokens": shared.max_new_tokens}
        rules |= {"seed": shared.seed, "target": _fingerprint(target.model)}
        keep_settings(work / "answers.json", rules, path)
        write_answers(
            path,
            target.model,
            prompts,
            sampling=SamplingParams(**config["sampling"]),
            max_new_tokens=shared.max_new_tokens,
            batch=shared.answer_batch,
            ends=ends,
            tokenizer=tokenizer,
            seed=shared.seed,
            report=report,
        )
    texts = list(read_answers(path, tokenizer, prompts))
    if len(texts) < 2:
        raise UserError(f"{path} has {len(texts)} answers: at least two are needed")
    largest = max(int(text.tokens.max()) for text in texts)
    if largest >= target.vocab_size:
        raise UserError(f"{path} has the token {largest}, the target {target.vocab_size} tokens")
    return [AnsweredText(text.tokens[:limit], min(text.num_prompt, limit)) for text in texts]


def _prompts(
    data: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, room: int
) -> dict[int, np.ndarray[Any, np.dtype[np.int64]]]:
    if tokenizer is None:
        raise UserError("this model has no tokenizer for the prompts of data=: give answers=FILE")
    request = Request.of(**data)
    most = min(room, request.max_prompt_tokens or room)
    found = {}
    for prompt in load_prompts(request):
        tokens = prompt_tokens(prompt, tokenizer, chat=request.chat)
        found[prompt.id], _ = fit_prompt(
            tokens, max_len=most, truncation=request.truncation, label=prompt.name
        )
    return found


def _fingerprint(model: PreTrainedModel) -> str:
    """Returns 16 hexadecimal digits that depend on names, shapes and some values of all weights."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        values = weight.detach().flatten()[:: max(1, weight.numel() // 64)].float().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def sharded(folder: Path, dtype: str) -> PreTrainedModel:
    """Loads a target whose layers accelerate spreads over all devices; not tested on a GPU."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map="auto", local_files_only=True
    )
    return model.eval()
