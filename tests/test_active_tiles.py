"""What is found of the tiles of a gradient of the logits, one launch at a time."""

from __future__ import annotations

import pytest
import torch

from cases import normal
from measures import assert_close

pytest.importorskip("triton", reason="needs triton")

from parallel_lce.backends.interface import Projection
from parallel_lce.backends.triton_filter import inverse_of, limits_of
from parallel_lce.core.partials import Coefficients
from parallel_lce.kernels.filter.tiles import TILE, entry_shares, find_active_tiles, list_tiles
from parallel_lce.kernels.filter.windows import TokenSample, mean_shares, sample_tokens


@pytest.mark.parametrize("width", [TILE, 2 * TILE])
@pytest.mark.parametrize(("row_blocks", "tiles"), [(1, 1), (3, 129), (17, 300)])
def test_lists_have_what_is_active(row_blocks, tiles, width, device):
    each = width // TILE
    largest = normal(row_blocks, -(-tiles // each)).abs().float()
    largest[:, ::5], largest[0, : tiles // 2] = 0.0, torch.inf
    is_active = (largest > 0.25).repeat_interleave(each, 1)[:, :tiles]
    found = list_tiles(largest.to(device), 0.25, tiles * TILE - 5, width)
    for lists, expected in zip(found, (is_active, is_active.T), strict=True):
        assert lists.numbers.shape == expected.shape and lists.numbers.data_ptr() % 16 == 0
        assert lists.counts.data_ptr() % 16 == 0
        for numbers, count, row in zip(lists.numbers.tolist(), lists.counts.tolist(), expected, strict=True):
            assert numbers[:count] == row.nonzero().squeeze(1).tolist()


def test_shares_of_sums(device):
    """Or others, of the windows that have none."""
    sums, otherwise = normal(3, 600).abs().float(), normal(768, seed=1).float()
    sums[:, 256:512] = 0.0
    first, last = sums[:, :256].sum(0), sums[:, 512:].sum(0)
    for others in (otherwise, torch.zeros(768)):
        expected = torch.cat([first / first.sum(), others[256:512], last / last.sum(), torch.zeros(168)])
        found = entry_shares(sums.to(device), 256, otherwise.to(device) if others is otherwise else None)
        torch.testing.assert_close(found.cpu(), expected)


def test_the_limits_of_rows(device):
    def inverse(alpha, scale, factor, token_scale, fp16_scale, dx_factor):
        coefficients = Coefficients(alpha, None, None, None, None, factor)
        projection = Projection(alpha[:, None], None, 0, 1, scale, None, token_scale)
        return inverse_of(limits_of(coefficients, projection, fp16_scale), dx_factor)

    alpha, factor, scales, dx = (normal(5, seed=s).float().to(device) for s in range(4))
    alpha[1], dx[2], alpha[3], dx[3] = 0.0, 0.0, 0.0, 0.0
    fp16 = torch.tensor(8.0, device=device)
    found = inverse(alpha, -0.5, factor, scales, fp16, dx)
    expected = dx.double().abs() / (0.5 * alpha * factor * scales * fp16).double().abs()
    expected[1], expected[3] = torch.finfo(torch.float32).max, 0.0
    assert_close(found, expected, 1e-6)
    ones = torch.ones(5, device=device)
    for one in (torch.tensor(2.0, device=device), torch.tensor([2.0], device=device).expand(5)):
        assert inverse(ones, 0.25, one, None, None, None).tolist() == [2.0] * 5


def test_a_tile_with_nan_is_active(device):
    gradient = torch.zeros(300, 384, dtype=torch.bfloat16, device=device)
    gradient[130, 300] = torch.nan
    found = find_active_tiles(gradient, torch.ones(300, device=device), 0.5)
    assert found.of_rows.counts.tolist() == [0, 1, 0] and found.of_entries.counts.tolist() == [0, 0, 1]
    assert found.of_rows.numbers[1, 0] == 2 and not found.masses.any()


def test_shares_by_mean_logits(device):
    """Of windows of which the last is cut, and of one without a number."""
    logits = normal(600, seed=2).float().to(device)
    logits[300] = torch.nan
    found = mean_shares(logits, 256).cpu()
    torch.testing.assert_close(found[:256], logits[:256].cpu().softmax(0))
    torch.testing.assert_close(found[512:600], logits[512:].cpu().softmax(0))
    assert found[256:512].tolist() == [1 / 256] * 256 and not found[600:].any()


def test_the_sums_of_a_sample(device):
    """Of those of its groups whose windows are skipped."""
    gradient = normal(96, 304, seed=2).bfloat16().to(device)[:, :300]
    gradient[40, 70] = torch.nan
    bounds = torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.1, 0.1]], device=device)
    found = TokenSample(1, 4, 6).sums(gradient, bounds, 256, 0.5)
    expected = gradient.double().abs().view(6, 16, 300).sum(1)
    # The groups 1, 5, ... 21 of 24.
    expected[:2, 256:], expected[2:4, :256] = 0.0, 0.0
    assert_close(found, expected, 1e-6)


@pytest.mark.parametrize(
    ("rows", "step", "count"), [(1536, 3, 32), (2560, 5, 32), (6655, 11, 38), (6656, 13, 32), (8192, 13, 39)]
)
def test_a_sample_has_groups_of_tokens_at_equal_distances(rows, step, count):
    sample = sample_tokens(rows)
    assert sample is not None and (sample.first, sample.step, sample.count) == (step // 2, step, count)
    groups = range(step // 2, rows // 16, step)
    assert sample.of(torch.arange(rows)).tolist() == [16 * g + i for g in groups for i in range(16)]


def test_few_tokens_have_no_sample():
    assert sample_tokens(1535) is None
