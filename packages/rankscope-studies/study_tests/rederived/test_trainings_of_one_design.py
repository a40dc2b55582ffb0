"""Sixteen trainings of one encoder: which keep tokens apart, by the rows beside the benchmark."""

import polars as pl

from study_tests.rederived.kept_data import ROOT, near

ROWS = pl.read_csv(ROOT / "packages" / "rankscope-studies" / "data" / "trained_encoders.csv").filter(
    of="network", metric="relative_residual"
)
ALIKE = ("default", "BLOSUM", "left-aligned", "shuffled", "synthetic")  # The same losses on the same loops
SMALL = ("CDR3", "CDR3, masked only", "alpha", "beta", "width 16", "width 32", "width 128")  # Other inputs or sizes


def at(training: str, layer: int) -> float:
    return float(ROWS.filter(training=training, layer=layer)["mean"][0])


def test_the_training_whose_loss_reads_an_average_is_apart_from_five_alike() -> None:
    for layer, said, (low, high) in ((2, 0.863, (0.949, 1.011)), (3, 0.772, (0.924, 0.964))):
        alike = [at(training, layer) for training in ALIKE]
        assert near([at("average pooling", layer), min(alike), max(alike)], [said, low, high], 0.001)
    others = {name for name in {*ROWS["training"]} if not name.startswith("untrained")} - {
        "average pooling",
        "width 128",
    }
    assert min(at(name, 3) for name in others) > at("average pooling", 3) + 0.1


def test_it_lies_within_the_range_of_untrained_networks_at_both_layers() -> None:
    """One training of its kind: that it was never moved from there is as good an account as that its loss drew it."""
    for layer in (2, 3):
        untrained = [at(f"untrained {seed}", layer) for seed in range(5)]
        assert min(untrained) < at("average pooling", layer) < max(untrained)


def test_filling_in_alone_is_furthest_by_no_more_than_trainings_alike_differ() -> None:
    three_layers = {name for name in {*ROWS["training"]} if not name.startswith("untrained")} - {*SMALL}
    assert max(three_layers, key=lambda name: at(name, 3)) == "masked only"
    ends = [at(training, 3) for training in ALIKE]
    assert at("masked only", 3) - at("default", 3) < 1.3 * (max(ends) - min(ends))
    assert abs(at("CDR3, masked only", 3) - at("CDR3", 3)) < max(ends) - min(ends)
