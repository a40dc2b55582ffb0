"""What a person reads."""

from rankscope.report.page import write_run_directory
from rankscope.report.verdict import verdict

__all__ = ["verdict", "write_run_directory"]
