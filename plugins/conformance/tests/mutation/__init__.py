"""Mutate the reference components mechanically and list the mutants that the conformance kit does not kill."""
