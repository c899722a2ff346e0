"""Every preset decodes as it did when it was recorded: tokens, counts and simulated times.

Changes of structure must pass this test without new records. Where a figure is meant to change,
record again, and say in the commit which figure and why:

    python -m tests.matrix.record_presets [PRESET ...]

``record_presets.py`` has the runs. Each preset decodes two prompts one after the other, greedily
and sampled, and five prompts sampled in batches of four; the suite runs one of the first two cases
of each preset, and the batches of every third. The records have:

- of each request: tokens, their sources, when each was emitted, why it ended, all counters;
- of the run: the clock, busy time by rank, drafting time and how much of it is hidden, steps, load,
  the counters of executor and source, rows per stage, model passes.

``test_the_records_prove_something`` checks what happens in them. In every case every preset but ar
has right drafts, accepted or hit (of the emitted tokens 20 % to all greedily, 9 % to 97 % sampled,
16 % to 93 % in batches), and sampled all have misses too. Decided tokens are cut at the end of
requests, which end by length and by an end token, and pipelines fill, flush, refill and prune.

Not in them: verifiers, sources, policies and serving options that no preset names, and ranks that
are processes. The other tests of this folder check the tokens of these, not their times.
"""

import re
from collections import Counter

import pytest

from tests.matrix.record_presets import (
    BATCHED,
    CASES,
    COMMAND,
    FILE,
    Record,
    differences,
    presets,
    read,
    record,
)
from tests.sampled import checkered, sampled

pytestmark = pytest.mark.slow

MAX_BYTES = 5_000  # of the file, per preset: a diff of it has to be readable
ALONE = [case for case in CASES if case != BATCHED]


@pytest.mark.parametrize(("case", "preset"), checkered(ALONE, presets()))
def test_preset_decodes_as_recorded(preset: str, case: str) -> None:
    recorded = read().get(preset, {}).get(case)
    assert recorded, (
        f"preset {preset} has no record of case {case} in {FILE.name}: look at its results, then"
        f" run `{COMMAND} {preset}` and commit the file"
    )
    found = differences(recorded, record(preset, case))
    if found:
        head = f"{preset}, {case}: {len(found) // 3} figures differ from the record"
        pytest.fail("\n".join([head, *found]), pytrace=False)


@pytest.mark.parametrize("preset", sampled(presets(), every=3))
def test_preset_decodes_batches_as_recorded(preset: str) -> None:
    test_preset_decodes_as_recorded(preset, BATCHED)


def test_every_record_is_of_a_preset() -> None:
    gone = sorted(read().keys() - {*presets()})
    assert not gone, f"records of presets that are gone: run `{COMMAND} ar`, which drops {gone}"
    assert FILE.stat().st_size < MAX_BYTES * len(presets())


@pytest.mark.parametrize("case", CASES)
def test_the_records_prove_something(case: str) -> None:
    """A pair that never agrees, or always does, would hide most changes."""
    found = {preset: totals(records[case]) for preset, records in read().items()}
    drafting = {preset: total for preset, total in found.items() if preset != "ar"}
    for preset, total in drafting.items():
        drafted = total["accepted"] + total["hits"]
        assert total["proposed"] > 0, preset
        least = _LEAST.get((preset, case), 0.1)
        assert drafted >= least * total["tokens"], f"{preset}: hardly a draft is right"
        assert total["misses"] or case == "greedy", f"{preset}: every draft is right"
    everything = sum(found.values(), Counter[str]())
    for name in ("cut_tokens", "fill_steps", "flush_steps", "refill_steps", "length", "eos"):
        assert everything[name] > 0, name


# The draft has another tokenizer, and few of its texts are the target's tokens; drafters that were
# fitted to sampled text for a second are right there, but hardly along greedy text.
_LEAST = {
    ("translated", "sampled"): 0.08,
    ("dflash", "greedy"): 0.02,
    ("dspark", "greedy"): 0.02,
}


def totals(recorded: Record) -> Counter[str]:
    """Sums of the counters, number of tokens and reasons of ending over a record's requests."""
    total = Counter[str]()
    for name, text in recorded.items():
        if name.endswith(" counters"):
            for counter, number in re.findall(r"(\w+)=(\d+)(?!\S)", text):
                total[counter] += int(number)
        elif name.endswith(" tokens"):
            *tokens, reason = text.split()
            total["tokens"] += len(tokens)
            total[reason] += 1
    return total
