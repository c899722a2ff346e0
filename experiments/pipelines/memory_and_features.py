"""Memory per device (SpecPipe Table 1) and the feature table (SpecPipe Table 2)."""

from __future__ import annotations

from experiments.reproduce.drafts import drafts
from experiments.reproduce.findings import Findings
from experiments.reproduce.items import Item
from experiments.reproduce.lab import Lab
from specdec.clocks import Work
from specdec.clocks.build import build_profile

_MIB, _GIB = 2**20, 2**30


def memory(item: Item, lab: Lab) -> Findings:
    """Memory per device from the model's shape, and the additional memory of the tree (Table 1).

    The totals include a context budget that contains the keys and values of tree nodes (4.5), so
    the tree adds only its rows in flight and its mask.

    Keys: ``shape`` (hidden, layers, kv_heads, head_dim, ffn, vocab), ``devices``,
    ``context_tokens``, ``runtime_mib``, ``width``, ``levels``.
    """
    findings, config = Findings(), item.config
    s = config["shape"]
    kv_size = s["kv_heads"] * s["head_dim"]
    layer = 2 * s["hidden"] ** 2 + 2 * s["hidden"] * kv_size + 3 * s["hidden"] * s["ffn"]
    layers = s["layers"] // config["devices"]
    kv_token = 2 * kv_size * 2 * layers  # bytes on one device: keys and values, 2 bytes each
    weights = 2 * layer * layers / _GIB
    cache = kv_token * config["context_tokens"] / _GIB
    runtime = config["runtime_mib"] * _MIB / _GIB
    middle = weights + cache + runtime
    table = 2 * s["hidden"] * s["vocab"] / _GIB
    width, nodes = config["width"], 1 + config["width"] * config["levels"]
    hidden = 2 * width * s["hidden"] * 2 / _MIB  # in and out, 2 bytes each
    mask = nodes**2 / _MIB
    rows = (
        ("parameters of a layer (millions)", layer / 1e6),
        (f"weights of {layers} layers, bf16 (GiB)", weights),
        (f"KV of {config['context_tokens']} tokens (GiB)", cache),
        ("embedding or output table (GiB)", table),
        ("runtime (GiB)", runtime),
        ("KV of one token on a device (KiB)", kv_token / 1024),
        (f"KV of {nodes} tree nodes, first stage (MiB, of the KV budget)", nodes * kv_token / _MIB),
        (f"hidden states of a level of {width}, in and out (MiB)", hidden),
        (f"mask of {nodes} nodes, a byte each (MiB)", mask),
    )
    findings.table("Arithmetic on the model's shape", ("what", "value"), rows)
    for claim, value in {
        "first": middle + table,
        "middle": middle,
        "last": middle + table,
        "tree": hidden + mask,
    }.items():
        findings.add(claim, value, "formula", config["conditions"])
    return findings


def features(item: Item, lab: Lab) -> Findings:
    """SpecPipe's row of Table 2: a run, or a reason, for each feature.

    Keys: ``common``, ``draft``, ``batch`` (presets that stand for feature 3).
    """
    from specdec.config.options import options

    findings, config = Findings(), item.config
    presets = options("strategy", ())
    for draft in drafts([config["draft"]], item, lab, findings):
        run = lab.run(draft.words(*config["common"]))
        step = 1e3 * run.summary["clock_s"] / run.summary["steps"]
        draft_ms = build_profile(run.config["clock"]).ms(Work.DRAFT, 1)
        batch = [name for name in config["batch"] if name in presets]
        text = f"a draft pass of {draft_ms:.0f} ms beside a mean step of {step:.0f} ms"
        findings.add("no_latency", draft_ms < step, "simulated", text)
        text = "any pair that shares a tokenizer runs as it is"
        findings.add("no_training", True, "formula", text)
        text = "the tree grows and is pruned each step (specdec trace)"
        findings.add("dynamic", True, "formula", text)
        if batch:
            findings.add("large_batch", True, "formula", f"preset {', '.join(batch)}")
    return findings
