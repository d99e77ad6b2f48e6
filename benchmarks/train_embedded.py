"""Train the embedded model on generated images within a time limit; writes its weights and a training record."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adamerge.embedded import CLASSES, build, load, preprocess, scenes
from adamerge.embedded.scene_generator import DIFFICULTY, TEST_SEED, TRAINING_SEED

VALIDATION_SEED = 2**31
TEST_IMAGES = 4096
RECORDS = 20


@dataclass(frozen=True)
class Settings:
    """The settings of a training run."""

    minutes: float
    batch: int
    lr: float
    seed: int
    steps: int | None = None
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    warm_up: float = 0.05
    label_smoothing: float = 0.1
    clip: float = 1.0
    # Rendering costs more than a training step, so each image stays in a pool and is used this often.
    reuse: int = 4
    pool: int = 32768
    piece: int = 1024
    # The difficulty grows from `easiest` to `difficulty` over this share of the run.
    ramp: float = 0.25
    easiest: float = 0.3
    difficulty: float = DIFFICULTY
    validation_images: int = 1008
    test_images: int = TEST_IMAGES
    reserve_seconds: float = 12.0
    compile: bool = True


@dataclass
class Pool:
    """The latest generated images as uint8; every batch is a random sample of them."""

    images: Tensor
    labels: Tensor
    drawn: int = 0

    @classmethod
    def empty(cls, capacity: int, device: torch.device) -> Pool:
        images = torch.empty(capacity, 3, 224, 224, dtype=torch.uint8, device=device)
        return cls(images, torch.empty(capacity, dtype=torch.long, device=device))

    def draw(self, count: int, seed: int, difficulty: float) -> None:
        """Replace the oldest images with new ones."""
        fresh = scenes(self.drawn, count, seed=seed, device=self.images.device, difficulty=difficulty)
        start = self.drawn % len(self.labels)
        self.images[start : start + count] = (fresh.images * 255.0).round().to(torch.uint8)
        self.labels[start : start + count] = fresh.labels
        self.drawn += count

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(min(self.drawn, len(self.labels)), (count,), device=self.labels.device)
        return self.images[rows].float() / 255.0, self.labels[rows]


@dataclass
class Progress:
    """The progress of the run: by steps if their number is given, by time otherwise."""

    settings: Settings
    deadline: float
    begun: float = field(default_factory=time.monotonic)
    step: int = 0

    @property
    def share(self) -> float:
        if self.settings.steps is not None:
            return min(self.step / self.settings.steps, 1.0)
        return min((time.monotonic() - self.begun) / max(self.deadline - self.begun, 1e-6), 1.0)


def main(arguments: list[str] | None = None) -> None:
    started = time.monotonic()
    options = _parse(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.smoke:
        settings = Settings(
            minutes=options.minutes,
            batch=8,
            lr=options.lr,
            seed=options.seed,
            steps=20,
            reuse=2,
            pool=96,
            piece=24,
            validation_images=24,
            test_images=48,
            compile=False,
        )
    else:
        settings = Settings(
            minutes=options.minutes,
            batch=options.batch,
            lr=options.lr,
            seed=options.seed,
            reuse=options.reuse,
            difficulty=options.difficulty,
            compile=not options.no_compile and device.type == "cuda",
        )
    train(settings, device, options.out, started)


def train(settings: Settings, device: torch.device, out: Path, started: float) -> None:
    """Run the whole schedule and write `weights.safetensors` and `training.json` into `out`."""
    if settings.seed in (TEST_SEED, VALIDATION_SEED):
        sys.exit(
            f"expected a training seed other than {TEST_SEED} and {VALIDATION_SEED}, got {settings.seed}; "
            "choose another, those draw the images the model is measured on"
        )
    out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    deadline = started + settings.minutes * 60.0 - settings.reserve_seconds
    pool = Pool.empty(settings.pool, device)
    for _ in range(max(settings.pool // (8 * settings.piece), 1)):
        pool.draw(settings.piece, settings.seed, settings.easiest)
    validation = scenes(
        0, settings.validation_images, seed=VALIDATION_SEED, device=device, difficulty=settings.difficulty
    )
    model, compiled = _prepare_model(settings, pool, device)

    curve: list[dict[str, float]] = []
    progress = Progress(settings, deadline)
    for losses in _run_schedule(model, pool, progress, device):
        watched = _copy_for_evaluation(model.state_dict(), device)
        right = _predict(watched, validation.images, device) == validation.labels
        point = {
            "share": round(progress.share, 4),
            "step": progress.step,
            "images_seen": progress.step * settings.batch,
            "seconds": round(time.monotonic() - started, 1),
            "loss": round(losses.mean().item(), 4),
            "validation_top1": round(right.float().mean().item() * 100.0, 2),
        }
        curve.append(point)
        print(json.dumps(point), flush=True)

    weights = {name: tensor.to("cpu", torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    draft = out / "weights.safetensors.partial"
    draft.write_bytes(safetensors.torch.save(weights))
    record = {
        "settings": asdict(settings),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "compiled": compiled,
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "steps": progress.step,
        "images_seen": progress.step * settings.batch,
        "images_drawn": pool.drawn,
        "images_per_second": round(progress.step * settings.batch / (time.monotonic() - progress.begun), 1),
        "curve": curve,
        "test": measure(load(draft).to(device), settings.test_images, settings.difficulty, device),
        "seconds": round(time.monotonic() - started, 1),
    }
    notes = out / "training.json.partial"
    notes.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(draft, out / "weights.safetensors")
    os.replace(notes, out / "training.json")
    print(json.dumps({key: record[key] for key in ("steps", "images_seen", "images_per_second", "seconds")}))
    print(json.dumps(record["test"], indent=2))


def measure(model: nn.Module, count: int, difficulty: float, device: torch.device) -> dict[str, Any]:
    """Top-1 in per cent on the first test images: overall, by clutter and by class."""
    hits, labels, clutter = [], [], []
    for first in range(0, count, 512):
        part = scenes(first, min(512, count - first), seed=TEST_SEED, device=device, difficulty=difficulty)
        hits.append((_predict(model, part.images, device) == part.labels).float().cpu())
        labels.append(part.labels.cpu())
        clutter.append(part.clutter.cpu())
    hit, label, level = torch.cat(hits), torch.cat(labels), torch.cat(clutter)
    thirds = (level * 3.0).long().clamp(max=2)

    def percent(rows: Tensor) -> float | None:
        return round(hit[rows].mean().item() * 100.0, 2) if rows.any() else None

    return {
        "seed": TEST_SEED,
        "images": count,
        "top1": percent(torch.ones_like(label, dtype=torch.bool)),
        "top1_by_clutter": {name: percent(thirds == third) for third, name in enumerate(("low", "middle", "high"))},
        "top1_by_class": {name: percent(label == number) for number, name in enumerate(CLASSES)},
    }


def _run_schedule(model: nn.Module, pool: Pool, progress: Progress, device: torch.device) -> Iterator[Tensor]:
    """Train until the schedule ends; yields the losses since the last stop, about `RECORDS` times in all."""
    settings = progress.settings
    optimizer = _prepare_optimizer(model, settings, device)
    finished: deque[torch.cuda.Event] = deque()
    losses: list[Tensor] = []
    stops = 0
    while (share := progress.share) < 1.0:
        rate = _rate(share, settings.warm_up) * settings.lr
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses.append(_step(model, optimizer, pool, settings, device))
        progress.step += 1
        if progress.step * settings.batch >= pool.drawn * settings.reuse:
            pool.draw(settings.piece, settings.seed, _difficulty(share, settings))
        if device.type == "cuda":
            # The schedule depends on the time, so the queue of unfinished work must stay short.
            finished.append(torch.cuda.Event())
            finished[-1].record()
            if len(finished) > 2:
                finished.popleft().synchronize()
        if progress.share >= (stops + 1) / RECORDS:
            stops = int(progress.share * RECORDS)
            yield torch.stack(losses)
            losses = []


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, pool: Pool, settings: Settings, device: torch.device
) -> Tensor:
    images, labels = pool.sample(settings.batch)
    with _autocast(device):
        logits = model(preprocess(images))
    loss = F.cross_entropy(logits.float(), labels, label_smoothing=settings.label_smoothing)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def _rate(share: float, warm_up: float) -> float:
    if share < warm_up:
        return max(share / warm_up, 1e-3)
    return 0.5 * (1.0 + math.cos(math.pi * (share - warm_up) / (1.0 - warm_up)))


def _difficulty(share: float, settings: Settings) -> float:
    grown = min(share / settings.ramp, 1.0)
    return settings.easiest + (settings.difficulty - settings.easiest) * grown


def _prepare_model(settings: Settings, pool: Pool, device: torch.device) -> tuple[nn.Module, bool]:
    """The untrained model on the device, with its blocks compiled where that works."""
    if settings.compile:
        model = _untrained(settings, device)
        try:
            # One block is compiled and serves for all twelve, which takes seconds instead of a minute.
            for block in model.blocks:
                block.compile()
            images, labels = pool.sample(settings.batch)
            with _autocast(device):
                loss = F.cross_entropy(model(preprocess(images)), labels)
            loss.backward()
            model.zero_grad(set_to_none=True)
            return model, True
        except Exception as problem:
            print(f"training without torch.compile: {type(problem).__name__}", file=sys.stderr)
            torch._dynamo.reset()
    return _untrained(settings, device), False


def _untrained(settings: Settings, device: torch.device) -> Any:
    torch.manual_seed(settings.seed)
    return build().to(device).train()


def _prepare_optimizer(model: nn.Module, settings: Settings, device: torch.device) -> torch.optim.Optimizer:
    decayed = {name for name, tensor in model.named_parameters() if tensor.ndim >= 2 and "embed.proj" not in name}
    decayed -= {"pos_embed", "cls_token"}
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in decayed], "weight_decay": settings.weight_decay},
        {"params": [p for n, p in model.named_parameters() if n not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=device.type == "cuda")


def _copy_for_evaluation(state: dict[str, Tensor], device: torch.device) -> nn.Module:
    # A fresh copy leaves the compiled blocks alone; switching those to evaluation would compile them anew.
    model = build().to(device).eval()
    model.load_state_dict(state)
    return model


@torch.no_grad()
def _predict(model: nn.Module, images: Tensor, device: torch.device) -> Tensor:
    return torch.cat([model(preprocess(part)).argmax(dim=1) for part in images.to(device).split(256)])


def _autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=6.0, help="time limit, start-up and final test included")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--reuse", type=int, default=4, help="how often each drawn image is seen")
    parser.add_argument("--difficulty", type=float, default=DIFFICULTY, help="of the training and test images")
    parser.add_argument("--seed", type=int, default=TRAINING_SEED, help="of the weights and the training images")
    parser.add_argument("--out", type=Path, default=Path("build/embedded"))
    parser.add_argument("--device", default=None, help="cuda or cpu; by default cuda where there is one")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="twenty tiny steps, to see that everything runs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
