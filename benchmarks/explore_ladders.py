"""Writes the recipes that `adamerge explore` offers for the embedded model; takes about two minutes on two cores."""

import time
import warnings

from adamerge.core.files import write_atomically
from adamerge.embedded import load, preprocess, scenes
from adamerge.embedded.scene_generator import CALIBRATION_SEED
from adamerge.explore.ladders import EMBEDDED, IMAGES, LABELS, build_ladder, write_ladders


def main() -> None:
    """Build every ladder and write the file."""
    warnings.simplefilter("ignore")
    model, images = load(), preprocess(scenes(0, IMAGES, seed=CALIBRATION_SEED).images)
    ladders = {}
    for label in LABELS:
        begin = time.monotonic()
        ladders[label] = build_ladder(model, images, label)
        cuts = [rung.cut for rung in ladders[label]]
        print(f"{label}: {len(cuts)} recipes, {min(cuts):.1%} to {max(cuts):.1%}, {time.monotonic() - begin:.0f} s")
    write_atomically(EMBEDDED, write_ladders(ladders))


if __name__ == "__main__":
    main()
