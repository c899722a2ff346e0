from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.cli.arguments import Arguments
from specdec.cli.execute import run_in, show_config
from specdec.config.folders import output_folder
from specdec.config.hydra import read_keys
from specdec.config.job import Job, check_stages, run_job_of
from specdec.config.options import Node
from specdec.errors import UserError
from specdec.files import read_json, write_json
from specdec.parts.fields import Text

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
  stop_rules           EOS, stop strings, limits inside a path; short and long prompts
  long_request         so does one request of 530 tokens; draws of 640 positions do not repeat
  batch_independence   a request's output is the same alone and in any batch
  sampler              tokens and distributions of the target's sampler, row by row
  numerics             configured models and dtype: differences are ties, not faults
  configured_law       configured models, sampled: the law of the output is the target's
  exact_dtype          with model.exact=true: long outputs in that dtype have no difference

strategies=[NAME,...] certifies several presets one after another, each in a folder of its name
below output_dir; the same command resumes after those that were lossless.

--fail-fast ends with the first check that fails.

depth=full decodes four times as many requests, longer outputs, a vocabulary of 40,040 tokens, and
every family that can have a sliding window (minutes instead of seconds).

Exit status: 0 lossless, 1 not (or a lossy verifier), 2 a configuration that cannot be used.

Examples
  specdec verify strategy=best_first
  specdec verify strategy=speculative verifier=rejection sampling=t08
  specdec verify strategy=specpipe model.dtype=bfloat16 output_dir=outputs/certificate
  specdec verify 'strategies=[ar,suffix,eagle3]' model=smollm2 output_dir=outputs/smollm2
"""
FLAGS = ("--cfg", "--fail-fast")


@dataclass(frozen=True, kw_only=True)
class _Keys:
    depth: Literal["standard", "full"] = "standard"
    strategies: Annotated[Sequence[Text], Field(min_length=1)] = ()


def main(arguments: Arguments) -> int:
    shared, own = read_keys(arguments.overrides, _Keys)
    keys, several = _Keys(**own), "strategies" in own
    jobs = [[f"strategy={name}", *shared] for name in dict.fromkeys(keys.strategies)]
    if arguments.cfg:
        arguments = replace(arguments, overrides=tuple(shared))
        return show_config(arguments, run_job_of, jobs or None, name="config")
    found = [run_job_of(each, arguments.config_dirs) for each in jobs or [shared]]
    root = output_folder(found[0].output_dir, "verify", "" if several else found[0].name)
    from specdec.certify import refuse

    for job in found:
        refuse(job.config)
        if layers := job.config["model"].get("num_layers"):  # others are checked with their files
            check_stages(job.config, layers)
    fail_fast = "--fail-fast" in arguments.flags
    verdicts, refused = list[Node](), list[str]()
    for job in found:
        folder = root / job.name if several else root
        try:
            verdicts.append(_verify(job, folder, keys.depth, fail_fast, keep=several))
        except UserError as refusal:
            if not several:
                raise
            refused.append(f"strategy={job.name} was not checked: {refusal}")
    if several:
        for verdict in verdicts:
            print(f"{verdict['verdict']} ({verdict['seconds']:.0f} s)")
        lossless = sum(verdict["lossless"] for verdict in verdicts)
        print(f"{lossless} of {len(found)} are lossless; results in {root}")
    if refused:
        raise UserError("; ".join(refused))
    return 0 if all(verdict["lossless"] for verdict in verdicts) else 1


def _verify(job: Job, folder: Path, depth: str, fail_fast: bool, *, keep: bool) -> Node:
    """Certifies a job, or if ``keep`` returns a lossless verdict that ``folder`` already has."""
    from specdec.certify import CHECKS, Report, print_report
    from specdec.certify.certify import certify
    from specdec.certify.report import RESULT_FILE

    def verify(progress: Any) -> Report:
        progress.phase(f"{job.name}: checking", len(CHECKS))
        report = certify(
            job.config,
            depth=depth,
            on_check=lambda check: progress.advance(detail=check.name),
            fail_fast=fail_fast,
        )
        write_json(folder / RESULT_FILE, {**report.as_dict(), "depth": depth})
        return report

    done = (keep and read_json(folder / RESULT_FILE)) or {}
    config = {"command": "verify", "depth": depth, **job.config}
    report, is_new = run_in(folder, config, RESULT_FILE if done.get("lossless") else "", verify)
    if not is_new:
        return done  # type: ignore[no-any-return]
    print_report(report, job.config["choices"])
    print(f"results in {folder}")
    return report.as_dict()  # type: ignore[no-any-return]
