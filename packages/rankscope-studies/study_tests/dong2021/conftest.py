"""Networks of figure 4, trained once for the tests of this folder."""

import pytest

from rankscope.lab import Model
from rankscope.paths import Decomposition, decompose
from rankscope_studies.dong2021.fig4 import PublishedSort, TaskPlan
from rankscope_studies.dong2021.tasks import Hull, Memorization
from study_tests.dong2021.plans import small


@pytest.fixture(
    scope="package", params=[PublishedSort(40, 12), Hull(40, 12), Memorization(8, 24)], ids=lambda task: task.name
)
def trained(request: pytest.FixtureRequest) -> tuple[TaskPlan, Model]:
    """Two layers, two heads; memorization with padding."""
    plan = small(request.param)
    return plan, plan.training(0).finish().models[0].double().eval().requires_grad_(False)


@pytest.fixture(scope="package")
def decomposed(trained: tuple[TaskPlan, Model]) -> Decomposition:
    plan, model = trained
    data = plan.task.data[1].part(slice(None))
    return decompose(model.network(), model.tokens(data.inputs), data.padding)
