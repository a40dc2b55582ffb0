"""Reports: run directories as one page that stands alone."""

from rankscope.report.causes import network_name, same_network, verdict
from rankscope.report.page import render, write_report, write_run_directory
from rankscope.report.reported_run import FolderChapter, ReportedRun, read_run

__all__ = [
    "FolderChapter", "ReportedRun", "network_name", "read_run", "render", "same_network", "verdict", "write_report",
    "write_run_directory",
]  # fmt: skip
