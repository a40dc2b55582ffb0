"""`RowStatistics`: what attention does, row by row, in five numbers that need no pattern.

Of the scores `s_ij` of query i over the keys j that the query sees, and of their softmax P:

| number    | what it is                  | what it is for                                                         |
|-----------|-----------------------------|------------------------------------------------------------------------|
| `log_sum` | `log sum_j e^{s_ij}`        | the log-sum-exp that flash attention keeps for its backward pass       |
| `mean`    | `sum_j P_ij s_ij`           | the entropy is `log_sum - mean`: `-sum P log P = sum P (log_sum - s)`  |
| `largest` | `max_j s_ij`                | the largest logit                                                      |
| `first`   | `P_ij` of the first key     | the attention sink                                                     |
| `square`  | `sum_j P_ij^2`              | `1 / square` is the effective number of keys                           |

A head with a sink (gpt-oss) has one more score in each row, which leads to no value. In `log_sum`, `mean` and `square`
the sink counts as one more key; in `largest` it does not.

Made by `live/attention/row_statistics.py`; read by metrics with a rule `from_scores` (`attention.py`).
"""

from dataclasses import dataclass

from torch import Tensor

from rankscope.shapes import Bool, Float


@dataclass(frozen=True)
class RowStatistics:
    """The numbers of the module's table, of every query; NaN, and minus infinity for `largest`, if it sees no key."""

    log_sum: Float[Tensor, "batch head query"]
    mean: Float[Tensor, "batch head query"]
    largest: Float[Tensor, "batch head query"]
    first: Float[Tensor, "batch head query"]
    square: Float[Tensor, "batch head query"]

    @property
    def entropy(self) -> Float[Tensor, "batch head query"]:
        """The entropy of each row in nats."""
        return (self.log_sum - self.mean).clamp(min=0.0)

    @property
    def effective_keys(self) -> Float[Tensor, "batch head query"]:
        """The effective number of keys of each row, `1 / sum_j P_ij^2`."""
        return 1 / self.square

    @property
    def blind(self) -> Bool[Tensor, "batch head query"]:
        """True at queries that see no key."""
        return self.largest == -float("inf")
