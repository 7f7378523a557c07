"""Two classes of rated sentences from film reviews (C. Hutto, E. Gilbert: VADER, ICWSM 2014): `--task texts`.

The ratings come with old releases of a package: `pip download --no-deps vaderSentiment==0.5`, therein
`additional_resources/hutto_ICWSM_2014.tar.gz`, therein the file that this script is given, and the folder to write to:

    python notebooks/results/adapters.py movieReviewSnippets_GroundTruth.txt sentiment
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

NEUTRAL = 0.8
"""Means below it, either way, are the middle fifth of the scale from -4 to 4: what SST-2 leaves out of SST's."""

PARTS = (("train", 0, 6_920), ("dev", 6_920, 7_792), ("test", 7_792, None))
"""As many as SST-2 has of the first two; the rest tests."""


def main(source: Path, folder: Path) -> None:
    """Write `train.txt`, `dev.txt` and `test.txt`, a label, a space and a sentence a line."""
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
