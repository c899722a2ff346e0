from dataclasses import replace
from functools import partial

from specdec.cli.arguments import Arguments
from specdec.cli.execute import show_config
from specdec.config.hydra import Words, compose_config
from specdec.config.job import Job, check_section
from specdec.config.options import Trees, first_comment, options
from specdec.errors import UserError
from specdec.parts.fields import did_you_mean

_HELP = """\
specdec train WHAT [--cfg] [--config-dir DIR] model=hf model.target=DIR [group=option] [key=value]

Trains a drafter for a model that stays as it is, on the model's own answers to prompts, measures
how much of held-out answers it predicts, and writes what the strategies read. WHAT is one of

{kinds}

  data=jsonl data.path=FILE data.field=NAME   the prompts: one in each line of a file, in the
                       model's chat template if it has one; data=text and every data set work too
  sampling=t06         how the model answers them, into WORK_DIR/answers.jsonl
  answers=FILE         or answers that exist: JSON lines of prompt and completion (text, or token
                       ids as prompt_token_ids and output_token_ids), of chats (messages), or the
                       requests.jsonl of `specdec run strategy=ar` with the same data=
  output_dir=DIR       for what is trained; work_dir=DIR for answers and checkpoints
  output.vocabulary=8192 output.matrix=shared    what the output matrix of a head is
  plan.stop_minutes=150  ends with a checkpoint; the same command resumes
  estimate_only=true   ends after the estimate of time and memory

  --cfg    print the resolved configuration and stop: every key with its value

Examples
  specdec train eagle3 model=hf model.target=PATH data.path=prompts.jsonl \\
      output.vocabulary=8192 output_dir=heads/eagle3
  specdec run strategy=eagle3 model=hf model.target=PATH model.eagle_head=heads/eagle3
"""
FLAGS = ("--cfg",)


def main(arguments: Arguments) -> int:
    known = options("train", arguments.config_dirs)
    if "--help" in arguments.flags or not arguments.overrides:
        kinds = "\n".join(f"  {name:<8} {first_comment(path)}" for name, path in known.items())
        print(_HELP.format(kinds=kinds), end="")
        return 0 if "--help" in arguments.flags else 2
    kind, *overrides = arguments.overrides
    if kind not in known:
        raise UserError(f"specdec train {kind}: {did_you_mean(kind, known)}")
    arguments = replace(arguments, overrides=tuple(overrides))
    if arguments.cfg:
        return show_config(arguments, partial(train_job, kind), name=f"train/{kind}")
    config = train_job(kind, overrides, arguments.config_dirs).config
    import torch

    from specdec.pairs import HuggingFacePair, PretrainedPair, build_pair
    from specdec.train.progress import progress_bar
    from specdec.train.run import check_texts, sharded, train

    check_texts(config)
    if config["threads"]:
        torch.set_num_threads(config["threads"])
    pair = build_pair(config["model"])
    if not isinstance(pair, PretrainedPair if config["shard"] else HuggingFacePair):
        what = "model on disk, which shard=true reads" if config["shard"] else "model to train for"
        raise UserError(f"model={config['model'].get('kind')} has no {what}: use model=hf")
    with progress_bar(kind) as report:
        size = pair.weight_bytes["target"] / 1e9
        report(0.0, f"loading the target: {size:.2f} GB of weights in {pair.dtype}")
        target = sharded(pair.info.path, pair.dtype) if config["shard"] else pair.target
        tokenizer, ends = getattr(pair, "tokenizer", None), sorted(pair.eos_ids)
        train(kind, config, target, tokenizer=tokenizer, ends=ends, report=report)
    return 0


def train_job(kind: str, overrides: Words, extra: Trees) -> Job:
    from specdec.train.run import GROUPS, check

    composed = compose_config(overrides, name=f"train/{kind}", extra=extra)
    for group in GROUPS:
        check_section(group, composed.values[group], composed.choices)
    check(kind, composed.values)
    return Job(kind, composed.values, None)
