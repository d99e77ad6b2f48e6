"""The sentences about fine-tuning say what the rows say: who is ahead of ToMe, and whether the gap grows."""

import pytest
import torch
from scripts import load_script

tables = load_script("finetune_tables")


def rows(gaps: dict[float, float], seeds: int = 3, images: int = 400) -> list[dict[str, str]]:
    """Rows in which ToMe is right on half of the images, and a method on a share more or less at each cut."""
    found = []
    for cut, more in gaps.items():
        for method, share in (("tome", 0.5), ("adamerge", 0.5 + more)):
            right = torch.arange(images) < round(share * images)
            for seed in range(seeds):
                mixed = right[torch.randperm(images, generator=torch.Generator().manual_seed(seed))]
                told = {"right_after": tables.pack_answers(mixed), "test_images": str(images)}
                found.append({"method": method, "target_cut": str(cut), "seed": str(seed), **told})
    return found


def test_answers_come_back_as_they_were():
    right = torch.tensor([False, True, True, False, False, True, False])
    assert tables.unpack_answers(tables.pack_answers(right), 7).tolist() == right.double().tolist()
    none = torch.zeros(9, dtype=torch.bool)
    assert tables.unpack_answers(tables.pack_answers(none), 9).tolist() == [0.0] * 9


@pytest.mark.parametrize(
    ("gaps", "place", "trend"),
    [
        ({0.2: 0.05, 0.4: 0.1, 0.6: 0.2}, "ahead of ToMe at every cut", "the advantage grows with the cut"),
        ({0.2: 0.2, 0.4: 0.1, 0.6: 0.05}, "ahead of ToMe at every cut", "the advantage shrinks as the cut grows"),
        ({0.2: -0.05, 0.4: -0.1, 0.6: -0.3}, "behind ToMe at every cut", "falls further behind as the cut grows"),
        ({0.2: -0.3, 0.4: -0.1, 0.6: -0.05}, "behind ToMe at every cut", "falls less behind as the cut grows"),
        ({0.2: 0.0, 0.4: 0.0, 0.6: 0.0}, "level with ToMe at every cut", "a trend with the cut is not shown"),
        (
            {0.2: 0.1, 0.4: 0.0, 0.6: -0.1},
            "ahead of ToMe at 20%, behind ToMe at 60%, level with ToMe at 40%",
            "falls further behind as the cut grows",
        ),
    ],
)
def test_the_sentence_follows_the_rows(gaps, place, trend):
    told = tables.statement(rows(gaps), "adamerge")
    assert f"It is {place}, and " in told and trend in told
    for cut, gap in gaps.items():
        assert f"{100 * gap:+.2f} [" in told and f"at {cut:.0%}" in told


def test_the_interval_is_over_seeds_and_images():
    """Seeds that disagree widen it, and so do few images."""
    agree, disagree = torch.full((3, 400), 0.1), torch.tensor([[0.0], [0.1], [0.2]]).expand(3, 400)
    narrow, wide = (tables.points(one.double()) for one in (agree, disagree))
    assert narrow.high == pytest.approx(narrow.low) and wide.low < 5 < 15 < wide.high
    images = (torch.arange(400) % 2).double().expand(3, 400)
    few = tables.points(images[:, :40])
    assert few.high - few.low > 2 * (tables.points(images).high - tables.points(images).low) > 0
    assert few.mean == pytest.approx(50)


def test_a_seed_counts_when_all_its_runs_are_there():
    found = rows({0.2: 0.1, 0.6: 0.2}, seeds=2)
    assert tables.complete(found) == found
    assert {row["seed"] for row in tables.complete(found[:-1])} == {"0"}
