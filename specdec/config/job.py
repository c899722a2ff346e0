"""Composes overrides into jobs, which are checked configurations that can be run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Annotated, Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from specdec.clocks.build import clock_kind
from specdec.config.hydra import Composed, Words, compose_config, compose_raw, key_of, parse, plain
from specdec.config.options import BASES, GROUPS, PARTS, Node, Trees, has_key
from specdec.config.profiles import fit, load_profile, with_caveat
from specdec.data import Request, check_data
from specdec.errors import UserError
from specdec.files import flatten
from specdec.parts.build import build_part, check_values, locate
from specdec.parts.fields import Count, Index, Positive, Text, Threads, did_you_mean, expects


@dataclass
class _RunKeys:
    max_new_tokens: Count
    stop_strings: list[Annotated[str, Field(min_length=1, max_length=200)]]
    ignore_eos: bool
    seed: Index
    batch_size: Count
    prefill_chunk: Count
    trace: bool
    threads: Threads | None
    record: bool
    output_dir: Annotated[Text | None, expects("name a folder, or leave it out")]


@dataclass
class _CompareKeys(_RunKeys):
    strategies: list[str]
    repeats: Count


COMPARE = tuple(_CompareKeys.__annotations__)  # top-level keys that only ``specdec compare`` has


def _keys(**hints: Any) -> type:
    return make_dataclass("Keys", hints.items())


_PRESET = {"name": Text, "title": Text, "baseline": bool}
_OTHER = {**_PRESET, "options": dict[str, Any]}
_HF = Field(pattern="^hf_(generate|assisted|prompt_lookup)$")
_RIVAL = Field(pattern="^((ort|openvino)_(generate|draft|lookup)|llamacpp_(generate|draft|ngram))$")
_PROFILED = _keys(profile=Text, scale=Positive)

_SCHEMAS: dict[str, str | type] = {
    "strategy=parts": _keys(**_PRESET),
    "strategy=hf": _keys(**_OTHER, method=Annotated[str, _HF]),
    "strategy=rival": _keys(**_OTHER, method=Annotated[str, _RIVAL]),
    "strategy=endpoint": _keys(**_OTHER),
    "options of hf": "specdec.runs.hf_generate.HFOptions",
    "options of rival": "specdec.runs.rival.RivalOptions",
    "options of endpoint": "specdec.rivals.endpoint.EndpointOptions",
    "sampling": "specdec.sampling.transform.SamplingParams",
    "serving": "specdec.serving.rules.ServingRules.of",
    "data": "specdec.data.request.Request",
    "clock=measured": _keys(),
    "clock=simulated": _PROFILED,
    "clock=paced": _PROFILED,
    "logger=none": _keys(),
    "logger=wandb": "specdec.cli.loggers.WandbLogger",
    "model=pretrained": "specdec.pairs.pretrained.build_pretrained",
    "model=random": "specdec.pairs.random.build_random",
    "model=synthetic": "specdec.pairs.recorded.build_synthetic",
    "model=replay": "specdec.pairs.recorded.build_replay",
    "profiling": "specdec.profiling.job.ProfilingOptions",
}
"""Section (with ``kind`` if it has several) -> class or function whose parameters are its keys.

