"""The stub by itself: what its README says of it."""


def test_it_is_as_poptorch(python):
    assert "all right" in python("stub.py")
