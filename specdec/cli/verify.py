from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.cli.arguments import Arguments
from specdec.cli.execute import run_in, show_config
from specdec.config.folders import output_folder
from specdec.config.job import check_stages, run_job_of
from specdec.errors import UserError

HELP = """\
specdec verify [--cfg] [--fail-fast] [--config-dir DIR] [depth=standard|full] [group=option]
               [key=value] ...

Certifies that a configuration is lossless, or names what is wrong. Takes what `specdec run` takes.
Most checks run on small random models in float64, so that every difference is a fault; two run the
configured models with their dtype, backend and transport, and tell ties from faults. Writes
verify.json.

  greedy_parity        greedy output equals plain decoding, token for token
  sampled_parity       so does sampled output with the same seed (verifier=match)
  distribution         the law of the output is the target's, on tables of logits (e-values)
  cache_invariant      every cache entry equals a fresh forward over its path
  tree_invariant       what survives a step is the new root's subtree, and nothing else
  draft_rows           the draft computes each node once, and each committed token it lacked; a note
  stop_rules           EOS, stop strings, limits inside a path; short and long prompts
  long_request         so does one request of 530 tokens; draws of 640 positions do not repeat
  batch_independence   a request's output is the same alone and in any batch
  sampler              tokens and distributions of the target's sampler, row by row
  numerics             configured models and dtype: differences are ties, not faults
  configured_law       configured models, sampled: the law of the output is the target's
  exact_dtype          with model.exact=true: long outputs in that dtype have no difference

--fail-fast ends with the first check that fails.

depth=full decodes four times as many requests, longer outputs, a vocabulary of 40,040 tokens, and
every family that can have a sliding window (minutes instead of seconds).

Exit status: 0 lossless, 1 not (or a lossy verifier), 2 a configuration that cannot be used.

Examples
  specdec verify strategy=best_first
  specdec verify strategy=speculative verifier=rejection sampling=t08
  specdec verify strategy=specpipe model.dtype=bfloat16 output_dir=outputs/certificate
"""
FLAGS = ("--cfg", "--fail-fast")


def main(arguments: Arguments) -> int:
    depths = [word for word in arguments.overrides if word.startswith("depth=")]
    depth = depths[-1].removeprefix("depth=") if depths else "standard"
    others = tuple(word for word in arguments.overrides if word not in depths)
    arguments = replace(arguments, overrides=others)
    if arguments.cfg:
        return show_config(arguments, lambda *words: run_job_of(*words).config, name="config")
    job = run_job_of(arguments.overrides, arguments.config_dirs)
    # Imported here: torch and transformers take seconds to import.
    from specdec.certify import CHECKS, DEPTHS, Report, print_report, refuse, write_report
    from specdec.certify.certify import certify

    if depth not in DEPTHS:
        raise UserError(f"depth={depth} is not one of {', '.join(DEPTHS)}")
    refuse(job.config)
    layers = job.config["model"].get("num_layers")
    if layers is not None:  # other models are checked with their files
        check_stages(job.config, layers, f"model={job.config['choices']['model']}")
    folder = output_folder(job.output_dir, "verify", job.name)

    def verify(progress: Any) -> Report:
        progress.phase(f"{job.name}: checking", len(CHECKS))
        report = certify(
            job.config,
            depth=depth,
            on_check=lambda c: progress.advance(detail=c.name),
            fail_fast="--fail-fast" in arguments.flags,
        )
        write_report(folder, report, {"depth": depth})
        return report

    report = run_in(folder, {"command": "verify", "depth": depth, **job.config}, "", verify)
    assert report is not None, "verification is always repeated"
    print_report(report, job.config["choices"])
    print(f"results in {folder}")
    return 0 if report.lossless else 1
