"""What dcp takes apart comes back as it was, whatever it is called; what torch's file refuses, dcp refuses too."""

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world import rank

from torchhal.errors import CheckpointError
from torchhal_parallel.checkpoint._flatten import as_plain, flatten, merge_flat, unflatten
from torchhal_parallel.checkpoint.dcp import DCPCheckpointIO

pytestmark = pytest.mark.timeout(120)

MARK = "__tensor__"
keys = st.one_of(
    st.text("ab/~01-'s", max_size=3), st.just(MARK), st.integers(-2, 12), st.none(), st.floats(0.5, 1.5),
    st.tuples(st.text("/~", max_size=2)),
)  # fmt: skip
tensors = st.sampled_from([(), (0,), (2, 3)]).map(torch.ones)
leaves = st.one_of(tensors, st.none(), st.integers(), st.text("ab", max_size=2), st.just(MARK))


def containers(items):
    mappings = st.dictionaries(keys, items, max_size=3)
    ordered = mappings.map(OrderedDict)
    return st.one_of(mappings, ordered, st.lists(items, max_size=3), st.lists(items, max_size=2).map(tuple))


nests = st.dictionaries(keys, st.recursive(leaves, containers, max_leaves=12), max_size=4)


def assert_same(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted) and list(map(type, found)) == list(map(type, wanted))
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


def paths(value, path=()):
    if isinstance(value, torch.Tensor):
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from paths(item, (*path, index))


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(nests)
def test_what_is_taken_apart_comes_together(nest):
    plain, found = flatten(nest)
    assert len(found) == len(list(paths(nest))), "a name for each"
    assert_same(unflatten(as_plain(plain), lambda reference: found[reference.name]), nest)
    assert_same(unflatten(as_plain(merge_flat([plain, plain])), lambda reference: found[reference.name]), nest)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(nests, nests)
def test_a_name_means_one_place_on_all_ranks(one, other):
    names = {}
    for nest in (one, other):
        for path, name in zip(paths(nest), flatten(nest)[1], strict=True):
            assert names.setdefault(name, path) == path


@settings(max_examples=25, deadline=None)
@given(nests)
def test_a_folder_holds_it(tmp_path_factory, nest):
    path = tmp_path_factory.getbasetemp() / "hypothesis.ckpt"
    io = DCPCheckpointIO()
    io.save_checkpoint(nest, path)
    assert_same(io.load_checkpoint(path), nest)


def test_unloadable_containers_refused(tmp_path):
    """What a load would not rebuild is refused by name."""
    Point = namedtuple("Point", "x y")
    io = DCPCheckpointIO()
    for value, words in (
        (Point(torch.ones(2), 3), "Point"),
        (defaultdict(list, a=[torch.ones(2)]), "defaultdict"),
        (Point, "class|type|Point"),
    ):
        with pytest.raises(CheckpointError, match=rf"checkpoint\['a/b'\]\[1\] holds an? .*({words})"):
            io.save_checkpoint({"a/b": [0, value]}, tmp_path / "x.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_the_rest_of_what_torchs_file_holds(tmp_path):
    state = torch.nn.BatchNorm1d(2).state_dict()
    nest = {
        "sparse": torch.eye(3).to_sparse(), "state": state, "set": {1, 2}, "size": torch.Size([2]),
        "dtype": torch.float16, "complex": torch.tensor([1 + 2j]).conj(), "strided": torch.arange(6).view(2, 3).t(),
    }  # fmt: skip
    io = DCPCheckpointIO()
    io.save_checkpoint(nest, tmp_path / "x.ckpt")
    loaded = io.load_checkpoint(tmp_path / "x.ckpt")
    assert list(loaded) == list(nest)
    assert loaded["state"]._metadata == state._metadata, "by which modules tell their states' versions"
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert (loaded["set"], loaded["size"], loaded["dtype"]) == ({1, 2}, torch.Size([2]), torch.float16)
    assert torch.equal(loaded["complex"], nest["complex"]) and torch.equal(loaded["strided"], nest["strided"])


def save_alike_names(path):
    from world import joined

    with joined() as strategy:
        strategy.checkpoint_io = DCPCheckpointIO()
        mine = (
            {"a": {"b": torch.zeros(2)}, 1: torch.ones(1)}
            if rank() == 0
            else {"a/b": torch.ones(3), "1": torch.ones(2)}
        )
        strategy.save_checkpoint(mine, path)
        try:
            strategy.save_checkpoint({"value": (i for i in "ab") if rank() == 1 else 0}, f"{path}2")
        except CheckpointError as error:
            return str(error)


def test_places_of_two_ranks_are_not_mixed(world2, tmp_path):
    said = world2.run(save_alike_names, str(tmp_path / "x.ckpt"))
    assert all("rank 1" in text and "checkpoint['value'] holds a generator" in text for text in said)
    loaded = DCPCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")
    assert loaded["a"]["b"].tolist() == [0, 0] and loaded["a/b"].tolist() == [1, 1, 1]
    assert (len(loaded[1]), len(loaded["1"])) == (1, 2)
