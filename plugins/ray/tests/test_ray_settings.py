"""What needs no cluster: who is which rank, whose devices are seen, what is refused, what is imported when."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from torchhal.errors import ConfigurationError, LaunchError
from torchhal.resolve import Request, resolve
from torchhal_ray._placement import of_trial
from torchhal_ray._ranks import seats, shared_devices
from torchhal_ray._sdk import connect
from torchhal_ray.environment import RayEnvironment


def numbers(found):
    return [(seat.rank, seat.node_rank, seat.local_rank, seat.local_world_size, seat.bundle) for seat in found]


def test_ranks_count_by_node_and_not_by_bundle():
    spread = {0: "b", 1: "a", 2: "b", 3: "a", 4: "b"}
    found = seats(spread, {"a": "10.0.0.9", "b": "10.0.0.1"}, 1)
    assert numbers(found) == [(0, 0, 0, 2, 1), (1, 0, 1, 2, 3), (2, 1, 0, 3, 0), (3, 1, 1, 3, 2), (4, 1, 2, 3, 4)]
    assert [seat.address for seat in found] == ["10.0.0.9"] * 2 + ["10.0.0.1"] * 3
    # two nodes of one address are two; the driver's comes first
    assert numbers(seats({0: "a", 1: "b"}, {"a": "10.0.0.1", "b": "10.0.0.1"}, 2, driver="b")) == [
        (0, 0, 0, 2, 1), (1, 0, 1, 2, 1), (2, 1, 0, 2, 0), (3, 1, 1, 2, 0)
    ]  # fmt: skip
    assert str(found[2]) == "rank 2 on node 10.0.0.1 (b)"


def test_workers_of_a_node_see_the_devices_of_all_in_their_order():
    assert shared_devices([{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "0"}]) == {
        "CUDA_VISIBLE_DEVICES": "3,0"
    }
    assert shared_devices([{}, {}]) == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_workers": 0}, "'num_workers' must be an int of at least 1 (got 0)"),
        ({"num_workers": True}, "(got True)"),
        ({"num_workers": 2, "placement": "pack"}, "'PACK', 'SPREAD', 'STRICT_PACK', 'STRICT_SPREAD' (got 'pack')"),
        ({"placement": "SPREAD"}, "'placement' goes with 'num_workers'"),
        ({"timeout": -1}, "'timeout' must be a number of seconds (got -1)"),
        ({"stop_timeout": float("inf")}, "'stop_timeout' must be a number of seconds (got inf)"),
        ({"resources_per_worker": {"CPU": "4"}}, "'resources_per_worker' must be a dict"),
        ({"resources_per_worker": {}}, "'resources_per_worker' must be a dict"),
        ({"runtime_env": ["pip"]}, "'runtime_env' must be a dict (got ['pip'])"),
    ],
)
def test_nonsense_is_refused_by_name(arguments, says):
    with pytest.raises(ConfigurationError) as caught:
        RayEnvironment(**arguments)
    assert says in str(caught.value)


def asked(device_type="cpu", devices=1, **arguments):
    launcher = RayEnvironment(**arguments)
    launcher.configure(num_nodes=1, local_world_size=devices)
    return launcher.make_launcher(device_type=device_type, prepare=print)


def test_a_worker_gets_a_core_and_one_of_the_devices():
    assert asked("cpu").resources == {"CPU": 1.0}
    assert asked("cuda", devices=2).resources == {"CPU": 1.0, "GPU": 1.0}
    assert asked("cuda", num_workers=2, resources_per_worker={"GPU": 0.5}).resources == {"GPU": 0.5}
    with pytest.raises(ConfigurationError, match=r"each of 2 workers of a node one device \(got \{'GPU': 0.5\}\)"):
        asked("cuda", devices=2, resources_per_worker={"GPU": 0.5})


def test_inside_a_worker_nothing_is_launched_again(monkeypatch):
    for name, value in {"TORCHHAL_LAUNCH_ID": "x", "TORCHHAL_LAUNCH_KIND": "ray", "RANK": "2", "WORLD_SIZE": "3",
                        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    plan = resolve(Request(strategy="ddp", accelerator="cpu", plugins=RayEnvironment(num_workers=3)))
    assert type(plan.build().make_launcher()).__name__ == "ExternalLauncher"
    assert pickle.loads(pickle.dumps(RayEnvironment(num_workers=3))).global_rank() == 2
    with pytest.raises(ConfigurationError, match="launched as one of 3, but num_workers=4"):
        RayEnvironment(num_workers=4).configure(1, 1)
    monkeypatch.setenv("TORCHHAL_LAUNCH_KIND", "spawn")
    with pytest.raises(LaunchError, match="'spawn' has started"):
        RayEnvironment(num_workers=3).make_launcher(device_type="cpu", prepare=print)


class Trial:
    """What of_trial asks of ray: the group that a trial runs in."""

    def __init__(self, *bundles):
        self.bundle_specs = list(bundles)
        self.util = self

    def get_current_placement_group(self):
        return self


def test_a_trial_has_to_reserve_its_workers():
    group = Trial({"CPU": 1}, {"CPU": 2}, {"CPU": 2})
    assert of_trial(group, [{"CPU": 2.0}] * 2) is group
    for bundles in ([{"CPU": 2.0}] * 3, [{"CPU": 2.0, "GPU": 1.0}] * 2):
        with pytest.raises(LaunchError, match=r"reserved CPU 2; CPU 2, not .*tune.PlacementGroupFactory"):
            of_trial(group, bundles)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"pip install 'torchhal-ray\[vendor\]'"):
        connect({})


def test_a_plan_imports_no_ray():
    program = (
        "import sys, torchhal\n"
        "trainer = torchhal.Trainer(accelerator='cpu', strategy='ddp', devices=2, num_nodes=2, plugins='ray')\n"
        "print(trainer.plan.launcher, trainer.plan.world_size, 'ray' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout.split() == ["ray", "4", "False"]
