"""Attention and norms of a step against torch's in float64, and the same bits for a row beside any others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastserve._ext.decode_step import attend, rms_norm

SHAPES = [(12, 12, 64, 128, 1 << 40), (8, 2, 24, 64, 1 << 40), (4, 1, 200, 64, 7), (2, 2, 1, 32, 1 << 40)]


@pytest.mark.parametrize(("heads", "key_heads", "dim", "room", "window"), SHAPES)
def test_attention_is_torchs(heads: int, key_heads: int, dim: int, room: int, window: int) -> None:
    random = torch.Generator().manual_seed(heads)
    rows, share = 5, heads // key_heads
    keys, values = torch.randn(2, rows + 1, key_heads, room, dim, generator=random)
    turned = torch.randn(rows, heads + key_heads, dim, generator=random)
    query, key = turned[:, :heads], turned[:, heads:]
    value = torch.randn(key_heads, rows, dim, generator=random).transpose(0, 1)
    positions = torch.tensor([0, room - 1, 1, 15, 16])
    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys[torch.arange(rows), :, positions] = key
    expected_values[torch.arange(rows), :, positions] = value
    behind = positions[:, None] - torch.arange(room)
    seen = ((behind >= 0) & (behind < window))[:, None, None]
    wide = [one[:rows].repeat_interleave(share, 1).double() for one in (expected_keys, expected_values)]
    scores = (query[:, :, None].double() @ wide[0].transpose(-1, -2) * 0.3).masked_fill(~seen, float("-inf"))
    expected = (torch.softmax(scores, -1) @ wide[1])[:, :, 0].numpy()
    alone = np.empty((rows, heads, dim), np.float32)
    for threads in (1, 3):
        there = keys.clone().numpy(), values.clone().numpy()
        room_beside = np.full((rows + 1, heads, dim), 1234.5, np.float32)
        made = room_beside[:rows]
        given = [part.numpy() for part in (query, key, value)]
        attend(*given, *there, positions.numpy(), made, scale=0.3, window=window, threads=threads)
        np.testing.assert_allclose(made, expected, rtol=1e-4, atol=5e-6)
        np.testing.assert_array_equal(there[0], expected_keys.numpy())
        np.testing.assert_array_equal(there[1], expected_values.numpy())
        assert (room_beside[rows] == 1234.5).all()
    for row in range(rows):
        one = slice(row, row + 1)
        own = keys[one].clone().numpy(), values[one].clone().numpy()
        parts, place = [part[one] for part in given], positions[one].numpy()
        attend(*parts, *own, place, alone[one], scale=0.3, window=window)
    np.testing.assert_array_equal(alone, made)


def test_large_scores_stay_finite() -> None:
    """The largest weighs 1 and others nothing."""
    keys, values = np.zeros((2, 1, 1, 32, 4), np.float32)
    keys[0, 0, :, 0], values[0, 0] = np.arange(32) * 1e4, np.arange(32)[:, None]
    query, out = np.zeros((2, 1, 1, 4), np.float32)
    query[..., 0] = 3e3
    new = np.zeros((1, 1, 4), np.float32)
    attend(query, new, new, keys, values, np.array([20]), out, scale=1.0)
    np.testing.assert_array_equal(out[0, 0], np.full(4, 19, np.float32))


@pytest.mark.parametrize("width", [1, 15, 64, 259])
def test_a_norm_is_torchs(width: int) -> None:
    random = np.random.default_rng(width)
    rows, weight = random.normal(size=(3, width)).astype(np.float32), np.ones(width, np.float32) * 1.5
    made = np.empty_like(rows)
    rms_norm(rows, weight, made, 1e-5)
    expected = torch.rms_norm(torch.from_numpy(rows).double(), (width,), eps=1e-5).numpy() * 1.5
    np.testing.assert_allclose(made, expected, rtol=1e-6)
    rms_norm(rows[:0], weight, made[:0], 1e-5)
    for refused in ((rows, weight[:-1], made), (rows, weight, made[:2])):
        with pytest.raises(ValueError):
            rms_norm(*refused, 1e-5)


def test_what_does_not_fit_is_refused() -> None:
    def room(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    fine = [room(2, 4, 3), room(2, 2, 3), room(2, 2, 3), room(2, 2, 32, 3), room(2, 2, 32, 3)]
    fine += [np.array([0, 31]), room(2, 4, 3)]
    attend(*fine, scale=1.0)
    others = {
        0: [room(1, 4, 3), room(2, 3, 3), room(2, 4, 4), room(2, 4, 6)[:, :, ::2], room(0, 4, 3)],
        1: [room(1, 2, 3), room(2, 4, 3)],
        2: [room(2, 2, 4)],
        3: [room(1, 2, 32, 3), room(2, 1, 32, 3), room(2, 2, 32, 4)],
        4: [room(2, 2, 16, 3)],
        5: [np.array([0]), np.array([0, 32]), np.array([-1, 0]), np.array([0, 1], np.int32)],
        6: [room(2, 4, 4), room(2, 4, 6)[:, :, ::2]],
    }
    for place, refused in others.items():
        for one in refused:
            with pytest.raises(ValueError):
                attend(*fine[:place], one, *fine[place + 1 :], scale=1.0)
    with pytest.raises(ValueError):
        attend(*fine, scale=1.0, window=0)
