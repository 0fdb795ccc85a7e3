"""Show what a run has left in its folder: a self-contained HTML page, or text for a terminal, of one run or several.

Imports neither torch nor a plugin. Reading never fails over a file that is damaged or half-written: the result says so.
"""

from torchhal.report._page import html_page
from torchhal.report._record import RECORD_FILE, DamagedRecordError, read_record, write_record
from torchhal.report._run_folder import RunFolder, read_run, read_runs
from torchhal.report._text import text_summary

__all__ = [
    "RECORD_FILE",
    "DamagedRecordError",
    "RunFolder",
    "html_page",
    "read_record",
    "read_run",
    "read_runs",
    "text_summary",
    "write_record",
]
