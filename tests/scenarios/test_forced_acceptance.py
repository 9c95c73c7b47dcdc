"""Forced acceptance: the rule that scheduler, oracle and engine share."""

from __future__ import annotations

import pytest

from scenarios import forced_acceptance as forced


def test_the_pool_is_what_torch_draws() -> None:
    torch = pytest.importorskip("torch", reason="it is torch's generator")
    generator = torch.Generator().manual_seed(forced.SEED)
    assert list(forced.uniforms()) == torch.rand(forced.POOL_SIZE, generator=generator).tolist()


@pytest.mark.parametrize(
    ("force", "draft_len", "least", "most"),
    [(2.6, 3, 3, 4), (5.0, 3, 4, 4), (2.6, 2, 3, 3), (2.0, 3, 3, 3), (0.5, 1, 1, 2), (0.5, 0, 1, 1), (1.0, 0, 1, 1)],
)
def test_the_target_s_own_token_comes_on_top(force: float, draft_len: int, least: int, most: int) -> None:
    assert (forced.least(force, draft_len), forced.most(force, draft_len)) == (least, most)
    assert forced.draws(force, draft_len) == (least < most)
    assert set(forced.counts(force, draft_len, 1, 40)) == set(range(least, most + 1))


def test_counter_and_row_choose_the_number() -> None:
    pool = forced.uniforms()
    expected = [3 + (pool[(7 * 6007 + row * 1009) % 65_536] < 0.6) for row in range(8)]
    assert forced.counts(2.6, 3, 7, 8) == expected
    assert set(expected) == {3, 4}
    assert forced.counts(2.6, 3, 7 + 65_536, 8) == expected


def test_the_fraction_is_the_chance_of_one_more() -> None:
    """One row comes by every number of the pool before one comes again."""
    taken = [count for counter in range(forced.POOL_SIZE) for count in forced.counts(1.25, 3, counter, 1)]
    assert sum(taken) / len(taken) == pytest.approx(2.25, abs=0.005)
