"""Make the data of `--task texts` from rated sentences of film reviews (C. Hutto and E. Gilbert: VADER, ICWSM 2014).

Old releases of a package contain the ratings: `pip download --no-deps --no-binary :all: vaderSentiment==0.5`. The
archive `additional_resources/hutto_ICWSM_2014.tar.gz` in the package contains the file that this script reads. The
second argument is the folder that the script writes:

    python notebooks/results/adapters.py movieReviewSnippets_GroundTruth.txt sentiment
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

NEUTRAL = 0.8
"""Sentences with a mean rating between -0.8 and 0.8 are left out: the middle fifth of the scale, as in SST-2."""

PARTS = (("train", 0, 6_920), ("dev", 6_920, 7_792), ("test", 7_792, None))
"""The first and last sentence of each file. Training and validation files have as many sentences as those of SST-2."""


def main(source: Path, folder: Path) -> None:
    """Write `train.txt`, `dev.txt` and `test.txt`. Each line has a label, a space and a sentence."""
    labelled: dict[str, str] = {}
    for line in source.read_text(encoding="utf-8", errors="replace").splitlines():
        _, mean, sentence = line.split("\t")
        if abs(float(mean)) >= NEUTRAL:
            label = "positive" if float(mean) > 0 else "negative"
            labelled.setdefault(sentence, f"{label} {' '.join(sentence.split())}\n")
    lines = list(labelled.values())
    random.Random(0).shuffle(lines)
    folder.mkdir(parents=True, exist_ok=True)
    for name, first, last in PARTS:
        (folder / f"{name}.txt").write_text("".join(lines[first:last]), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
