"""What a person reads."""

from rankscope.report.causes import verdict
from rankscope.report.page import render, write_report
from rankscope.report.run import Run, read_run
from rankscope.report.write import write_run_directory

__all__ = ["Run", "read_run", "render", "verdict", "write_report", "write_run_directory"]
