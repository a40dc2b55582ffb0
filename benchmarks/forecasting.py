"""What a forecast costs: against one forward and backward pass of a batch, 16 x 64 tokens, float32."""

from collections.abc import Callable

import torch

from benchmarks.timing import Row, ratios


def cases(layers: int, width: int) -> dict[str, Callable[[], object]]:
    """A pass of the network that is forecast, its readings, and the whole forecast."""
    from rankscope.forecasts import Plan, forecast_of, point_of
    from rankscope.lab import task

    learnt = task("next-character")
    plan = Plan(learnt.architecture(layers, width, width // 16), learnt)
    model, batch = plan.model(), learnt.batch(plan.recipe.batch_size, 0, 0)
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def passed() -> object:
        with torch.enable_grad():
            return torch.autograd.grad(learnt.loss(model(batch.inputs, batch.padding), batch), weights)

    return {
        "plain": passed,
        f"readings and probability, {layers} x {width}": lambda: forecast_of(plan, layers=False),
        f"readings alone, {layers} x {width}": lambda: point_of(model, learnt, plan.recipe),
        f"the whole forecast, {layers} x {width}": lambda: forecast_of(plan),
    }


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio of times)."""
    sizes = [(2, 32)] if small else [(12, 64), (48, 64), (12, 256)]
    plain = "a forward and backward pass"
    return [row for size in sizes for row in ratios(plain, cases(*size), rounds=1 if small else 3)]
