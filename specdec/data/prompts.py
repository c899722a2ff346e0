import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from specdec.data.files import fill, text_field
from specdec.data.prompt import Prompt
from specdec.data.readers import DataRecord, json_lines, paragraphs, speed_bench
from specdec.data.request import Request, check_request
from specdec.data.sets import FIRST_TURN, MIXED, OWN, SETS, STDLIB, Hub, Texts, holds, place_of
from specdec.errors import UserError

_FIRST_TURN = "{turns.0}"
_MAX_CHECKED = 1_000
_ID_BLOCK = 1_000_000  # ids of set number s in ``mixed`` start at s * _ID_BLOCK


def load_prompts(request: Request | None = None, **keys: Any) -> list[Prompt]:
    """Loads the prompts of ``Request(**keys)``, as in ``name="humaneval", limit=8``.

    Line breaks at the end of a prompt are removed, except in user files: byte-level tokenizers join
    a line break with the indentation after it, so a final line break would exclude indentation.
    """
    request = request or Request(**keys)
    check_request(request)
    prompts = list(islice(_prompts(request), request.limit))
    if not prompts:
        where = f" in {str(request.path)!r}" if request.path else ""
        raise UserError(f"data={request.name} has no prompts{where}")
    if request.reader is None and request.name not in OWN:
        prompts = [replace(p, text=p.text.rstrip("\n")) for p in prompts]
    return prompts


def check_data(request: Request) -> None:
    """Checks that the data set's file exists, by reading its first prompt; a user's file is read as
    far as the run does, up to ``_MAX_CHECKED`` prompts.
    """
    check_request(request)
    if request.origin == "hub":
        return
    for name in request.sets or [request.name]:
        if request.reader is not None or name not in ("stdlib", "mixed"):
            limit = min(request.limit or _MAX_CHECKED, _MAX_CHECKED) if name in OWN else 1
            load_prompts(replace(request, name=name, sets=None, sample_seed=None, limit=limit))


def _prompts(request: Request) -> Iterator[Prompt]:
    if request.name == "mixed" and request.reader is None:
        return _mixed(request)
    prompts = _in_order(request)
    if request.sample_seed is not None:
        prompts = list(prompts)
        random.Random(request.sample_seed).shuffle(prompts)  # noqa: S311 - order, not decoding
    return iter(prompts)


def _in_order(request: Request) -> Iterable[Prompt]:
    name = request.name
    if request.reader is not None:
        return request.reader.prompts()
    if name in OWN:
        return _from_own_file(request)
    entry = STDLIB if name == "stdlib" else SETS[name]
    if request.origin == "hub":
        assert entry.hub is not None, "check_request refuses sets without one"
        texts, records = entry.hub.texts, _hub_records(name, entry.hub)
    else:
        place, path = entry.places[0], Path()
        if name != "stdlib":
            place, path = place_of(name, request.subset)
        texts, records = place.texts, place.read(path, request.subset)
    subset = request.subset or entry.first_subset
    forms = Texts(*(text.replace("{subset}", subset) for text in texts))
    return _of_records(name, records, forms, f"is this the file of data={name}?")


def _hub_records(name: str, hub: Hub) -> Iterator[DataRecord]:
    from datasets import load_dataset

    try:
        rows = load_dataset(hub.repo, hub.config, split=hub.split)
    except Exception as error:  # network, renamed set, missing split: depends on the hub
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"data={name}: {hub.repo} (split {hub.split}) cannot be loaded from the hub ({reason});"
            " check the network, or put the files into the folder that SPECDEC_DATA names"
        ) from error
    for index, fields in enumerate(rows):
        yield DataRecord(index, f"{hub.repo} row {index}", dict(fields))


def _from_own_file(request: Request) -> Iterator[Prompt]:
    assert request.path is not None, "check_request refuses it"
    read = {"jsonl": json_lines, "text": paragraphs, "speed_bench": speed_bench}[request.name]
    records, template = read(Path(request.path).expanduser(), request.subset), request.template
    if request.name == "speed_bench" and template is None:
        return _of_records(request.name, records, FIRST_TURN, "is this a file of SPEED-Bench?")
    if request.name == "jsonl" and template is None:
        field, hint = request.field or "prompt", "correct or remove this line, or set data.field"
        records = (
            replace(r, fields={"text": text_field(r.fields, field, where=r.where, hint=hint)})
            for r in records
        )
    template = template or "{text}"
    return _of_records(request.name, records, Texts(template, template), "see data.template")


def _of_records(
    name: str, records: Iterable[DataRecord], forms: Texts, hint: str
) -> Iterator[Prompt]:
    for record in records:
        fields = record.fields
        turns, question = fields.get("turns"), fields.get("question_id")
        # Further turns of a dialogue, for templates that contain the first one.
        further = turns[1:] if _FIRST_TURN in forms.template and isinstance(turns, list) else []
        filled = [
            fill(form.replace(_FIRST_TURN, f"{{turns.{i}}}"), fields, where=record.where, hint=hint)
            for i in range(1 + len(further))
            for form in forms
        ]
        (text, message), *later = zip(filled[::2], filled[1::2], strict=True)
        yield Prompt(
            id=record.index,
            text=text,
            name=f"{name}/{record.index}",
            source=record.where,
            message=message,
            later=tuple(later),
            question_id=question if isinstance(question, int | str) else None,
            category=str(fields.get("category") or ""),
        )


def _mixed(request: Request) -> Iterator[Prompt]:
    names = request.sets or ["stdlib", *filter(holds, MIXED)]

    def prompts_of(name: str) -> Iterator[Prompt]:
        base = _ID_BLOCK * ("stdlib", *SETS).index(name)
        for prompt in _prompts(replace(request, name=name, sets=None)):
            yield replace(prompt, id=base + prompt.id)

    return filter(None, chain.from_iterable(zip_longest(*map(prompts_of, names))))
