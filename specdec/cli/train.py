from __future__ import annotations

from collections.abc import Sequence

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.cli.arguments import read_arguments
from specdec.cli.folders import as_yaml
from specdec.config.hydra import parse
from specdec.config.options import first_comment, flatten, has_key, options
from specdec.errors import UserError
from specdec.parts.suggest import did_you_mean

_HELP = """\
specdec train WHAT [--cfg] [key=value] ...

Trains a model from conf/train/WHAT.yaml, whose keys the arguments override. A map of names that is
given whole (weights={stdlib: 1}, packages={}) takes the place of the default's.

  --cfg    print the resolved configuration and stop

WHAT is one of
"""

_MAPS = ("packages", "weights", "distill_weights", "prompts")
"""Keys whose values map names (of streams, packages, data sets) to amounts."""


def main(words: Sequence[str]) -> int:
    arguments = read_arguments(words, flags=("--cfg",))
    known = options("train")
    if "--help" in arguments.flags or not arguments.overrides:
        lines = [f"  {name:<12} {first_comment(path)}" for name, path in known.items()]
        print(_HELP + "\n".join(lines))
        return 0 if "--help" in arguments.flags else 2
    what, *overrides = arguments.overrides
    if what not in known:
        raise UserError(f"specdec train {what}: {did_you_mean(what, known)}")
    config = _with_overrides(what, overrides)
    if arguments.cfg:
        print(as_yaml(config), end="")
        return 0
    # Imported here, since it imports torch.
    from specdec.train.cli import run

    return run(what, config)


def _with_overrides(what: str, overrides: Sequence[str]) -> dict[str, object]:
    config = OmegaConf.load(options("train")[what])
    defaults = OmegaConf.to_container(config, resolve=False)
    keys = flatten(defaults)
    for override in parse(overrides):
        key = str(override.key_or_group)
        if not has_key(defaults, key):
            raise UserError(f"train {what} has no key {key}: {did_you_mean(key, keys)}")
        value, default = override.value(), keys.get(key)
        if not _alike(value, default):
            raise UserError(
                f"train {what}: {key}={value!r} has the wrong type; its default is {default!r}"
            )
        # A map of names is replaced; the keys of a section that are not given stay.
        OmegaConf.update(config, key, value, merge=key.rpartition(".")[2] not in _MAPS)
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"train {what}: {str(error).splitlines()[0]}") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _alike(value: object, default: object) -> bool:
    """Whether a value has the type of its default; any value fits a default of null."""
    if default is None or value is None:
        return True
    numbers = (int, float)
    if type(default) in numbers:
        return type(value) in numbers
    return type(value) is type(default)
