"""The report page: one HTML file that shows one run, or several side by side, and needs nothing else."""

from rlsprune.app.report.page import write_report

__all__ = ["write_report"]
