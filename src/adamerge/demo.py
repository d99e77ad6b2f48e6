"""The whole thing on a machine without network: the embedded model on images it draws itself."""

import json
from pathlib import Path

from rich.console import Group

from adamerge.calibrate import calibrate
from adamerge.core.stats import write_atomically
from adamerge.embedded import load, preprocess, scenes
from adamerge.embedded.scenes import CALIBRATION_SEED, TEST_SEED
from adamerge.evaluate import evaluate
from adamerge.methods import adamerge, none, tome

CALIBRATION_IMAGES = 128
# r_max of AdaMerge and r of ToMe in pairs of about equal cost.
SETTINGS = ((14, 6), (23, 9), (32, 12))


def run(out: Path, images: int) -> Group:
    """Calibrate, evaluate, draw; everything written to `out`; the result is ready to print."""
    model = load()
    drawn = scenes(0, images, seed=TEST_SEED)
    data = list(zip(preprocess(drawn.images).split(64), drawn.labels.split(64), strict=True))
    calibration = preprocess(scenes(0, CALIBRATION_IMAGES, seed=CALIBRATION_SEED).images)
    rows = [{"method": "unmerged", **evaluate(model, data, none()).summary()}]
    strongest = none()
    for r_max, r in SETTINGS:
        stats = calibrate(model, calibration, r_max=r_max)
        stats.save(out / f"stats-{r_max}.json")
        strongest = adamerge(r_max=r_max, stats=stats)
        for label, recipe in ((f"AdaMerge r_max={r_max}", strongest), (f"ToMe r={r}", tome(r))):
            rows.append({"method": label, **evaluate(model, data, recipe).summary()})
    write_atomically(out / "results.json", json.dumps(rows, indent=1) + "\n")
    pictures = [_gallery(model, strongest, out / "merging.png"), _frontier(rows, out / "frontier.png")]
    return Group(_table(rows), *(f"wrote {path}" for path in (out / "results.json", *pictures)))
