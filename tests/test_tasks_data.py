"""Examples in batches: passes, augmentation, held-out parts."""

from itertools import islice, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gbfunc.tasks import Split, endless_batches
from gbfunc.tasks.data import distort, hold_out, in_turn, leave_out, noise, shift, steps_per_epoch


@settings(deadline=None, max_examples=50)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    n_classes=st.integers(1, 6),
    rest=st.integers(0, 50),
    seed=st.integers(0, 2**32 - 1),
)
def test_hold_out_covers_once_and_keeps_proportions(
    counts: tuple[int, ...], n_classes: int, rest: int, seed: int
) -> None:
    n = sum(counts) + rest
    labels = np.random.RandomState(1).randint(0, n_classes, n)
    parts = hold_out(labels, counts, seed)
    assert tuple(map(len, parts)) == (*counts, rest)
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    for part in parts:
        for label in range(n_classes):
            expected = (labels == label).sum() * len(part) / max(n, 1)
            # A stretch of the interleaved classes is off by at most one example at each end.
            assert abs((labels[part] == label).sum() - expected) <= 2 + n_classes / 2


def test_hold_out_is_the_same_everywhere() -> None:
    labels = np.arange(12) % 3
    held, rest = hold_out(labels, (3,), seed=0)
    assert held.tolist() == [4, 6, 11]
    assert sorted(labels[held]) == [0, 1, 2] and len(rest) == 9


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 40), batch_size=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_batches_are_full_and_never_repeat_an_example(n: int, batch_size: int, seed: int) -> None:
    with pytest.raises(ValueError, match=f"a class for each input, got {n} for {n + 1}"):
        Split(torch.zeros(n + 1, 3), torch.arange(n))
    split = Split(torch.arange(n)[:, None].float(), torch.arange(n))
    generator = torch.Generator().manual_seed(seed)
    if batch_size > n:
        with pytest.raises(ValueError, match=f"the {n} training examples, got {batch_size}"):
            steps_per_epoch(split, batch_size)
        return
    batches = list(islice(endless_batches(split, batch_size, generator), steps_per_epoch(split, batch_size)))
    assert all(x.shape == (batch_size, 1) and torch.equal(x[:, 0].long(), y) for x, y in batches)
    seen = torch.cat([y for _, y in batches]).tolist()
    assert len(set(seen)) == len(seen) == n // batch_size * batch_size
    before, endless = torch.get_rng_state(), endless_batches(split, batch_size, torch.Generator().manual_seed(seed))
    assert all(torch.equal(y, next(endless)[1]) for _, y in batches)
    # The next pass has another order, from the same generator.
    again = torch.cat([next(endless)[1] for _ in batches]).tolist()
    assert len(set(again)) == len(seen) and (n < 20 or batch_size > 2 or again != seen)
    assert torch.equal(before, torch.get_rng_state())


def test_a_part_of_the_tokens_is_left_out_but_for_the_first() -> None:
    tokens = torch.arange(2_000).reshape(100, 20) + 10
    before = tokens.clone()
    changed = leave_out(0.3, 7)(tokens, torch.Generator().manual_seed(0))
    gone = changed == 7
    assert torch.equal(tokens, before) and torch.equal(changed[~gone], tokens[~gone]) and not gone[:, 0].any()
    assert gone[:, 1:].float().mean() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(changed, leave_out(0.3, 7)(tokens, torch.Generator().manual_seed(0)))
    assert not torch.equal(changed, leave_out(0.3, 7)(tokens, torch.Generator().manual_seed(1)))


def test_noise_has_its_deviation() -> None:
    images = torch.ones(2, 50, 10, 10).to(memory_format=torch.channels_last)
    x = in_turn(noise(0.5), lambda x, generator: 2 * x)(images, torch.Generator().manual_seed(0))
    assert abs(float(x.std()) - 1) < 0.04 and abs(float(x.mean()) - 2) < 0.04
    assert x.stride() == images.stride()


def test_distort_is_an_affine_map_about_the_middle() -> None:
    rows, cols = torch.meshgrid(torch.arange(20.0) - 9.5, torch.arange(30.0) - 14.5, indexing="ij")
    images = torch.stack([rows, cols])[None].repeat(500, 1, 1, 1)
    changed = distort(0.1, 2.0, 0.0)(images, torch.Generator().manual_seed(0))
    assert changed.shape == images.shape and changed.is_contiguous(memory_format=torch.channels_last)
    # Inside, numbers that grow evenly do so after an affine map, and are where it took them from.
    inner = changed[:, :, 6:-6, 6:-6]
    down, right = inner.diff(dim=2), inner.diff(dim=3)
    assert float(down.diff(dim=2).abs().max()) < 1e-4 and float(right.diff(dim=3).abs().max()) < 1e-4
    # Of sides from -1 to 1: a row in terms of columns is 20 / 30 of the number drawn.
    slopes = torch.stack([down[:, 0].mean((1, 2)) - 1, right[:, 0].mean((1, 2)) * 30 / 20,
                          down[:, 1].mean((1, 2)) * 20 / 30, right[:, 1].mean((1, 2)) - 1])  # fmt: skip
    assert slopes.abs().amax(1).tolist() == pytest.approx([0.1] * 4, abs=0.002)
    middle = inner.mean((2, 3))
    assert middle.abs().amax(0).tolist() == pytest.approx([2.0, 2.0], abs=0.04)


def test_nothing_and_blank_images_stay() -> None:
    generator = torch.Generator().manual_seed(0)
    images, blank = torch.randn(5, 2, 7, 9, generator=generator), torch.full((5, 1, 7, 9), -0.5)
    for change in (distort(0.0, 0.0, -0.5), shift(1, 0.0, -0.5)):
        torch.testing.assert_close(change(images, generator), images)
    for change in (distort(0.2, 2.0, -0.5), shift(1, 1.0, -0.5)):
        torch.testing.assert_close(change(blank, generator), blank)


@pytest.mark.parametrize("flips", [False, True])
def test_images_are_shifted_and_mirrored(flips: bool) -> None:
    images = torch.arange(2 * 5 * 7.0).reshape(1, 2, 5, 7).repeat(1_000, 1, 1, 1) + 1
    changed = shift(1, 0.5, 0.0, mirrors=flips)(images, torch.Generator().manual_seed(0))
    ways = list(product((-1, 0, 1), (-1, 0, 1), (False, True)))
    counts = [sum(torch.equal(image, _moved(images[0], *way)) for image in changed) for way in ways]
    assert sum(counts) == 1_000
    # Half are mirrored, and all shifted; or half stay, and a ninth of the other half.
    stay = {way: 0.5 * (way == (0, 0, False)) + 0.5 / 9 * (not way[2]) for way in ways}
    assert counts == pytest.approx([1_000 * (1 / 18 if flips else stay[way]) for way in ways], abs=60)


def _moved(image: torch.Tensor, dy: int, dx: int, flip: bool) -> torch.Tensor:
    """A slow shift: pixel by pixel, zeros from outside."""
    channels, rows, cols = image.shape
    moved = torch.zeros_like(image)
    for y in range(rows):
        for x in range(cols):
            if 0 <= y + dy < rows and 0 <= x + dx < cols:
                moved[:, y, x] = image[:, y + dy, x + dx]
    return moved.flip(2) if flip else moved