A section with ``_target_`` has the parameters of that class.
"""

_UNSTATED = {"logit_scale", "logit_step"}  # of RandomPair: only certification passes them


def check_config(config: Node, choices: Mapping[str, str]) -> None:
    top = {key: value for key, value in config.items() if key not in GROUPS}
    check_values(_CompareKeys if "strategies" in top else _RunKeys, top, also=GROUPS)
    strategy: Any = config.get("strategy")
    has_parts = isinstance(strategy, dict) and strategy.get("kind") == "parts"
    for section in GROUPS:
        if has_parts or section not in PARTS:
            check_section(section, config.get(section), choices)
    if has_parts:
        executor = dict(config["executor"])
        cls: Any = locate(executor.pop("_target_"), "executor")
        cls.check(executor, clock_kind(config["clock"]), tracing=config["trace"])
    else:
        schema = _schema(f"options of {strategy['kind']}")
        check_values(schema, strategy["options"], "strategy.options")


def check_section(section: str, node: Any, choices: Mapping[str, str]) -> None:
    label = f"{section}={choices[section]}" if section in choices else section
    if not isinstance(node, dict):
        raise UserError(f"{label} is not a section: give it an option's keys, or drop ~{section}")
    values = {key: value for key, value in node.items() if key not in ("kind", "_target_")}
    path = BASES.get(section)
    base: Any = resolve_name(path) if path else None
    outside, kind = "_target_" in node, node.get("_target_", node.get("kind"))
    common, schema = _schema(section), _schema(f"{section}={kind}")
    if not outside:
        schema = schema or common
    elif section == "executor":  # whose keys are arguments of the first phase
        cls: Any = locate(kind, section, base)
        schema = cls.options or cls.plan
    if schema is not None:
        also = ("path",) if kind == "pretrained" else ()  # only model=gguf has it
        complete = section != "executor"
        check_values(schema, values, section, label, given=_UNSTATED, also=also, complete=complete)
    elif base and (outside or section in PARTS):
        build_part(node, None, section, base, label=label, common=common)
    else:
        kinds = ", ".join(k.partition("=")[2] for k in _SCHEMAS if k.startswith(f"{section}="))
        raise UserError(f"{label} has kind {str(kind)!r}, which is unknown: use one of {kinds}")


def _schema(name: str) -> Any:
    schema = _SCHEMAS.get(name)
    return resolve_name(schema) if isinstance(schema, str) else schema


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    config: dict[str, Any]
    output_dir: str | None
    notices: tuple[str, ...] = ()


def run_job_of(overrides: Words, extra: Trees = ()) -> Job:
    parsed = parse(overrides)
    for override in parsed:
        if key_of(override) in COMPARE:
            raise UserError(f"{override.input_line} is for `specdec compare` only: leave it out")
        if key_of(override).startswith(("hydra.", "hydra/")):
            raise UserError(
                f"{override.input_line} is for sweeps only: add -m to `specdec run`, or leave it"
                " out (output_dir=DIR names the folder of a run)"
            )
    composed = compose_config(overrides, extra=extra)
    strategy = composed.values.get("strategy", {})  # absent: refused by ``check_config``
    for override in parsed if strategy.get("kind") != "parts" else ():
        part = key_of(override).split(".")[0]
        if part in PARTS and not (part == "executor" and str(override.value()) == "local"):
            raise UserError(
                f"{override.input_line} does not fit strategy={strategy['name']}: that is decoding"
                f" of another program, which has no {part}; choose another strategy or leave it out"
            )
    return checked_job(composed)


def checked_job(composed: Composed) -> Job:
    values, choices = composed.values, dict(composed.choices)
    check_config(values, choices)
    config = {key: value for key, value in values.items() if key not in ("output_dir", *COMPARE)}
    clock, model = config["clock"], config["model"]
    if "_target_" in clock:  # built-in kinds are in the section already
        clock = {"kind": str(clock_kind(clock)), **clock}
    elif "profile" in clock:
        clock = clock | load_profile(clock["profile"], composed.trees)
    if "_target_" in model:
        model = {"kind": str(model["_target_"]), **model}
    executor = config["executor"]
    shared = any((executor.get(key) or 1) > 1 for key in ("target_degree", "draft_degree"))
    if shared and model.get("backend") == "auto" and executor.get("transport") == "distributed":
        # Devices that share layers run them eagerly; results name what ran.
        model = {**model, "backend": "eager"}
    config = fit({**config, "clock": clock, "model": model})
    name, model = str(config["strategy"]["name"]), config["model"]
    if config["strategy"]["kind"] != "parts":
        _check_own_decoding(name, config)
        for part in PARTS:
            del config[part]
            choices.pop(part, None)
    choices.pop("strategy", None)
    if config["record"] and model["kind"] in ("synthetic", "replay"):
        raise UserError(
            f"record=true needs a draft model, which model={choices.get('model')} does not have:"
            " leave it out, or use model=tiny or model=hf"
        )
    at_once = config["serving"].get("arrivals", "at_once") == "at_once"
    if config["data"].get("turns", "first") == "all" and (config["batch_size"] > 1 or not at_once):
        raise UserError(
            "data.turns=all asks a turn after the answer to the one before: use batch_size=1 and"
            " serving.arrivals=at_once, or data.turns=first"
        )
    notices: tuple[str, ...] = ()
    if (mixed := _mixture_with_head(config)) is not None:
        config["source"] = mixed
        notices = (f"model.draft is not set: strategy={name} drafts with model.eagle_head",)
    sources = [*nodes_of(config.get("source"))]
    if any(node.get("model") == "middle" for node in sources):
        lacks = {"pretrained": "middle", "random": "middle_layers"}.get(model["kind"])
        if lacks and model[lacks] is None:
            raise UserError(
                f"strategy={name} needs a middle model, but model.{lacks} is not set: add it, or"
                " choose a source without one (source=draft_model)"
            )
    if model["kind"] == "pretrained":
        check_data(Request.of(**config["data"]))
        num_layers, more = _check_models(name, config, sources)
    else:
        num_layers, more = model.get("num_layers", 1), _notices_without_text(config, sources)
    config["clock"] = with_caveat(config, num_layers)
    config["choices"] = choices
    return Job(name, config, values["output_dir"], (*notices, *more))


def _mixture_with_head(config: Node) -> dict[str, Any] | None:
    """If a target has an EAGLE head but no draft model, returns the node of its mixture source with
    the head in place of the draft model; else None.
    """
    source, model = config.get("source", {}), config["model"]
    if model["kind"] != "pretrained" or model["draft"] or not model["eagle_head"]:
        return None
    draft = {"_target_": "specdec.sources.DraftModelSource"}
    if not _class(source).endswith(".MixtureSource") or draft not in source["sources"]:
        return None
    head = {"_target_": "specdec.sources.EagleSource"}
    return {**source, "sources": [head if s == draft else s for s in source["sources"]]}


def _check_own_decoding(name: str, config: Node) -> None:
    fits = {
        "executor": _class(config["executor"]).endswith(".LocalExecutor"),
        "clock": config["clock"].get("kind") == "measured",
        "trace": not config["trace"],
        "batch_size": config["batch_size"] == 1,
        "model": config["model"].get("kind") in ("pretrained", "random"),
    }
    for key in (key for key, fitting in fits.items() if not fitting):
        raise UserError(
            f"strategy={name} is decoding of another program: one device, one prompt at a time,"
            f" measured time, real models; this {key} does not fit. Leave the strategy or the"
            f" {key} out"
        )


_REQUIRED = {  # class of a source -> the key of ``model`` that it needs, and the remedy
    ".EagleSource": (
        "eagle_head",
        "an EAGLE head: add model.eagle_head=FOLDER (config.json and model.safetensors, trained for"
        " model.target)",
    ),
    ".TranslatedSource": (
        "translated",
        "a draft that has another tokenizer: add model.translated=PATH",
    ),
}


def _check_models(name: str, config: Node, sources: Sequence[Node]) -> tuple[int, tuple[str, ...]]:
    """Checks the models' files without loading the models; returns the number of the target's
    layers, and warnings.
    """
    from specdec.models.inspection import inspect_pair

    model, strategy = config["model"], config["strategy"]
    drafts = any(_class(node).endswith(".DraftModelSource") for node in sources)
    if strategy["kind"] != "parts":
        drafts = str(strategy.get("method")).endswith(("_assisted", "_draft"))
    needed = drafts or config["record"]
    infos = inspect_pair(target=model["target"], draft=model["draft"] if needed else None)
    target, draft, at = infos["target"], infos.get("draft"), f"model.target={model['target']}"
    check_stages(config, target.num_layers)
    if not target.has_mtp and any(node.get("untrained") == "mtp" for node in sources):
        raise UserError(
            f"{at} of model_type {target.model_type!r} has no MTP layers (num_mtp_layers,"
            " num_nextn_predict_layers): choose another source, or model=random to try it"
        )
    for own_class, (key, remedy) in _REQUIRED.items():
        if model[key] is None and any(_class(node).endswith(own_class) for node in sources):
            raise UserError(f"strategy={name} drafts with {remedy}, or choose another source")
    if needed and draft is None:
        why = f"strategy={name} drafts with a draft model, but model.draft is not set"
        other = "choose a source without one (source=prompt_lookup)"
        if not drafts:
            why, other = "record=true records a draft's ranks", "leave out record=true"
        raise UserError(f"{why}: add model.draft=PATH_OR_ID, or {other}")
    if draft is None or not 0 < draft.max_positions < target.max_positions:
        return target.num_layers, ()
    return target.num_layers, (
        f"model.draft={model['draft']} has {draft.max_positions} positions, the target"
        f" {target.max_positions}: beyond them nothing is drafted, and all rates count those"
        " tokens too (max_new_tokens and data.max_prompt_tokens limit the length)",
    )


def _notices_without_text(config: Node, sources: Sequence[Node]) -> tuple[str, ...]:
    copies = (".PromptLookupSource", ".SuffixSource", ".NGramSource")
    names = [_class(node).rpartition(".")[2] for node in sources if _class(node).endswith(copies)]
    if not names or config["model"].get("kind") != "synthetic":
        return ()
    return (
        f"strategy={config['strategy']['name']}: {' and '.join(dict.fromkeys(names))} copies from"
        " earlier text, and the tokens of model=synthetic are random, so it finds next to nothing;"
        " its figures say nothing of the method. Use model=tiny, model=hf, or model=replay with a"
        " record of your own pair",
    )


def check_stages(config: Node, num_layers: int) -> None:
    stages = config.get("executor", {}).get("stages")
    if stages is not None and stages > num_layers:
        raise UserError(
            f"executor.stages={stages} is more than the {num_layers} layers of the target: choose"
            f" 1 to {num_layers}"
        )


def nodes_of(node: object) -> Iterator[dict[str, Any]]:
    """Yields the mappings of a configuration node, at any depth."""
    if isinstance(node, dict):
        yield node
    for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from nodes_of(item)


def _class(node: Node) -> str:
    return str(node.get("_target_", ""))


COMPARISON_FILE = "comparison.json"  # if this file exists in a folder, the comparison is complete


@dataclass(frozen=True, slots=True)
class Comparison:
    jobs: tuple[Job, ...]
    repeats: int
    output_dir: str | None
    notices: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        rows = {job.name: job.config for job in self.jobs}
        return {"command": "compare", "repeats": self.repeats, "strategies": rows}


def compose_comparison(overrides: Words, extra: Trees = ()) -> Comparison:
    parsed = parse(overrides)
    if any(o.key_or_group == "strategy" for o in parsed):
        raise UserError(
            "compare takes several presets: write 'strategies=[ar,NAME]', not strategy="
        )
    of_parts = [o for o in parsed if _part_of(o)]  # only these depend on the row
    common = [str(o.input_line) for o in parsed if not _part_of(o)]
    base = compose_config(common, name="compare", extra=extra).values
    rows, notices, unused = list[Composed](), list[str](), of_parts
    for name in _row_names(base["strategies"]):
        raw, left_out = _compose_row([f"strategy={name}", *common], of_parts, extra)
        rows.append(plain(raw, extra))
        notices += [f"{o.input_line} does not apply to {name}" for o in left_out]
        unused = [o for o in unused if o in left_out]
    if base["trace"] is True:
        raise UserError("trace=true is for one strategy at a time: use it with `specdec run`")
    jobs = [checked_job(row) for row in rows]
    for override in unused:
        part = str(_part_of(override))
        for row in rows:
            if f"{part}={row.choices.get(part)}" in overrides:
                raise UserError(row.unknown_key(override))
        keys = {k for job in jobs for k in flatten({part: job.config.get(part, {})})}
        known = [key for key in keys if not key.endswith("_target_")]
        hint = did_you_mean(key_of(override), known) or f"their {part} has no keys, so leave it out"
        raise UserError(f"{override.input_line} applies to none of the rows: {hint}")
    notices += [text for job in jobs for text in job.notices]
    once = tuple(dict.fromkeys(notices))
    return Comparison(tuple(jobs), base["repeats"], base["output_dir"], once)


def _compose_row(
    common: Words, of_parts: Sequence[Override], extra: Trees
) -> tuple[DictConfig, list[Override]]:
    """Composes a row with those overrides of parts that apply to it; also returns the others."""

    @cache
    def composed(*words: str) -> DictConfig:
        return compose_raw([*common, *words], name="compare", extra=extra)

    fixed = PARTS[:3] if composed().strategy.get("baseline") else ()
    applying = [o for o in of_parts if _part_of(o) not in fixed]
    keys, groups = [key_of(o) for o in applying], [o for o in applying if o.key_or_group in PARTS]
    words = [str(o.input_line) for o in groups]
    if "executor.stages" in keys and "executor" not in keys:
        words += [] if "stages" in composed(*words).executor else ["executor=pipeline"]
    row = OmegaConf.to_container(composed(*words))
    values = [o for o in applying if o not in groups and (o.is_add() or has_key(row, key_of(o)))]
    left_out = [o for o in of_parts if o not in (*groups, *values)]
    return composed(*words, *(str(o.input_line) for o in values)), left_out


def _row_names(strategies: object) -> list[str]:
    if not isinstance(strategies, list) or not strategies:
        example = "write 'strategies=[ar,staged]'"
        raise UserError(f"strategies={strategies} must be a list of presets: {example}")
    names = [str(name) for name in strategies]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"strategies={names} names {twice[0]} twice: name each row once")
    return names


def _part_of(override: Override) -> str | None:
    key = key_of(override)
    if key.startswith("strategy.options."):
        return "strategy"
    part = key.split(".")[0]
    return part if part in PARTS else None
