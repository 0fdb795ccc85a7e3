"""What TensorBoardLogger writes is drawn by TensorBoard: a browser opens its page and reads the curve there."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import chromium
import pytest
from limits import scaled

from torchhal.trainer.loggers import TensorBoardLogger

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.find() is None, reason="no Chromium: make browser"),
]


@pytest.fixture
def server(tmp_path):
    """A TensorBoard over the folder ``tmp_path``; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        tmp_path,
        "--port",
        str(port),
        "--load_fast",
        "false",
        "--reload_interval",
        "1",
    ]
    with open(tmp_path.with_suffix(".txt"), "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    end = time.monotonic() + scaled(60)
    url = f"http://127.0.0.1:{port}"
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            break
        except OSError:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.1)
    yield url
    process.kill()
    process.wait()


def test_the_curve_is_on_the_page(server, tmp_path):
    logger = TensorBoardLogger(tmp_path, name="digits")
    for step in range(6):
        logger.log_metrics({"loss": 0.5 - step / 16}, step)
    logger.finalize("success")
    curve = f"{server}/data/plugin/scalars/scalars?run=digits%2Fversion_0&tag=loss"
    end = time.monotonic() + scaled(60)
    while (points := answer(curve)) is None:  # TensorBoard reads the folder now and then
        assert time.monotonic() < end
        time.sleep(0.2)
    assert [(step, value) for _, step, value in points] == [(step, 0.5 - step / 16) for step in range(6)]
    with chromium.page(1400, 900) as page:
        page.open(f"{server}/?darkMode=false&smoothing=0#timeseries")
        page.wait_for("document.querySelector('scalar-card line-chart')")
        left, top, width, height = page.evaluate(
            "(({x, y, width, height}) => [x, y, width, height])"
            "(document.querySelector('scalar-card line-chart').getBoundingClientRect())"
        )
        told = set()
        end = time.monotonic() + scaled(60)
        while len(told) < len(points) and time.monotonic() < end:
            for part in range(10, 100, 3):  # a person moves the mouse along the curve, and reads what the page tells
                page.hover(left + width * part / 100, top + height / 2)
                if tip := page.evaluate("document.querySelector('.cdk-overlay-container')?.innerText"):
                    told |= {(int(step), float(value)) for value, step in re.findall(r"version_0\t(\S+)\t(\d+)\t", tip)}
        page.screenshot(tmp_path / "tensorboard.png")
    assert sorted(told) == [(step, round(0.5 - step / 16, 4)) for step in range(6)]


def answer(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as found:
            return json.load(found)
    except urllib.error.HTTPError:
        return None
