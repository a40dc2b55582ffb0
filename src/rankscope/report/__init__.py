"""Reports: run directories as one page that stands alone."""

from rankscope.report.causes import network_name, same_network, verdict
from rankscope.report.chapter import section_json
from rankscope.report.page import render, write_report, write_run_directory
from rankscope.report.reported_run import FolderChapter, ReportedRun, read_run
from rankscope.report.sections import cloud_views

__all__ = [
    "FolderChapter", "ReportedRun", "cloud_views", "network_name", "read_run", "render", "same_network", "section_json",
    "verdict", "write_report", "write_run_directory",
]  # fmt: skip
