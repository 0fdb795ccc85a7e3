"""Replica groups on two hosts with names and networks of their own, and the lighthouse on a third."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from cluster_hosts import cluster_of
from limits import scaled

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).with_name("replica.py"))
LIGHTHOUSE = str(Path(sys.executable).with_name("torchft_lighthouse"))
END = 30


@pytest.mark.timeout(300)  # some 15 s on a quiet machine
def test_a_group_on_another_host_is_killed_and_comes_back():
    with cluster_of(2) as hosts:
        # of two, so that who is left waits, and all steps are made together
        arguments = ("--bind", "0.0.0.0:29510", "--min_replicas", "2", "--heartbeat_timeout_ms", "4000")
        hosts.start("n0", LIGHTHOUSE, *arguments, RUST_LOG="error")

        def start(rank, **options):
            folder = hosts.folder / str(rank)
            folder.mkdir(exist_ok=True)
            (folder / "end").write_text(str(END))
            options = json.dumps({"replica_rank": rank, **options})
            address = {"TORCHFT_LIGHTHOUSE": "http://n0:29510"}
            return hosts.start(f"n{rank + 1}", sys.executable, SCRIPT, str(folder), options, **address)

        first, second = start(0), start(1, seed=1)
        deadline = time.monotonic() + scaled(120)
        log = hosts.folder / "1" / "log"
        while not log.exists() or log.read_text().count("\n") < 5:
            assert second.poll() is None, second.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        second.kill()
        second.wait()
        second = start(1, seed=2)
        for process in (first, second):
            said, _ = process.communicate(timeout=150)
            assert process.returncode == 0, said
        assert "torchhal: joined at step" in said
        mine, theirs = (torch.load(hosts.folder / rank / "final.pt", weights_only=True) for rank in "01")
    assert mine["step"] == theirs["step"] == END
    assert mine["place"] == theirs["place"]
    for name, value in mine["model"].items():
        torch.testing.assert_close(theirs["model"][name], value, rtol=0, atol=0, msg=name)
