"""The pull of the entropy of uncertain tokens to the start of the run, by hand."""

import torch

from megatron_rl.loss.per_token import entropy_anchor
from tests.unit.loss.groups import flags, same, vector


def test_find_peaks_by_hand() -> None:
    """Of 0, 1, 2, 3, 4 the 0.6-quantile is 2.4: the peaks are 3 and 4, and 2.5 is halfway. Of six
    values the 0.8-quantile is the fifth itself, which is a peak."""
    found = entropy_anchor.find_peaks(vector(3, 0, 4, 1, 2), 0.6)
    same(vector(*found), 2.5, 2, 3.5)
    found = entropy_anchor.find_peaks(vector(0, 10, 20, 30, 40, 50), 0.8)
    same(vector(*found), 35, 2, 45)


def test_where_most_entropies_are_equal_all_of_them_are_peaks_by_hand() -> None:
    found = entropy_anchor.find_peaks(vector(0, 0, 0, 0, 0, 0, 0, 0, 0, 2), 0.8)
    same(vector(*found), -1, 10, 0.2)
    same(vector(*entropy_anchor.find_peaks(vector(7), 0.8)), 6, 1, 7)


def test_entropies_of_32_bits_keep_their_side_by_hand() -> None:
    """The mean of two float32 numbers that are next to each other is no float32."""
    low = torch.tensor(1.0)
    values = torch.stack([low, low.nextafter(torch.tensor(2.0))])
    found = entropy_anchor.find_peaks(values, 0.5)
    assert found.num == 1 and values[0].item() < found.threshold < values[1].item()


def test_anchored_by_hand() -> None:
    """Peaks 3 and 5 of the minibatch's four (mean 2.5, anchor 2): half of 0.1 (2.5 - 2)^2 = 0.025
    is here; the gradient of each is 0.1 * 2 * 0.5 / 4 = 0.025; the third is below the threshold,
    the fourth takes no part."""
    entropy = vector(3, 5, 1, 9).requires_grad_()
    peaks = vector(1.5, 4, 2.5, 2)
    loss, mean = entropy_anchor.anchored(entropy, peaks, flags(1, 1, 1, 0), coef=0.1)
    same(torch.stack([loss.detach(), mean]), 0.0125, 2)
    loss.backward()
    assert entropy.grad is not None
    same(entropy.grad, 0.025, 0.025, 0, 0)


def test_at_the_threshold_a_token_is_a_peak_by_hand() -> None:
    _, mean = entropy_anchor.anchored(vector(3, 5), vector(3, 2, 4, 4), flags(1, 1), coef=1.0)
    same(mean[None], 4)


def test_it_has_the_gradient_of_its_formula() -> None:
    """By autograd through the mean over the peaks."""
    draw = torch.Generator().manual_seed(0)
    entropy = torch.rand(20, generator=draw, dtype=torch.float64).requires_grad_()
    every = torch.ones(20, dtype=torch.bool)
    found = entropy_anchor.find_peaks(entropy.detach(), 0.8)
    loss, mean = entropy_anchor.anchored(entropy, vector(*found, 0.3), every, coef=0.7)
    chosen = entropy.detach() >= torch.quantile(entropy.detach(), 0.8)
    assert int(chosen.sum()) == found.num == 4
    plain = 0.7 * (entropy[chosen].mean() - 0.3) ** 2
    same(torch.stack([loss.detach(), mean]), plain.item(), entropy[chosen].mean().item())
    (wanted,) = torch.autograd.grad(plain, entropy)
    (gradient,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)


def test_at_the_start_nothing_pulls_by_hand() -> None:
    entropy = vector(3, 5).requires_grad_()
    loss, _ = entropy_anchor.anchored(entropy, vector(2, 2, 4, 4), flags(1, 1), coef=1.0)
    loss.backward()
    assert entropy.grad is not None and not entropy.grad.any() and loss.item() == 0
