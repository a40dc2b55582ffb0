"""The learning rate of a recipe, step by step."""

from rankscope.lab import Recipe


def test_the_rate_rises_then_falls_to_nothing() -> None:
    recipe = Recipe(steps=100, warmup=0.1)
    rates = [recipe.lr_scale(step) for step in range(100)]
    assert rates[0] == 0.1
    assert max(rates) == rates[9] == 1
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] < 0.001
