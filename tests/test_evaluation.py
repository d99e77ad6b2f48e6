"""Every figure of an evaluation, from logits and times that were made by hand."""

import math
from dataclasses import replace

import pytest
import torch
from hosts.families import build, pictures
from timed_models import MERGED, UNMERGED, Clock, TimedModel
from torch import Tensor
from torch.distributions import Categorical
from torch.distributions import kl_divergence as reference

import adamerge
from adamerge import calibrate, flops
from adamerge.core.budget import ZScore
from adamerge.core.errors import BadImages, UnsupportedModel
from adamerge.evaluation import Evaluation, evaluate, judge, kl_divergence
from adamerge.methods import none, tome
from adamerge.timing import time_call


def logits(seed: int) -> torch.Tensor:
    return torch.randn(7, 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def divergence(full: Tensor, merged: Tensor) -> Tensor:
    """KL(full || merged) by torch."""
    return reference(Categorical(logits=full.double()), Categorical(logits=merged.double()))


def test_the_divergence_is_from_the_unmerged_to_the_merged_probabilities():
    full, merged = logits(0), logits(1)
    found = kl_divergence(full.log_softmax(1), merged.log_softmax(1))
    torch.testing.assert_close(found, divergence(full, merged))
    assert not torch.allclose(found, kl_divergence(merged.log_softmax(1), full.log_softmax(1)))


def test_a_model_that_changes_nothing_diverges_by_exactly_nothing():
    full = logits(0).float()
    *_, agreement, kl = judge(full, full.clone(), full.argmax(1))
    assert agreement.all() and (kl == 0).all()


def ranked(*classes: int, of: int = 8) -> list[float]:
    """Logits whose order is that of `classes`, the best first; the others are lower."""
    return [float(10 - classes.index(c)) if c in classes else 0.0 for c in range(of)]


# For each image: the label, the ranking of the unmerged model, and that of the merged one.
IMAGES = [
    (0, (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5)),  # both right
    (1, (1, 2, 3, 4, 5, 6), (2, 1, 3, 4, 5, 6)),  # only the unmerged one right; the label comes second
    (2, (3, 2, 1, 0, 4, 5), (2, 3, 1, 0, 4, 5)),  # only the merged one right
    (3, (4, 3, 1, 0, 2, 5), (4, 0, 1, 2, 3, 5)),  # both wrong alike; the label comes fifth
    (5, (4, 5, 1, 0, 2, 3), (6, 0, 1, 2, 3, 5)),  # both wrong; the label comes sixth
]


def test_choices_are_judged_image_by_image():
    labels = torch.tensor([label for label, _, _ in IMAGES])
    full = torch.tensor([ranked(*order) for _, order, _ in IMAGES])
    merged = torch.tensor([ranked(*order) for _, _, order in IMAGES])
    top1, top5, full_top1, agreement, kl = judge(full, merged, labels)
    assert top1.tolist() == [True, False, True, False, False]
    assert top5.tolist() == [True, True, True, True, False]
    assert full_top1.tolist() == [True, True, False, False, False]
    assert agreement.tolist() == [True, False, False, True, False]
    torch.testing.assert_close(kl, divergence(full, merged))


def test_the_divergence_in_numbers_points_from_unmerged_to_merged():
    full, merged = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert judge(full, merged, torch.tensor([0]))[4].item() == pytest.approx(expected)
    back = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert judge(merged, full, torch.tensor([0]))[4].item() == pytest.approx(back)
    assert abs(expected - back) > 0.1


def test_fewer_than_five_classes_have_a_top_five_that_is_always_right():
    full = torch.tensor([[1.0, 2.0, 3.0]])
    assert judge(full, full, torch.tensor([0]))[1].tolist() == [True]


def test_the_summary_says_the_means():
    evaluation = Evaluation(
        top1=torch.tensor([True, False, False, False]),
        top5=torch.tensor([True, True, True, False]),
        full_top1=torch.tensor([True, True, False, False]),
        agreement=torch.tensor([True, True, True, True]),
        kl=torch.tensor([0.1, 0.2, 0.3, 0.6], dtype=torch.float64),
        cost=flops.Cost(torch.tensor([1e9, 2e9, 3e9, 4e9]).double(), torch.tensor([5e9, 6e9, 7e9, 8e9]).double()),
        full_cost=flops.Cost(torch.tensor([9e9]).double(), torch.tensor([10e9]).double()),
        r=torch.tensor([[1, 2], [1, 4], [1, 2], [1, 4]]),
        seconds=2.0,
        full_seconds=5.0,
        timed=10,
        patches=9,
    )
    assert evaluation.kept.tolist() == [6, 4, 6, 4]
    summary = evaluation.summary()
    assert summary.pop("r_per_layer") == [1.0, 3.0]
    assert summary == pytest.approx(
        {
            "images": 4,
            "top1": 0.25,
            "top5": 0.75,
            "top1_unmerged": 0.5,
            "agreement": 1.0,
            "kl": 0.3,
            "gmacs_paper": 2.5,
            "gmacs_true": 6.5,
            "gmacs_paper_unmerged": 9.0,
            "gmacs_true_unmerged": 10.0,
            "merged_mean": 4.0,
            "merged_std": 1.0,
            "images_per_second": 5.0,
            "images_per_second_unmerged": 2.0,
            "speedup": 2.5,
        }
    )


@pytest.fixture
def timed(monkeypatch) -> TimedModel:
    full = torch.tensor([ranked(*order) for _, order, _ in IMAGES])
    merged = torch.tensor([ranked(*order) for _, _, order in IMAGES])
    return TimedModel(full, merged, Clock(monkeypatch))


def batches(timed: TimedModel, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    labels = torch.tensor([label for label, _, _ in IMAGES])
    return list(zip(timed.images.split(list(sizes)), labels.split(list(sizes)), strict=True))


def test_an_evaluation_of_a_model_whose_answers_and_times_are_known(timed):
    """The first batch is a warm-up: its times, ten times the others', do not count."""
    model, clock = timed.model, timed.clock
    clock.slowness = 10
    data = batches(timed, 2, 2, 1)
    found = evaluate(model, data, tome(1), progress=False)
    summary = found.summary()
    assert found.top1.tolist() == [True, False, True, False, False]
    assert found.top5.tolist() == [True, True, True, True, False]
    assert found.full_top1.tolist() == [True, True, False, False, False]
    assert found.agreement.tolist() == [True, False, False, True, False]
    torch.testing.assert_close(found.kl, divergence(timed.full, timed.merged))
    assert found.timed == 3 and found.seconds == 3 * MERGED and found.full_seconds == 3 * UNMERGED
    assert summary["speedup"] == UNMERGED / MERGED > 1
    assert summary["images_per_second"] == 1 / MERGED and summary["images_per_second_unmerged"] == 1 / UNMERGED
    assert found.r.tolist() == [[1, 1, 1]] * 5
    assert summary["merged_mean"] == 3 and summary["merged_std"] == 0
    unmerged = flops.meter(model).unmerged()
    assert torch.equal(found.full_cost.true, unmerged.true) and torch.equal(found.full_cost.paper, unmerged.paper)
    adamerge.apply(model, tome(1))
    with torch.no_grad():
        model(timed.images[:1])
    assert found.cost.true.tolist() == [flops.cost(model).true.item()] * 5
    assert found.cost.paper.tolist() == [flops.cost(model).paper.item()] * 5
    assert found.cost.true[0] < unmerged.true[0]


def test_a_single_batch_is_timed_although_it_is_the_first(timed):
    found = evaluate(timed.model, batches(timed, 5), tome(1), progress=False)
    assert found.timed == 5 and found.seconds == 5 * MERGED and found.full_seconds == 5 * UNMERGED


def test_nothing_to_evaluate_on_and_no_classifier_are_refused():
    with pytest.raises(BadImages, match=r"^there are no images to evaluate on; pass at least one batch"):
        evaluate(build("vit"), [], none(), progress=False)
    empty = [(torch.zeros(0, 3, 64, 64), torch.zeros(0).long())]
    with pytest.raises(BadImages, match=r"^there are no images to evaluate on; pass at least one batch"):
        evaluate(build("vit"), empty, none(), progress=False)
    backbone = build("vit", num_classes=0, global_pool="")
    data = [(torch.zeros(1, 3, 64, 64), torch.zeros(1).long())]
    with pytest.raises(UnsupportedModel, match=r"classifier that gives \(images, classes\) logits; got \(1, 17, 48\)$"):
        evaluate(backbone, data, none(), progress=False)


def test_the_images_that_keep_the_fewest_tokens_are_those_after_the_last_layer():
    """All images keep the same up to the last layer here, and different numbers after it."""
    model, images = build("vit"), pictures(7)
    recipe = replace(tome(0), budget=ZScore((0.0, 0.0, 8.0)))
    recipe = recipe.with_stats(calibrate(model, images, recipe, progress=False))
    found = evaluate(model, [(images, torch.zeros(7).long())], recipe, progress=False)
    fewest = found.kept.sort(stable=True)
    assert fewest.values[0] < fewest.values[-1]
    assert found.extremes["simplest_tokens"].tolist() == fewest.values[:4].tolist()
    assert found.extremes["simplest_numbers"].tolist() == fewest.indices[:4].tolist()
    assert found.extremes["complex_tokens"].tolist() == fewest.values.flip(0)[:4].tolist()


def test_progress_is_shown_if_nothing_else_is_said(timed, capfd):
    evaluate(timed.model, batches(timed, 5), tome(1))
    assert "evaluating" in capfd.readouterr().err
    evaluate(timed.model, batches(timed, 5), tome(1), progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_gpu_is_waited_for_before_and_after_a_timed_call_and_a_cpu_is_not(monkeypatch):
    happened: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append(f"waited for {device}"))
    time_call(lambda: happened.append("called"), torch.device("cuda", 1))
    assert happened == ["waited for cuda:1", "called", "waited for cuda:1"]
    time_call(lambda: happened.append("called on a CPU"), torch.device("cpu"))
    assert happened[3:] == ["called on a CPU"]
