"""What a run found about itself, in words."""

from rankscope.profiles import Profile, Summary
from rankscope.runs import Network


def checks(measured: Profile | Summary) -> list[dict[str, str]]:
    """What the run found about itself, in words."""
    return [
        {"variant": network.variant, "arithmetic": network.arithmetic, "said": _checked(network)}
        for network in measured.manifest.networks
    ]


def _checked(network: Network) -> str:
    """In words, of a check that is there what it says: other versions may have others."""
    checks = network.checks
    notes = [_rows(checks.get("rows_sum_to_one"), checks.get("largest_row_sum_defect"))]
    if isinstance(checks.get("padded_tokens"), int):
        notes.append(f"{checks['padded_tokens']} padded tokens left out")
    if isinstance(checks.get("dropout"), int | float):
        notes.append(f"dropout {checks['dropout']:g}")
    overflow = checks.get("first_layer_not_finite", "unknown")
    if overflow is None:
        notes.append("all layers finite")
    elif isinstance(overflow, int):
        notes.append(f"numbers overflow from layer {overflow}")
    asked = checks.get("arithmetic_asked", network.arithmetic)
    if asked != network.arithmetic:
        notes.append(f"run instead of {asked}, which has no rule for one of its parts")
    return "; ".join(notes)


def _rows(one: object, defect: object) -> str:
    if not isinstance(one, bool) or not isinstance(defect, int | float):
        return "attention was not looked at"
    if one:
        return f"attention rows sum to one within {defect:.1e}"
    return f"attention rows miss one by up to {defect:.2g}: theorems on averaging do not apply"
