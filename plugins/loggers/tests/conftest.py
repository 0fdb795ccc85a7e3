"""Lets the tests import the modules beside them, and keeps Trackio's databases out of the home folder."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ |= {"TRACKIO_DIR": tempfile.mkdtemp(prefix="torchhal-trackio-"), "HF_HUB_OFFLINE": "1"}  # read by its import
