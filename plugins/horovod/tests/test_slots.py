"""What Horovod is told about the places of processes, without Horovod."""

from torchhal_horovod._slots import Slot, assign


def test_slots_of_nodes_of_different_sizes():
    """As horovodrun counts: ``cross`` goes over the hosts that have a process of this local rank."""
    slots = assign([0, 0, 1, 2, 2])
    assert slots == [
        Slot("node-0", 0, 5, 0, 2, 0, 3), Slot("node-0", 1, 5, 1, 2, 0, 2), Slot("node-1", 2, 5, 0, 1, 1, 3),
        Slot("node-2", 3, 5, 0, 2, 2, 3), Slot("node-2", 4, 5, 1, 2, 1, 2),
    ]  # fmt: skip


def test_ranks_that_go_to_the_nodes_in_turn():
    assert [(slot.hostname, slot.local_rank, slot.cross_rank) for slot in assign([0, 1, 0, 1])] == [
        ("node-0", 0, 0), ("node-1", 0, 1), ("node-0", 1, 0), ("node-1", 1, 1),
    ]  # fmt: skip
