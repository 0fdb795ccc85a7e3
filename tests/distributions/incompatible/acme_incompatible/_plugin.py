raise AssertionError("imported in spite of its requirement")
