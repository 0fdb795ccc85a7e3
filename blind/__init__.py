"""Defective components, written from the contracts alone, to see whether the conformance kit notices them."""
