"""``specdec verify``: certifies one configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.cli.arguments import read_arguments
from specdec.cli.execute import run_in
from specdec.cli.folders import output_folder
from specdec.cli.show import show_config
from specdec.config.job import check_stages, run_job_of

HELP = """\
specdec verify [--cfg] [--config-dir DIR] [group=option] [key=value] ...

Certifies that a configuration is lossless, or names what is wrong. Takes what `specdec run` takes.
Most checks run on small random models in float64, so that every difference is a fault; one runs the
configured models in the configured dtype and tells ties from faults. Writes verify.json.

  greedy_parity        greedy output equals plain decoding, token for token
  sampled_parity       so does sampled output with the same seed (verifier=match)
  distribution         the law of the output is the target's (chi-square, total variation)
  cache_invariant      every cache entry equals a fresh forward over its path
  tree_invariant       what survives a step is the new root's subtree, and nothing else
  draft_rows           the draft computes each node once, and each committed token it lacked; a note
  stop_rules           EOS, stop strings, limits inside a path; short and long prompts
  long_request         so does one request of 530 tokens; draws of 640 positions do not repeat
  batch_independence   a request's output is the same alone and in any batch
  numerics             configured models and dtype: differences are ties, not faults

Exit status: 0 lossless, 1 not (or a lossy verifier), 2 a configuration that cannot be used.

Examples
  specdec verify strategy=best_first
  specdec verify strategy=speculative verifier=rejection sampling=t08
  specdec verify strategy=specpipe model.dtype=bfloat16 output_dir=outputs/certificate
"""


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    arguments = read_arguments(words, flags=("--cfg",))
    if arguments.cfg:
        return show_config(arguments, lambda *words: run_job_of(*words).config, name="config")
    # Imported here: torch and transformers take seconds to import.
    from specdec.certify import CHECKS, Report, certify, print_report, refuse, write_report

    job = run_job_of(arguments.overrides, arguments.config_dirs)
    refuse(job.config)
    layers = job.config["model"].get("num_layers")
    if layers is not None:  # others are checked with their files
        check_stages(job.config, layers, f"model={job.config['choices']['model']}")
    folder = output_folder(job.output_dir, "verify", job.name)

    def verify(progress: Any) -> Report:
        progress.phase(f"{job.name}: checking", len(CHECKS))
        report = certify(job.config, on_check=lambda c: progress.advance(detail=c.name))
        write_report(folder, report)
        return report

    report = run_in(folder, {"command": "verify", **job.config}, "", verify)
    assert report is not None, "verification is always repeated"
    print_report(report, job.config["choices"])
    print(f"results in {folder}")
    return 0 if report.lossless else 1
